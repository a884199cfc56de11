// The TensorBoard tab: the page, with runs from TensorBoard's server and its light or dark theme.
import { start } from "./page.js";

const at = (path) => new URL(path, import.meta.url);

async function answer(path) {
  const reply = await fetch(at(path));
  const body = await reply.json();
  if (!reply.ok) throw new Error(body.error);
  return body;
}

async function show() {
  try {
    start({ ...await answer("./runs"), reload: show,
      load: (name) => answer(`./run?name=${encodeURIComponent(name)}`) });
  } catch (error) {
    start({ runs: [], notes: [`the runs cannot be read: ${error.message}`], reload: show });
  }
}

function followTheme() {
  const outer = window.parent.document.body;
  const follow = () =>
    (document.documentElement.dataset.theme = outer.classList.contains("dark-mode") ? "dark"
      : "light");
  new MutationObserver(follow).observe(outer, { attributeFilter: ["class"] });
  follow();
}

// Called by TensorBoard after loading this module into its frame.
export async function render() {
  const style = Object.assign(document.createElement("link"),
    { rel: "stylesheet", href: at("./page.css") });
  document.head.append(style);
  document.documentElement.lang = "en";
  followTheme();
  await show();
}

// The page: one run, or several with the selected one below.
import { h, list } from "./dom.js";
import { patterns } from "./marks.js";
import { runView } from "./run.js";
import { newest, sweepView } from "./sweep.js";

let opened = null; // the selected run, kept across reloads

// Fills the document. `load(name)` returns one of `runs` in full; `reload`, if given, reads
// everything again.
export function start({ runs, notes = [], declared, load, reload }) {
  const main = h("main", { id: "main", tabindex: "-1" },
    reload && h("p", { class: "reload" },
      h("button", { type: "button", click: reload }, "Reload")),
    list(notes, "notes"));
  const link = h("a", { class: "skip", href: "#main", click: skip }, "Skip to the run");
  document.querySelector(".page")?.remove();
  document.body.append(h("div", { class: "page" }, patterns(), link, main));
  if (!runs.length) {
    main.append(h("h1", {}, "No run yet"),
      h("p", {}, "A run appears as soon as its folder has metrics.jsonl or report.json."));
    return;
  }
  const first = runs.some((run) => run.name === opened) ? opened : newest(runs)[0].name;
  const detail = h("div", { class: "detail", tabindex: "-1" });
  const show = async (name) => {
    opened = name;
    const view = await load(name)
      .then((run) => runView(run, declared, runs.length > 1 ? "h2" : "h1"))
      .catch((error) => list([`run ${name}: ${error.message}`], "notes", "alert"));
    if (opened !== name) return; // another one was selected since
    detail.replaceChildren(view);
  };
  if (runs.length > 1) {
    const open = async (name) => {
      mark(name);
      await show(name);
      if (opened !== name) return;
      detail.focus({ preventScroll: true });
      detail.scrollIntoView({ behavior: matchMedia("(prefers-reduced-motion: reduce)").matches
        ? "auto" : "smooth" });
    };
    const { view, mark } = sweepView(runs, open);
    main.append(view);
    mark(first);
  }
  main.append(detail);
  show(first);
}

// The tab's address belongs to TensorBoard, so links within the page must not change it.
function skip(event) {
  event.preventDefault();
  document.querySelector(".detail")?.focus();
}

const embedded = document.getElementById("data");
if (embedded) {
  const content = JSON.parse(embedded.textContent);
  try {
    start({ ...content, load: async (name) => content.runs.find((run) => run.name === name) });
  } catch (error) {
    start({ runs: [], notes: [`the runs cannot be shown: ${error.message}`] });
  }
}

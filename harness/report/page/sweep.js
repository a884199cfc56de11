// Runs side by side: a sortable table, small charts of one scale, and the selection of a run.
import { smallCourse, usualHeight } from "./course.js";
import { absent, h, note, scrolled } from "./dom.js";
import { known, ms, rounded, share, words } from "./format.js";
import { keys, partKeys } from "./marks.js";

const FIRST_CHOSEN = 12; // initial small charts

const FIGURES = [
  { title: "images/s", of: ({ report }) => report.images_per_s, show: rounded },
  { title: "step", of: ({ report }) => report.step_ms?.median, show: ms },
  { title: "stalled", of: ({ report }) => report.stall_fraction, show: share },
  { title: "goodput", of: ({ report }) => report.goodput?.fraction, show: share },
  { title: "top-1", of: ({ report }) => report.top1, show: share },
  { title: "verdict", of: ({ report }) => report.verdict?.bottleneck ?? report.status,
    show: words },
];

function typedOf({ report }) {
  const typed = (report.run?.overrides ?? [])
    .map((override) => override.replace(/^\+*/, "").split(/=(.*)/s));
  return new Map(typed.map(([name, value]) => [name, value ?? ""]));
}

// All settings typed, as typed, and the loader's settings as used, by name.
function settingsOf(run) {
  const typed = typedOf(run);
  const used = Object.entries(run.report.loader ?? {})
    .map(([name, value]) => [`loader.${name}`, String(value)]);
  const both = ([name, value]) =>
    [name, typed.has(name) && typed.get(name) !== value ? `${typed.get(name)} (used ${value})`
      : value];
  return new Map([...typed, ...used.map(both)]);
}

// A sweep's job by its swept settings, such as "0: num_workers=2 pin_memory=true"; other runs have
// their own names.
function labelsOf(runs) {
  const typed = new Map(runs.map((run) => [run, typedOf(run)]));
  const names = new Set([...typed.values()].flatMap((settings) => [...settings.keys()]));
  const swept = [...names]
    .filter((name) => new Set(runs.map((run) => typed.get(run).get(name))).size > 1);
  const last = (name) => name.split(".").at(-1);
  const short = (name) =>
    (swept.filter((other) => last(other) === last(name)).length > 1 ? name : last(name));
  const said = (settings) => swept.filter((name) => settings.has(name))
    .map((name) => `${short(name)}=${settings.get(name)}`);
  const isJob = ({ name }) => swept.length > 0 && /(^|\/)\d+$/.test(name);
  return new Map(runs.map((run) =>
    [run, isJob(run) ? `${run.name}: ${said(typed.get(run)).join(" ")}` : run.name]));
}

function differing(runs) {
  const all = runs.map(settingsOf);
  const names = [...new Set(all.flatMap((settings) => [...settings.keys()]))];
  return names.filter((name) => new Set(all.map((settings) => settings.get(name))).size > 1)
    .map((name) => {
      const of = (run) => all[runs.indexOf(run)].get(name) ?? (run.latest ? undefined : "default");
      return { title: name, of, show: String, setting: true };
    });
}

const numeric = (value) =>
  (value !== "" && Number.isFinite(Number(value)) ? Number(value) : null);

// Numbers before texts, and unavailable values last in either direction.
function compare(a, b, falling) {
  if (a === undefined || b === undefined) return (a === undefined) - (b === undefined);
  const [x, y] = [numeric(a), numeric(b)];
  const order = x !== null && y !== null ? x - y
    : String(a).localeCompare(String(b), "en", { numeric: true });
  return falling ? -order : order;
}

// The most recently written run first.
export function newest(runs) {
  return runs.toSorted((a, b) => b.changed_s - a.changed_s);
}

// `open(name)` shows one run below; the view's `mark(name)` marks it.
export function sweepView(runs, open) {
  const columns = [{ title: "run", of: (run) => run.name, show: String }, ...FIGURES,
    ...differing(runs)];
  const labels = labelsOf(runs);
  const chosen = new Set(newest(runs).slice(0, FIRST_CHOSEN).map((run) => run.name));
  const body = h("tbody");
  const multiples = h("div", { class: "multiples" });
  const redraw = () => multiples.replaceChildren(...small(runs, labels, chosen, open));
  const rows = new Map(runs.map((run) =>
    [run, rowOf(run, labels.get(run), columns, chosen, open, redraw)]));
  const sort = (column, falling) => {
    body.append(...[...runs].sort((a, b) => compare(column.of(a), column.of(b), falling))
      .map((run) => rows.get(run)));
  };
  const head = h("tr", {}, h("th", { scope: "col" }, "chart"),
    columns.map((column) => heading(column, sort)));
  body.append(...rows.values());
  redraw();
  const view = h("section", { class: "sweep" }, h("h1", {}, `${runs.length} runs`),
    note("Click a heading to sort, or a run to show it below. The newest is shown first."),
    scrolled("Runs", h("table", {}, h("thead", {}, head), body)),
    h("h2", {}, "Step time side by side"),
    keys([...partKeys(), [h("span", { class: "spike-key" }, "▼"), "an outlier step"]],
      "All charts have one scale."),
    multiples);
  const mark = (name) =>
    rows.forEach((row, run) => row.toggleAttribute("data-open", run.name === name));
  return { view, mark };
}

function heading(column, sort) {
  const click = () => {
    const falling = cell.getAttribute("aria-sort") === "ascending";
    for (const other of cell.parentElement.children) other.removeAttribute("aria-sort");
    cell.setAttribute("aria-sort", falling ? "descending" : "ascending");
    sort(column, falling);
  };
  const cell = h("th", { scope: "col", class: column.setting && "setting" },
    h("button", { type: "button", click }, column.title));
  return cell;
}

function rowOf(run, label, columns, chosen, open, redraw) {
  const change = (event) => {
    if (event.target.checked) chosen.add(run.name);
    else chosen.delete(run.name);
    redraw();
  };
  const [, ...rest] = columns;
  return h("tr", { "data-run": run.name },
    h("td", {}, h("input",
      { type: "checkbox", checked: chosen.has(run.name), change,
        "aria-label": `Chart of run ${label}` })),
    h("th", { scope: "row" }, h("button", { type: "button", click: () => open(run.name) }, label)),
    rest.map((column) => h("td", { class: column.of(run) === undefined && "absent" },
      known(column.of(run), column.show))));
}

function small(runs, labels, chosen, open) {
  const shown = runs.filter((run) => chosen.has(run.name));
  const end = Math.max(1e-9, ...shown.filter((run) => run.course)
    .map((run) => usualHeight(run.course)));
  return shown.map((run) => {
    const stall = known(run.report.stall_fraction, share);
    const bound = run.report.verdict?.bottleneck ?? run.report.status ?? "no report";
    return h("figure", {},
      h("figcaption", {}, h("button", { type: "button", click: () => open(run.name) },
        labels.get(run)),
        h("span", { class: "note" }, ` ${words(bound)}, stalled ${stall}`)),
      run.course ? [smallCourse(run.course, end), note(`0 to ${ms(end)}`)]
        : absent("no window of steps"));
  });
}

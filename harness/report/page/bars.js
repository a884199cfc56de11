// Bars: one whole in parts (a step, the wall time), and the cost of each worker stage.
import { fitted, h, label, s, showMark, steered, table } from "./dom.js";
import { share, together } from "./format.js";
import { paint, swatch } from "./marks.js";

const HEIGHT = 44;
// behind a figure, to be legible on any pattern
const PLATE = { width: 52, height: 20, y: 12, rx: 4, class: "plate" };

// `segments` are {name, value, fill, cells, meaning}; the table under the bar has a row for each,
// with `cells` under `columns`.
export function wholeBar({ title, segments, columns }) {
  const total = segments.reduce((sum, segment) => sum + segment.value, 0);
  const shares = segments.map((segment) => (total > 0 ? segment.value / total : 0));
  const rows = segments.map((segment) => [
    [swatch(segment.fill), segment.name], ...segment.cells,
      h("span", { class: "note" }, segment.meaning),
  ]);
  const parts = segments.map((segment, index) => `${segment.name} ${share(shares[index])}`);
  const spoken = `${title}: ${parts.join(", ")}`;
  return h("div", { class: "whole" },
    fitted((width) => drawn({ spoken, segments, shares, columns }, width)),
    table({ kind: "legend",
      columns: ["part", ...columns, h("span", { class: "unseen" }, "meaning")], rows }));
}

function drawn({ spoken, segments, shares, columns }, width) {
  let end = 0;
  const spans = shares.map((one) => [end, (end += one * width)]);
  const blocks = segments.map((segment, index) => {
    const [from, to] = spans[index];
    const middle = (from + to) / 2;
    const block = s("rect",
      { x: from, width: to - from, height: HEIGHT, fill: paint(segment.fill), class: "block" });
    const figure = to - from > 60
      && [s("rect", { x: middle - PLATE.width / 2, ...PLATE }),
        label(middle, 26.5, share(shares[index]))];
    return [block, figure];
  });
  const chosen = s("rect", { y: 1, height: HEIGHT - 2, class: "chosen", hidden: true });
  const inside = ([from, to]) => ({ x: from + 1, width: Math.max(1, to - from - 2) });
  return steered(s("svg", { class: "bar", width, height: HEIGHT }, blocks, chosen), {
    name: spoken,
    count: segments.length,
    nearest: (x) => Math.max(0, spans.findIndex((span) => x <= span[1])),
    place: (index) => (spans[index][0] + spans[index][1]) / 2,
    lines: (index) => [segments[index].name,
      ...columns.map((column, n) => [column, segments[index].cells[n]])],
    choose: (index) => showMark(chosen, index !== null && inside(spans[index])),
  });
}

// The cost of a sample per stage: CPU time solid, the rest of the wall time (waiting) hatched.
export function stageBars(stages, caption) {
  const show = together(stages.map((stage) => stage.wall_ms));
  const most = Math.max(...stages.map((stage) => stage.wall_ms)) || 1;
  const rows = stages.map(({ name, group, wall_ms: wall, cpu_ms }) => {
    const cpu = Math.min(cpu_ms, wall); // two clocks may differ slightly
    const bar = (width) =>
      s("svg", { width, height: 18 },
        s("rect", { width: (cpu / most) * width, height: 18, fill: paint("compute") }),
        s("rect", { x: (cpu / most) * width, width: ((wall - cpu) / most) * width, height: 18,
          fill: paint("waiting") }));
    const told = [name, name !== group && h("span", { class: "note" }, ` ${group}`)];
    return [told, fitted(bar, { "aria-hidden": "true" }), show(wall), show(cpu), show(wall - cpu)];
  });
  const columns = [
    "stage", h("span", { class: "unseen" }, "bar"), "time", [swatch("compute"), "computing"],
      [swatch("waiting"), "waiting"],
  ];
  return table({ kind: "stages", caption, columns, rows });
}

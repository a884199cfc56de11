// The course of a run: charts above each other on one axis of steps, with one cursor.
import { absent, fitted, h, label, list, note, path, s } from "./dom.js";
import { showMark, steered, tableOf } from "./dom.js";
import { count, known, many, ms, ticks, unitOf, words } from "./format.js";
import { keys, paint, partKeys, PARTS, stroke, swatch } from "./marks.js";
import { areaPath, axis, epochLines, grid, heightOf, LEFT, linePath, TOP } from "./plot.js";

const ROOM = 1.15; // headroom, to make clipping visible
const LABEL_PX = 64; // closer labels would overlap
const LABEL_ROWS = 2, LABEL_ROW = 16; // above the chart that names its spikes
const LISTED = 12; // spikes told in words

const mean = (course, tag) => course.columns[tag]?.mean;
const most = (course, tag) => course.columns[tag]?.high ?? course.columns[tag]?.mean;
const largest = (values) => values.reduce((top, value) => Math.max(top, value ?? 0), 0);

// The parts of a step, each with the sum of those below it and with its own upper edge.
function layers(course) {
  let sum = course.steps.map(() => 0);
  return PARTS.filter((part) => mean(course, `time/${part}_ms/median`)).map((part) => {
    const lower = sum;
    sum = mean(course, `time/${part}_ms/median`).map((value, index) => lower[index] + (value ?? 0));
    return { part, lower, upper: sum };
  });
}

// The height that shows every usual step; outliers exceed it unless `whole`.
export function usualHeight(course, whole) {
  const p95 = (most(course, "time/step_ms/p95") ?? []).filter((value) => value !== null)
    .toSorted((a, b) => a - b);
  const usual = p95[Math.floor(0.9 * (p95.length - 1))] ?? 0;
  const sums = layers(course).at(-1)?.upper ?? [];
  const longest = whole ? largest(most(course, "time/step_ms/max") ?? []) : 0;
  return ROOM * Math.max(usual, longest, largest(mean(course, "time/step_ms/median")),
    largest(sums)) || 1;
}

function partShapes(course, ax, y) {
  return layers(course).map(({ part, lower, upper }) =>
    s("path", { d: areaPath(lower, upper, ax, y), fill: paint(part), class: "area" }));
}

function stepShapes(course, ax, y) {
  const p95 = most(course, "time/step_ms/p95");
  return [partShapes(course, ax, y), p95 && path(linePath(p95, ax, y), "line p95"),
    path(linePath(mean(course, "time/step_ms/median"), ax, y), "line median")];
}

function told(spike) {
  const single = spike.step - spike.after === 1;
  const where = single ? `step ${count(spike.step)}`
    : `steps ${count(spike.after + 1)} to ${count(spike.step)}`;
  return `${ms(spike.ms)} in ${where}${spike.cause ? `, mostly ${words(spike.cause)}` : ""}`;
}

// Each outlier step: a bar to its height or through the top edge, a triangle, and its length if
// there is room.
function spikeMarks(course, ax, y, height, rows) {
  const taken = Array.from({ length: rows }, () => []);
  const longer = []; // the bars so far: the longest spike comes first
  return course.spikes.map((spike) => {
    const x = Math.round(ax.middle(spike.at)); // whole pixels: a sharp line
    const top = y(spike.ms);
    const free = longer.every((bar) => Math.abs(bar - x) > LABEL_PX / 2);
    const row = free ? taken.findIndex((others) =>
      others.every((other) => Math.abs(other - x) > LABEL_PX)) : -1;
    taken[row]?.push(x);
    longer.push(x);
    const side = x > ax.right - LABEL_PX ? "end" : x < ax.left + LABEL_PX ? "start" : "middle";
    return s("g", { class: "spike", "data-step": spike.step, "data-ms": spike.ms },
      s("title", {}, told(spike)),
      path(`M${x},${height}V${top}`, "spike-bar"),
      path(`M${x - 5},${top - 8}h10l-5,8z`, "spike-head"),
      row >= 0 && label(x, top - 11 - row * LABEL_ROW, ms(spike.ms), `spike-text ${side}`));
  });
}

// One cursor for all charts of a run; `rows` of index give each chart's values there.
function cursorOf(course) {
  const lines = new Set();
  const choose = (index) => {
    for (const [line, ax] of lines) {
      showMark(line, index !== null && { transform: `translate(${ax.middle(index)},0)` });
    }
  };
  const title = (index) => {
    const epoch = course.epochs[index];
    return `up to step ${count(course.steps[index])}${epoch === null ? "" : `, epoch ${epoch}`}`;
  };
  return (svg, { ax, height, name, rows }) => {
    const line = s("path", { d: `M0,${ax.top}V${height}`, class: "cursor", hidden: true });
    svg.append(line);
    // redrawn at another width
    for (const old of lines) if (!old[0].isConnected) lines.delete(old);
    lines.add([line, ax]);
    const read = (index) => [title(index), ...rows.flatMap((row) => row(index))];
    return steered(svg, { name, count: course.steps.length, nearest: ax.nearest, place: ax.middle,
      lines: read, choose });
  };
}

// A row of the tooltip: none if a group of windows has no figure.
function rowOf(values, name, show, mark) {
  return (index) => ((values?.[index] ?? null) === null ? [] : [[name, show(values[index]), mark]]);
}

function rangeOf(values, name, show) {
  const there = values.filter((value) => value !== null);
  return `${name} from ${show(Math.min(...there))} to ${show(Math.max(...there))}`;
}

function standOut(course) {
  return course.spike_count === 1 ? "1 window has an outlier step"
    : `${count(course.spike_count)} windows have an outlier step`;
}

function stepRows(course) {
  const cause = (index) => {
    const spike = course.spikes.find((one) => one.at === index);
    return spike?.cause ? [["mostly", words(spike.cause), swatch(spike.cause)]] : [];
  };
  return [
    ...PARTS.map((part) =>
      rowOf(mean(course, `time/${part}_ms/median`), words(part), ms, swatch(part))),
    rowOf(mean(course, "time/step_ms/median"), "median step", ms, stroke("median")),
    rowOf(most(course, "time/step_ms/p95"), "95th percentile", ms, stroke("p95")),
    rowOf(most(course, "time/step_ms/max"), "longest step", ms),
    cause,
  ];
}

function head(title, ...more) {
  return h("div", { class: "head" }, h("h3", {}, title), ...more);
}

function stepChart(course, basis, join) {
  let whole = false;
  const height = 260;
  const named = course.spikes.length ? LABEL_ROWS : 0;
  const range = rangeOf(mean(course, "time/step_ms/median"), "median", ms);
  const name = `Step time: ${range}; ${standOut(course)}`;
  const draw = (width) => {
    const ax = axis(course, width, { top: TOP + LABEL_ROW * named });
    const end = usualHeight(course, whole);
    const y = heightOf(ax, height, end);
    const steps = ticks(ax.last, Math.max(2, Math.floor(width / 160))).map((tick) => {
      const atEdge = ax.x(tick) > ax.right - 24; // its middle there would carry it out of the page
      return label(atEdge ? width : ax.x(tick), height + 18, count(tick), atEdge ? "end"
        : "middle");
    });
    const shapes = [stepShapes(course, ax, y), spikeMarks(course, ax, y, height, named)];
    const svg = s("svg", { width, height: height + 24 }, grid(ax, y, end, ms),
      epochLines(course, ax, height), shapes);
    svg.append(label(LEFT - 8, height + 18, "step", "end"), ...steps);
    return join(svg, { ax, height, name, rows: stepRows(course) });
  };
  const box = fitted(draw);
  const click = () => {
    whole = !whole;
    toggle.setAttribute("aria-pressed", whole);
    box.redraw();
  };
  const toggle = h("button", { type: "button", "aria-pressed": "false", click },
    "Draw at full height");
  const lines = [[stroke("median"), "median step"], [stroke("p95"), "95th percentile"]];
  const legend = [...partKeys(layers(course).map(({ part }) => part)), ...lines];
  const clock = { device: "device events", host: "host clock" }[basis] ?? "unknown clock";
  return h("div", { class: "chart" },
    head("Step time", h("span", { class: "badge" }, clock), keys(legend)), box,
      spikeList(course, toggle));
}

function spikeList(course, toggle) {
  const listed = course.spikes.slice(0, LISTED);
  if (!listed.length) return note("No outlier steps.");
  const marked = course.spike_count > course.spikes.length
    ? "; the longest of each group is marked" : "";
  const rest = course.spikes.length > listed.length
    ? `; the ${listed.length} longest of those marked` : "";
  return h("div", { class: "spikes" },
    h("p", {}, h("span", { class: "spike-key", "aria-hidden": "true" }, "▼ "),
      `${standOut(course)}${marked}${rest}: `, toggle),
    list(listed.map(told)));
}

const WHY = { // by where a figure comes from
  gpu: "no NVIDIA GPU reported it",
  host: "the system does not report it",
  stages: "no worker reported it",
  loader: "no worker made batches",
};

const paintOf = (tag, place, count) =>
  (tag.startsWith("stall/") || (count > 1 && place === count - 1) ? "strong" : "plain");

// A chart of figures over the run, as `declared` by the harness, if the run has any.
function companion(course, { title, unit, series: all }, join) {
  const series = all.map((one, place) => ({ ...one, kind: paintOf(one.tag, place, all.length) }))
    .filter(({ tag }) => mean(course, tag));
  if (!series.length) return null;
  const { show, tick } = unitOf(unit);
  const end = unit === "fraction" ? 1
    : ROOM * largest(series.flatMap(({ tag }) => most(course, tag))) || 1;
  const height = 92;
  const ranges = series.map((one) => rangeOf(mean(course, one.tag), one.name, show));
  const name = `${title}: ${ranges.join("; ")}`;
  const rows = series.map((one) => rowOf(mean(course, one.tag), one.name, show, stroke(one.kind)));
  const draw = (width) => {
    const ax = axis(course, width);
    const y = heightOf(ax, height, end);
    const shapes = series.map(({ tag, kind }) => {
      const { low, high, mean: middle } = course.columns[tag];
      return [high && path(areaPath(low, high, ax, y), `band ${kind}`),
        path(linePath(middle, ax, y), `line ${kind}`)];
    });
    const svg = s("svg", { width, height: height + 6 }, grid(ax, y, end, tick),
      epochLines(course, ax, height), shapes);
    return join(svg, { ax, height, name, rows });
  };
  const legend = series.map((one) => [stroke(one.kind), one.name]);
  return h("div", { class: "chart" }, head(title, keys(legend)), fitted(draw));
}

function missing(course, charts) {
  const without = charts.filter(({ series }) => !series.some(({ tag }) => mean(course, tag)));
  const told = without.map(({ title, series }) =>
    `${title} (${WHY[series[0].tag.split("/")[0]] ?? "no window has it"})`);
  return told.length > 0 && note(`Not available in this run: ${told.join(", ")}.`);
}

export function courseSection(run, charts) {
  const course = run.course;
  if (!course) return absent("metrics.jsonl contains no window of steps");
  const join = cursorOf(course);
  const grouped = course.windows > course.steps.length
    && `, in ${course.steps.length} groups: lines are means, `
    + "bands and marks keep every lowest and highest value";
  const tags = Object.keys(course.columns);
  const cell = (tag, index) =>
    known((tag.endsWith("/max") ? most : mean)(course, tag)[index], String);
  const rows = () => course.steps.map((step, index) =>
    [count(step), ...tags.map((tag) => cell(tag, index))]);
  return h("div", { class: "course" },
    note(many(course.windows, "window"), " of steps", grouped,
      ". Parts are medians of each window, which need not add up."),
    stepChart(course, run.report.stall_basis, join),
    charts.map((chart) => companion(course, chart, join)),
    missing(course, charts),
    tableOf("Course of the run", ["up to step", ...tags], rows));
}

// A small chart of step times for one run among several, all of one height.
export function smallCourse(course, end) {
  const height = 96;
  const draw = (width) => {
    const ax = axis(course, width, { left: 0, right: 0 });
    const y = heightOf(ax, height, end);
    const parts = partShapes(course, ax, y);
    const drawn = parts.length ? parts : stepShapes(course, ax, y); // lines would cover thin parts
    const shapes = [drawn, spikeMarks(course, ax, y, height, 0)];
    return s("svg", { width, height }, path(`M0,${height}H${width}`, "axis"), shapes);
  };
  return fitted(draw, { "aria-hidden": "true" });
}

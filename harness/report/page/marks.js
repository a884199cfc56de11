// Names and paints of the parts of a step: each has a color and a pattern, so that either suffices.
import { h, path, s } from "./dom.js";
import { words } from "./format.js";

export const PARTS = ["compute", "launch", "prepare", "starved", "exposed_copy", "host"];
export const SELDOM = ["launch", "prepare"]; // parts that many runs lack

export const MEANINGS = {
  compute: "the device worked on the step",
  launch: "the device waited for Python to launch the next kernel of the step",
  prepare: "batches were augmented and normalized",
  starved: "the device had nothing to run: no batch was ready",
  exposed_copy: "the device waited for a batch on its way to it",
  host: "the device waited for Python: launches, logging, garbage collection",
};

const SLANTED = "M-2,2 l4,-4 M0,8 l8,-8 M6,10 l4,-4";
// each returns a function, because elements cannot be shared
const lines = (d) => () => path(d, "stroke");
const dots = (...places) => () =>
  places.map((at) => s("circle", { cx: at, cy: at, r: 1.4, class: "ink" }));
const plain = () => [];

const OTHERS = 6; // paints for things other than parts
const PATTERNS = {
  compute: plain,
  launch: lines("M0,2 h8 M0,6 h8"),
  prepare: lines("M0,4 h8 M4,0 v8"),
  starved: lines(SLANTED),
  exposed_copy: dots(2, 6),
  host: lines("M2,0 v8 M6,0 v8"),
  waiting: lines(SLANTED),
  other0: plain,
  other1: lines("M0,4 h8"),
  other2: lines("M-2,6 l4,4 M0,0 l8,8 M6,-2 l4,4"),
  other3: dots(4),
  other4: lines("M0,4 h8 M4,0 v8"),
  other5: lines("M4,0 v4"),
};

// The definitions behind `paint`, once in a document.
export function patterns() {
  const square = { width: 8, height: 8, patternUnits: "userSpaceOnUse" };
  const defined = Object.entries(PATTERNS).map(([name, marks]) =>
    s("pattern", { id: `paint-${name}`, ...square },
      s("rect", { width: 8, height: 8, class: `flat ${name}` }), marks()));
  return s("svg", { width: 0, height: 0, class: "patterns", "aria-hidden": "true" },
    s("defs", {}, defined));
}

export function paint(name) {
  return `url(#paint-${name})`;
}

// The paint of the n-th thing that is no part of a step.
export function other(n) {
  return `other${n % OTHERS}`;
}

// A sample of 14 by 14 pixels for a legend.
export function sample(mark) {
  return s("svg", { class: "swatch", width: 14, height: 14, "aria-hidden": "true" }, mark);
}

export function swatch(name) {
  return sample(s("rect", { width: 14, height: 14, rx: 2, fill: paint(name) }));
}

export function stroke(kind) {
  return sample(path("M0,7 h14", `line ${kind}`));
}

// A legend of [sample, name] pairs.
export function keys(pairs, more) {
  return h("span", { class: "keys" }, pairs.map(([mark, name]) => h("span", {}, mark, name)),
    more);
}

export function partKeys(parts = PARTS) {
  return parts.map((part) => [swatch(part), words(part)]);
}

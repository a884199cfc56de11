// Coordinates and shapes in charts over the steps of a run.
import { label, path } from "./dom.js";
import { ticks } from "./format.js";

export const LEFT = 64;
export const TOP = 12;
const RIGHT = 12;

// The horizontal axis: a group of windows extends from the previous one's last step to its own.
export function axis(course, width, { left = LEFT, right = RIGHT, top = TOP } = {}) {
  const inner = Math.max(1, width - left - right);
  const last = course.steps.at(-1) || 1;
  const x = (step) => left + (step / last) * inner;
  const from = (index) => x(index ? course.steps[index - 1] : 0);
  const to = (index) => x(course.steps[index]);
  const nearest = (px) => {
    const found = course.steps.findIndex((step) => x(step) >= px);
    return found < 0 ? course.steps.length - 1 : found;
  };
  return { x, from, to, nearest, middle: (index) => (from(index) + to(index)) / 2, left,
    right: left + inner, top, last };
}

// The vertical axis from 0 to `end`; larger values are clipped to it.
export function heightOf(ax, height, end) {
  return (value) => height - (Math.min(value, end) / end) * (height - ax.top);
}

export function grid(ax, y, end, show) {
  return ticks(end, 4).map((tick) => [
    path(`M${ax.left},${y(tick)}H${ax.right}`, tick ? "grid" : "axis"),
      label(ax.left - 8, y(tick) + 4, show(tick), "end"),
  ]);
}

const px = (value) => value.toFixed(1);

// A line that is flat within each group, and straight over groups without a figure.
export function linePath(values, ax, y) {
  const flat = (value, index) =>
    (value === null ? [] : [`${px(ax.from(index))},${px(y(value))}H${px(ax.to(index))}`]);
  return `M${values.flatMap(flat).join("L")}`;
}

// The area between two lists of heights, group by group.
export function areaPath(lower, upper, ax, y) {
  const block = (top, index) => {
    const [from, to] = [px(ax.from(index)), px(ax.to(index))];
    return top === null ? []
      : [`M${from},${px(y(lower[index]))}V${px(y(top))}H${to}V${px(y(lower[index]))}Z`];
  };
  return upper.flatMap(block).join("");
}

export function epochLines(course, ax, height) {
  const starts = course.epochs.flatMap((epoch, index) =>
    (index && epoch !== course.epochs[index - 1] ? [ax.from(index)] : []));
  return starts.length < 60
    && path(starts.map((x) => `M${px(x)},${ax.top}V${height}`).join(""), "epoch");
}

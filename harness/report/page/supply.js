// The tuner's measurements: loader throughput by num_workers, and model throughput.
import { absent, fitted, h, label, path, s, showMark, steered, tableOf } from "./dom.js";
import { known, perSecond, rounded, seconds } from "./format.js";
import { keys, sample } from "./marks.js";
import { grid, heightOf, LEFT } from "./plot.js";

const RIGHT = 16, TOP = 24, BOTTOM = 220, HEIGHT = 260;
// a demand beyond this many times the fastest rate is only printed, to keep the rates apart
const NEAR = 3;
const KINDS = { supply: "loader only", steps: "delivered to training steps" };
const IDENTITY = ["num_workers", "prefetch_factor", "pin_memory", "backend"];

const BACKENDS = { processes: "filled: processes", threads: "hollow: threads",
  arrays: "pale: arrays" };

const setting = (of) =>
  `${of.num_workers} workers${of.backend ? ` (${of.backend})` : ""}, `
  + `prefetch ${of.prefetch_factor ?? "none"}, `
  + `${of.pin_memory ? "pinned" : "not pinned"}`;
const interval = ({ images_per_s: rate, low, high }) =>
  `${perSecond(rate)} (${rounded(low)} to ${high === undefined ? "any" : rounded(high)})`;
const measured = (trial) => KINDS[trial.kind] ?? trial.kind;

// A circle for loader only, a diamond for steps; filled, hollow or pale by the backend.
function dot(x, y, kind, backend = "processes") {
  if (kind === "steps") return path(`M${x},${y - 5}l5,5l-5,5l-5,-5z`, `steps ${backend}`);
  return s("circle", { cx: x, cy: y, r: 4, class: `supply ${backend}` });
}

function backendsOf(trials) {
  const seen = Object.keys(BACKENDS)
    .filter((backend) => trials.some(({ settings }) => settings.backend === backend));
  return seen.length > 1
    ? seen.map((backend) => [sample(dot(7, 7, "supply", backend)), BACKENDS[backend]]) : [];
}

function cross(x, y) {
  return path(`M${x - 4},${y - 4}l8,8m0,-8l-8,8`, "refused");
}

function ring(x, y, r) {
  return s("circle", { cx: x, cy: y, r, class: "ring" });
}

export function supplySection(tuning) {
  if (!tuning) return absent("this run has no tuning.json, because loader.autotune=false");
  const trials = tuning.trials.toSorted((a, b) => a.settings.num_workers - b.settings.num_workers
    || a.kind.localeCompare(b.kind));
  const cost = tuning.reused ? "remembered from an earlier run"
    : `measured in ${known(tuning.seconds, seconds)}`;
  const legend = [
    [sample(dot(7, 7, "supply")), "loader only"],
    [sample(dot(7, 7, "steps")), "delivered to steps"],
    [sample(cross(7, 7)), "refused"],
    [sample(path("M0,7h14", "demand")), "the step can take"],
    [sample(ring(7, 7, 5.5)), "chosen"],
    ...backendsOf(trials),
  ];
  const rows = () => trials.map((trial) =>
    [setting(trial.settings), measured(trial), known(trial.rate, interval), trial.refused]);
  return h("div", { class: "supply" },
    h("p", {}, tuning.sentence, h("span", { class: "note" }, ` (${tuning.search}, ${cost})`)),
    trials.length ? [keys(legend), fitted((width) => drawn(tuning, trials, width))]
      : absent("nothing was measured"),
    tableOf("Tuner measurements",
      ["setting", "measured", "images/s (95% interval)", "refused"], rows));
}

function scaleOf({ demand, settings }, trials, width) {
  const fastest = Math.max(0, ...trials.map((trial) => trial.rate?.images_per_s ?? 0));
  const near = demand && (!fastest || demand.images_per_s <= NEAR * fastest);
  const end = 1.15 * Math.max(fastest, near ? demand.images_per_s : 0) || 1;
  const last = Math.max(1, settings.num_workers,
    ...trials.map((trial) => trial.settings.num_workers));
  const x = (workers) => LEFT + ((workers + 0.5) / (last + 1)) * (width - LEFT - RIGHT);
  const y = heightOf({ top: TOP }, BOTTOM, end);
  // a delivered rate is next to the supply of the same setting
  const beside = Math.min(7, 0.3 * (x(1) - x(0)));
  const at = ({ settings: { num_workers: workers }, kind, rate }) =>
    [x(workers) + (kind === "steps" ? beside : 0), rate ? y(rate.images_per_s) : BOTTOM - 6];
  return { x, y, at, end, last, near };
}

function backdrop({ x, y, end, last }, width) {
  const every = Math.ceil((last + 1) / Math.max(2, Math.floor(width / 48)));
  const workers = Array.from({ length: Math.floor(last / every) + 1 }, (_, n) => n * every);
  const lines = grid({ left: LEFT, right: width - RIGHT }, y, end, rounded);
  const names = [label((LEFT + width - RIGHT) / 2, HEIGHT - 4, "num_workers"),
    label(LEFT - 8, 12, "images/s", "end")];
  return [lines, workers.map((n) => label(x(n), BOTTOM + 18, String(n))), names];
}

function demandLine({ y, near }, demand, width) {
  const said = `the step can take ${perSecond(demand.images_per_s)}`;
  if (!near) return label(LEFT + 6, 12, `${said}, far above this chart`, "start");
  const height = y(demand.images_per_s);
  return [path(`M${LEFT},${height}H${width - RIGHT}`, "demand"),
    label(LEFT + 6, height - 7, said, "start")];
}

function trialMark({ y, at, end }, trial) {
  const [x, height] = at(trial);
  if (!trial.rate) return cross(x, height);
  return [path(`M${x},${y(trial.rate.low)}V${y(trial.rate.high ?? end)}`, "interval"),
    dot(x, height, trial.kind, trial.settings.backend)];
}

function drawn(tuning, trials, width) {
  const scale = scaleOf(tuning, trials, width);
  const isChoice = (trial) => trial.rate
    && IDENTITY.every((name) => trial.settings[name] === tuning.settings[name]);
  const choice = trials.findLast(isChoice);
  const cursor = s("circle", { r: 9, class: "chosen-trial", hidden: true });
  const svg = s("svg", { width, height: HEIGHT },
    backdrop(scale, width),
    tuning.demand && demandLine(scale, tuning.demand, width),
    trials.map((trial) => trialMark(scale, trial)),
    choice && ring(...scale.at(choice), 9),
    cursor);
  const center = (trial) => {
    const [cx, cy] = scale.at(trial);
    return { cx, cy };
  };
  const distance = (trial, px) => Math.abs(scale.at(trial)[0] - px);
  return steered(svg, {
    name: `Supply by num_workers, ${trials.length} measurements; `
      + `chosen: ${setting(tuning.settings)}`,
    count: trials.length,
    nearest: (px) => trials.reduce((best, trial, index) =>
      (distance(trial, px) < distance(trials[best], px) ? index : best), 0),
    place: (index) => scale.at(trials[index])[0],
    lines: (index) => {
      const { settings, rate, refused } = trials[index];
      return [setting(settings), [measured(trials[index]), known(rate, interval)],
        ...(refused ? [["refused", refused]] : [])];
    },
    choose: (index) => showMark(cursor, index !== null && center(trials[index])),
  });
}

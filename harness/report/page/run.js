// One run: its bottleneck, step, wall time, course, workers, tuner and settings.
import { wholeBar, stageBars } from "./bars.js";
import { courseSection } from "./course.js";
import { absent, h, list, note, scrolled, table, tableOf } from "./dom.js";
import { bytes, known, many, ms, perSecond, quoted, seconds } from "./format.js";
import { share, times, together, unitOf, words } from "./format.js";
import { MEANINGS, other, PARTS, SELDOM } from "./marks.js";
import { firstBatch, mistakesSection } from "./mistakes.js";
import { supplySection } from "./supply.js";

const BASIS = {
  device: {
    clock: "device events",
    says: "Measured by events on the device's timeline.",
    by: "by device events",
  },
  host: {
    clock: "host clock",
    says: "Measured by the host's clock: nothing runs here during a wait.",
    by: "by the host's clock",
  },
};
const LAST = {
  clock: "last window", by: "in the last window",
  says: "Medians of the last window, as shares of their sum; exact shares come with the report.",
};
const WAITS = {
  make: "no batch was made yet",
  transport: "on its way from a worker",
  pin: "copied to pinned memory",
  move: "handed over, and copy started",
};
const REST = {
  ...MEANINGS,
  start: "from the command to the first step",
  tuning: "the loader was tuned",
  evaluate: "passes over the validation or test set",
  first_steps: "workers start, kernels are chosen, networks compiled",
  pictures: "the first batch drawn",
  checkpoint: "state saved", other: "unaccounted time",
};
const WELL = ["balanced", "compute"];

// One run in full, with figures and charts as `declared` by the harness; `heading` is the level of
// its title.
export function runView(run, declared, heading) {
  const { report } = run;
  const ended = !run.latest;
  const sections = [
    ["One step", stepSection(report, declared.figures, ended)],
    ["Wall time", goodputSection(report, ended)],
    // a watched script has no tuner
    ...(report.expected ? [] : [["Mistakes", mistakesSection(run)],
      ["Tuner measurements", supplySection(run.tuning)]]),
    ["Course of the run", courseSection(run, declared.charts)],
    ["Loading time per sample", stagesSection(report)],
    run.first_batch && ["First training batch", firstBatch(run.first_batch)],
    report.sizes && ["Training sizes", report.sizes.map(sized)],
    report.ranks && ["Ranks", ranksSection(report.ranks)],
    ["Settings and environment", settingsSection(run)],
  ].filter(Boolean);
  const headings = sections.map(([title]) => h("h2", { tabindex: "-1" }, title));
  return h("article", { class: "run" },
    h("header", {}, h(heading, {}, "Run ", h("span", { class: "name" }, run.name)),
      note(facts(report, ended))),
    list(run.notes, "notes"),
    verdictCard(report, ended),
    (report.expected ?? []).map((text) => note(`Suggestion: ${text}`)),
    figures(run, ended),
    contents(headings),
    sections.map(([, body], index) => h("section", {}, headings[index], body)));
}

// Buttons, not links: the tab's address belongs to TensorBoard.
function contents(headings) {
  const go = (heading) => () => {
    heading.scrollIntoView();
    heading.focus({ preventScroll: true });
  };
  return h("nav", { class: "contents", "aria-label": "Contents" }, headings.map((heading) =>
    h("button", { type: "button", click: go(heading) }, heading.textContent)));
}

function facts({ status, steps, epochs, world_size: ranks, goodput, environment, error }, ended) {
  return [
    ended ? status : "no report",
    steps !== undefined && many(steps, "step"),
    epochs !== undefined && many(epochs, "epoch"),
    ranks > 1 && many(ranks, "rank"),
    goodput && `${seconds(goodput.wall_s)} from command to exit`,
    environment?.device ?? environment?.cpu,
    error && `error: ${error}`,
  ].filter(Boolean).join(" · ");
}

function copyButton(text) {
  const said = h("span", { role: "status", class: "note" });
  const code = h("code", {}, text);
  const click = async () => {
    try {
      await navigator.clipboard.writeText(text);
      said.textContent = "copied";
    } catch {
      // without clipboard permission: ready to copy by hand
      getSelection().selectAllChildren(code);
      said.textContent = "selected, copy it with Ctrl+C";
    }
  };
  return h("span", { class: "copy" }, code,
    h("button", { type: "button", click, "aria-label": `Copy ${text}` }, "Copy"), said);
}

function verdictCard({ verdict }, ended) {
  const why = ended ? "this run's report contains no verdict"
    : "the verdict comes with the report, at the end of the run";
  if (!verdict) return h("div", { class: "verdict" }, absent(why));
  const { bottleneck, ceiling, sentence, next_step: next, evidence = [] } = verdict;
  const bound = { balanced: "balanced", unknown: "unknown" }[bottleneck]
    ?? `verdict: ${words(bottleneck)}`;
  const mood = WELL.includes(bottleneck) ? "good" : bottleneck === "unknown" ? "" : "bad";
  return h("div", { class: `verdict ${mood}` },
    h("p", { class: "bound" }, h("span", { class: "chip" }, bound),
      ceiling !== undefined
        && h("span", {}, h("strong", {}, times(ceiling)), " at most, if loading were free")),
    h("p", { class: "sentence" }, sentence),
    next && h("p", { class: "next" }, "Next: ", copyButton(next)),
    list(evidence));
}

function figures(run, ended) {
  const { report } = run;
  const { step_ms: step, gpu_memory: memory } = report;
  const { by } = BASIS[report.stall_basis] ?? LAST;
  const cards = [
    ["Throughput", report.images_per_s, perSecond, ended ? "while training" : "in the last window",
      "no step was timed"],
    ["Step", step?.median, ms, step && `95th percentile ${ms(step.p95)}, longest ${ms(step.max)}`,
      "no step was timed"],
    ["Stalled", report.stall_fraction, share, `of the time, ${by}`, "no step was timed"],
    ["Goodput", report.goodput?.fraction, share, "of the wall time the device was busy",
      "the device's own time is unknown"],
    ["Top-1", report.top1, share, report.val_images
      && `on ${many(report.val_images, report.evaluated?.replace(/s$/, "") ?? "image")}`,
      "no evaluation has finished"],
    ...(run.mistakes?.classes.class.length > 5 ? [["Top-5", report.top5, share,
      "the true class is among the top five predictions", "no evaluation has finished"]] : []),
    ["GPU utilization", report.gpu_utilization, share, "a kernel was running, whole device",
      "no NVIDIA GPU reported it"],
    ["GPU memory", memory && Math.max(memory.training_bytes, memory.evaluation_bytes), bytes,
      memoryHint(memory),
      "no NVIDIA GPU reported it"],
  ];
  return h("dl", { class: "figures" },
    cards.map(([name, value, show, hint, reason]) => (value === undefined
    ? figure(name, "absent", "not available", ended ? reason : "there is no report")
    : figure(name, "", withUnit(show(value)), hint))));
}

function memoryHint(memory) {
  return memory && `peak allocation, ${bytes(memory.evaluation_bytes)} in evaluation; `
    + `${bytes(memory.reserved_bytes)} reserved of ${bytes(memory.total_bytes)}`;
}

function figure(name, kind, value, hint) {
  return h("div", {}, h("dt", {}, name), h("dd", { class: kind }, value),
    h("dd", { class: "note" }, hint));
}

function withUnit(text) {
  const [number, unit] = text.split(" ");
  return [number, unit && h("span", { class: "unit" }, ` ${unit}`)];
}

function stepSection(report, declared, ended) {
  const { shares, stall_basis: basis } = report;
  if (!shares || !PARTS.some((part) => shares[part] > 0)) return absent("no step was timed");
  const { clock, says } = BASIS[basis] ?? LAST;
  const column = (which) => {
    const show = together(PARTS.map((part) => report[`${part}_ms`]?.[which]));
    return (part) => known(report[`${part}_ms`]?.[which], show);
  };
  const median = column("median");
  const longest = column("max");
  const segments = PARTS.filter((part) => part in shares).map((part) => ({
    name: words(part), value: shares[part], fill: part, meaning: MEANINGS[part],
    cells: [share(shares[part]), median(part), longest(part)],
  }));
  const missing = PARTS.filter((part) => !(part in shares) && !SELDOM.includes(part))
    .map(words);
  const reason = basis === "host" ? "it needs the events of a CUDA device"
    : "this device does not report it";
  const why = ended ? reason : "not in the last window";
  return [
    note(h("span", { class: "badge" }, clock), says),
    wholeBar({ title: "One step", columns: ["share of the time", "median", "longest"], segments }),
    missing.length > 0 && note(`Not available: ${missing.join(", ")} (${why}).`),
    waitBar(Object.entries(report.wait_parts ?? {})),
    hostParts(Object.entries(report.host_parts_s ?? {})),
    tableOf("All step metrics",
      ["metric", "median", "95th percentile", "longest", "meaning"], () =>
        allFigures(report, declared)),
  ];
}

// Every figure in the report, so that new ones appear once declared.
function allFigures(report, declared) {
  return declared.filter(({ name }) => report[name] !== undefined).map(({ name, unit, text }) => {
    const value = report[name];
    const { show } = unitOf(unit);
    const cells = typeof value === "number" ? [show(value), "", ""]
      : [value.median, value.p95, value.max].map(show);
    return [words(name), ...cells, text];
  });
}

function waitBar(parts) {
  const segments = parts.map(([name, value], index) => (
    { name: words(name), value, fill: other(index), cells: [share(value)], meaning: WAITS[name] }));
  return segments.length > 0
    && [h("h3", {}, "Data wait by cause"),
      wholeBar({ title: "Wait for data", columns: ["share of the wait"], segments })];
}

function hostParts(parts) {
  const told = parts.map(([name, value]) => `${words(name)} ${seconds(value)}`);
  return told.length > 0 && note(`Host work between steps, in total: ${told.join(", ")}.`);
}

function goodputSection({ goodput }, ended) {
  if (!goodput || goodput.wall_s <= 0) return absent(ended ? "the device's own time is unknown"
    : "it is known when the run ends");
  const { fraction, busy_s: busy, wall_s: wall } = goodput;
  const rest = goodput.rest.filter((part) => part.s > 0);
  const others = rest.map((part) => part.name).filter((name) => !PARTS.includes(name));
  const fill = (name) => (PARTS.includes(name) ? name : other(others.indexOf(name)));
  const segments = [
    { name: "device busy", value: busy, fill: "compute", meaning: MEANINGS.compute },
    ...rest.map((part) => (
    { name: words(part.name), value: part.s, fill: fill(part.name), meaning: REST[part.name] }))];
  return [
    note(`${share(fraction)} of ${seconds(wall)}, from command to exit, went into steps.`),
    wholeBar({ title: "Wall time", columns: ["share", "time"], segments: segments.map((part) => (
      { ...part, cells: [share(part.value / wall), seconds(part.value)] })) }),
  ];
}

function stagesSection({ stages, workers, loader }) {
  if (!stages?.length) return absent("no sample was timed");
  const alone = loader?.num_workers === 0;
  const who = alone ? "The training process was" : "Workers were";
  const busy = workers?.busy_fraction;
  const told = busy !== undefined
    && `${who} making batches in ${share(busy)} of the training time. `;
  const caption = alone ? "per sample, in the training process"
    : "per sample, mean over all workers";
  return [note(told, workers && `${many(workers.samples, "sample")} in total.`),
    stageBars(stages, caption)];
}

function ranksSection(ranks) {
  const slowest = Math.max(...ranks.map((rank) => rank.step_ms));
  const rows = ranks.map((rank) => [
    [`rank ${rank.rank}`, rank.step_ms === slowest
      && h("span", { class: "note" }, " longest step")],
    ...["step_ms", "stalled_ms", "host_ms", "forward_ms"].map((name) => known(rank[name], ms)),
  ]);
  return scrolled("Ranks",
    table({ columns: ["rank", "step", "stalled for data", "host", "forward"], rows }));
}

const sized = ({ size, images_per_s: rate, stall_fraction: stall, loader }) => note(`At ${size} px: \
${known(rate, perSecond)}, stalled for data ${known(stall, share)} of the time, ${loader}`);

function settingsSection({ report, config }) {
  const typed = report.run?.overrides ?? [];
  return [
    h("p", {}, typed.length ? ["Typed: ", copyButton(typed.map(quoted).join(" "))]
      : "No setting was typed, or the report does not contain it."),
    h("div", { class: "columns" }, pairs("Loader as used", report.loader),
      pairs("Environment", report.environment)),
    config && h("details", {}, h("summary", {}, "The whole configuration"),
      h("pre", { tabindex: "0" }, config)),
  ];
}

function pairs(title, values = {}) {
  const shown = ([name, value]) =>
    [name, name.endsWith("_bytes") && typeof value === "number" ? bytes(value) : String(value)];
  const rows = Object.entries(values).map(shown);
  return h("div", {}, h("h3", {}, title), rows.length ? table({ kind: "pairs", columns: [], rows })
    : absent("not in the report"));
}

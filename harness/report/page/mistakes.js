// Mistakes of the last evaluation: by class, confused classes, the most confident ones; and the
// first training batch.
import { absent, fitted, h, label, note, s, scrolled, table } from "./dom.js";
import { count, known, many, share } from "./format.js";

const MOST_ROWS = 1000, MOST_KINDS = 50;
const MOST_CELLS = 100; // a side; more classes are grouped with their neighbors
const NAMED = 40, NUMBERED = 16; // most classes with room for names, for numbers
const LETTERS = 16;
const cut = (name) => (name.length > LETTERS ? `${name.slice(0, LETTERS - 1)}…` : name);
const part = (some, all) => (all > 0 ? some / all : undefined);

export function mistakesSection({ report, mistakes }) {
  if (!mistakes) {
    return absent(report.top1 === undefined ? "no evaluation has finished"
      : "the folder has no mistakes.json, or this page shows several runs: see the run's own page");
  }
  const { classes, kinds, counts, mistakes: surest } = mistakes;
  const sum = (numbers) => numbers.reduce((all, one) => all + one, 0);
  const all = sum(classes.images);
  const wrong = all - sum(classes.correct);
  return [
    note(`${many(wrong, "mistake")} in ${many(all, "image")}. `, counts && `${counts}.`),
    classTable(classes, kinds),
    h("div", { class: "columns confused" },
      h("div", {}, h("h3", {}, "Confusion matrix"), matrix(classes, kinds)),
      h("div", {}, h("h3", {}, "Most frequent mistakes"), kindTable(classes, kinds))),
    h("h3", {}, "Most confident mistakes"),
    surest.length ? pictures(surest.map(({ label, given, probability, where, picture }) => (
      { picture, where,
        lines: [`predicted as ${given} (${share(probability)})`, `true class ${label}`] })))
      : note("None."),
  ];
}

export function firstBatch(images) {
  return pictures(images.map(({ label, picture }) => ({ picture, lines: [label] })));
}

function classTable(classes, kinds) {
  const names = classes.class;
  const taken = new Map();
  for (const [label, given, images] of kinds) {
    if (!taken.has(label)) taken.set(label, `${names[given]} (${count(images)})`);
  }
  const accuracy = (place) => part(classes.correct[place], classes.images[place]);
  // a class without images comes last
  const order = [...names.keys()].sort((a, b) => (accuracy(a) ?? 2) - (accuracy(b) ?? 2));
  const trained = classes.train_images ?? [];
  const rows = order.slice(0, MOST_ROWS).map((place) => [names[place],
    known(accuracy(place), share), known(classes.images[place], count), taken.get(place) ?? "",
    known(part(classes.correct[place], classes.given[place]), share),
    ...(trained.length ? [known(trained[place], count)] : [])]);
  const columns = ["class", "recall", "images", "most often predicted as",
    "precision", ...(trained.length ? ["training images"] : [])];
  return [scrolled("Classes", table({ kind: "classes", columns, rows })),
    names.length > MOST_ROWS && note(`The ${count(MOST_ROWS)} worst classes of `
      + `${count(names.length)}; classes.csv contains all.`)];
}

function kindTable(classes, kinds) {
  if (!kinds.length) return note("None.");
  const rows = kinds.slice(0, MOST_KINDS).map(([label, given, images]) =>
    [classes.class[label], classes.class[given],
      `${count(images)} of ${known(classes.images[label], count)}`]);
  return scrolled("Most frequent mistakes",
    table({ kind: "classes", columns: ["true class", "predicted as", "images"], rows }));
}

// Cells of true classes (rows) and predictions (columns), by their share of the row.
function matrix(classes, kinds) {
  const names = classes.class;
  const group = Math.ceil(names.length / MOST_CELLS);
  const side = Math.ceil(names.length / group);
  const cells = new Map();
  const rows = Array(side).fill(0);
  const add = (label, given, images) => {
    const [row, column] = [Math.floor(label / group), Math.floor(given / group)];
    cells.set(row * side + column, (cells.get(row * side + column) ?? 0) + images);
    rows[row] += images;
  };
  classes.correct.forEach((images, place) => add(place, place, images));
  kinds.forEach(([label, given, images]) => add(label, given, images));
  const nameOf = (row) => (group === 1 ? names[row]
    : `${names[row * group]} to ${names[Math.min(names.length, (row + 1) * group) - 1]}`);
  return [
    note(side > NAMED
      ? "Rows are true classes, columns predictions, in the order of classes.csv. "
      : "Rows are true classes, columns predictions. ", group > 1
      && `A cell stands for ${group} by ${group} classes.`),
    fitted((width) => {
      const edge = side > NAMED ? 2
        : 12 + 6.5 * Math.max(...names.map((name) => cut(name).length));
      const size = Math.min((width - edge) / side, 520 / side, 64);
      const cell = ([place, images]) => {
        const [row, column] = [Math.floor(place / side), place % side];
        const [x, y] = [edge + column * size, edge + row * size];
        const told = `${nameOf(row)} predicted as ${nameOf(column)}: ${many(images, "image")}`;
        return [s("rect", { x, y, width: size, height: size, class: row === column ? "right"
          : "wrong", "fill-opacity": Math.sqrt(images / rows[row]) }, s("title", {}, told)),
        side <= NUMBERED && images > 0 && label(x + size / 2, y + size / 2 + 4, count(images))];
      };
      const middle = (place) => edge + (place + 0.5) * size + 4;
      const titles = side <= NAMED && names.map((name, place) => [
        label(edge - 6, middle(place), cut(name), "end"),
        s("text", { transform: `translate(${middle(place)},${edge - 6}) rotate(-90)` },
          cut(name))]);
      return s("svg", { width, height: edge + side * size + 1, role: "img", class: "matrix",
        "aria-label": "Confusion matrix; the table next to it contains the numbers" },
      s("rect", { x: edge, y: edge, width: side * size, height: side * size, class: "frame" }),
      titles, [...cells].map(cell));
    }),
  ];
}

// The pixels of a small picture are not smoothed.
const loaded = ({ target }) => target.classList.toggle("small", target.naturalWidth < 64);

function pictures(found) {
  return h("div", { class: "pictures" }, found.map(({ picture, where, lines }) =>
    h("figure", {}, picture && h("img", { src: `data:image/jpeg;base64,${picture}`,
      alt: lines.join(", "), title: where,
      load: loaded }),
    h("figcaption", {}, lines.map((line) => h("div", {}, line)),
      where && h("div", { class: "note" }, where)))));
}

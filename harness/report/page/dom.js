// Elements, the tooltip, and the common behavior of charts: fitting their width, control by pointer
// and keyboard, a table.
// Text from a run's files becomes text nodes and attributes only, never markup.

const SVG = "http://www.w3.org/2000/svg";

export function h(tag, attributes, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

export function s(tag, attributes, ...children) {
  return filled(document.createElementNS(SVG, tag), attributes, children);
}

const isThere = (value) => (value ?? false) !== false;

function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (typeof value === "function") element.addEventListener(name, value);
    else if (isThere(value)) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(Infinity).filter(isThere));
  return element;
}

export function path(d, kind) {
  return s("path", { d, class: kind });
}

export function label(x, y, text, anchor = "middle") {
  return s("text", { x, y, class: anchor }, text);
}

export function note(...children) {
  return h("p", { class: "note" }, ...children);
}

// A list of texts, if there are any.
export function list(texts, kind, role) {
  return texts.length > 0
    && h("ul", { class: kind, role }, texts.map((text) => h("li", {}, text)));
}

// An unavailable figure, and why.
export function absent(reason) {
  return h("p", { class: "absent" }, h("strong", {}, "not available"), ` ${reason}`);
}

// A table with named columns and rows; a cell is text or an element.
export function table({ kind, caption, columns, rows }) {
  const head = columns.length > 0
    && h("thead", {}, h("tr", {}, columns.map((name) => h("th", { scope: "col" }, name))));
  const row = ([first, ...rest]) =>
    h("tr", {}, h("th", { scope: "row" }, first), rest.map((cell) => h("td", {}, cell)));
  return h("table", { class: kind }, caption && h("caption", {}, caption), head,
    h("tbody", {}, rows.map(row)));
}

// A scrolling box for a large table, by keyboard too.
export function scrolled(name, inner) {
  return h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": name }, inner);
}

// The numbers behind a chart, made on demand.
export function tableOf(caption, columns, rows) {
  const fill = () => {
    if (!details.open || details.querySelector("table")) return;
    details.append(scrolled(caption, table({ caption, columns, rows: rows() })));
  };
  const details = h("details", { toggle: fill }, h("summary", {}, "Show the numbers"));
  return details;
}

// A box filled by the SVG of `draw(width)`, redrawn when its width changes.
export function fitted(draw, attributes) {
  const box = h("div", { class: "fit", ...attributes });
  let width = 0;
  const redraw = () => {
    const svg = draw(width);
    // paper is narrower, without a redraw
    svg.setAttribute("viewBox", `0 0 ${width} ${svg.getAttribute("height")}`);
    box.replaceChildren(svg);
  };
  new ResizeObserver(([entry]) => {
    const now = Math.floor(entry.contentRect.width);
    if (now > 0 && now !== width) {
      width = now;
      redraw();
    }
  }).observe(box);
  box.redraw = () => width > 0 && redraw();
  return box;
}

const tip = h("div", { class: "tip", "aria-hidden": "true" });

function showTip([title, ...rows], x, y) {
  const row = ([name, value, mark]) =>
    h("tr", {}, h("td", {}, mark), h("th", {}, name), h("td", {}, value));
  tip.replaceChildren(h("strong", {}, title), h("table", {}, rows.map(row)));
  if (!tip.isConnected) document.body.append(tip);
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  const left = x + 16 + box.width > innerWidth ? x - 16 - box.width : x + 16;
  const top = Math.min(y + 16, innerHeight - box.height - 4);
  tip.style.transform = `translate(${Math.max(4, left)}px, ${Math.max(4, top)}px)`;
}

// Shows a mark with these attributes; hides it without any.
export function showMark(mark, attributes) {
  mark.toggleAttribute("hidden", !attributes);
  filled(mark, attributes, []);
}

// Makes `frame` a slider over `count` points: the pointer and the arrow keys choose one, and
// `choose(index)` marks it.
// `nearest(x)` gives the point at a pixel from the frame's left edge, `place(index)` the inverse,
// and `lines(index)` its tooltip: a title, then rows of [name, value, mark].
export function steered(frame, { name, count, nearest, place, lines, choose }) {
  let at = -1;
  const set = (index, x, y) => {
    at = Math.max(0, Math.min(count - 1, index));
    const [title, ...rows] = lines(at);
    frame.setAttribute("aria-valuenow", at + 1);
    const told = rows.map((row) => `${row[0]} ${row[1]}`);
    frame.setAttribute("aria-valuetext", [title, ...told].join(", "));
    choose(at);
    const box = frame.getBoundingClientRect();
    showTip([title, ...rows], x ?? box.left + place(at), y ?? box.top);
  };
  const leave = () => {
    tip.hidden = true;
    choose(null);
  };
  const moves = {
    ArrowLeft: -1, ArrowRight: 1, ArrowDown: -1, ArrowUp: 1,
    PageDown: -10, PageUp: 10, Home: -Infinity, End: Infinity,
  };
  return filled(frame, {
    role: "slider",
    tabindex: 0,
    "aria-label": name,
    "aria-valuemin": 1,
    "aria-valuemax": count,
    "aria-valuenow": 1,
    "aria-valuetext": "use the arrow keys",
    pointermove: (event) =>
      set(nearest(event.clientX - frame.getBoundingClientRect().left), event.clientX,
        event.clientY),
    pointerleave: leave,
    blur: leave,
    focus: () => frame.matches(":focus-visible") && set(at),
    keydown: (event) => {
      if (event.key === "Escape") leave();
      if (!(event.key in moves)) return;
      event.preventDefault();
      set(at + moves[event.key]);
    },
  }, []);
}

// Numbers as text, always with their unit.

const digits = (value, count) =>
  value.toLocaleString("en", { minimumFractionDigits: count, maximumFractionDigits: count });

export function count(value) {
  return digits(value, 0);
}

export function rounded(value) {
  const size = Math.abs(value);
  return digits(value, size >= 100 || value === 0 ? 0 : size >= 10 ? 1 : 2);
}

export function ms(value) {
  if (value >= 1000) return `${rounded(value / 1000)} s`;
  return value > 0 && value < 0.1 ? `${rounded(value * 1000)} µs` : `${rounded(value)} ms`;
}

export function seconds(value) {
  if (value < 1) return ms(1000 * value);
  if (value < 100) return `${rounded(value)} s`;
  const whole = Math.round(value);
  const [hours, minutes] = [Math.floor(whole / 3600), Math.floor((whole % 3600) / 60)];
  return hours ? `${hours} h ${minutes} min` : `${minutes} min ${whole % 60} s`;
}

export function share(value) {
  return `${digits(100 * value, 1)}%`;
}

export function bytes(value) {
  const units = ["B", "kB", "MB", "GB", "TB", "PB"];
  const power = Math.min(units.length - 1,
    Math.max(0, Math.floor(Math.log10(Math.max(1, value)) / 3)));
  return `${power ? rounded(value / 1000 ** power) : count(value)} ${units[power]}`;
}

export function times(value) {
  return `${digits(value, 2)}x`;
}

// One unit for a column of milliseconds, by the longest of them, so that rows can be compared.
export function together(values) {
  const most = Math.max(0, ...values.filter((value) => Number.isFinite(value)));
  const [factor, unit] = most >= 1000 ? [1e-3, "s"] : most < 0.1 ? [1e3, "µs"] : [1, "ms"];
  return (value) => (value > 0 && factor * value < 0.005 ? `<0.01 ${unit}`
    : `${rounded(factor * value)} ${unit}`);
}

export const perSecond = (value) => `${rounded(value)} images/s`;
const bytesPerSecond = (value) => `${bytes(value)}/s`;
// How values of a unit are shown, in text and on an axis.
const UNITS = {
  ms: { show: ms, tick: ms },
  fraction: { show: share, tick: (value) => `${Math.round(100 * value)}%` },
  "images/s": { show: perSecond, tick: rounded },
  cores: { show: (value) => `${rounded(value)} cores`, tick: rounded },
  bytes: { show: bytes, tick: bytes },
  "bytes/s": { show: bytesPerSecond, tick: bytesPerSecond },
};
export const unitOf = (unit) => UNITS[unit]
  ?? { show: (value) => `${rounded(value)} ${unit}`.trim(), tick: rounded };
export const known = (value, show) =>
  (value === undefined || value === null ? "not available" : show(value));

// A number of things, whose plural ends in s.
export function many(number, thing) {
  return `${count(number)} ${thing}${number === 1 ? "" : "s"}`;
}

// Names in files as words.
export function words(name) {
  return name.replaceAll("_", " ");
}

// A word quoted for a shell, by the rules of Python's shlex.quote.
export function quoted(word) {
  return /^[\w@%+=:,./-]+$/.test(word) ? word : `'${word.replaceAll("'", `'"'"'`)}'`;
}

// At most about `most` round values from 0 to `end`.
export function ticks(end, most) {
  const rough = Math.max(end, Number.MIN_VALUE) / most;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((one) => one * power).find((one) => one >= rough) ?? rough;
  return Array.from({ length: Math.floor(end / step + 1e-9) + 1 }, (_, index) => index * step);
}

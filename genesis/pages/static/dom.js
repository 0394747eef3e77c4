// What every page builds itself with: elements, text of strangers, figures, tables, and looking again.
//
// Nothing here, and nothing in a page's own module, parses markup: text goes into text nodes. A string that a stranger
// gave is cut to a length, its control and direction marks are shown as signs, and it stands in a <bdi>, so it neither
// runs, nor floods the page, nor turns the text beside it around.
//
// Styles are set as properties (`style: {width: "40%"}`), never as a style attribute: the policy forbids that.
// The one-file form of a page (genesis/pages/single_file.py) wraps each module in a function: `import` and `export`
// stand at the beginning of a line, and there is neither a default export nor a top-level await.

export const MAX_TEXT = 300;
const DASH = "–";

/** An element. Properties: class, text, on: {event: listener}, style: {property: value}, data: {name: value}; every
 *  other is an attribute (null and false leave it out, true sets it empty). Children: nodes, strings, null. */
export function element(tag, properties = {}, ...children) {
  return fill(document.createElement(tag), properties, children);
}

/** The same for SVG. */
export function svgElement(tag, properties = {}, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", tag), properties, children);
}

function fill(made, properties, children) {
  for (const [name, value] of Object.entries(properties)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "class") made.setAttribute("class", value);
    else if (name === "text") made.textContent = value;
    else if (name === "on") for (const [event, listener] of Object.entries(value)) made.addEventListener(event, listener);
    else if (name === "style") for (const [property, set] of Object.entries(value)) made.style.setProperty(property, set);
    else if (name === "data") Object.assign(made.dataset, value);
    else if (name.startsWith("on")) throw new Error(`${name}: expected listeners in "on"`);
    else made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.flat().filter(child => child !== null && child !== undefined && child !== false));
  return made;
}

/** The element of that id. */
export function byId(id) {
  return document.getElementById(id);
}

/** Sets the text of an element only if it changes, so that a reader's selection and a screen reader are left alone. */
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
  return node;
}

// Text of strangers.

/** A string with what cannot be seen shown as signs: controls, direction marks, byte order marks, lone surrogates. */
export function visibleText(value, maxLength = MAX_TEXT) {
  const whole = typeof value === "string" ? value : value === null || value === undefined ? DASH : String(value);
  let shown = "";
  let numShown = 0;
  let numUnits = 0;
  for (const character of whole.slice(0, 2 * maxLength)) {
    if (numShown === maxLength) break;
    shown += signOf(character);
    numShown += 1;
    numUnits += character.length;
  }
  return numUnits < whole.length ? shown + "…" : shown;
}

function signOf(character) {
  const code = character.codePointAt(0);
  if (code < 0x20) return String.fromCodePoint(0x2400 + code);
  if (code === 0x7f) return "␡";
  const isHidden = (code >= 0x80 && code < 0xa0) || code === 0xad || code === 0x61c || (code >= 0x200b && code <= 0x200f)
    || (code >= 0x2028 && code <= 0x202e) || (code >= 0x2060 && code <= 0x206f) || code === 0xfeff
    || (code >= 0xd800 && code <= 0xdfff) || (code >= 0xfff9 && code <= 0xfffb) || (code >= 0xe0000 && code <= 0xe0fff);
  return isHidden ? `⟨U+${code.toString(16).toUpperCase().padStart(4, "0")}⟩` : character;
}

/** A stranger's text, cut, made visible and isolated from the direction of what stands beside it. */
export function isolated(value, maxLength = MAX_TEXT, properties = {}) {
  return element("bdi", { ...properties, text: visibleText(value, maxLength) });
}

// Figures. What is no finite number is a dash.

function isNumber(value) {
  return typeof value === "number" && Number.isFinite(value);
}

/** 85,000 or 3.1416: with so many digits behind the point. */
export function formatNumber(value, digits = 0) {
  if (!isNumber(value)) return DASH;
  return value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
}

const COUNTS = [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e4, "k"]];

/** 9,512, 85.0 k, 320 M, 1.25 B: three digits or so. */
export function formatCompact(value) {
  if (!isNumber(value)) return DASH;
  const size = Math.abs(value);
  for (const [least, name] of COUNTS) if (size >= least) return `${threeDigits(value / (name === "k" ? 1e3 : least))} ${name}`;
  return Number.isInteger(value) ? formatNumber(value) : threeDigits(value);
}

function threeDigits(value) {
  const size = Math.abs(value);
  return formatNumber(value, size >= 100 ? 0 : size >= 10 ? 1 : 2);
}

const SIZES = ["B", "kB", "MB", "GB", "TB", "PB"];

/** 20.0 MB: powers of 1,000. */
export function formatBytes(value) {
  if (!isNumber(value)) return DASH;
  let size = value;
  let unit = 0;
  while (Math.abs(size) >= 999.5 && unit < SIZES.length - 1) {
    size /= 1000;
    unit += 1;
  }
  return `${unit === 0 ? formatNumber(size) : threeDigits(size)} ${SIZES[unit]}`;
}

/** 25 %, 0.8 %: of a fraction of one. */
export function formatPercent(fraction, digits = null) {
  if (!isNumber(fraction)) return DASH;
  const percent = 100 * fraction;
  const size = Math.abs(percent);
  return `${formatNumber(percent, digits ?? (size >= 10 || size === 0 ? 0 : size >= 1 ? 1 : 2))} %`;
}

/** 250 ms, 42 s, 5 min 12 s, 3 h 04 min, 12 d 5 h. */
export function formatDuration(seconds) {
  if (!isNumber(seconds)) return DASH;
  if (seconds < 0) return `−${formatDuration(-seconds)}`;
  if (seconds > 0 && seconds < 0.995) return `${threeDigits(1000 * seconds)} ms`;
  if (seconds < 9.95) return `${formatNumber(seconds, 1)} s`;
  const whole = Math.round(seconds);
  if (whole < 60) return `${whole} s`;
  const two = number => String(number).padStart(2, "0");
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${two(whole % 60)} s`;
  const minutes = Math.round(whole / 60);
  if (minutes < 1440) return `${Math.floor(minutes / 60)} h ${two(minutes % 60)} min`;
  const hours = Math.round(minutes / 60);
  return `${formatNumber(Math.floor(hours / 24))} d ${hours % 24} h`;
}

function asDate(value) {
  const found = isNumber(value) ? new Date(1000 * value) : typeof value === "string" ? new Date(value) : null;
  return found === null || Number.isNaN(found.getTime()) ? null : found;
}

/** A moment (ISO 8601, or seconds since 1970) in the reader's own time: 2026-11-28 17:32:15. */
export function formatTime(value) {
  const date = asDate(value);
  return date === null ? DASH : date.toLocaleString("sv-SE");
}

/** A <time> of that moment, with UTC on hover. */
export function timeElement(value) {
  const date = asDate(value);
  if (date === null) return element("span", { text: DASH });
  return element("time", { datetime: date.toISOString(), title: date.toISOString(), text: formatTime(value) });
}

/** "12 s ago". */
export function formatAge(seconds) {
  return isNumber(seconds) ? `${formatDuration(Math.max(0, Math.round(seconds)))} ago` : DASH;
}

// Pieces of pages.

/** A state: kind is "good", "warning", "bad" or "" (plain). */
export function chip(kind, text) {
  return element("span", { class: `chip ${kind}`.trim(), text: visibleText(text, 80) });
}

/** A <div class="card"> for a <dl class="cards">: label, figure and detail, all plain text or nodes. */
export function card(label, figure, detail = null) {
  return element("div", { class: "card" },
    element("dt", {}, label),
    element("dd", { class: "figure" }, figure),
    detail === null ? null : element("dd", { class: "detail" }, detail));
}

/** Term and description of a <dl class="facts">. */
export function fact(term, ...description) {
  return [element("dt", {}, term), element("dd", {}, ...description)];
}

/** A bar of a fraction from 0 to 1; null: not known. */
export function progressBar(fraction, label) {
  const known = isNumber(fraction);
  const percent = known ? Math.min(100, Math.max(0, 100 * fraction)) : null;
  return element("span", {
    class: known ? "bar" : "bar unknown", role: "progressbar", "aria-label": visibleText(label, 120), "aria-valuemin": "0",
    "aria-valuemax": "100", "aria-valuenow": known ? percent.toFixed(1) : null,
  }, element("i", { style: { width: known ? `${percent}%` : "0" } }));
}

/** Puts children into a node, unless what it would show is what it shows: focus and selection stay where they are. */
export function show(node, ...children) {
  const made = document.createDocumentFragment();
  made.append(...children.flat().filter(child => child !== null && child !== undefined && child !== false));
  const same = node.childNodes.length === made.childNodes.length
    && [...node.childNodes].every((old, index) => old.isEqualNode(made.childNodes[index]));
  if (!same) node.replaceChildren(made);
  return node;
}

/** A table whose columns sort by their headings, and whose rows stay the same elements from one update to the next.
 *
 *  columns: {key, title, hint, value(row) -> what sorts, show(row, value) -> string or node, kind: "text", "wrap" or ""
 *  (a figure), isRowHeading}. Options: caption, rowKey(row), sort: {key, descending}, empty (said when there is no row),
 *  maxRows, onRow(row, tr) for classes and listeners of a new row. */
export class DataTable {
  constructor(columns, { caption, rowKey, sort = null, empty = "nothing yet", maxRows = 500, onRow = null }) {
    this.columns = columns;
    this.rowKey = rowKey;
    this.sort = sort;
    this.maxRows = maxRows;
    this.onRow = onRow;
    this.rows = [];
    this.drawn = new Map();
    this.body = element("tbody");
    this.headings = columns.map(column => this.#heading(column));
    this.table = element("table", { class: "data" },
      element("caption", { class: "visually-hidden", text: caption }),
      element("thead", {}, element("tr", {}, ...this.headings)), this.body);
    this.scroll = element("div", { class: "scroll", role: "region", "aria-label": caption, tabindex: "0" }, this.table);
    this.rest = element("p", { class: "note", hidden: true });
    this.empty = element("p", { class: "note", text: empty });
    this.node = element("div", {}, this.scroll, this.empty, this.rest);
    this.#draw();
  }

  /** Shows these rows. */
  update(rows) {
    this.rows = rows;
    this.#draw();
  }

  #heading(column) {
    const button = element("button", { type: "button", title: column.hint, text: column.title,
      on: { click: () => this.#sortBy(column) } });
    return element("th", { scope: "col", class: column.kind ?? "" }, button);
  }

  #sortBy(column) {
    const isSame = this.sort?.key === column.key;
    this.sort = { key: column.key, descending: isSame ? !this.sort.descending : !column.kind };
    this.#draw();
  }

  #sorted() {
    const column = this.columns.find(each => each.key === this.sort?.key);
    if (!column) return this.rows;
    const sign = this.sort.descending ? -1 : 1;
    return this.rows.map(row => [column.value(row), row]).sort(([a], [b]) => compare(a, b, sign)).map(([, row]) => row);
  }

  #draw() {
    this.columns.forEach((column, index) => {
      const state = column.key === this.sort?.key ? (this.sort.descending ? "descending" : "ascending") : "none";
      this.headings[index].setAttribute("aria-sort", state);
    });
    const rows = this.#sorted().slice(0, this.maxRows);
    const kept = new Map();
    for (const row of rows) kept.set(String(this.rowKey(row)), row);
    for (const [key, drawn] of this.drawn) if (!kept.has(key)) {
      drawn.remove();
      this.drawn.delete(key);
    }
    let before = null;
    for (const [key, row] of kept) {
      const drawn = this.#rowElement(key, row);
      const place = before === null ? this.body.firstChild : before.nextSibling;
      if (place !== drawn) this.body.insertBefore(drawn, place);
      before = drawn;
    }
    this.scroll.hidden = rows.length === 0;
    this.empty.hidden = rows.length > 0;
    this.rest.hidden = this.rows.length <= rows.length;
    setText(this.rest, `${formatNumber(this.rows.length - rows.length)} further rows are not shown`);
  }

  #rowElement(key, row) {
    let drawn = this.drawn.get(key);
    if (!drawn) {
      drawn = element("tr", {}, ...this.columns.map(column =>
        element(column.isRowHeading ? "th" : "td", { class: column.kind ?? "", scope: column.isRowHeading ? "row" : null })));
      this.drawn.set(key, drawn);
      this.onRow?.(row, drawn);
    }
    this.columns.forEach((column, index) => {
      const value = column.value(row);
      const shown = column.show ? column.show(row, value) : visibleText(value);
      show(drawn.children[index], shown);
    });
    return drawn;
  }
}

/** Numbers before words, what is missing last whichever the direction. */
function compare(a, b, sign) {
  const [hasA, hasB] = [a, b].map(value => value !== null && value !== undefined && !Number.isNaN(value));
  if (!hasA || !hasB) return Number(hasB) - Number(hasA);
  if (typeof a === "number" && typeof b === "number") return sign * (a - b);
  if (typeof a === "number" || typeof b === "number") return typeof a === "number" ? -1 : 1;
  return sign * String(a).localeCompare(String(b), "en", { numeric: true });
}

// Data: what stands in the page (a report), or what the server says now.

/** The data inside a one-file page; null where the page is served. */
export function embeddedData() {
  const found = document.getElementById("page-data");
  return found === null ? null : JSON.parse(found.textContent);
}

/** An answer that is no success. */
export class AnswerError extends Error {
  constructor(status, text) {
    super(text);
    this.status = status;
  }
}

/** The JSON at a path below the page's address. Throws AnswerError, or what fetch throws. */
export async function fetchJson(path, { timeoutMs = 10000, signal = null } = {}) {
  const deadline = AbortSignal.timeout(timeoutMs);
  const answer = await fetch(path, {
    headers: { accept: "application/json" }, cache: "no-cache", credentials: "same-origin",
    signal: signal === null ? deadline : AbortSignal.any([deadline, signal]),
  });
  if (!answer.ok) throw new AnswerError(answer.status, visibleText(await detailOf(answer)));
  return answer.json();
}

async function detailOf(answer) {
  const text = (await answer.text()).trim();
  try {
    const found = JSON.parse(text);
    return typeof found.detail === "string" ? found.detail : `status ${answer.status}`;
  } catch {
    return text || `status ${answer.status}`;
  }
}

/** Looks again and again, one request at a time: every intervalMs, four times as seldom while the page is hidden, and
 *  more and more seldom (up to 30 s) while it fails. look(): a promise; onFailure(error): told of each failure. */
export function poll(look, { intervalMs = 2000, onFailure = () => {} } = {}) {
  let failures = 0;
  let timer = 0;
  let isLooking = false;
  const next = () => {
    const backoffMs = Math.min(30000, intervalMs * 2 ** Math.min(failures, 6));
    timer = setTimeout(again, failures ? backoffMs : intervalMs * (document.hidden ? 4 : 1));
  };
  const again = async () => {
    isLooking = true;
    try {
      await look();
      failures = 0;
    } catch (error) {
      failures += 1;
      onFailure(error);
    }
    isLooking = false;
    next();
  };
  document.addEventListener("visibilitychange", () => {
    if (document.hidden || isLooking) return;
    clearTimeout(timer);
    again();
  });
  again();
}

/** Tells a screen reader, in the page's element of the id "announcements" (aria-live). */
export function announce(text) {
  const region = document.getElementById("announcements");
  if (region) setText(region, text);
}

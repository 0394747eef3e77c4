// Curves of a course (`CourseView` of trainer/monitor/pages/course.py), drawn by plotly from plain data: nothing here asks
// a server for figures.
//
// plotly reads some markup in labels: names of strangers are given to it with "<" and "&" escaped, and cut. A chart has a
// sentence for those who do not see it, and a table of some of its points; zooming has buttons beside the mouse.

import { element, formatCompact, formatNumber, formatTime, setText, show, visibleText } from "./dom.js";

const NAMES = { step: "steps done", tokens: "tokens", time: "time" };
const TABLE_ROWS = 12;
const MAX_NAME = 40;

let loading = null;

/** Resolves to whether charts can be drawn. Loads the library that <meta name="chart-library"> names, once. */
export function chartsReady() {
  if (window.Plotly) return Promise.resolve(true);
  const named = document.querySelector('meta[name="chart-library"]');
  if (!named?.content) return Promise.resolve(false);
  loading ??= loadAll(named.content.split(" "));
  return loading;
}

async function loadAll(paths) {
  for (const path of paths) {
    const isLoaded = await new Promise(done => {
      const script = element("script", { src: path, on: { load: () => done(true), error: () => done(false) } });
      document.head.append(script);
    });
    if (!isLoaded) return false;
  }
  return Boolean(window.Plotly);
}

/** Text that plotly shows as it is. */
export function plainLabel(text, maxLength = MAX_NAME) {
  return visibleText(text, maxLength).replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");
}

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

function faded(hex, share) {
  const [red, green, blue] = [1, 3, 5].map(at => parseInt(hex.slice(at, at + 2), 16));
  return `rgba(${red},${green},${blue},${share})`;
}

const DIGITS = { loss: 3, held_out: 3, gradient_norm: 3, seconds: 2 };
const MAX_COLOURED = 200;
const colourIndices = new Map();

/** The same colour for a name in all charts: the first for the run as a whole, the second for who answers. */
function colourIndex(curve) {
  if (curve.who !== "node") return curve.who === "run" ? 0 : 1;
  if (!colourIndices.has(curve.name) && colourIndices.size < MAX_COLOURED) colourIndices.set(curve.name, 2 + colourIndices.size);
  return colourIndices.get(curve.name) ?? 2;
}

/** Values with a hole before each of these points, where the line is broken. */
function broken(values, breaks) {
  if (!breaks?.length) return values;
  const holes = new Set(breaks);
  return values.flatMap((value, index) => holes.has(index) ? [null, value] : [value]);
}

function seriesColour(index) {
  return colour(`--series-${1 + (index % 8)}`);
}

/** x as plotly takes it: moments as dates. */
function placed(by, x) {
  return by === "time" ? x.map(at => new Date(1000 * at)) : x;
}

function shownX(by, x) {
  return by === "time" ? formatTime(x) : by === "tokens" ? formatCompact(x) : formatNumber(x);
}

function tracesOf(curve, by, index, isMain) {
  const own = seriesColour(index);
  const x = placed(by, curve.breaks?.length ? broken(curve.x, curve.breaks).map((at, index, all) => at ?? all[index + 1]) : curve.x);
  const name = plainLabel(curve.name);
  const traces = [];
  if (curve.low) {
    const band = { x, mode: "lines", line: { width: 0, shape: "linear" }, hoverinfo: "skip", showlegend: false, legendgroup: name };
    traces.push({ ...band, y: broken(curve.low, curve.breaks) });
    traces.push({ ...band, y: broken(curve.high, curve.breaks), fill: "tonexty", fillcolor: faded(own, 0.16) });
  }
  traces.push({
    x, y: broken(curve.y, curve.breaks), name, legendgroup: name, mode: curve.x.length === 1 ? "markers" : "lines",
    line: { color: own, width: isMain ? 2.2 : 1.2, dash: index >= 8 ? "dot" : "solid" }, marker: { color: own, size: 7 },
    hovertemplate: "%{y:.5~g}<extra>%{fullData.name}</extra>",
  });
  return traces;
}

function roundShapes(course) {
  return (course.rounds ?? []).map(mark => ({
    type: "line", xref: "x", yref: "paper", y0: 0, y1: mark.is_failed ? 1 : 0.035,
    x0: placed(course.by, [mark.x])[0], x1: placed(course.by, [mark.x])[0], layer: "below",
    line: { color: colour(mark.is_failed ? "--bad" : "--strong-line"), width: 1, dash: mark.is_failed ? "dot" : "solid" },
  }));
}

/** Ticks of counted things: at whole numbers only, also where few of them are in sight. */
function wholeTicks(begin, end) {
  return end !== null && end - begin < 8 ? { tick0: 0, dtick: 1 } : {};
}

function layoutOf(course, { isLogScale, yTitle, range, most }) {
  const [first, last] = range ?? [course.begin, course.end];
  const [text, line] = [colour("--muted"), colour("--line")];
  const axis = { gridcolor: line, linecolor: line, zeroline: false, tickfont: { color: text, size: 12 }, fixedrange: false };
  return {
    autosize: true, margin: { l: 56, r: 12, t: 8, b: 40 }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: getComputedStyle(document.body).fontFamily, size: 12.5, color: text },
    hovermode: "x unified", hoverlabel: { bgcolor: colour("--surface"), bordercolor: line, font: { color: colour("--text") } },
    dragmode: "zoom", showlegend: true,
    legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom", font: { color: text }, itemsizing: "constant", traceorder: "reversed" },
    xaxis: {
      ...axis, type: course.by === "time" ? "date" : "linear", nticks: 7, exponentformat: "SI", separatethousands: true,
      ...(course.by === "time" ? {} : wholeTicks(first, last)),
      title: { text: NAMES[course.by], font: { size: 12 }, standoff: 6 },
      ...(range ? { range: placed(course.by, range), autorange: false } : { autorange: true }),
    },
    yaxis: { ...axis, type: isLogScale ? "log" : "linear", nticks: 6, fixedrange: true, autorange: true,
      title: { text: yTitle, font: { size: 12 }, standoff: 8 }, ...(isLogScale ? { dtick: "D2" } : most === null ? {} : wholeTicks(0, most)) },
    shapes: roundShapes(course), uirevision: "kept",
  };
}

const CONFIG = { responsive: true, displayModeBar: false, displaylogo: false, doubleClick: false, showTips: false, scrollZoom: false };

/** One chart of a course's curves of one kind ("loss", "speed", "nodes"). */
export class CourseChart {
  /** onZoom(begin, end): the reader has marked a range of x, in the course's own figures; both null: all of it. */
  constructor({ what, title, unit, height = 320, onZoom = null }) {
    this.what = what;
    this.title = title;
    this.unit = unit;
    this.onZoom = onZoom;
    this.isLogScale = false;
    this.canvas = element("div", { class: "chart", style: { height: `${height}px` }, "aria-hidden": "true" });
    this.summary = element("figcaption", { class: "note" });
    this.table = element("table", { class: "data" });
    this.details = element("details", {}, element("summary", { text: `${title} as a table` }),
      element("div", { class: "scroll", role: "region", "aria-label": `${title} as a table`, tabindex: "0" }, this.table));
    this.node = element("figure", { class: "chart-frame", "aria-label": title }, this.canvas, this.summary, this.details);
    this.isDrawn = false;
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.course && this.update(this.course, this.range));
  }

  /** Draws; range: [begin, end] of x, or null. Resolves when the chart is there, to whether one could be drawn. */
  async update(course, range = null) {
    this.course = course;
    this.range = range;
    const curves = course.curves.filter(curve => curve.what === this.what);
    this.#describe(course, curves);
    const isReady = await chartsReady();
    this.canvas.hidden = !isReady || curves.length === 0;
    if (!isReady || this.course !== course || curves.length === 0) return isReady;
    const order = { run: 0, self: 1, node: 2 };
    const sorted = [...curves].sort((a, b) => order[b.who] - order[a.who]);
    for (const curve of curves) colourIndex(curve);  // In the order of their names, whichever is drawn first.
    const traces = sorted.flatMap(curve => tracesOf(curve, course.by, colourIndex(curve), curve.who !== "node" || curves.length === 1));
    const most = this.what === "nodes" ? Math.max(...curves.map(curve => Math.max(...curve.y))) : null;
    await window.Plotly.react(this.canvas, traces, layoutOf(course, { isLogScale: this.isLogScale, yTitle: this.unit, range, most }), CONFIG);
    if (!this.isDrawn) this.#listen();
    this.isDrawn = true;
    return true;
  }

  #listen() {
    this.canvas.on("plotly_relayout", change => {
      const [begin, end] = [change["xaxis.range[0]"], change["xaxis.range[1]"]];
      if (begin === undefined || end === undefined || !this.onZoom) return;
      const figure = value => this.course.by === "time" ? new Date(String(value).replace(" ", "T")).getTime() / 1000 : Number(value);
      this.onZoom(figure(begin), figure(end));
    });
    this.canvas.on("plotly_doubleclick", () => this.onZoom?.(null, null));
  }

  #describe(course, curves) {
    // Of the run and of this node the one with more points: a node's looks at the run are fewer than its steps.
    const main = curves.filter(curve => curve.who !== "node").sort((a, b) => b.x.length - a.x.length)[0] ?? curves[0];
    if (!main) {
      setText(this.summary, "Nothing is recorded yet.");
      this.details.hidden = true;
      return;
    }
    const [first, last] = [main.y[0], main.y[main.y.length - 1]];
    const lowest = Math.min(...(main.low ?? main.y));
    setText(this.summary, `${visibleText(main.name, MAX_NAME)}: ${formatNumber(first, DIGITS[this.what] ?? 0)} at ${NAMES[course.by]} `
      + `${shownX(course.by, main.x[0])}, ${formatNumber(last, DIGITS[this.what] ?? 0)} at ${shownX(course.by, main.x[main.x.length - 1])}; `
      + `lowest ${formatNumber(lowest, DIGITS[this.what] ?? 0)}. ${DIGITS[this.what] && main.low ? "Shaded: from lowest to highest." : ""}`);
    this.details.hidden = false;
    const count = Math.min(TABLE_ROWS, main.x.length);
    const picked = [...Array(count).keys()].map(index => Math.round(index * (main.x.length - 1) / Math.max(1, count - 1)));
    const digits = DIGITS[this.what] ? 4 : 0;
    show(this.table, element("caption", { class: "visually-hidden", text: this.title }),
      element("thead", {}, element("tr", {}, ...[NAMES[course.by], "mean", "lowest", "highest"].map(text => element("th", { scope: "col", text })))),
      element("tbody", {}, ...picked.map(at => element("tr", {}, element("th", { scope: "row", text: shownX(course.by, main.x[at]) }),
        ...[main.y, main.low ?? main.y, main.high ?? main.y].map(values => element("td", { text: formatNumber(values[at], digits) }))))));
  }
}

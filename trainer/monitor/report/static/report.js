// A report on a run, from the `RunReport` that stands in the page: what it says is shown, and what is null there is not.

import { CourseChart, chartsReady } from "./charts.js";
import {
  DataTable, byId, card, chip, element, embeddedData, fact, formatBytes, formatCompact, formatDuration, formatNumber,
  formatPercent, formatTime, isolated, setText, show, timeElement, visibleText,
} from "./dom.js";
import { showRounds } from "./rounds.js";
import { KINDS, timelineOf } from "./timeline.js";

const report = embeddedData();
const AXES = [["step", "steps", "loss_by_step"], ["tokens", "tokens", "loss_by_tokens"], ["time", "time", "course_by_time"]];
const PAPER_PX = 670;  // A4 without margins and the padding of a section.
const SHOWN_ROUNDS = 24;
const ONLY_BELOW = new Set(["lowest loss of a step"]);
const NO_TEXT = "–";
const charts = [];

/** The body of a section, which is there if there is something to show. */
function body(id, isShown = true) {
  const section = byId(id);
  section.hidden = !isShown;
  return section.querySelector(".body");
}

// -- the top ----------------------------------------------------------------------------------------------------------

function showTop() {
  show(byId("title"), isolated(report.title, 64));
  const names = report.nodes.length === 1 ? "one node" : `${formatNumber(report.nodes.length)} nodes`;
  show(byId("subtitle"), "Report on a run: ", ...(report.nodes.length ? [names, ", "] : []),
    ...(report.first_at ? [timeElement(report.first_at), " to ", timeElement(report.last_at), ", ",
      formatDuration((Date.parse(report.last_at) - Date.parse(report.first_at)) / 1000)] : []));
  const bad = report.incidents.filter(it => it.is_bad).length;
  show(byId("cards"), ...report.figures.filter(it => it.value !== null && !ONLY_BELOW.has(it.name)).map(it => card(it.name, shownFigure(it), !["of 1", "bytes", it.name].includes(it.unit) ? it.unit : null)),
    card("incidents", formatNumber(bad), bad ? "below, on a time line" : "none in these logs"));
}

function shownFigure({ value, unit }) {
  if (unit === "nats a token") return formatNumber(value, 4);
  if (unit === "of 1") return formatPercent(value);
  return unit === "bytes" ? formatBytes(value) : formatCompact(value);
}

// -- what was run, on what --------------------------------------------------------------------------------------------

function showRun() {
  const { settings } = report;
  const place = body("run");
  const changed = settings.options.filter(it => it.is_changed);
  const model = settings.model;
  const dims = [model.num_layers && `${model.num_layers} layers`, model.dim && `width ${model.dim}`, model.num_heads && `${model.num_heads} heads`,
    model.vocab_size && `${formatNumber(Number(model.vocab_size))} ids`].filter(Boolean).join(", ");
  place.append(element("dl", { class: "facts" },
    ...fact("run", settings.run_id ? isolated(settings.run_id, 130) : "not told by these logs"),
    ...(settings.run_digest ? fact("signed run file", element("span", { class: "mono", text: visibleText(settings.run_digest, 64) })) : []),
    ...(settings.num_parameters ? fact("model", `${formatCompact(settings.num_parameters)} parameters${dims ? `: ${visibleText(dims, 160)}` : ""}`) : []),
    ...settings.changes.flatMap(text => fact("change", isolated(text)))));
  if (!settings.options.length) return place.append(element("p", { class: "note", text: "The options are not in these logs: a release before this one wrote them." }));
  place.append(element("h3", { text: "Options that differ from their defaults" }), optionList(changed));
  place.append(element("details", {}, element("summary", { text: `All ${formatNumber(settings.options.length)} options` }), optionList(settings.options),
    Object.keys(model).length ? element("div", {}, element("h3", { text: "The model's" }),
      element("dl", { class: "facts" }, ...Object.entries(model).flatMap(([name, value]) => fact(isolated(name, 64), isolated(value))))) : null));
}

function optionList(options) {
  if (!options.length) return element("p", { class: "note", text: "None does." });
  return element("dl", { class: "options" }, ...options.map(it => element("div", {},
    element("dt", {}, element("code", {}, isolated(it.name, 130))),
    element("dd", {}, isolated(it.value), it.differs ? element("span", { class: "note" }, " (", isolated(it.differs), ")") : null))));
}

function showMachines() {
  const groups = new Map();
  for (const node of report.nodes.filter(each => each.machine)) {
    const key = JSON.stringify([{ ...node.machine, peak: "" }]);
    if (groups.has(key)) groups.get(key).names.push(node.name);
    else groups.set(key, { names: [node.name], machine: node.machine });
  }
  const known = [...groups.values()].map(it => ({ ...it, name: it.names.join(", ") }));
  const place = body("machines", known.length > 0);
  const table = new DataTable([
    { key: "node", title: "nodes", kind: "wrap", isRowHeading: true, value: it => it.name, show: it => isolated(it.name, 200) },
    { key: "host", title: "machine", kind: "text", value: it => it.machine.host, show: (it, value) => isolated(value, 40) },
    { key: "devices", title: "computes on", kind: "wrap", value: it => it.machine.devices.join(", ") || it.machine.processor,
      show: it => isolated(it.machine.devices.length ? counted(it.machine.devices) : it.machine.processor, 120) },
    ...(known.some(it => it.machine.peak) ? [{ key: "peak", title: "peak", hint: "of the first of them", kind: "wrap", value: it => it.machine.peak || null, show: (it, value) => isolated(value ?? NO_TEXT, 80) }] : []),
    { key: "cores", title: "cores", value: it => it.machine.cores, show: (it, value) => formatNumber(value) },
    { key: "memory", title: "memory", value: it => it.machine.memory_bytes, show: (it, value) => formatBytes(value) },
    { key: "versions", title: "versions", kind: "wrap", value: it => versionsOf(it.machine), show: (it, value) => isolated(value, 160) },
    { key: "system", title: "system", kind: "wrap", value: it => it.machine.system, show: (it, value) => isolated(value, 120) },
  ], { caption: "machines", rowKey: it => it.name, maxRows: 512 });
  table.update(known);
  place.append(table.node);
}

function counted(names) {
  const counts = new Map();
  for (const name of names) counts.set(name, (counts.get(name) ?? 0) + 1);
  return [...counts].map(([name, count]) => count > 1 ? `${count} × ${name}` : name).join(", ");
}

function versionsOf(machine) {
  return Object.entries(machine.versions).map(([name, version]) => `${name} ${version}`).join(", ");
}

// -- curves -----------------------------------------------------------------------------------------------------------

/** A chart of a course, zoomed by the reader within what is in the file. */
function addChart(id, course, options) {
  const curves = course.curves.filter(each => each.what === options.what);
  const place = body(id, curves.length > 0);
  if (!curves.length) return null;
  let shown = course;
  const chart = new CourseChart({ ...options, onZoom: (begin, end) => chart.update(shown, begin === null ? null : [begin, end]) });
  const again = next => {
    shown = next ?? shown;
    return chart.update(shown);
  };
  place.append(chart.node);
  charts.push({ chart, again });
  again();
  return again;
}

function showCurves() {
  const course = report.loss_by_step;
  byId("curves").hidden = course.curves.length === 0;
  const draw = addChart("curves", course, { what: "loss", title: "Loss", unit: "nats a token", height: 340 });
  if (draw) {
    const buttons = AXES.map(([by, text, name]) => element("button", {
      type: "button", text, "aria-pressed": String(by === "step"),
      on: { click: () => {
        buttons.forEach((button, index) => button.setAttribute("aria-pressed", String(AXES[index][0] === by)));
        draw(report[name]);
      } },
    }));
    const chart = charts[charts.length - 1].chart;
    const log = element("button", { type: "button", text: "log scale", "aria-pressed": "false", on: { click: () => {
      chart.isLogScale = !chart.isLogScale;
      log.setAttribute("aria-pressed", String(chart.isLogScale));
      draw();
    } } });
    const all = element("button", { type: "button", text: "all", title: "the whole range", on: { click: () => draw() } });
    byId("curve-controls").append(element("span", { class: "button-group", role: "group", "aria-label": "x axis" }, ...buttons), all, log);
    body("curves").append(element("p", { class: "note", text: "Ticks: rounds; dotted lines: rounds that failed. Tokens are those of a node." }));
  }
  addChart("speed", report.course_by_time, { what: "speed", title: "Speed", unit: "tokens a second", height: 220 });
  addChart("held-out", report.held_out_by_step, { what: "held_out", title: "Loss on held-out shards", unit: "nats a token", height: 240 });
  if (!report.nodes.length) {
    addChart("watched", report.watched_by_time, { what: "loss", title: "Loss of the run", unit: "nats a token", height: 260 });
    addChart("watched", report.watched_by_time, { what: "speed", title: "Speed of the run", unit: "tokens a second", height: 200 });
  }
  addChart("watched", report.watched_by_time, { what: "nodes", title: "Nodes that announced themselves", unit: "nodes", height: 180 });
  addChart("gradients", report.gradient_norm, { what: "gradient_norm", title: "Gradient norm before clipping", unit: "L2 norm", height: 200 });
  addBySource();
}

function addBySource() {
  const last = report.held_out[report.held_out.length - 1];
  if (!last || !Object.keys(last.by_source).length) return;
  body("held-out").append(element("p", { class: "note" }, "At step ", formatNumber(last.step), " (", isolated(last.node, 64), "): ",
    ...Object.entries(last.by_source).flatMap(([name, loss], index) => [index ? ", " : "", isolated(name, 64), ` ${formatNumber(loss, 4)}`]),
    last.bits_per_byte === null ? "" : `; ${formatNumber(last.bits_per_byte, 4)} bits a byte of all`));
}

// -- what happened ----------------------------------------------------------------------------------------------------

function showTimeline() {
  const place = body("timeline", report.nodes.length > 0 || report.incidents.length > 0);
  place.append(...[timelineOf(report)].filter(Boolean));
  const table = new DataTable([
    { key: "at", title: "when", kind: "text", value: it => it.began_at, show: it => timeElement(it.began_at) },
    { key: "node", title: "where", kind: "text", isRowHeading: true, value: it => it.node, show: it => isolated(it.node, 64) },
    { key: "kind", title: "what", kind: "text", value: it => it.kind, show: it => chip(KINDS[it.kind]?.[1] ?? "", it.kind) },
    { key: "count", title: "times", value: it => it.count, show: (it, value) => formatNumber(value) },
    { key: "lasted", title: "for", value: it => (Date.parse(it.ended_at) - Date.parse(it.began_at)) / 1000, show: (it, value) => value > 0 ? formatDuration(value) : "" },
    { key: "text", title: "in words", kind: "wrap", value: it => it.text, show: it => isolated(it.text) },
  ], { caption: "incidents", rowKey: it => `${it.node}|${it.kind}|${it.began_at}|${it.text}`, sort: { key: "at", descending: false }, empty: "nothing went wrong that these logs tell of", maxRows: 300 });
  const bad = report.incidents.filter(it => it.kind !== "note");
  table.update(bad);
  const numNotes = report.incidents.length - bad.length;
  const notes = element("button", { type: "button", "aria-pressed": "false", text: `with ${formatNumber(numNotes)} notes`, on: { click: () => {
    const isOn = notes.getAttribute("aria-pressed") !== "true";
    notes.setAttribute("aria-pressed", String(isOn));
    table.update(isOn ? report.incidents : bad);
  } } });
  if (numNotes) place.append(element("div", { class: "controls" }, notes));
  place.append(table.node);
}

function showNodes() {
  const place = body("nodes", report.nodes.length > 0);
  const some = key => report.nodes.some(node => node[key]);
  const number = (key, title, digits = 0, hint = null) => ({ key, title, hint, value: it => it[key], show: (it, value) => formatNumber(value, digits) });
  const table = new DataTable([
    { key: "name", title: "node", kind: "text", isRowHeading: true, value: it => it.name, show: it => isolated(it.name, 64) },
    { key: "part", title: "part", kind: "text", value: it => it.stage || it.role || null, show: (it, value) => isolated(value, 40) },
    number("num_lives", "lives", 0, "processes, one after the other"),
    { key: "end", title: "its end", kind: "text", value: it => it.lives[it.lives.length - 1]?.outcome, show: (it, value) => endOf(value) },
    number("num_steps", "steps"),
    ...(some("steps_repeated") ? [number("steps_repeated", "done twice")] : []),
    ...(some("steps_skipped") ? [number("steps_skipped", "skipped")] : []),
    { key: "tokens", title: "tokens", value: it => it.num_tokens, show: (it, value) => formatCompact(value) },
    { key: "speed", title: "tokens/s", value: it => it.tokens_per_s, show: (it, value) => formatCompact(value) },
    ...(report.nodes.some(node => node.mfu !== null) ? [{ key: "mfu", title: "MFU", value: it => it.mfu, show: (it, value) => formatPercent(value) }] : []),
    number("loss", "loss", 4, "mean of the last hundredth of its steps"),
    number("lowest_loss", "lowest", 4),
    { key: "waited", title: "data wait", hint: "share of its steps' time", value: it => it.active_s ? it.loader_wait_s / it.active_s : null, show: (it, value) => formatPercent(value) },
    number("rounds_shared", "rounds", 0, "with others' work in the result"),
    ...(some("rounds_alone") ? [number("rounds_alone", "alone")] : []),
    ...(some("rounds_failed") ? [number("rounds_failed", "failed")] : []),
    { key: "sent", title: "sent", value: it => it.sent_bytes, show: (it, value) => formatBytes(value) },
    ...(some("withdrawals") ? [number("withdrawals", "withdrawals")] : []),
  ], { caption: "table of nodes", rowKey: it => it.name, maxRows: 512 });
  table.update(report.nodes);
  place.append(table.node);
}

function endOf(outcome) {
  const [kind, text] = { ended: ["good", "in order"], failed: ["bad", "an error"], killed: ["bad", "killed"], open: ["warning", "the log ends"] }[outcome] ?? ["", NO_TEXT];
  return chip(kind, text);
}

// -- rounds -----------------------------------------------------------------------------------------------------------

function showRoundsOf() {
  const { rounds } = report;
  const place = body("rounds", rounds.length > 0);
  if (!rounds.length) return;
  const failed = rounds.filter(it => !it.num_reports).length;
  place.append(element("p", { class: "note", text: `${formatNumber(rounds.reduce((sum, it) => sum + it.num_rounds, 0))} rounds; `
    + `${failed ? `${formatNumber(failed)} had a result nowhere` : "all of them had a result somewhere"}.` }));
  addChart("rounds", report.round_seconds, { what: "seconds", title: "What rounds took", unit: "seconds", height: 200 });
  const list = element("div");
  place.append(element("h3", { text: `The latest ${formatNumber(Math.min(SHOWN_ROUNDS, rounds.length))}` }), list);
  showRounds(list, rounds.slice(-SHOWN_ROUNDS).reverse().map(shownRound));
}

function shownRound(it) {
  const pairs = it.left_out.map(text => {
    const at = text.indexOf(": ");
    return at < 0 ? [text, ""] : [text.slice(0, at), text.slice(at + 2)];
  });
  return {
    stage: it.stage, round_index: it.last_index, ended_at: it.ended_at, seconds: it.seconds ?? 0, agree_s: it.agree_s ?? 0,
    reduce_s: it.reduce_s ?? 0, vote_s: it.vote_s ?? 0, num_members: it.most_members, completeness: it.completeness ?? 0,
    num_reports: it.num_reports + it.num_failed, num_failed: it.num_failed, sent_bytes: it.sent_bytes, rule: it.rule, members: it.members,
    left_out: pairs, error: it.num_reports ? "" : it.errors.join("; ") || "no result",
  };
}

// -- the rest ---------------------------------------------------------------------------------------------------------

function showData() {
  const { data } = report;
  const rows = [
    ...(data.store ? fact("store", isolated(data.store)) : []),
    ...(data.sources.length ? fact("sources", isolated(data.sources.join(", "))) : []),
    ...(data.num_shards === null ? [] : fact("shards read", `${formatNumber(data.num_shards)} different ones`)),
    ...(data.num_shards === null ? [] : fact("rotations", `${formatNumber(data.num_rotations)} times a node's shards changed`)),
    ...(data.store_shards === null ? [] : fact("in the store", `${formatNumber(data.store_shards)} shards, as last seen`)),
    ...(data.vocabulary_rows === null ? [] : fact("vocabulary", `${formatNumber(data.vocabulary_rows)} rows`)),
  ];
  const place = body("data", rows.length > 0);
  place.append(element("dl", { class: "facts" }, ...rows), textList("Changes", data.changes));
}

function textList(title, texts) {
  return texts.length ? element("details", {}, element("summary", { text: `${title} (${formatNumber(texts.length)})` }),
    element("ul", { class: "plain" }, ...texts.map(text => element("li", { class: "note" }, isolated(text))))) : "";
}

function showCheckpoints() {
  const known = report.nodes.filter(({ checkpoints: it }) => it.saved || it.skipped || it.failed);
  const place = body("checkpoints", known.length > 0);
  const table = new DataTable([
    { key: "name", title: "node", kind: "text", isRowHeading: true, value: it => it.name, show: it => isolated(it.name, 64) },
    { key: "saved", title: "saved", value: it => it.checkpoints.saved, show: (it, value) => formatNumber(value) },
    { key: "failed", title: "failed", value: it => it.checkpoints.failed, show: (it, value) => formatNumber(value) },
    { key: "step", title: "last at step", value: it => it.checkpoints.last_step, show: (it, value) => formatNumber(value) },
    { key: "at", title: "when", kind: "text", value: it => it.checkpoints.last_at, show: (it, value) => timeElement(value) },
    { key: "gap", title: "longest gap", value: it => it.checkpoints.longest_gap_s, show: (it, value) => formatDuration(value) },
    { key: "cost", title: "cost", hint: "of the training thread's time", value: it => it.checkpoints.seconds, show: (it, value) => formatDuration(value) },
  ], { caption: "checkpoints of nodes", rowKey: it => it.name, maxRows: 512 });
  table.update(known);
  place.append(table.node);
}

function showContributions() {
  const watched = report.watched;
  const place = body("contributions", watched !== null && watched.contributions.length > 0);
  if (!watched) return;
  const table = new DataTable([
    { key: "name", title: "node", kind: "text", isRowHeading: true, value: it => it.node_id, show: it => isolated(it.node_id, 64) },
    { key: "part", title: "part", kind: "text", value: it => it.stage || it.role, show: (it, value) => isolated(value, 40) },
    { key: "pflops", title: "PFLOP claimed", value: it => it.pflops, show: (it, value) => formatNumber(value, 3) },
    { key: "confirmed", title: "confirmed", value: it => it.confirmed_pflops, show: (it, value) => formatNumber(value, 3) },
    { key: "hours", title: "hours", value: it => it.hours, show: (it, value) => formatNumber(value, 2) },
    { key: "tokens", title: "tokens", value: it => it.tokens, show: (it, value) => formatCompact(value) },
    { key: "last", title: "last heard of", kind: "text", value: it => it.last_at, show: (it, value) => timeElement(value) },
  ], { caption: "contributions", rowKey: it => it.peer_id, maxRows: 300 });
  table.update(watched.contributions);
  place.append(table.node);
}

function showSamples() {
  const place = body("samples", report.samples.length > 0);
  const latest = report.samples.slice(-6).reverse();
  const older = report.samples.slice(0, -6).reverse();
  const shown = it => element("div", { class: "sample" },
    element("p", { class: "note" }, "step ", formatNumber(it.step), ", ", isolated(it.node, 64)),
    element("blockquote", {}, element("strong", {}, ...linesOf(it.prompt)), ...linesOf(it.text || NO_TEXT)));
  place.append(...latest.map(shown), older.length ? element("details", {}, element("summary", { text: `${formatNumber(older.length)} older ones` }), ...older.map(shown)) : "");
}

function linesOf(text) {
  return text.split("\n").slice(0, 60).flatMap((line, index) => [index ? element("br") : null, isolated(line, 2000)]);
}

function showLog() {
  const place = body("log", report.log.length > 0);
  place.append(element("div", { class: "log-lines", role: "region", "aria-label": "log lines", tabindex: "0" },
    ...report.log.map(line => element("div", { class: `log-line ${line.level.toLowerCase()}` }, element("span", { class: "note", text: visibleText(line.at, 20) }),
      element("span", { class: "level", text: visibleText(line.level, 8) }), element("span", { class: "note" }, isolated(line.node, 40)), isolated(line.text)))));
}

function showMeasured() {
  const place = body("measured");
  place.append(element("dl", { class: "facts" }, ...report.figures.flatMap(it => fact(it.name, `${shownFigure(it)}${it.unit === "of 1" || it.unit === "bytes" ? "" : ` ${it.unit}`}: ${it.how}`))));
  place.append(element("ul", {}, ...[...report.notes, ...report.left_out.map(text => `Not shown: ${text}`)].map(text => element("li", {}, isolated(text, 500)))));
  const table = new DataTable([
    { key: "path", title: "log", kind: "wrap", isRowHeading: true, value: it => it.path, show: it => isolated(it.path) },
    { key: "kind", title: "kind", kind: "text", value: it => it.kind },
    { key: "count", title: "events", hint: "lives of a process, looks of a monitor", value: it => it.num_events, show: (it, value) => formatNumber(value) },
    { key: "from", title: "from", kind: "text", value: it => it.first_at, show: (it, value) => timeElement(value) },
    { key: "to", title: "to", kind: "text", value: it => it.last_at, show: (it, value) => timeElement(value) },
  ], { caption: "logs that were read", rowKey: it => it.path, maxRows: 1000 });
  table.update(report.read);
  place.append(element("details", {}, element("summary", { text: `Read from ${formatNumber(report.read.length)} ${report.read.length === 1 ? "log" : "logs"}` }), table.node));
}

function showFooter() {
  show(byId("footer"), element("p", { text: `Made ${formatTime(report.made_at)} by Genesis ${visibleText(report.software, 40)} from the logs named above; `
    + "this file holds all it shows and asks nobody for anything." }));
  setText(byId("sections"), "");
  const sections = [...document.querySelectorAll("main .section")].filter(section => !section.hidden);
  show(byId("sections"), ...sections.map(section => element("a", { href: `#${section.id}`, text: section.querySelector("h2").textContent })));
}

/** On paper charts are as wide as the paper, whatever the window was. */
function fitPaper() {
  for (const { chart } of charts) if (window.Plotly && chart.isDrawn) window.Plotly.relayout(chart.canvas, { width: PAPER_PX });
}

function fitWindow() {
  for (const { chart } of charts) if (window.Plotly && chart.isDrawn) window.Plotly.relayout(chart.canvas, { width: null, autosize: true });
}

showTop();
showRun();
showMachines();
showCurves();
showTimeline();
showNodes();
showRoundsOf();
showData();
showCheckpoints();
showContributions();
showSamples();
showLog();
showMeasured();
showFooter();
window.addEventListener("beforeprint", fitPaper);
window.addEventListener("afterprint", fitWindow);
chartsReady().then(isReady => {
  document.body.dataset.drawn = String(isReady);
});

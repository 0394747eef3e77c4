// The page of a run or a node: looks at its server every two seconds, on one connection, and shows what has changed.

import { CourseChart } from "./charts.js";
import { announce, byId, element, fetchJson, formatTime, poll, setText, show } from "./dom.js";
import {
  NodesTable, showAlarms, showData, showFooter, showIncidents, showLog, showOverview, showOwn,
  showRoundsOf, showSwarm,
} from "./sections.js";

const VIEW_MS = 2000;
const COURSE_MS = 10000;
const AXES = [["step", "steps"], ["tokens", "tokens"], ["time", "time"]];

const nodes = new NodesTable();
let verdict = null;
let lastView = null;

function showView(view) {
  showOverview(view);
  showAlarms(view);
  showSwarm(view);
  nodes.update(view);
  showRoundsOf(view);
  showOwn(view);
  showData(view);
  showIncidents(view);
  showLog(view);
  showFooter(view);
  showSections();
  if (verdict !== null && verdict !== view.verdict) announce(`training: ${view.verdict}`);
  verdict = view.verdict;
}

function showSections() {
  const shown = [...document.querySelectorAll("main .section")].filter(section => !section.hidden);
  show(byId("sections"), ...shown.map(section => element("a", { href: `#${section.id}`, text: section.querySelector("h2").textContent })));
}

// Curves.

const wanted = { by: "step", begin: null, end: null };
let course = null;
let courseAt = 0;
let courseOf = "";

const charts = [
  new CourseChart({ what: "loss", title: "Loss", unit: "nats a token", height: 340, onZoom: zoom }),
  new CourseChart({ what: "speed", title: "Speed", unit: "tokens a second", height: 190, onZoom: zoom }),
];
const axisButtons = AXES.map(([by, text]) => element("button", { type: "button", text, "aria-pressed": "false", on: { click: () => choose(by) } }));
const logButton = element("button", { type: "button", text: "log scale", "aria-pressed": "false", on: { click: toggleLog } });
const zoomButtons = [["+", "zoom in", 0.25, 0.75], ["−", "zoom out", -0.5, 1.5], ["←", "earlier", -0.5, 0.5], ["→", "later", 0.5, 1.5]]
  .map(([sign, name, from, to]) => element("button", { type: "button", text: sign, "aria-label": name, title: name, on: { click: () => move(from, to) } }));
const allButton = element("button", { type: "button", text: "all", on: { click: () => zoom(null, null) } });

function buildCurves() {
  byId("curve-controls").append(
    element("span", { class: "button-group", role: "group", "aria-label": "x axis" }, ...axisButtons),
    element("span", { class: "button-group", role: "group", "aria-label": "range" }, ...zoomButtons, allButton), logButton);
  byId("curves").querySelector(".body").append(...charts.map(chart => chart.node));
  showPressed();
}

function showPressed() {
  AXES.forEach(([by], index) => axisButtons[index].setAttribute("aria-pressed", String(by === wanted.by)));
  allButton.disabled = wanted.begin === null && wanted.end === null;
}

function choose(by) {
  Object.assign(wanted, { by, begin: null, end: null });
  lookAtCourse();
}

function zoom(begin, end) {
  Object.assign(wanted, { begin, end });
  lookAtCourse();
}

/** Moves the range to parts of itself: 0.25 to 0.75 is its middle. */
function move(from, to) {
  if (!course || course.begin === null) return;
  const [begin, end] = [wanted.begin ?? course.begin, wanted.end ?? course.end];
  const size = end - begin;
  const [first, last] = [Math.max(course.begin, begin + from * size), Math.min(course.end, begin + to * size)];
  if (last - first <= 0) return;
  if (first <= course.begin && last >= course.end) zoom(null, null);
  else zoom(first, last);
}

function toggleLog() {
  charts[0].isLogScale = !charts[0].isLogScale;
  logButton.setAttribute("aria-pressed", String(charts[0].isLogScale));
  if (course) charts[0].update(course, rangeShown());
}

function rangeShown() {
  return wanted.begin === null && wanted.end === null ? null : [wanted.begin ?? course.begin, wanted.end ?? course.end];
}

async function lookAtCourse() {
  showPressed();
  const asked = { ...wanted };
  const points = Math.min(1200, Math.max(200, Math.round(byId("curves").clientWidth)));
  const query = new URLSearchParams({ by: asked.by, points: String(Math.ceil(points / 100) * 100) });
  for (const side of ["begin", "end"]) if (asked[side] !== null) query.set(side, String(asked[side]));
  courseAt = Date.now();
  const found = await fetchJson(`api/page/course?${query}`);
  if (asked.by !== wanted.by || asked.begin !== wanted.begin || asked.end !== wanted.end) return;
  course = found;
  courseOf = lastView?.time ?? "";
  const drawn = await Promise.all(charts.map(chart => chart.update(course, rangeShown())));
  byId("no-charts").hidden = drawn.every(Boolean);
  byId("curves").dataset.drawn = String(course.by);
}

// Looking.

async function look() {
  const view = await fetchJson("api/page");
  if (view === null) {
    tell("Nothing is known of the run yet; this page goes on asking.");
    return;
  }
  const isNew = lastView === null || view.time !== lastView.time;
  if (lastView === null && view.scope === "run" && view.kind === "whole-model") {
    wanted.by = "time";  // Its steps are outer steps, of which there are few.
  }
  lastView = view;
  byId("problem").hidden = true;
  if (isNew) showView(view);
  setText(byId("liveness"), `as of ${formatTime(view.time)}`);
  document.body.dataset.time = view.time;
  if (courseAt === 0 || (courseOf !== view.time && Date.now() - courseAt >= COURSE_MS)) await lookAtCourse();
}

function failed(error) {
  const isOver = error.status === 401;
  if (isOver) location.reload();
  tell("The server does not answer; this page goes on asking. What it shows is as of the time above.");
}

function tell(problem) {
  setText(byId("problem"), problem);
  byId("problem").hidden = false;
}

buildCurves();
poll(look, { intervalMs: VIEW_MS, onFailure: failed });

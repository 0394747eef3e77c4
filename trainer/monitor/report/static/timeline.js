// Lives and incidents on one axis of time: a row a node with a bar for each of its lives, a row for all else that has
// incidents (the run, a stage), and a mark for each incident, whose sign and colour say what it was.
//
// From plain data: `nodes`, `incidents` and the period of `RunReport`. Everything in it is also in a table below.

import { element, formatTime, isolated, visibleText } from "./dom.js";

export const KINDS = {
  death: ["✕", "bad", "deaths"], failed: ["✕", "bad", "ended with an error"], restart: ["↻", "", "restarts"],
  "failed-round": ["◇", "bad", "rounds without a result"], "left-out": ["◇", "warning", "members left out"],
  withdrawal: ["⇤", "warning", "withdrawals"], ban: ["⊘", "bad", "bans"], checkpoint: ["▽", "bad", "checkpoints that failed"],
  "skipped-steps": ["▲", "warning", "steps skipped"], "lost-micro-batches": ["▲", "warning", "micro-batches lost"],
  "lost-events": ["▲", "warning", "events not logged"], alarm: ["▲", "bad", "alarms"], note: ["•", "", "notes"],
};
const MAX_ROWS = 40;
const TICKS = 5;

/** A figure of the whole period; null where nothing has a place in time. */
export function timelineOf({ nodes, incidents, first_at, last_at }) {
  const [begin, end] = [Date.parse(first_at), Date.parse(last_at)];
  if (!(end > begin)) return null;
  const at = time => 100 * Math.min(1, Math.max(0, (Date.parse(time) - begin) / (end - begin)));
  const others = [...new Set(incidents.map(it => it.node))].filter(name => !nodes.some(node => node.name === name));
  const rows = [...nodes.map(node => ({ name: node.name, lives: node.lives })), ...others.map(name => ({ name, lives: [] }))];
  const byRow = Map.groupBy ? Map.groupBy(incidents, it => it.node) : grouped(incidents);
  const shown = rows.slice(0, MAX_ROWS);
  return element("figure", { class: "timeline", "aria-label": "lives and incidents over time" },
    legend(incidents),
    element("ol", { class: "plain lanes" }, ...shown.map(row => lane(row, byRow.get(row.name) ?? [], at))),
    axis(begin, end),
    rows.length > shown.length ? element("p", { class: "note", text: `${rows.length - shown.length} further nodes are in the table only` }) : null);
}

function grouped(incidents) {
  const found = new Map();
  for (const incident of incidents) found.set(incident.node, [...(found.get(incident.node) ?? []), incident]);
  return found;
}

function lane({ name, lives }, incidents, at) {
  const told = [lives.length ? `${lives.length} ${lives.length === 1 ? "life" : "lives"}` : "", `${incidents.length} incidents`].filter(Boolean).join(", ");
  return element("li", { class: "lane" },
    element("span", { class: "lane-name" }, isolated(name, 40)),
    element("span", { class: "lane-track", role: "img", "aria-label": `${visibleText(name, 40)}: ${told}` },
      ...lives.map(life => element("i", {
        class: `life ${life.outcome}`, title: `${formatTime(life.began_at)} to ${formatTime(life.ended_at)}: ${life.outcome}`,
        style: { left: `${at(life.began_at)}%`, width: `${Math.max(0.3, at(life.ended_at) - at(life.began_at))}%` },
      })),
      ...incidents.filter(it => it.kind !== "note").map(it => {
        const [sign, colour] = KINDS[it.kind] ?? ["•", ""];
        const spans = at(it.ended_at) - at(it.began_at) > 0.5;
        return element("i", {
          class: `mark ${colour}${spans ? " span" : ""}`, text: sign, "aria-hidden": "true",
          title: `${formatTime(it.began_at)} ${it.kind}: ${visibleText(it.text, 160)}${it.count > 1 ? ` (${it.count} times)` : ""}`,
          style: { left: `${at(it.began_at)}%`, ...(spans ? { width: `${at(it.ended_at) - at(it.began_at)}%` } : {}) },
        });
      })));
}

function legend(incidents) {
  const kinds = [...new Set(incidents.map(it => it.kind))].filter(kind => kind !== "note" && KINDS[kind]);
  return element("p", { class: "note legend", "aria-hidden": "true" },
    element("i", { class: "swatch life" }), element("span", { text: "alive" }),
    ...kinds.flatMap(kind => [element("i", { class: `mark-sign ${KINDS[kind][1]}`, text: KINDS[kind][0] }), element("span", { text: KINDS[kind][2] })]));
}

function axis(begin, end) {
  const ticks = [...Array(TICKS).keys()].map(index => index / (TICKS - 1));
  const isLong = end - begin > 36 * 3600 * 1000;
  return element("div", { class: "lane-axis", "aria-hidden": "true" }, ...ticks.map(share => {
    const whole = formatTime((begin + share * (end - begin)) / 1000);
    return element("span", { style: { left: `${100 * share}%` }, text: isLong ? whole.slice(5, 16) : whole.slice(11) });
  }));
}

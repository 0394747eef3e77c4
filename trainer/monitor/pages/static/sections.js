// The sections of the page, from plain data (`PageView` of trainer/monitor/pages/page_view.py): what it says is shown, and
// what is null there is not.

import {
  DataTable, byId, card, chip, element, fact, formatAge, formatBytes, formatCompact, formatDuration, formatNumber,
  formatPercent, isolated, progressBar, setText, show, timeElement,
} from "./dom.js";
import { showRounds } from "./rounds.js";
import { rate, showAccount, showStages } from "./swarm.js";

const VERDICTS = {
  verified: ["good", "training, verified"], "not-verified": ["bad", "not verified"], unknown: ["warning", "too early to judge"],
};
const TRENDS = { improving: "↘ improving", stable: "→ stable", degrading: "↗ degrading", unknown: "trend not known yet" };
const HEALTH = { ok: "good", quiet: "warning", failing: "warning", doubtful: "warning", unreachable: "bad", gone: "" };

/** The body of a section, which is shown if there is something to show. */
export function body(id, isShown) {
  const section = byId(id);
  section.hidden = !isShown;
  return section.querySelector(".body");
}

/** Whether it trains, and the figures that one wants first. */
export function showOverview(view) {
  const whose = view.scope === "run" ? ["run ", isolated(view.run_id, 64)]
    : [`${view.role} `, isolated(view.node_id, 64), " of run ", isolated(view.run_id, 64)];
  show(byId("subtitle"), ...whose);
  document.title = `${view.node_id ? `${view.node_id} · ` : ""}${view.run_id} · Global LLM Status`.slice(0, 120);
  const [kind, text] = VERDICTS[view.verdict];
  show(byId("verdict"), chip(kind, text));
  const said = { bad: "bad", warning: "" }[kind] ?? "";
  show(byId("reasons"), view.reasons.length
    ? element("ul", { class: `message plain ${said}` }, ...view.reasons.slice(0, 8).map(reason => element("li", {}, isolated(reason)))) : null);
  show(byId("cards"), ...cards(view));
}

function cards(view) {
  const isRun = view.scope === "run";
  const round = view.last_round;
  const perNode = view.num_nodes && view.tokens_per_s !== null && view.num_nodes > 1 ? `${formatCompact(view.tokens_per_s / view.num_nodes)} a node` : null;
  return [
    card("loss, nats a token", formatNumber(view.loss, 4), element("span", {}, TRENDS[view.loss_trend], view.loss === null || !view.loss_of ? "" : `; ${view.loss_of}`)),
    view.step === null ? null : card(view.step_name, formatNumber(view.step), view.total_steps ? `${formatNumber(view.total_steps)} inner steps of all` : null),
    view.tokens === null ? null : card(isRun || view.account ? "tokens" : `tokens, this ${view.role}`, formatCompact(view.tokens), view.tokens < 1e4 ? null : formatNumber(view.tokens)),
    view.tokens_per_s === null ? null : card(view.role === "node" ? "tokens a second, all nodes" : "tokens a second", formatCompact(view.tokens_per_s), perNode),
    view.num_nodes === null ? null : card("nodes", formatNumber(view.num_nodes), view.num_reached === null ? null : `${formatNumber(view.num_reached)} answer`),
    round === null ? null : card("last round", round.error ? "failed" : formatDuration(round.seconds),
      element("span", {}, `round ${formatNumber(round.round_index)}${round.num_members ? `, ${formatNumber(round.num_members)} ${round.num_members === 1 ? "member" : "members"}` : ""}`)),
    view.convergence === null ? null : card("convergence", `${formatNumber(view.convergence)} %`, "hold one state"),
    budgetCard(view.budget),
  ].filter(Boolean);
}

function budgetCard(budget) {
  if (!budget) return null;
  const isDone = budget.done >= budget.limit;
  const left = isDone ? "done" : budget.eta_s === null ? "not known yet" : formatDuration(budget.eta_s);
  return card("time left", left, element("span", {}, progressBar(budget.done / budget.limit, "share of the budget"),
    `${formatCompact(budget.done)} of ${formatCompact(budget.limit)} ${budget.unit}`));
}

/** What a person should look at. */
export function showAlarms(view) {
  if (view.alarms === null) return;
  show(body("alarms", true), view.alarms.length === 0 ? element("p", { class: "note", text: "No alarm." })
    : element("ul", { class: "plain alarms" }, ...view.alarms.map(alarm => element("li", {},
      chip(alarm.kind === "empty-stage" || alarm.kind === "account" ? "bad" : "warning", alarm.kind), " ",
      element("strong", {}, isolated(alarm.subject, 64)), " ", isolated(alarm.text), " ",
      element("span", { class: "note" }, "since ", timeElement(alarm.since))))));
}

/** The stages, and the account. */
export function showSwarm(view) {
  const stages = body("swarm", view.stages.length > 0);
  if (view.stages.length) showStages(stages, view.stages, view.flow);
  const account = body("account", view.account !== null);
  if (view.account) showAccount(account, view.account);
}

const COLUMNS = [
  { key: "node", title: "node", kind: "text", isRowHeading: true, value: node => node.node_id,
    show: node => element("span", {}, isolated(node.node_id, 48), node.is_self ? " (this one)" : "") },
  { key: "health", title: "health", kind: "text", value: node => node.health,
    show: node => chip(HEALTH[node.health] ?? "", node.health) },
  { key: "stage", title: "part", kind: "text", value: node => node.stage || (node.role === "node" ? null : node.role) || null },
  { key: "step", title: "outer step", ofSwarm: "version", hint: "outer steps in its state, or the version of its stage", value: node => node.step, show: (node, value) => formatNumber(value) },
  { key: "behind", title: "lag", hint: "behind the newest of its kind", value: node => node.behind, show: (node, value) => formatNumber(value) },
  { key: "last", title: "last round", hint: "the newest agreed one it was in", value: node => node.last_round, show: (node, value) => formatNumber(value) },
  { key: "weight", title: "weight", hint: "in that round", value: node => node.weight, show: (node, value) => formatNumber(value, 2) },
  { key: "loss", title: "loss", hint: "mean of its latest 50 or so steps", value: node => node.loss, show: (node, value) => formatNumber(value, 4) },
  { key: "speed", title: "tokens/s", value: node => node.tokens_per_s || null, show: (node, value) => formatNumber(value) },
  { key: "pflops", title: "PFLOP", hint: "claimed, over all its lives seen", value: node => node.pflops, show: (node, value) => small(value) },
  { key: "confirmed", title: "confirmed", hint: "of these, what the account confirms", value: node => node.confirmed_pflops, show: (node, value) => small(value) },
  { key: "hours", isMore: true, title: "hours", hint: "in which it computed, claimed", value: node => node.hours, show: (node, value) => formatNumber(value, 2) },
  { key: "inner", isMore: true, title: "inner steps", hint: "done, before restarts too", value: node => node.inner_steps, show: (node, value) => formatNumber(value) },
  { key: "rounds", title: "rounds", hint: "shared with others, in its present life", value: node => node.rounds_shared, show: (node, value) => formatNumber(value) },
  { key: "failed", title: "failed", hint: "rounds without a result", value: node => node.rounds_failed, show: (node, value) => formatNumber(value) },
  { key: "shards", isMore: true, title: "shards", value: node => node.num_shards, show: (node, value) => formatNumber(value) },
  { key: "sent", isMore: true, title: "sent", value: node => node.sent_bytes_per_s, show: (node, value) => rate(value) },
  { key: "memory", isMore: true, title: "memory", value: node => node.memory_bytes, show: (node, value) => formatBytes(value) },
  { key: "clock", isMore: true, title: "clock, s", hint: "ahead of the monitor's", value: node => node.clock_offset_s, show: (node, value) => formatNumber(value, 1) },
  { key: "checkpoint", title: "checkpoint", hint: "age", value: node => node.checkpoint_age_s, show: (node, value) => formatDuration(value) },
  { key: "state", isMore: true, title: "state", hint: "digest", kind: "text", value: node => node.state_digest,
    show: (node, value) => element("span", { class: "mono", text: value ? value.slice(0, 8) : "–" }) },
  { key: "software", isMore: true, title: "version", kind: "text", value: node => node.software, show: (node, value) => isolated(value, 24) },
  { key: "doubts", title: "doubts", kind: "wrap", value: node => node.doubts.join("; ") || null, show: (node, value) => value ? isolated(value) : "" },
];

/** 12.3, 0.123, 2.2e-4: three digits, of small figures two. */
function small(value) {
  if (value === null || value === 0 || Math.abs(value) >= 0.01) return formatNumber(value, 3);
  return value.toExponential(1);
}

/** The table of nodes, with the columns that somebody has a figure for; of a run's those that fit at first. */
export class NodesTable {
  constructor() {
    this.keys = "";
    this.table = null;
    this.view = null;
    this.hasAll = false;
    this.button = element("button", { type: "button", text: "all columns", "aria-pressed": "false", on: { click: () => this.#toggle() } });
  }

  #toggle() {
    this.hasAll = !this.hasAll;
    this.button.setAttribute("aria-pressed", String(this.hasAll));
    this.update(this.view);
    this.button.focus();
  }

  update(view) {
    const nodes = view.nodes;
    this.view = view;
    const place = body("nodes", nodes.length > 0);
    if (!nodes.length) return;
    const named = COLUMNS.map(column => ({ ...column, title: view.kind === "swarm" && column.ofSwarm || column.title }));
    const known = named.filter(column => column.key === "node" || nodes.some(node => hasValue(column.value(node))));
    const isCut = view.scope === "run" && known.some(column => column.isMore);
    const columns = isCut && !this.hasAll ? known.filter(column => !column.isMore) : known;
    const keys = columns.map(column => column.key).join(" ");
    if (keys !== this.keys) {
      const sort = this.table?.sort ?? { key: nodes.some(node => node.pflops !== null) ? "pflops" : "node", descending: nodes.some(node => node.pflops !== null) };
      this.table = new DataTable(columns, { caption: "Table of nodes", rowKey: node => node.peer_id || node.node_id, sort });
      this.keys = keys;
      place.replaceChildren(this.table.node, ...(isCut ? [element("p", { class: "table-more" }, this.button)] : []));
    }
    this.table.update(nodes);
  }
}

function hasValue(value) {
  return value !== null && value !== undefined && value !== "";
}

/** The latest rounds. */
export function showRoundsOf(view) {
  const place = body("rounds", view.rounds.length > 0);
  if (view.rounds.length) showRounds(place, view.rounds);
}

const SHARES = { data: "data", compute: "compute", optimizer: "optimizer", outer_step: "outer step", checkpoint: "checkpoint", other: "other" };

/** What a node knows of its own training. */
export function showOwn(view) {
  const own = view.own;
  const place = body("own", own !== null);
  if (!own) return;
  setText(byId("own-title"), `This ${view.role || "node"}`);
  const speed = own.speed;
  const rows = [
    ...fact("running for", formatDuration(own.uptime_s)),
    ...(own.last_step_age_s === null ? [] : fact("last step", formatAge(own.last_step_age_s))),
    ...fact(view.role === "node" ? "inner steps" : "steps", `${formatNumber(own.num_steps)}${own.steps_skipped ? `, ${formatNumber(own.steps_skipped)} skipped` : ""}`),
    ...(own.loss === null ? [] : fact("loss of its latest step", formatNumber(own.loss, 4))),
    ...(own.inner_steps && view.role !== "driver" ? fact("to the next outer step", element("span", {}, `${formatNumber(own.inner_step)} of ${formatNumber(own.inner_steps)} inner steps`,
      progressBar(own.inner_step / own.inner_steps, "to the next outer step"))) : []),
    ...(own.outer_step || own.outer_syncs ? fact("outer steps", `${formatNumber(own.outer_step)} in its state, ${formatNumber(own.outer_syncs)} rounds since the start`) : []),
    ...(own.outer_syncs || own.rounds_failed ? fact("rounds", `${formatNumber(own.rounds_alone)} alone, ${formatNumber(own.rounds_failed)} failed`) : []),
    ...(view.role === "node" ? fact("same state", own.hash_agreement_rate === null ? isolated(own.hash_agreement.reason)
      : `${formatNumber(own.hash_agreement_rate)} %, ${formatNumber(own.hash_agreement.num_agreeing)} of ${formatNumber(own.hash_agreement.num_compared)} compared`) : []),
    ...(view.role !== "driver" ? fact("rounds with others", own.sync_success_rate === null ? isolated(own.sync_success.reason)
      : `${formatNumber(own.sync_success_rate)} % of ${formatNumber(own.sync_success.num_attempted)}`) : []),
    ...(speed ? [
      ...fact("speed", `${formatNumber(speed.tokens_per_s)} tokens/s${speed.num_devices > 1 ? `, ${formatNumber(speed.tokens_per_s_per_device)} a device` : ""}`),
      ...fact("MFU", `${formatPercent(speed.mfu)} of ${formatNumber(speed.peak_flops_per_s / 1e12, 3)} TFLOP/s ${speed.peak_kind}`),
      ...fact("device", isolated(speed.peak_device, 80)),
      ...fact("time goes to", sharesBar(speed.time_shares)),
    ] : []),
  ];
  show(place, element("dl", { class: "facts" }, ...rows), gaugesOf(view.gauges));
}

function sharesBar(shares) {
  const known = Object.entries(shares).filter(([name, share]) => SHARES[name] && share > 0);
  return element("span", { class: "shares" },
    element("span", { class: "shares-bar", "aria-hidden": "true" }, ...known.map(([name, share]) => element("i", { class: name, style: { width: `${100 * share}%` } }))),
    element("span", { class: "note", text: known.map(([name, share]) => `${SHARES[name]} ${formatPercent(share, 0)}`).join(", ") }));
}

function gaugesOf(gauges) {
  if (!gauges.length) return null;
  return element("details", {}, element("summary", { text: "all figures" }),
    element("dl", { class: "facts" }, ...gauges.flatMap(gauge => fact(gauge.name.replaceAll("_", " "), element("span", { title: gauge.help, text: formatCompact(gauge.value) })))));
}

/** Shards in use and checkpoints. */
export function showData(view) {
  const { data, checkpoints } = view;
  const place = body("data", data !== null || checkpoints.length > 0);
  const rows = [];
  if (data?.num_shards !== null && data) rows.push(...fact("shards in use", formatNumber(data.num_shards)));
  if (data?.own_shards) rows.push(...fact("this node's", `${formatNumber(data.num_own_shards)}: ${ranges(data.own_shards)}${data.num_own_shards > data.own_shards.length ? " …" : ""}`));
  if (data && data.rotations !== null) rows.push(...fact("rotations", formatNumber(data.rotations)));
  for (const point of checkpoints) rows.push(...fact(element("span", {}, "checkpoint, ", isolated(point.subject, 40)),
    point.age_s === null ? "none yet" : formatAge(point.age_s), point.problem ? element("p", { class: "left-out" }, isolated(point.problem)) : null));
  if (view.dht) rows.push(...fact("DHT", `${formatNumber(view.dht.stores_per_s, 1)} stores/s, ${formatNumber(view.dht.finds_per_s, 1)} finds/s, ${formatNumber(view.dht.records)} records at ${formatNumber(view.dht.num_nodes)} nodes`));
  show(place, element("dl", { class: "facts" }, ...rows));
}

/** 3, 5–9. */
function ranges(numbers) {
  const parts = [];
  for (const number of numbers) {
    const last = parts[parts.length - 1];
    if (last && last[1] === number - 1) last[1] = number;
    else parts.push([number, number]);
  }
  return parts.slice(0, 24).map(([first, last]) => first === last ? `${first}` : `${first}–${last}`).join(", ");
}

/** Failed rounds, withdrawals, alarms that are over. */
export function showIncidents(view) {
  const place = body("incidents", view.incidents.length > 0);
  show(place, element("ol", { class: "plain incidents" }, ...view.incidents.map(incident => element("li", {},
    timeElement(incident.time), " ", chip(incident.is_bad ? "warning" : "", incident.kind), " ", isolated(incident.text)))));
}

/** The latest lines of the log. */
export function showLog(view) {
  const place = body("log", view.log.length > 0);
  show(place, element("div", { class: "log-lines", role: "region", "aria-label": "log lines, the newest first", tabindex: "0" },
    ...view.log.map(line => element("div", { class: `log-line ${line.level.toLowerCase()}` }, timeElement(line.time),
      element("span", { class: "level", text: line.level.slice(0, 8) }), isolated(line.text)))));
}

/** What nobody can verify, and where the figures are as JSON. */
export function showFooter(view) {
  show(byId("footer"), ...view.unverified.map(text => element("p", {}, "Not verified: ", isolated(text))),
    element("p", {}, "The same as JSON: ", element("a", { href: "api/page", text: "api/page" }), ", ",
      element("a", { href: "api/page/course", text: "api/page/course" }), ", ", element("a", { href: "openapi.json", text: "openapi.json" }), "."));
}

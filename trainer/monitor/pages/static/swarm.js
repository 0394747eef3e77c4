// A pipeline as a picture: a column a stage, a box a worker, the flow of micro-batches between them, and the account.
//
// From plain data: `stages`, `flow` and `account` of `PageView`. Boxes are a list of lists to a screen reader.

import { chip, element, formatBytes, formatCompact, formatDuration, formatNumber, formatPercent, isolated, progressBar, show } from "./dom.js";

const STATUS = { serving: "good", joining: "warning", leaving: "warning" };

/** Shows the stages in a node. */
export function showStages(node, stages, flow) {
  const columns = stages.flatMap((stage, index) => [
    ...(index ? [element("li", { class: "flow-arrow", "aria-hidden": "true", text: "→" })] : []),
    stageColumn(stage),
  ]);
  show(node, element("ol", { class: "pipeline", "aria-label": "stages of the pipeline" }, ...columns), flowLine(stages, flow));
}

function stageColumn(stage) {
  const state = stage.num_serving ? (stage.num_serving < 2 ? "warning" : "good") : "bad";
  const said = stage.num_serving ? `${formatNumber(stage.num_serving)} serving` : "nobody serves it";
  const facts = [
    stage.num_layers === null ? null : `${formatNumber(stage.num_layers)} ${stage.num_layers === 1 ? "layer" : "layers"}`,
    stage.version === null ? null : `version ${formatNumber(stage.version)}`,
    `${formatNumber(stage.rows_per_s, 1)} rows/s`,
    stage.num_joining ? `${formatNumber(stage.num_joining)} joining` : null,
    stage.empty_for_s ? `empty for ${formatDuration(stage.empty_for_s)}` : null,
  ];
  return element("li", { class: "stage" },
    element("div", { class: "stage-head" }, element("h3", {}, isolated(stage.stage, 40)), chip(state, said)),
    element("p", { class: "note", text: facts.filter(Boolean).join(" · ") }),
    element("ul", { class: "workers", "aria-label": `workers of ${stage.stage}` },
      ...stage.workers.map(worker => workerBox(worker, stage.version))));
}

function workerBox(worker, newest) {
  const isBanned = worker.banned_for_s > 0;
  const isSilent = worker.silent_s > 0;
  const [kind, state] = isBanned ? ["bad", `banned, ${formatDuration(worker.banned_for_s)}`]
    : isSilent ? ["bad", `silent, ${formatDuration(worker.silent_s)}`] : [STATUS[worker.status] ?? "", worker.status];
  const behind = newest === null ? 0 : newest - worker.version;
  const facts = [
    `version ${formatNumber(worker.version)}${behind > 0 ? ` (${formatNumber(behind)} behind)` : ""}`,
    `${formatNumber(worker.queued)} queued`,
    worker.in_flight ? `${formatNumber(worker.in_flight)} in flight` : null,
    `${formatNumber(worker.rows_per_s, 1)} rows/s`,
    worker.unsaved_because ? "checkpoint failed" : null,
  ];
  return element("li", { class: `worker ${kind}` },
    element("div", { class: "worker-head" }, element("strong", {}, isolated(worker.node_id, 40)), chip(kind, state)),
    progressBar(worker.busy, `load of ${worker.node_id}`),
    element("p", { class: "note", text: facts.filter(Boolean).join(" · ") }),
    worker.differs_from.length ? element("p", { class: "note" }, "computes something else than ", isolated(worker.differs_from.join(", "), 120)) : null);
}

function flowLine(stages, flow) {
  const queued = stages.reduce((sum, stage) => sum + stage.workers.reduce((own, worker) => own + worker.queued, 0), 0);
  const parts = [`${formatNumber(queued)} micro-batches queued at workers`];
  if (flow) {
    parts.unshift(`${formatNumber(flow.in_flight)} in flight from this driver`, `${formatNumber(flow.held)} held`);
    if (flow.keeper_away_s) parts.push(`the keeper of the account has not answered for ${formatDuration(flow.keeper_away_s)}`);
  }
  return element("p", { class: "note", text: parts.join(" · ") });
}

const SHARES = [["done", "done"], ["open", "open"], ["lost", "lost"]];

/** Shows what has become of the data: leased = done + open + lost. */
export function showAccount(node, account) {
  const tally = account.micro_batches;
  const sum = tally.done + tally.open + tally.lost;
  const addsUp = sum === tally.leased;
  const bar = element("div", { class: "account-bar", role: "img",
    "aria-label": SHARES.map(([key, name]) => `${formatNumber(tally[key])} ${name}`).join(", ") },
    ...SHARES.map(([key]) => element("i", { class: key, style: { width: `${sum ? 100 * tally[key] / sum : 0}%` } })));
  const equation = element("p", { class: "equation" },
    figure(tally.leased, "leased"), sign(addsUp ? "=" : "≠"), figure(tally.done, "done", "done"), sign("+"),
    figure(tally.open, "open", "open"), sign("+"), figure(tally.lost, "lost", tally.lost ? "lost" : ""),
    chip(addsUp ? "good" : "bad", addsUp ? "adds up" : "does not add up"));
  const facts = [
    `${formatCompact(account.trained_tokens)} tokens trained`,
    `${formatNumber(account.waiting)} waiting`,
    `${formatNumber(account.reissued)} given again`,
    `${formatNumber(account.leases)} live leases`,
    tally.leased ? `${formatPercent(tally.lost / tally.leased)} lost` : null,
  ];
  const lost = [...account.lost.map(share => [share.stage, share.reason, share.micro_batches]),
    ...account.perished.map(share => [share.stage, "perished with a worker that had not shared them", share.micro_batches])];
  show(node, equation, bar, element("p", { class: "note", text: facts.filter(Boolean).join(" · ") }),
    lost.length ? element("ul", { class: "plain" }, ...lost.map(([stage, reason, count]) =>
      element("li", {}, `${formatNumber(count)} at `, isolated(stage, 40), ": ", isolated(reason, 200)))) : null,
    element("p", { class: "note" }, "kept by ", isolated(account.keeper, 64),
      account.age_s ? `, as of ${formatDuration(account.age_s)} ago` : ""));
}

function figure(value, name, kind = "") {
  return element("span", { class: `term ${kind}` }, element("b", { text: formatNumber(value) }), ` ${name}`);
}

function sign(text) {
  return element("span", { class: "sign", text });
}

/** Bytes and their rate, for tables of nodes. */
export function rate(bytesPerSecond) {
  return bytesPerSecond === null ? "–" : `${formatBytes(bytesPerSecond)}/s`;
}

// The first thing one sees: state, figures, sources, writer.

import {
  DataTable, byId, card, chip, element, fact, formatAge, formatBytes, formatCompact, formatDuration, formatNumber,
  formatPercent, formatTime, isolated, progressBar, setText, show, timeElement, visibleText,
} from "./dom.js";
import { isReport, reportData } from "./store_data.js";

const DASH = "–";

/** How far a source is: to its target or to the end of its input, whichever is nearer. */
export function progressOf(source) {
  if (source.ended) return { fraction: 1, text: "read to its end" };
  const ways = [];
  if (source.target_shards) ways.push([source.shards / source.target_shards, "of its target"]);
  if (source.input_bytes && source.input_bytes_read !== null) {
    ways.push([source.input_bytes_read / source.input_bytes, "of its input"]);
  }
  if (!ways.length) return { fraction: null, text: "no target, input not measured" };
  const [fraction, what] = ways.sort(([a], [b]) => b - a)[0];
  return { fraction, text: `${formatPercent(fraction)} ${what}` };
}

function stateOf(source, overview) {
  if (overview.writer?.state === "alive" && overview.writer.source === source.name) return chip("good", "populating");
  if (source.ended) return chip("", "complete");
  return chip("", "idle");
}

const sourcesTable = new DataTable([
  { key: "name", title: "source", kind: "text", isRowHeading: true, value: row => row.source.name, show: row => isolated(row.source.name, 64) },
  { key: "state", title: "state", kind: "text", value: row => row.state.textContent, show: row => row.state },
  {
    key: "progress", title: "progress", hint: "to the target, or to the end of the input", kind: "wrap",
    value: row => row.progress.fraction,
    show: row => element("span", {}, progressBar(row.progress.fraction, `${row.source.name}: ${row.progress.text}`),
      element("span", { class: "note" }, row.progress.text)),
  },
  {
    key: "shards", title: "shards", hint: "of its target", value: row => row.source.shards,
    show: (row, value) => `${formatNumber(value)}${row.source.target_shards ? ` of ${formatNumber(row.source.target_shards)}` : ""}`,
  },
  { key: "tokens", title: "tokens", value: row => row.source.tokens, show: (row, value) => formatCompact(value) },
  { key: "documents", title: "documents", value: row => row.source.documents, show: (row, value) => formatNumber(value) },
  { key: "text", title: "text", hint: "UTF-8 bytes of the documents", value: row => row.source.text_bytes, show: (row, value) => formatBytes(value) },
  {
    key: "ratio", title: "B/token", hint: "bytes of text a token", value: row => bytesPerToken(row.source),
    show: (row, value) => formatNumber(value, 2),
  },
  { key: "speed", title: "tokens/s", value: row => row.source.tokens_per_s, show: (row, value) => formatCompact(value) },
  { key: "eta", title: "time left", value: row => row.source.eta_s, show: (row, value) => formatDuration(value) },
  {
    key: "commit", title: "last commit", value: row => row.source.last_commit,
    show: row => row.source.last_commit === null ? DASH : element("span", { title: row.source.last_commit },
      isReport ? formatTime(row.source.last_commit).slice(0, 10) : formatAge(row.source.last_commit_age_s)),
  },
], { caption: "Sources of the store", rowKey: row => row.source.name, sort: null, empty: "no source has given anything yet", maxRows: 200 });

function counted(number, what) {
  return `${formatNumber(number)} ${what}${number === 1 ? "" : "s"}`;
}

function bytesPerToken(source) {
  const tokens = source.tokens + (source.unsharded_tokens ?? source.leftover_tokens ?? 0);
  return source.text_bytes === null || !tokens ? null : source.text_bytes / tokens;
}

const commitsTable = new DataTable([
  { key: "sequence", title: "commit", value: row => row.sequence, show: (row, value) => formatNumber(value), isRowHeading: true },
  { key: "seen", title: "seen", kind: "text", value: row => row.seen_at, show: (row, value) => timeElement(value) },
  { key: "shards", title: "shards", value: row => row.total_shards, show: (row, value) => formatNumber(value) },
  { key: "tokens", title: "tokens", value: row => row.total_tokens, show: (row, value) => formatCompact(value) },
], { caption: "Commits that were published while this page's server looked", rowKey: row => row.sequence, empty: "no commit was seen yet", maxRows: 8 });

byId("sources-table").append(sourcesTable.node);
byId("commits-table").append(element("h3", { class: "sub-head", text: isReport ? "Newest commit" : "Commits seen since the page was first opened" }),
  commitsTable.node);

/** Draws a look at the store. */
export function drawOverview(store) {
  document.title = `${visibleText(store.name, 80)}: store`;
  show(byId("title"), isolated(store.name, 120));
  setText(byId("subtitle"), subtitleOf(store));
  show(byId("states"), ...statesOf(store));
  const isReady = store.state === "ready";
  show(byId("problem"), isReady ? null : element("p", { class: `message ${store.state === "empty" ? "" : "bad"}` },
    store.state === "empty" ? "" : `The store is ${store.state}: `, isolated(store.problem, 600)));
  for (const id of ["sources", "shards", "documents", "vocabulary", "commits"]) byId(id).hidden = !isReady;
  show(byId("cards"), ...(isReady ? cardsOf(store) : []));
  if (!isReady) return;
  sourcesTable.update(store.sources.map(source => ({ source, state: stateOf(source, store), progress: progressOf(source) })));
  show(byId("sources-note"), store.pending.length ? element("span", {}, "not begun: ", isolated(store.pending.join(", "), 300)) : null);
  drawWriter(store);
  commitsTable.update(store.commits);
  drawFooter(store);
}

function subtitleOf(store) {
  if (isReport) return `one moment of the store, ${reportData.software}, ${store.read_at}`;
  if (store.state !== "ready") return "watching it";
  return `commit ${formatNumber(store.sequence)} of ${formatTime(store.updated_at)}`;
}

function statesOf(store) {
  if (store.state !== "ready") return [chip(store.state === "empty" ? "" : "bad", store.state)];
  const { writer, index } = store;
  const found = [];
  if (writer === null || writer.state === "released") found.push(chip("", "no writer at work"));
  else if (writer.state === "alive") found.push(chip("good", `populating ${writer.source ?? ""}`.trim()));
  else found.push(chip("warning", "its writer has died"));
  if (index.damaged_shards) found.push(chip("bad", `${formatNumber(index.damaged_shards)} damaged`));
  found.push(chip("", store.signed_by === null ? "unsigned" : `signed by ${store.signed_by}`));
  return found;
}

function cardsOf(store) {
  const { totals, index, vocabulary, writer, sources } = store;
  const target = sources.reduce((sum, source) => sum + (source.target_shards ?? 0), 0);
  const at = sources.find(source => source.name === writer?.source && writer.state === "alive");
  const tokens = totals.tokens;
  return [
    card("Shards", formatNumber(totals.shards), target ? `of ${formatNumber(target)} wanted, ${formatBytes(totals.shard_bytes)}` : formatBytes(totals.shard_bytes)),
    card("Tokens", formatCompact(tokens), `${formatNumber(store.shard_tokens)} a shard`),
    card("Documents", formatNumber(totals.documents), totals.documents ? `${formatNumber(tokens / totals.documents)} tokens each` : null),
    card("Text", formatBytes(totals.text_bytes), totals.text_bytes === null ? "not known from here" : "UTF-8"),
    card("Speed", at?.tokens_per_s ? `${formatCompact(at.tokens_per_s)}/s` : DASH, at ? "tokens, mean over the run" : "nothing is being written"),
    card("Time left", formatDuration(at?.eta_s ?? null), at ? `of ${at.name}` : null),
    card("Vocabulary", formatNumber(vocabulary?.ids ?? null), vocabulary?.origin ? "made elsewhere" : vocabulary ? `${formatNumber(vocabulary.merges)} merges` : "none yet"),
    card("Verified", formatPercent(index.indexed_shards ? index.verified_shards / totals.shards : null),
      `${formatNumber(index.verified_shards)} of ${counted(totals.shards, "shard")}`),
  ];
}

function drawWriter(store) {
  const { writer, verified } = store;
  const states = { alive: "at work", stale: "has died, or cannot reach the store; the next populator takes over", released: "none: the last one ended" };
  show(byId("writer"),
    ...fact("writer", writer === null ? "not known from here" : states[writer.state]),
    ...(writer?.state === "alive" ? fact("populating", isolated(writer.source, 64)) : []),
    ...(writer?.state === "alive" ? fact("lease until", timeElement(writer.expires_at)) : []),
    ...fact("commit", `${formatNumber(store.sequence)}${store.published_sequence === store.sequence ? "" : `, published: ${formatNumber(store.published_sequence)}`}`),
    ...fact("first, newest commit", timeElement(store.created_at), " – ", timeElement(store.updated_at)),
    ...fact("signature", store.signed_by === null ? "none" : `by ${store.signed_by} (checked by readers and by genesis verify, not by this page)`),
    ...fact("genesis verify", verified === null ? "no report was given to this page" : element("span", {},
      `${counted(verified.shards_verified, "shard")} sound, ${counted(verified.num_problems, "problem")}, at commit ${formatNumber(verified.sequence)}, `,
      timeElement(verified.finished_at))),
    ...(verified !== null && verified.problems.length ? fact("its problems", isolated(verified.problems.join("; "), 1200)) : []),
    ...fact("checked here", `${counted(store.index.verified_here, "shard")}, when a document was read`),
  );
}

function drawFooter(store) {
  const notes = store.notes.map(note => element("p", {}, "note: ", isolated(note, 600)));
  if (store.index.problem !== null) notes.unshift(element("p", { class: "message bad" }, isolated(store.index.problem, 600)));
  const measured = isReport ? reportData.measured.map(line => element("p", {}, isolated(line, 600))) : [
    element("p", { text: "Figures are those of the newest commit. “Verified” counts shards whose every byte was held against the index, by genesis verify or by this server." }),
    element("p", {}, "The same as JSON: ", element("a", { href: "api/store" }, "api/store"), ", described in ", element("a", { href: "openapi.json" }, "openapi.json"), "."),
  ];
  show(byId("footer"), ...notes, ...measured);
}

// A reader: a document of a shard, or of a source, each token in its colour.
//
// The tokens are plain text for a screen reader. Arrow keys move from token to token and say what each is; what is
// pointed at is said below. A character whose bytes are in several tokens stands in the first, with a dot for each other.

import { announce, byId, element, formatNumber, isolated, setText, show, visibleText } from "./dom.js";
import { isReport, readDocument, reportData } from "./store_data.js";
import { refreshPanel } from "./store_shards.js";

let page = null;
let shown = [];
let current = -1;
let lookUp = () => {};
let ticket = 0;

const sourceInput = element("select", { "aria-label": "source" });
const ordinalInput = element("input", { type: "number", min: "0", step: "1", value: "0", required: true, inputmode: "numeric" });
const bySource = element("form", { class: "controls" },
  element("label", {}, "source ", sourceInput), element("label", {}, "document ", ordinalInput), element("button", { type: "submit", text: "Read" }));
const shardInput = element("input", { type: "number", min: "0", step: "1", value: "0", required: true, inputmode: "numeric" });
const placeInput = element("input", { type: "number", min: "0", step: "1", value: "0", required: true, inputmode: "numeric" });
const byShard = element("form", { class: "controls" },
  element("label", {}, "shard ", shardInput), element("label", {}, "its document ", placeInput), element("button", { type: "submit", text: "Read" }));
const sampleInput = element("select", { "aria-label": "sampled document" });
const samples = element("div", { class: "controls" }, element("label", {}, "document ", sampleInput));
const colours = element("input", { type: "checkbox", checked: true });
const status = element("p", { class: "note", role: "status" });
const text = element("div", { class: "document coloured", tabindex: "0", role: "region", "aria-label": "Text of the document; arrow keys move from token to token", hidden: true });
const detail = element("p", { class: "token-detail" });
const moves = element("div", { class: "controls" });
const extra = element("div", { class: "controls" }, element("label", {}, colours, "colour the tokens"));
const failure = element("p", { class: "message bad", role: "alert", hidden: true });

byId("documents-body").append(isReport ? samples : element("div", { class: "reader-forms" }, bySource, byShard), failure, status, moves, text, detail, extra);

/** Tells what to do when a token is to be looked up: look(id). */
export function onLookUp(look) {
  lookUp = look;
}

/** Offers these sources. */
export function offerSources(names) {
  const known = [...sourceInput.options].map(option => option.value);
  if (known.length === names.length && known.every((name, place) => name === names[place])) return;
  const chosen = sourceInput.value;
  sourceInput.replaceChildren(...names.map(name => element("option", { value: name, text: visibleText(name, 64) })));
  if (names.includes(chosen)) sourceInput.value = chosen;
}

/** Reads the first document of the first source, unless one was read. */
export function openFirst() {
  if (ticket === 0 && sourceInput.value) open({ source: sourceInput.value, ordinal: 0 });
}

/** Reads the first document of a shard that begins in it. */
export function openShardDocuments(shardId) {
  byId("documents").scrollIntoView();
  open({ shard: shardId, document: 0 });
}

/** Offers a report's documents, and shows the first. */
export function offerSamples() {
  const documents = reportData.documents;
  sampleInput.replaceChildren(...documents.map((each, place) => element("option", { value: String(place),
    text: `${visibleText(each.source, 64)}, document ${formatNumber(each.ordinal)} (shard ${formatNumber(each.shard)})` })));
  samples.hidden = documents.length === 0;
  if (documents.length) draw(documents[0]);
  else setText(status, "no document was sampled");
}

/** On paper all of a report's documents stand below each other. */
function showAll() {
  byId("documents-body").append(element("div", { class: "print-only" }, ...reportData.documents.flatMap(each => [
    element("p", { text: statusOf(each) }),
    element("div", { class: "document coloured" }, ...runsOf(each.pieces).map(tokenElement)),
  ])));
}

if (isReport) {
  window.addEventListener("beforeprint", showAll);
  window.addEventListener("afterprint", () => document.querySelector(".print-only")?.remove());
}

sampleInput.addEventListener("change", () => draw(reportData.documents[Number(sampleInput.value)]));
bySource.addEventListener("submit", event => {
  event.preventDefault();
  if (sourceInput.value) open({ source: sourceInput.value, ordinal: ordinalInput.valueAsNumber });
});
byShard.addEventListener("submit", event => {
  event.preventDefault();
  open({ shard: shardInput.valueAsNumber, document: placeInput.valueAsNumber });
});
colours.addEventListener("change", () => text.classList.toggle("coloured", colours.checked));

/** Reads and draws; an answer that comes after a later question is dropped. */
async function open(fields) {
  const own = ++ticket;
  setText(status, "reading …");
  text.setAttribute("aria-busy", "true");
  try {
    const found = await readDocument(fields);
    if (own !== ticket) return;
    failure.hidden = true;
    draw(found);
    refreshPanel(found.shard);
  } catch (error) {
    if (own !== ticket) return;
    failure.hidden = false;
    setText(failure, visibleText(error.message, 600));
    setText(status, "");
  } finally {
    if (own === ticket) text.removeAttribute("aria-busy");
  }
}

function draw(found) {
  page = found;
  shown = runsOf(found.pieces);
  current = -1;
  text.hidden = false;
  text.replaceChildren(...shown.map(tokenElement));
  text.scrollTop = 0;
  setText(detail, "");
  if (!isReport) {
    shardInput.value = String(found.shard);
    placeInput.value = String(found.document);
    ordinalInput.value = String(found.ordinal);
    if ([...sourceInput.options].some(option => option.value === found.source)) sourceInput.value = found.source;
  }
  setText(status, statusOf(found));
  drawMoves(found);
}

function statusOf(found) {
  const last = found.first_token + found.pieces.length;
  const which = last - found.first_token < found.num_tokens ? `tokens ${formatNumber(found.first_token + 1)} to ${formatNumber(last)} of ` : "";
  const open = [found.begins_before ? "begins in an earlier shard" : "", found.continues_after ? "goes on in a later shard" : ""].filter(Boolean);
  return `${visibleText(found.source, 64)}, document ${formatNumber(found.ordinal)}: ${which}${formatNumber(found.num_tokens)} tokens in shard `
    + `${formatNumber(found.shard)} (its document ${formatNumber(found.document)} of ${formatNumber(found.num_documents)})${open.length ? `; it ${open.join(" and ")}` : ""}`;
}

function drawMoves(found) {
  const { shard, document, num_documents: number } = found;
  const before = document > 0 ? { shard, document: document - 1 } : found.previous_shard === null ? null : { shard: found.previous_shard, document: -1 };
  const after = document < number - 1 ? { shard, document: document + 1 } : found.next_shard === null ? null : { shard: found.next_shard, document: 0 };
  const pages = Math.max(1, found.pieces.length);
  const earlier = found.first_token > 0 ? { shard, document, token: Math.max(0, found.first_token - 1000) } : null;
  const later = found.next_token === null ? null : { shard, document, token: found.next_token };
  const buttons = [["← document", before], ["document →", after]];
  if (earlier !== null || later !== null) buttons.push([`← tokens`, earlier], [`tokens →`, later]);
  moves.replaceChildren(...(isReport || pages === 0 ? [] : buttons.map(([label, fields]) =>
    element("button", { type: "button", disabled: fields === null, text: label, on: { click: () => open(fields) } }))));
}

/** Pieces as they are shown: bytes of one character that are spread over tokens are put together in the first. */
export function runsOf(pieces) {
  const runs = pieces.map((piece, place) => ({ piece, place, text: piece.text, kind: piece.special ? "special" : piece.text === null ? "bytes" : "text" }));
  for (let start = 0; start < runs.length; start += 1) {
    if (runs[start].kind !== "bytes") continue;
    let end = start;
    let hex = "";
    while (end < runs.length && runs[end].kind === "bytes") hex += runs[end++].piece.hex;
    const decoded = decodedOf(hex);
    if (decoded !== null) {
      runs[start] = { ...runs[start], text: decoded, kind: "text" };
      for (let rest = start + 1; rest < end; rest += 1) runs[rest] = { ...runs[rest], text: "·", kind: "rest" };
    }
    start = end - 1;
  }
  return runs;
}

function decodedOf(hex) {
  const bytes = Uint8Array.from(hex.match(/../g) ?? [], digits => parseInt(digits, 16));
  try {
    return new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(bytes);
  } catch {
    return null;
  }
}

function tokenElement({ piece, place, text: spelled, kind }) {
  const made = element("span", { class: `token ${kind}`, data: { place: String(place) } });
  if (kind === "special") made.append(visibleText(piece.special, 100));
  else if (kind === "bytes") made.append(`⟨${piece.hex}⟩`);
  else made.append(...linesOf(spelled));
  return made;
}

/** Text with a sign before each line break and for each tab. */
function linesOf(spelled) {
  const nodes = [];
  for (const part of spelled.split(/(\r\n|\n|\t)/)) {
    if (part === "\n" || part === "\r\n") nodes.push(element("span", { class: "sign", "aria-hidden": "true", text: "↵" }), "\n");
    else if (part === "\t") nodes.push(element("span", { class: "sign", "aria-hidden": "true", text: "⇥" }), "\t");
    else if (part) nodes.push(visibleText(part, 5000));
  }
  return nodes;
}

function tell(place) {
  const run = shown[place];
  if (!run) return;
  const { piece } = run;
  const spelled = piece.special ? piece.special : piece.text === null ? `bytes ${piece.hex.match(/../g).join(" ")}` : `“${visibleText(piece.text, 200)}”`;
  const bytes = piece.special ? "" : `, ${formatNumber(piece.num_bytes ?? (piece.text === null ? piece.hex.length / 2 : new TextEncoder().encode(piece.text).length))} bytes`;
  show(detail, element("code", {}, `id ${piece.id}`), " ", isolated(spelled, 300), `${bytes}; token ${formatNumber(page.first_token + place + 1)} of ${formatNumber(page.num_tokens)}`);
}

function setCurrent(place) {
  text.children[current]?.classList.remove("current");
  current = Math.min(shown.length - 1, Math.max(0, place));
  const node = text.children[current];
  node?.classList.add("current");
  node?.scrollIntoView({ block: "nearest" });
  tell(current);
  announce(detail.textContent);
}

text.addEventListener("mouseover", event => {
  const token = event.target.closest(".token");
  if (token) tell(Number(token.dataset.place));
});
text.addEventListener("click", event => {
  const token = event.target.closest(".token");
  if (token && !window.getSelection()?.toString()) setCurrent(Number(token.dataset.place));
});
text.addEventListener("focus", () => {
  if (current < 0 && shown.length && text.matches(":focus-visible")) setCurrent(0);
});
text.addEventListener("keydown", event => {
  const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 20, ArrowUp: -20, Home: -shown.length, End: shown.length }[event.key];
  if (event.key === "Enter" && current >= 0) lookUp(shown[current].piece.id);
  if (step === undefined) return;
  event.preventDefault();
  setCurrent(current < 0 ? 0 : current + step);
});
text.addEventListener("dblclick", event => {
  const token = event.target.closest(".token");
  if (token) lookUp(shown[Number(token.dataset.place)].piece.id);
});

// Shards as a grid: a cell is a shard, or as many as make the range fit; a click goes closer.

import { announce, byId, chip, element, fact, formatBytes, formatNumber, formatPercent, isolated, setText, show } from "./dom.js";
import { colourOf, isReport, readGrid, readShard } from "./store_data.js";

const MAX_CELLS = 600;
const ALL = 2 ** 53 - 1;

let range = { first: 0, count: ALL };
let grid = null;
let openDocuments = () => {};
let readingNow = null;
let wantsAgain = false;

const crumbs = element("div", { class: "crumbs" });
const legend = element("ul", { class: "legend" });
const cells = element("div", { class: "grid", role: "group", "aria-label": "Shards, in order; arrow keys move, Enter goes closer" });
const detail = element("p", { class: "grid-detail" });
const panel = element("div", { class: "shard-panel", hidden: true });
const go = element("form", { class: "controls" },
  element("label", {}, "shard ", element("input", { type: "number", min: "0", step: "1", required: true, inputmode: "numeric" })),
  element("button", { type: "submit", text: "Show" }));

byId("shards-body").append(...(isReport ? [] : [element("div", { class: "section-head" }, crumbs, go)]), cells, detail, legend, panel);

go.addEventListener("submit", event => {
  event.preventDefault();
  const id = Number(go.querySelector("input").value);
  if (Number.isSafeInteger(id) && id >= 0) openShard(id);
});

/** Tells what to do when a shard's documents are asked for: open(shardId). */
export function onOpenDocuments(open) {
  openDocuments = open;
}

/** Reads the range again and draws it. One request at a time; a change meanwhile is read after it. */
export async function refreshGrid() {
  if (readingNow !== null) {
    wantsAgain = true;
    return readingNow;
  }
  readingNow = (async () => {
    do {
      wantsAgain = false;
      drawGrid(await readGrid(range.first, range.count, MAX_CELLS));
    } while (wantsAgain);
  })();
  try {
    await readingNow;
  } finally {
    readingNow = null;
  }
}

function drawGrid(found) {
  const sameShape = grid !== null && grid.first_shard === found.first_shard && grid.cell_shards === found.cell_shards;
  grid = found;
  cells.classList.toggle("few", found.cells.length <= 60);
  while (cells.children.length > found.cells.length) cells.lastChild.remove();
  found.cells.forEach((cell, place) => {
    const button = cells.children[place] ?? cells.appendChild(element("button", { type: "button", class: "cell", tabindex: "-1" }));
    drawCell(button, cell);
  });
  if (!sameShape || !cells.querySelector('[tabindex="0"]')) {
    for (const button of cells.children) button.tabIndex = -1;
    if (cells.firstChild) cells.firstChild.tabIndex = 0;
    setText(detail, isReport ? "" : "Point at a cell, or move with the arrow keys; a click goes closer.");
  }
  drawCrumbs();
  drawLegend();
  const seen = found.indexed_shards < found.num_shards ? `, index read for ${formatPercent(found.indexed_shards / found.num_shards)}` : "";
  setText(byId("shards-note"), found.total_shards === 0 ? "none yet"
    : `${formatNumber(found.total_shards)} ${found.total_shards === 1 ? "shard" : "shards"}${found.cell_shards > 1 ? `, ${formatNumber(found.cell_shards)} to a cell` : ""}${seen}`);
}

/** Above, what the shards are of; below, what was checked. */
function drawCell(button, cell) {
  const stripes = [];
  let at = 0;
  cell.by_source.forEach((count, source) => {
    if (!count) return;
    const to = at + 100 * count / cell.num_shards;
    stripes.push(`${colourOf(grid.sources[source])} ${at.toFixed(2)}% ${to.toFixed(2)}%`);
    at = to;
  });
  if (at < 100) stripes.push(`var(--grid-empty) ${at.toFixed(2)}% 100%`);
  const sound = 100 * cell.verified / cell.num_shards;
  const marks = `linear-gradient(90deg, var(--text) 0% ${sound.toFixed(2)}%, transparent ${sound.toFixed(2)}% 100%)`;
  const look = `${marks} left bottom / 100% 4px no-repeat, linear-gradient(90deg, ${stripes.join(", ")})`;
  if (button.dataset.look !== look) {
    button.dataset.look = look;
    button.style.background = look;
  }
  button.classList.toggle("damaged", cell.damaged > 0);
  const label = labelOf(cell);
  if (button.getAttribute("aria-label") !== label) button.setAttribute("aria-label", label);
}

function labelOf(cell) {
  const last = cell.first_shard + cell.num_shards - 1;
  const name = cell.num_shards === 1 ? `shard ${formatNumber(cell.first_shard)}` : `shards ${formatNumber(cell.first_shard)} to ${formatNumber(last)}`;
  const indexed = cell.by_source.reduce((sum, count) => sum + count, 0);
  const parts = grid.sources.map((source, place) => [source, cell.by_source[place]]).filter(([, count]) => count > 0)
    .map(([source, count]) => cell.num_shards === 1 ? source : `${source} ${formatNumber(count)}`);
  if (indexed < cell.num_shards) parts.push(`${formatNumber(cell.num_shards - indexed)} not indexed yet`);
  const of = count => cell.num_shards === 1 ? "" : `${formatNumber(count)} `;
  if (cell.packed) parts.push(`${of(cell.packed)}packed`);
  parts.push(cell.verified ? `${of(cell.verified)}verified` : "not verified");
  if (cell.damaged) parts.push(`${of(cell.damaged)}DAMAGED`);
  return `${name}: ${parts.join(", ")}`;
}

function drawLegend() {
  const items = grid.sources.map(source =>
    element("li", {}, element("span", { class: "swatch", style: { "background-color": colourOf(source) } }), isolated(source, 64)));
  items.push(element("li", {}, element("span", { class: "swatch mark", style: { "background-color": "var(--text)" } }), "verified (line below)"));
  if (grid.indexed_shards < grid.num_shards) items.push(element("li", {}, element("span", { class: "swatch" }), "index not read yet"));
  show(legend, ...(grid.cells.length ? items : []));
}

function drawCrumbs() {
  const isAll = grid.num_shards === grid.total_shards;
  const steps = [element("button", { type: "button", disabled: isAll, text: "All shards" })];
  if (!isAll) {
    const last = grid.first_shard + grid.num_shards - 1;
    const before = element("button", { type: "button", disabled: grid.first_shard === 0, "aria-label": "the range before", text: "←" });
    const after = element("button", { type: "button", disabled: last + 1 >= grid.total_shards, "aria-label": "the range behind", text: "→" });
    const farther = element("button", { type: "button", text: "farther away" });
    steps.push(before, element("span", { text: `${formatNumber(grid.first_shard)} – ${formatNumber(last)}` }), after, farther);
  }
  show(crumbs, ...(grid.total_shards ? steps : []));
}

crumbs.addEventListener("click", event => {
  const place = [...crumbs.children].indexOf(event.target.closest("button"));
  const { first_shard: first, num_shards: count, total_shards: total } = grid;
  if (place === 0) setRange(0, ALL);
  if (place === 1) setRange(Math.max(0, first - count), count);
  if (place === 3) setRange(first + count, count);
  if (place === 4) setRange(Math.max(0, Math.floor(first / (10 * count)) * 10 * count), Math.min(total, 10 * count));
});

function setRange(first, count) {
  range = { first, count };
  refreshGrid().then(() => announce(byId("shards-note").textContent), error => setText(detail, error.message));
}

function placeOf(event) {
  const button = event.target.closest("button.cell");
  return button === null ? -1 : [...cells.children].indexOf(button);
}

function point(place) {
  const button = cells.children[place];
  if (!button) return;
  for (const other of cells.querySelectorAll('[tabindex="0"]')) other.tabIndex = -1;
  button.tabIndex = 0;
  setText(detail, button.getAttribute("aria-label"));
}

cells.addEventListener("mouseover", event => {
  const place = placeOf(event);
  if (place >= 0) setText(detail, cells.children[place].getAttribute("aria-label"));
});
cells.addEventListener("focusin", event => point(placeOf(event)));
cells.addEventListener("keydown", event => {
  const place = placeOf(event);
  if (place < 0) return;
  const columns = getComputedStyle(cells).gridTemplateColumns.split(" ").length;
  const moves = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: columns, ArrowUp: -columns, Home: -place, End: cells.children.length - 1 - place };
  if (!(event.key in moves)) return;
  event.preventDefault();
  const next = Math.min(cells.children.length - 1, Math.max(0, place + moves[event.key]));
  point(next);
  cells.children[next].focus();
});
cells.addEventListener("click", event => {
  const place = placeOf(event);
  if (place < 0) return;
  const cell = grid.cells[place];
  if (isReport) setText(detail, labelOf(cell));
  else if (cell.num_shards > 1) setRange(cell.first_shard, grid.cell_shards);
  else openShard(cell.first_shard);
});

async function openShard(id) {
  try {
    drawPanel(await readShard(id));
  } catch (error) {
    panel.hidden = false;
    show(panel, element("p", { class: "message bad" }, isolated(error.message, 600)));
  }
}

const CHECKS = { verified: ["good", "verified"], damaged: ["bad", "damaged"], "not checked": ["", "not verified"] };

function drawPanel(shard) {
  panel.hidden = false;
  const moves = [["← previous of its source", shard.previous_shard], ["next of its source →", shard.next_shard]].map(([text, id]) =>
    element("button", { type: "button", disabled: id === null, text, on: { click: () => openShard(id) } }));
  panel.replaceChildren(
    element("div", { class: "section-head" }, element("h3", { text: `Shard ${formatNumber(shard.id)}` }), chip(...CHECKS[shard.check])),
    element("dl", { class: "facts" },
      ...fact("source", isolated(shard.source, 64)),
      ...fact("documents", `${formatNumber(shard.first_document)} to ${formatNumber(shard.last_document)} of its source`),
      ...fact("tokens", formatNumber(shard.tokens)),
      ...fact("size", `${formatBytes(shard.size_bytes)}${shard.packed_bytes === null ? ", not packed" : `, packed ${formatBytes(shard.packed_bytes)}`}`),
      ...fact("vocabulary", `${formatNumber(shard.vocabulary_ids)} ids when it was written`),
      ...fact("sha256", element("code", { text: shard.sha256 })),
      ...fact("index segment", element("code", { text: shard.segment }))),
    element("div", { class: "controls" },
      element("button", { type: "button", class: "primary", text: "Read its documents", on: { click: () => openDocuments(shard.id) } }), ...moves));
  panel.dataset.shard = String(shard.id);
  announce(`shard ${shard.id} of ${shard.source}, ${shard.check}`);
}

/** After a shard was read, its check may have changed. */
export function refreshPanel(shardId) {
  if (!panel.hidden && panel.dataset.shard === String(shardId)) openShard(shardId);
}

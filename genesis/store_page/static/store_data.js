// Where the page has its figures from: the server's routes, or the data inside a report.

import { embeddedData, fetchJson } from "./dom.js";

const report = embeddedData();

/** Whether this is a report: one file, made once. */
export const isReport = report !== null;

/** The report's data; null where the page is served. */
export const reportData = report;

const COLOURS = ["--series-1", "--series-2", "--series-3", "--series-4", "--series-5", "--series-6", "--series-7"];
const OTHER_COLOUR = "--series-8";
const places = new Map();

/** Gives each of these sources a colour that is the same all over the page. */
export function colourSources(names) {
  for (const name of names) if (!places.has(name) && places.size < COLOURS.length) places.set(name, places.size);
}

/** The colour of a source, as CSS has it. */
export function colourOf(name) {
  return `var(${places.has(name) ? COLOURS[places.get(name)] : OTHER_COLOUR})`;
}

function query(fields) {
  const given = Object.entries(fields).filter(([, value]) => value !== null && value !== undefined && value !== "");
  return given.length ? `?${new URLSearchParams(given.map(([name, value]) => [name, String(value)]))}` : "";
}

export async function readOverview() {
  return isReport ? report.store : fetchJson("api/store");
}

export async function readGrid(first, count, cells) {
  return isReport ? report.shards : fetchJson(`api/shards${query({ first, count, cells })}`);
}

export async function readShard(id) {
  return fetchJson(`api/shard${query({ id })}`);
}

/** fields: shard and document, or source and ordinal; token. */
export async function readDocument(fields) {
  return fetchJson(`api/document${query(fields)}`, { timeoutMs: 30000 });
}

/** fields: id or text. */
export async function readVocabulary(fields) {
  if (!isReport) return fetchJson(`api/vocabulary${query(fields)}`, { timeoutMs: 30000 });
  if (report.vocabulary === null || (fields.id === undefined && !fields.text)) return report.vocabulary;
  return searchInReport(fields);
}

const MAX_MATCHES = 100;

function searchInReport({ id, text }) {
  const { tokens, vocabulary } = report;
  const answer = { ...vocabulary, token: null, encoded: [], matches: [], num_matches: 0, is_complete: true, longest: [] };
  if (id !== undefined) {
    if (id >= tokens.length) throw new Error(`expected an id of 0 to ${tokens.length - 1}`);
    return { ...answer, token: factsOf(tokens[id]) };
  }
  const found = tokens.filter(piece => piece.text !== null && piece.text.includes(text));
  const exact = found.find(piece => piece.text === text);
  found.sort((a, b) => a.text.length - b.text.length || a.id - b.id);
  return { ...answer, token: exact ? factsOf(exact) : null, matches: found.slice(0, MAX_MATCHES), num_matches: found.length };
}

function factsOf(piece) {
  const numBytes = piece.text !== null ? new TextEncoder().encode(piece.text).length : (piece.hex ?? "").length / 2;
  return { piece, num_bytes: piece.num_bytes ?? numBytes, parents: [], used_in: [], num_used_in: 0 };
}

// The vocabulary: what it was learned from, and a search by text or id.

import { byId, element, fact, formatNumber, formatPercent, isolated, setText, show, visibleText } from "./dom.js";
import { colourOf, isReport, readVocabulary, reportData } from "./store_data.js";

let ticket = 0;
let drawnFor = null;

const contributed = element("div", {});
const facts = element("dl", { class: "facts" });
const input = element("input", { type: "search", class: "wide", maxlength: "200", autocomplete: "off", spellcheck: "false", "aria-label": "text, or # and an id", placeholder: "text, or #1234" });
const form = element("form", { class: "controls", role: "search" }, element("label", {}, "token ", input), element("button", { type: "submit", text: "Look up" }));
const failure = element("p", { class: "message bad", role: "alert", hidden: true });
const result = element("div", { "aria-live": "polite" });

byId("vocabulary-body").append(contributed, facts, form, failure, result);

form.addEventListener("submit", event => {
  event.preventDefault();
  search(input.value);
});

/** Looks an id up, and goes there. */
export function lookUpToken(id) {
  byId("vocabulary").scrollIntoView();
  input.value = `#${id}`;
  search(input.value);
}

/** Draws what the store says of its vocabulary; a new one is also read. */
export function drawVocabulary(store) {
  const { vocabulary, vocabulary_steps: steps } = store;
  form.hidden = vocabulary === null || (isReport && reportData.tokens.length === 0);
  if (vocabulary === null) {
    setText(byId("vocabulary-note"), "none yet");
    return;
  }
  setText(byId("vocabulary-note"), vocabulary.origin === null ? `${formatNumber(vocabulary.ids)} ids, of at most ${formatNumber(vocabulary.limit)}`
    : `${formatNumber(vocabulary.ids)} ids; made elsewhere, it never grows`);
  show(contributed, ...sharesOf(vocabulary));
  show(facts,
    ...(vocabulary.origin === null ? [] : fact("origin", isolated(vocabulary.origin, 300))),
    ...fact("end of a document", `id ${vocabulary.eos_id}`, vocabulary.eos_token === null ? "" : element("span", {}, " ", isolated(vocabulary.eos_token, 60))),
    ...(vocabulary.encoder === null ? [] : fact("encoded by", isolated(vocabulary.encoder, 60))),
    ...(steps.length > 1 ? fact("grew", element("span", {}, steps.map(step =>
      `${formatNumber(step.ids)} ids from shard ${formatNumber(step.first_shard)} (${visibleText(step.source, 64)})`).join(", "))) : []),
    ...fact("sha256", element("code", { text: vocabulary.sha256 })));
  if (drawnFor !== vocabulary.sha256) {
    drawnFor = vocabulary.sha256;
    search(input.value);
  }
}

function sharesOf(vocabulary) {
  const given = Object.entries(vocabulary.sources_contributed ?? {}).sort(([, a], [, b]) => b - a);
  const total = given.reduce((sum, [, merges]) => sum + merges, 0);
  if (!total) return [];
  const colour = name => ({ "background-color": colourOf(name) });
  return [
    element("h3", { class: "sub-head", text: "Merges by source" }),
    element("div", { class: "shares", "aria-hidden": "true" },
      ...given.map(([name, merges]) => element("i", { style: { ...colour(name), width: `${100 * merges / total}%` } }))),
    element("ul", { class: "legend" }, ...given.slice(0, 40).map(([name, merges]) =>
      element("li", {}, element("span", { class: "swatch", style: colour(name) }), isolated(name, 64), ` ${formatNumber(merges)} (${formatPercent(merges / total)})`))),
  ];
}

async function search(given) {
  const own = ++ticket;
  const id = /^#\s*(\d{1,10})$/.exec(given);
  try {
    const found = await readVocabulary(id ? { id: Number(id[1]) } : given ? { text: given } : {});
    if (own !== ticket) return;
    failure.hidden = true;
    draw(found, given);
  } catch (error) {
    if (own !== ticket) return;
    failure.hidden = false;
    setText(failure, visibleText(error.message, 600));
  }
}

function draw(found, given) {
  if (found === null) return;
  const parts = [];
  if (found.token) parts.push(...tokenParts(found.token));
  if (found.encoded.length) parts.push(heading(`The text as ${formatNumber(found.encoded.length)} tokens`), list(found.encoded));
  if (found.matches.length) {
    const more = found.num_matches > found.matches.length ? `, the shortest ${formatNumber(found.matches.length)}` : "";
    parts.push(heading(`${formatNumber(found.num_matches)}${found.is_complete ? "" : " or more"} tokens hold it${more}`), list(found.matches));
  } else if (given && !found.token && !given.startsWith("#")) parts.push(element("p", { class: "note", text: "No token holds that text." }));
  if (found.longest.length) {
    parts.push(heading(`Longest tokens${found.mean_token_bytes === null ? "" : ` (${formatNumber(found.mean_token_bytes, 2)} bytes on average)`}`), list(found.longest));
  }
  result.replaceChildren(...parts);
}

function tokenParts(token) {
  const name = `id ${formatNumber(token.piece.id)}${token.num_bytes ? `, ${formatNumber(token.num_bytes)} bytes` : ""}`;
  const parts = [heading(name), list([token.piece])];
  if (token.parents.length) parts.push(heading("merged from"), list(token.parents));
  if (token.used_in.length) {
    const more = token.num_used_in > token.used_in.length ? `, the first ${formatNumber(token.used_in.length)}` : "";
    parts.push(heading(`part of ${formatNumber(token.num_used_in)} merges${more}`), list(token.used_in));
  }
  return parts;
}

function heading(text) {
  return element("h3", { class: "sub-head", text });
}

function list(pieces) {
  return element("ul", { class: "tokens" }, ...pieces.map(piece => element("li", {}, tokenButton(piece))));
}

/** With signs for blanks; many spaces by their number. */
function signed(text) {
  if (/^ {9,}$/.test(text)) return `${text.length} spaces`;
  return text.replaceAll(" ", "␣").replaceAll("\n", "↵").replaceAll("\t", "⇥");
}

function tokenButton(piece) {
  const spelled = piece.special ?? (piece.text === null ? `⟨${piece.hex}⟩` : signed(piece.text));
  const parts = [isolated(spelled, 200, { class: "spelled" }), element("span", { class: "id", text: `#${piece.id}` })];
  if (form.hidden) return element("span", { class: "button token-button" }, ...parts);
  return element("button", { type: "button", class: "token-button", on: { click: () => lookUpToken(piece.id) } }, ...parts);
}

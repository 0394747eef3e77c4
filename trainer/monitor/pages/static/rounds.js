// Rounds below each other, the latest first: when, who took part, what its phases took, who was left out and why.
//
// From plain data: `rounds` of `PageView`. The bars share one scale, that of the longest round shown.

import { chip, element, formatBytes, formatDuration, formatNumber, formatPercent, isolated, show, timeElement } from "./dom.js";

const PHASES = [["agree_s", "agreeing"], ["reduce_s", "tensors"], ["vote_s", "vote"]];
const SHOWN = 24;

/** Shows rounds in a node. */
export function showRounds(node, rounds) {
  const shown = rounds.slice(0, SHOWN);
  const longest = Math.max(1e-9, ...shown.map(round => round.seconds));
  show(node, legend(), element("ol", { class: "rounds", "aria-label": "latest rounds, the newest first" },
    ...shown.map(round => roundRow(round, longest))));
}

function legend() {
  return element("p", { class: "note legend", "aria-hidden": "true" },
    ...PHASES.flatMap(([key, name]) => [element("i", { class: `swatch ${key}` }), element("span", { text: name })]),
    element("i", { class: "swatch rest" }), element("span", { text: "other" }));
}

function roundRow(round, longest) {
  const name = round.stage ? `${round.stage} ${formatNumber(round.round_index)}` : `round ${formatNumber(round.round_index)}`;
  const isFailed = Boolean(round.error);
  const isPartial = !isFailed && (round.completeness < 1 || round.num_failed > 0 || round.left_out.length > 0);
  const [kind, state] = isFailed ? ["bad", "no result"] : isPartial ? ["warning", `${formatPercent(round.completeness)} complete`] : ["good", "complete"];
  const members = round.num_members ? `${formatNumber(round.num_members)} ${round.num_members === 1 ? "member" : "members"}` : "";
  const told = [members, round.num_failed && round.num_reports ? `failed for ${formatNumber(round.num_failed)} of ${formatNumber(round.num_reports)}` : "",
    round.sent_bytes ? `${formatBytes(round.sent_bytes)} sent` : "", round.rule].filter(Boolean).join(" · ");
  return element("li", { class: "round" },
    element("div", { class: "round-name" }, element("strong", { text: name }), " ", timeElement(round.ended_at)),
    chip(kind, state),
    phasesBar(round, longest),
    element("div", { class: "round-told" }, element("span", { class: "note", text: told }),
      round.members.length > 1 ? element("details", {}, element("summary", { text: "members" }),
        element("p", { class: "note" }, ...round.members.flatMap((member, index) => [index ? ", " : "", isolated(member, 40)]))) : null,
      ...round.left_out.map(([who, why]) => element("p", { class: "left-out" }, "left out: ", isolated(who, 40), ", ", isolated(why, 160))),
      isFailed ? element("p", { class: "left-out" }, isolated(round.error, 240)) : null));
}

function phasesBar(round, longest) {
  const known = PHASES.map(([key]) => round[key]);
  const rest = Math.max(0, round.seconds - known.reduce((sum, each) => sum + each, 0));
  const words = PHASES.map(([key, name]) => `${name} ${formatDuration(round[key])}`).join(", ");
  const part = (kind, seconds) => element("i", { class: kind, style: { width: `${Math.min(100, 100 * seconds / longest)}%` } });
  return element("div", { class: "phases" },
    element("span", { class: "phases-bar", role: "img", "aria-label": `${formatDuration(round.seconds)}: ${words}` },
      ...PHASES.map(([key]) => part(key, round[key])), part("rest", rest)),
    element("span", { class: "note", text: round.seconds ? formatDuration(round.seconds) : "" }));
}

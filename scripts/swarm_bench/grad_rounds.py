"""A step of averaged gradients of 16 MB among four: ours, hivemind's GradientAverager, gloo's all-reduce.

A round lasts from the moment at which the last member has its gradients until the last one has their mean. Ours begins
with the hand-over, and its whole step, with clipping and the optimizer's update, is given beside it; gloo's is the sum
and the division. Ours and hivemind's are given with the round agreed on before the gradients were there, as both do
while they train, and without; ours with its defaults, in which members validate each other, and without validation.
All members are started before the first round and take turns, and a first round of each is not counted.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

from scripts.swarm_bench.call import SWARM_MEMBERS
from scripts.trainer_bench.crew import Answer, Crew, crew, load_average

ASKED = 0.6
_MEMBERS = 4
_AHEAD_S = 3.0
"""hivemind looks for its group in that time; ours takes some hundredths of it."""
CODECS = ("fp32", "fp16")
VALIDATIONS = ("enforce", "off")
_AHEAD = "agreed on ahead"
_MAX_ATTEMPTS = 5

Round = Callable[[int], Sequence[Answer]]


def bench_grad(arguments: argparse.Namespace) -> dict[str, Any]:
    """All in turn, ``grad_rounds`` rounds each."""
    values = int(arguments.grad_mb * 1e6) // 4
    report: dict[str, Any] = {"load": [load_average()], "bytes": 4 * values, "rounds": arguments.grad_rounds}
    with ExitStack() as stack:
        rounds: dict[str, Round] = {}
        for codec in arguments.grad_codecs:
            for validation in arguments.grad_validations:
                ours = stack.enter_context(crew("grad", _MEMBERS, folder=SWARM_MEMBERS))
                rounds |= _own_rounds(ours, codec, validation, values)
                report.setdefault("step", ours.each("step", [{}])[0])
            theirs = stack.enter_context(crew("grad_hivemind", _MEMBERS, folder=SWARM_MEMBERS))
            rounds |= _hivemind_rounds(theirs, codec, values)
        gloo = stack.enter_context(crew("gloo", _MEMBERS))
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        place = {"members": _MEMBERS, "store": f"file://{Path(folder) / 'store'}", "interface": "lo"}
        gloo.each("open", [{"rank": rank, **place} for rank in range(_MEMBERS)])
        rounds["gloo, fp32"] = lambda number: gloo.each("round", [{"values": values, "seed": number}] * _MEMBERS)
        found: dict[str, list[dict[str, float]]] = {name: [] for name in rounds}
        for number in range(arguments.grad_rounds + 1):
            for name, go in rounds.items():
                one = _one_round(name, go, number)
                if number:
                    found[name].append(one)
    medians = {name: {key: median(each[key] for each in all_of) for key in all_of[0]} for name, all_of in found.items()}
    report |= {"members": _MEMBERS, "contestants": medians}
    report["load"].append(load_average())
    print(_as_text(report))
    return report


def _own_rounds(ours: Crew, codec: str, validation: str, values: int) -> dict[str, Round]:
    opened = ours.all("open", values=values, compression=codec, rule={"rule": "mean", "validation": validation})
    ours.all("meet", peers=[answer["peer"] for answer in opened])

    def own(ahead: bool) -> Round:
        def go(number: int) -> Sequence[Answer]:
            seeds = [{"seed": _MEMBERS * number + rank, "ahead": ahead and number > 0} for rank in range(_MEMBERS)]
            ours.each("prepare", seeds)
            if ahead:
                time.sleep(0.3)
            answers = ours.all("round")
            if len({answer["lineage"] for answer in answers}) != 1:
                raise SystemExit("expected one state at all members, found several")
            return answers

        return go

    by = {"enforce": "ours", "off": "ours, not validated"}[validation]
    return {f"{by}, {codec}, {_AHEAD}": own(True), f"{by}, {codec}": own(False)}


def _hivemind_rounds(theirs: Crew, codec: str, values: int) -> dict[str, Round]:
    first = theirs.each("join", [{"initial_peers": []}])[0]["addresses"]
    theirs.each("join", [{"initial_peers": first}] * (_MEMBERS - 1), first=1)
    theirs.all("open", values=values, compression=codec, group_size=_MEMBERS)

    def other(ahead_s: float) -> Round:
        def go(number: int) -> Sequence[Answer]:
            theirs.each("prepare", [{"seed": _MEMBERS * number + rank, "ahead_s": ahead_s} for rank in range(_MEMBERS)])
            time.sleep(ahead_s)
            return theirs.all("round")

        return go

    return {f"hivemind, {codec}, {_AHEAD}": other(_AHEAD_S), f"hivemind, {codec}": other(0.0)}


def _one_round(name: str, go: Round, number: int) -> dict[str, float]:
    """Tried again where not all have met, which happens to hivemind's."""
    for _ in range(_MAX_ATTEMPTS):
        answers = go(number)
        if all(answer.get("members", _MEMBERS) == _MEMBERS for answer in answers):
            break
    else:
        raise SystemExit(f"{name}: expected a round of {_MEMBERS}, found {answers}")
    one = {"round_s": max(it["until_s"] for it in answers) - max(it["from_s"] for it in answers)}
    if "stepped_s" in answers[0]:
        one["step_s"] = max(it["stepped_s"] for it in answers) - max(it["from_s"] for it in answers)
        one |= {name: sum(it[name] for it in answers) for name in ("round_cpu_s", "step_cpu_s")}
        for place, name in enumerate(("agreement_s", "exchange_s", "vote_s")):
            one[name] = median(it["phases_s"][place] for it in answers)
    if "sent_bytes" in answers[0]:
        one["sent_bytes"] = max(it["sent_bytes"] for it in answers)
    return one


def _as_text(report: dict[str, Any]) -> str:
    """The report for people."""
    title = f"a step of {report['bytes'] / 1e6:.0f} MB of gradients among {report['members']}"
    lines = [f"{title}, ms, medians of {report['rounds']}   ({' to '.join(report['load'])})"]
    found = report["contestants"]
    for name, each in found.items():
        line = f"  {name:42} {1e3 * each['round_s']:>8.0f}"
        if name.startswith("ours"):
            peer = found[name.replace("ours, not validated", "hivemind").replace("ours", "hivemind")]
            line += f"   {each['round_s'] / peer['round_s']:.2f} of hivemind's   asked {ASKED:g} at most"
            line += f"   {each['round_s'] / found['gloo, fp32']['round_s']:.2f} of gloo's sum alone"
            line += f"   {each['sent_bytes'] / 1e6:.1f} MB sent, cpu {1e3 * each['round_cpu_s']:.0f}"
            line += f" (exchange {1e3 * each['exchange_s']:.0f}, vote {1e3 * each['vote_s']:.0f})"
            line += f"   with its step {1e3 * each['step_s']:.0f}, cpu {1e3 * each['step_cpu_s']:.0f}"
        lines.append(line)
    step = report["step"]
    lines.append(
        f"  of ours the update alone {1e3 * step['ours_s']:.0f}, torch's fused one {1e3 * step['fused_s']:.0f} "
        f"(ours takes {step['ours_s'] / step['fused_s']:.1f} times as long)"
    )
    return "\n".join(lines)

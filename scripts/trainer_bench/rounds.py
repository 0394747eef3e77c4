"""A round of 16 MB among two, three and four: ours, hivemind's DecentralizedAverager, gloo's all-reduce.

All members of all three are started before the first round, and take turns, so that a busy machine is as busy for
all; a first round of each, in which connections are made, is not counted. A round lasts from the moment at which the
last member asks for it until the last one has its result. hivemind's is given with the looking for a group, which is
part of it, and without (the longest of the members' all-reduces). It is told how many to expect, so that it need not
wait for more; the last line is what a round takes it where one of those expected does not come.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

from scripts.trainer_bench.crew import Answer, Crew, crew, load_average

ASKED = 3.0
_LOCAL = "127.0.0.1"
_MEMBERS = (2, 3, 4)
_MOST = max(_MEMBERS)
_OURS = (("fp32", False), ("fp32", True), ("int8", False), ("int8", True))
_MATCHMAKING_S = 5.0
"""hivemind's default; it matters only to those who are one too few."""
_UNMET_S = 2.0
_UNMET_ROUNDS = 2

Round = Callable[[int], Sequence[Answer]]


def bench_round(arguments: argparse.Namespace) -> dict[str, Any]:
    """Everyone in turn, among so many members after so many."""
    values = int(arguments.round_mb * 1e6) // 4
    report: dict[str, Any] = {"load": [load_average()], "bytes": 4 * values, "rounds": arguments.rounds}
    with ExitStack() as stack:
        genesis, gloo, hivemind = (stack.enter_context(crew(kind, _MOST)) for kind in ("genesis", "gloo", "hivemind"))
        peers = _open_genesis(genesis)
        _open_hivemind(hivemind)
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        report["members"] = {}
        for members in _MEMBERS:
            rounds = {
                **_gloo_rounds(gloo, members, values, Path(folder)),
                **_genesis_rounds(genesis, members, values, peers),
                **_hivemind_rounds(hivemind, members, values),
            }
            report["members"][str(members)] = _measured(rounds, members, arguments.rounds)
            gloo.each("close", [{}] * members)
            hivemind.each("close", [{"name": f"fp32-{members}"}] * members)
            hivemind.each("close", [{"name": f"int8-{members}"}] * members)
        report["unmet_s"] = _unmet(hivemind, values)
    report["load"].append(load_average())
    print(as_text(report))
    return report


def _measured(rounds: dict[str, Round], members: int, count: int) -> dict[str, dict[str, Any]]:
    """Medians, after a first round of each."""
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in rounds}
    for number in range(count + 1):
        for name, go in rounds.items():
            answers = go(number)
            if any(answer.get("members", members) != members for answer in answers):
                raise SystemExit(f"{name}: expected a round of {members}, found {answers}")
            if number:
                found[name].append(_one_round(answers))
    return {name: _medians(each) for name, each in found.items()}


def _one_round(answers: Sequence[Answer]) -> dict[str, Any]:
    """Of all members; the phases are those of the last to be done."""
    slowest = max(answers, key=lambda answer: answer["until_s"])
    round_s = slowest["until_s"] - max(answer["from_s"] for answer in answers)
    one = {"round_s": round_s}
    if "round_cpu_s" in slowest:
        one["cpu_s"] = sum(answer["round_cpu_s"] for answer in answers)
    if "all_reduce_s" in slowest:
        one["all_reduce_s"] = max(answer["all_reduce_s"] for answer in answers)
    one |= slowest.get("phases_s", {})
    if "passes" in slowest:
        one["passes"] = max(answer["passes"] for answer in answers)
    return one


def _medians(rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    found = {name: median(each[name] for each in rounds) for name in rounds[0]}
    found["best_s"] = min(each["round_s"] for each in rounds)
    if "passes" in found:
        found["passes"] = max(each["passes"] for each in rounds)
    return found


# -- contestants -------------------------------------------------------------------------------------------------------


def _open_genesis(genesis: Crew) -> dict[str, list[Any]]:
    """All kinds of node in each process; how to reach them, by kind."""
    peers = {}
    for compression, tls in _OURS:
        name = _kind(compression, tls)
        opened = genesis.all("open", name=name, host=_LOCAL, tls=tls, compression=compression)
        peers[name] = [answer["peer"] for answer in opened]
    return peers


def _genesis_rounds(genesis: Crew, members: int, values: int, peers: dict[str, list[Any]]) -> dict[str, Round]:
    def rounds(name: str) -> Round:
        first = 100 * members
        genesis.each("meet", [{"name": name, "peers": peers[name][:members], "next_round": first}] * members)
        return lambda number: genesis.each(
            "round",
            [
                {"name": name, "index": first + number, "values": values, "seed": number * _MOST + rank}
                for rank in range(members)
            ],
        )

    return {name: rounds(name) for name in peers}


def _kind(compression: str, tls: bool) -> str:
    return f"ours, {compression}{', TLS' if tls else ''}"


def _gloo_rounds(gloo: Crew, members: int, values: int, folder: Path) -> dict[str, Round]:
    place = {"members": members, "store": f"file://{folder / str(members)}", "interface": "lo"}
    gloo.each("open", [{"rank": rank, **place} for rank in range(members)])
    seeds = range(members)
    return {"gloo, fp32": lambda _: gloo.each("round", [{"values": values, "seed": seed} for seed in seeds])}


def _open_hivemind(hivemind: Crew) -> None:
    """One DHT of all."""
    first = hivemind.each("join", [{"host": _LOCAL, "initial_peers": []}])[0]["addresses"]
    later = [{"host": _LOCAL, "initial_peers": first}] * len(hivemind)
    hivemind.each("join", later[1:], first=1)


def _hivemind_rounds(hivemind: Crew, members: int, values: int) -> dict[str, Round]:
    def rounds(compression: str) -> Round:
        name = f"{compression}-{members}"
        averager = {"values": values, "compression": compression, "group_size": members}
        hivemind.each("open", [{"name": name, "matchmaking_s": _MATCHMAKING_S, **averager}] * members)
        return lambda number: hivemind.each(
            "round", [{"name": name, "seed": number * _MOST + rank} for rank in range(members)]
        )

    return {f"hivemind, {compression}": rounds(compression) for compression in ("fp32", "int8")}


def _unmet(hivemind: Crew, values: int) -> float:
    """Three of the four that are expected."""
    members = _MOST - 1
    averager = {"name": "unmet", "values": values, "compression": "fp32", "group_size": _MOST}
    hivemind.each("open", [{"matchmaking_s": _UNMET_S, **averager}] * members)
    rounds: dict[str, Round] = {
        "unmet": lambda number: hivemind.each("round", [{"name": "unmet", "seed": 0}] * members)
    }
    found: float = _measured(rounds, members, _UNMET_ROUNDS)["unmet"]["round_s"]
    return found


def as_text(report: dict[str, Any]) -> str:
    """The report for people."""
    title = f"a round of {report['bytes'] / 1e6:.0f} MB, ms, medians of {report['rounds']}"
    lines = [f"{title}   ({' to '.join(report['load'])})"]
    lines.append("cpu: processor time of all members, not known of hivemind; ×: ours is so many times as fast as that")
    for members, found in report["members"].items():
        lines.append(
            f"  {members + ' members':18} {'round':>8} {'best':>8} {'cpu':>8}   {'hivemind ×':>10} {'its sum ×':>10}"
            f" {'gloo ×':>7}   the phases of it"
        )
        for name, each in found.items():
            lines.append(_line(name, each, found))
    lines.append(
        f"  hivemind, fp32, three of four expected, told to look for {_UNMET_S:g} s: {report['unmet_s']:.2f} s"
    )
    return "\n".join(lines)


def _line(name: str, each: dict[str, Any], found: dict[str, dict[str, Any]]) -> str:
    line = f"  {name:18} {1e3 * each['round_s']:>8.0f} {1e3 * each['best_s']:>8.0f}"
    line += f" {1e3 * each['cpu_s']:>8.0f}" if "cpu_s" in each else " " * 9
    if not name.startswith("ours"):
        return line + (f"   {1e3 * each['all_reduce_s']:.0f} of it summing" if "all_reduce_s" in each else "")
    peer = found["hivemind, int8" if "int8" in name else "hivemind, fp32"]
    times = [peer["round_s"], peer["all_reduce_s"], found["gloo, fp32"]["round_s"]]
    ratios = [seconds / each["round_s"] for seconds in times]
    phases = ", ".join(f"{phase} {1e3 * each[phase]:.0f}" for phase in ("agreement", "exchange", "vote"))
    passes = f", passes up to {each['passes']}" if each["passes"] > 1 else ""
    return line + f"   {ratios[0]:>10.2f} {ratios[1]:>10.2f} {ratios[2]:>7.2f}   {phases}{passes}   asked {ASKED:g}"

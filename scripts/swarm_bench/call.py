"""A stage call of 1, 4 and 16 MB, both ways: ours with TLS and without, hivemind's RemoteExpert, and gRPC alone.

Asked and answered is a tensor of that size; a MB/s counts one way, so that it is the size over the time there and back.
gRPC alone sends the same bytes there and back and does nothing else: what speaks gRPC from Python cannot be faster.
All contestants are started first and take turns, so that a busy machine is as busy for all. Two things are told of
each: one call at a time, and four under way at once. Processor time is that of both sides with all their helpers, a MB;
unlike the time it hardly depends on what else the machine does.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from scripts.trainer_bench.crew import ROOT, Answer, Crew, crew, load_average, progress

SWARM_MEMBERS: Path = ROOT / "scripts" / "baselines" / "swarm"
ASKED = 5.0
_OURS = {"ours, TLS": True, "ours, plain": False}
_LIMITS = {"gRPC alone, TLS": True, "gRPC alone, plain": False}
_HIVEMIND = "hivemind"
_IN_FLIGHT = 4
_START_S = 90.0
_CALLS_S = 110.0


@dataclass(frozen=True, slots=True)
class _Contestant:
    server: Crew
    client: Crew
    names: dict[str, Any]

    def call(self, rows: int, count: int, in_flight: int) -> Answer:
        """So many calls; with the processor time of both sides."""
        before_s = self.server.all("cpu")[0]["session_cpu_s"]
        request = {"rows": rows, "count": count, "in_flight": in_flight, **self.names}
        answer = self.client.all("call", timeout_s=_CALLS_S, **request)[0]
        served_s = self.server.all("cpu")[0]["session_cpu_s"] - before_s
        return {**answer, "cpu_s": answer["session_cpu_s"] + served_s}


def bench_call(arguments: argparse.Namespace) -> dict[str, Any]:
    """All sizes, everyone in turn."""
    report: dict[str, Any] = {"load": [load_average()], "turns": arguments.call_turns, "rows": []}
    with ExitStack() as stack:

        def started(kind: str) -> Crew:
            return stack.enter_context(crew(kind, 1, folder=SWARM_MEMBERS))

        contestants = {**_ours(started), **_limits(started), _HIVEMIND: _hivemind(started)}
        for mib in arguments.call_mb:
            for in_flight in (1, _IN_FLIGHT):
                found = _measured(contestants, mib, in_flight, arguments)
                report["rows"].append({"mib": mib, "in_flight": in_flight, "contestants": found})
                rates = ", ".join(f"{name} {each['mb_s']:.0f}" for name, each in found.items())
                progress(f"{mib} MiB, {in_flight} at once: {rates}")
    report["load"].append(load_average())
    print(as_text(report))
    return report


def _ours(started: Callable[[str], Crew]) -> dict[str, _Contestant]:
    server, client = started("stage"), started("stage")
    for name, tls in _OURS.items():
        peer = server.all("serve", name=name, tls=tls, timeout_s=_START_S)[0]["peer"]
        client.all("connect", name=name, tls=tls, peer=peer, timeout_s=_START_S)
    return {name: _Contestant(server, client, {"name": name}) for name in _OURS}


def _limits(started: Callable[[str], Crew]) -> dict[str, _Contestant]:
    server, client = started("grpc"), started("grpc")
    for name, tls in _LIMITS.items():
        reached = server.all("serve", name=name, tls=tls, timeout_s=_START_S)[0]
        client.all("connect", name=name, port=reached["port"], certificate=reached["certificate"], timeout_s=_START_S)
    return {name: _Contestant(server, client, {"name": name}) for name in _LIMITS}


def _hivemind(started: Callable[[str], Crew]) -> _Contestant:
    server, client = started("expert"), started("expert")
    reached = server.all("serve", timeout_s=_START_S)[0]
    client.all("connect", peer_id=reached["peer_id"], addresses=reached["addresses"], timeout_s=_START_S)
    return _Contestant(server, client, {})


def _measured(
    contestants: dict[str, _Contestant], mib: int, in_flight: int, arguments: argparse.Namespace
) -> dict[str, dict[str, float]]:
    """Medians over turns, after one that is not counted; the first of a turn changes."""
    count = max(in_flight, arguments.call_turn_mb // mib // in_flight * in_flight)
    answers: dict[str, list[Answer]] = {name: [] for name in contestants}
    order = list(contestants)
    for turn in range(arguments.call_turns + 1):
        for name in order[turn % len(order) :] + order[: turn % len(order)]:
            answer = contestants[name].call(mib, count, in_flight)
            if turn:
                answers[name].append(answer)
    megabytes = count * mib * (1 << 20) / 1e6
    return {
        name: {
            "mb_s": median(megabytes / each["total_s"] for each in of),
            "best_mb_s": max(megabytes / each["total_s"] for each in of),
            "p50_ms": 1e3 * median(second for each in of for second in each["seconds"]),
            "cpu_ms_mb": 1e3 * median(each["cpu_s"] for each in of) / (megabytes + mib * (1 << 20) / 1e6),
        }
        for name, of in answers.items()
    }


def as_text(report: dict[str, Any]) -> str:
    """The report for people."""
    lines = [f"stage calls, both ways, medians of {report['turns']} turns   ({' to '.join(report['load'])})"]
    lines.append(
        "cpu: ms of both sides a MB; ×: so many times as fast as hivemind (in processor time); of gRPC alone: share"
    )
    for row in report["rows"]:
        lines.append(f"  {row['mib']} MiB, {row['in_flight']} at once {'MB/s':>9} {'best':>8} {'p50 ms':>8} {'cpu':>8}")
        other = row["contestants"][_HIVEMIND]
        for name, found in row["contestants"].items():
            figures = (found["mb_s"], found["best_mb_s"], found["p50_ms"], found["cpu_ms_mb"])
            line = f"    {name:18} " + " ".join(f"{figure:>8.1f}" for figure in figures)
            if name != _HIVEMIND:
                times, cpu_times = found["mb_s"] / other["mb_s"], other["cpu_ms_mb"] / found["cpu_ms_mb"]
                line += f"   {times:.2f} × ({cpu_times:.2f})"
            if name in _OURS:
                limit = next(limit for limit, tls in _LIMITS.items() if tls == _OURS[name])
                line += f"   asked {ASKED:g}   {found['mb_s'] / row['contestants'][limit]['mb_s']:.2f} of gRPC alone"
            lines.append(line)
    return "\n".join(lines)

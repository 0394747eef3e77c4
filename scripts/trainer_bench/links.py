"""Tokens a second over links of 10 and 100 Mbit/s: DiLoCo, DDP over gloo, hivemind.Optimizer; same model, same data.

Each member is in a network namespace at the end of its own link. What is measured of each:

    ours        100 inner steps, counted five times, and the round that follows them (TLS, as by default)
    DDP         some steps; the first ones, in which buckets are put in order, at full speed and not counted
    hivemind    every 1: gradients averaged each time the members have as many samples as a step of DDP (peers go on
                adding samples until they notice; all count);
                every 500: local steps and an averaging, its way of doing what DiLoCo does; 100 steps, as above

The model is small, because two cores have to train four of it; so that a step is short against what it costs to send
its gradients, as it is for large models on such links, a batch is small too. The share is printed.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from scripts.trainer_bench.crew import Answer, Crew, crew, load_average, progress
from scripts.trainer_bench.network import Links, can_make_networks, slow_links
from scripts.trainer_bench.workspace import make_store, workload_of

_INNER_STEPS = 500
_MEASURED_STEPS = 100
_TIMES = _INNER_STEPS // _MEASURED_STEPS
_CODECS = ("fp32", "int8")
_SECONDS_OF_DDP = 10.0
_HIVEMIND_EPOCHS = 1
_HIVEMIND_LIMIT_S = 25.0
_FREE_MBIT = 10_000.0


def bench_links(arguments: argparse.Namespace) -> dict[str, Any]:
    """One kind of member after the other, each at all rates."""
    reason = can_make_networks()
    if reason:
        print(f"links: {reason}")
        return {"skipped": reason}
    shape = {"batch_size": 1, "seq_len": arguments.link_tokens}
    workload = workload_of(make_store(arguments), preset="tiny", **shape)
    members = arguments.members
    report: dict[str, Any] = {"load": [load_average()], "members": members, "inner_steps": _INNER_STEPS}
    with slow_links(members) as links:
        found = []
        for contestant in (ours, ddp, hivemind):
            for row in contestant(links, members, workload, arguments.mbit):
                progress(f"{row['name']}, {row['mbit']:g} Mbit/s: {row['tokens_per_s']:.0f} tokens/s")
                found.append(row)
    report |= {"rows": found, "load": [*report["load"], load_average()]}
    print(as_text(report, arguments.mbit))
    return report


def ours(links: Links, members: int, workload: dict[str, Any], rates: list[float]) -> Iterator[dict[str, Any]]:
    """DiLoCo, a round every 500 steps."""
    with crew("genesis", members, links.prefixes) as genesis:
        links.set_rate(_FREE_MBIT)
        for mbit in rates:
            for compression in _CODECS:
                open_nodes(genesis, links, compression)
                links.set_rate(mbit)
                diloco = {"inner_steps": _MEASURED_STEPS}
                answers = train(genesis, workload, steps=_MEASURED_STEPS, diloco=diloco)
                genesis.all("close", name="node")
                yield {
                    "name": f"ours, {compression}",
                    "mbit": mbit,
                    "tokens_per_s": rate_of(answers, times=_TIMES),
                    "step_s": median(each["training_s"] for each in answers) / _MEASURED_STEPS,
                    "utilisation": utilisation(answers, times=_TIMES),
                    "round_s": max(each["waiting_s"] for each in answers),
                    "passes": max(each["passes"][0] for each in answers),
                }


def open_nodes(genesis: Crew, links: Links, compression: str) -> None:
    """A node at each member's place, which knows all the others."""
    nodes = [
        {"name": "node", "host": links.address(rank), "tls": True, "compression": compression}
        for rank in range(len(genesis))
    ]
    peers = [answer["peer"] for answer in genesis.each("open", nodes)]
    genesis.all("meet", name="node", peers=peers)


def train(genesis: Crew, workload: dict[str, Any], **options: Any) -> list[Answer]:
    """DiLoCo at all members; every round must have all of them in."""
    members = len(genesis)
    common = {"name": "node", "workload": workload, "members": members, **options}
    answers = genesis.each("train", [{"rank": rank, **common} for rank in range(members)], timeout_s=170.0)
    if any(count != members for each in answers for count in each["members"]) or not answers[0]["rounds"]:
        raise SystemExit(f"expected rounds of {members} members, found {[each['members'] for each in answers]}")
    return answers


def rate_of(answers: list[Answer], times: int) -> float:
    """Tokens a second of all members together, until the last is done, with training counted so many times."""
    seconds = max(times * each["training_s"] + each["waiting_s"] for each in answers)
    return float(times * sum(each["tokens"] for each in answers) / seconds)


def utilisation(answers: list[Answer], times: int = 1) -> float:
    """Training time, counted so many times, over wall time; all members together."""
    training_s = times * sum(each["training_s"] for each in answers)
    return float(training_s / (training_s + sum(each["waiting_s"] for each in answers)))


def ddp(links: Links, members: int, workload: dict[str, Any], rates: list[float]) -> Iterator[dict[str, Any]]:
    """Every step over the link."""
    with crew("gloo", members, links.prefixes) as gloo, tempfile.TemporaryDirectory() as folder:
        links.set_rate(_FREE_MBIT)
        place = {"members": members, "store": f"file://{Path(folder) / 'rendezvous'}", "interface": links.interface}
        gloo.each("open", [{"rank": rank, **place} for rank in range(members)])
        steps = [{"workload": workload, "rank": rank, "members": members} for rank in range(members)]
        free = gloo.each("train", [{**each, "steps": 10} for each in steps])
        free_s = median(free[0]["steps_s"][5:])
        for mbit in rates:
            links.set_rate(mbit)
            one_s = gloo.each("train", [{**each, "steps": 1} for each in steps])[0]["steps_s"][0]
            count = max(2, min(50, int(_SECONDS_OF_DDP / one_s)))
            answers = gloo.each("train", [{**each, "steps": count} for each in steps])
            seconds = max(sum(each["steps_s"]) for each in answers)
            rate = sum(each["tokens"] for each in answers) / seconds
            yield {"name": "DDP, gloo", "mbit": mbit, "tokens_per_s": rate, "step_s": seconds / count, "free_s": free_s}


def hivemind(links: Links, members: int, workload: dict[str, Any], rates: list[float]) -> Iterator[dict[str, Any]]:
    """Its Optimizer in two ways."""
    with crew("hivemind", members, links.prefixes) as peers:
        links.set_rate(_FREE_MBIT)
        hosts = [{"host": links.address(rank)} for rank in range(members)]
        first = peers.each("join", [{**hosts[0], "initial_peers": []}])[0]["addresses"]
        peers.each("join", [{**host, "initial_peers": first} for host in hosts[1:]], first=1)
        for every, epochs, times in ((1, _HIVEMIND_EPOCHS, 1), (_MEASURED_STEPS, 1, _TIMES)):
            for mbit in rates:
                links.set_rate(_FREE_MBIT)
                common = {"workload": workload, "members": members, "run": f"r{every}-{mbit:g}", "every": every}
                peers.each("optimize", [{"rank": rank, **common} for rank in range(members)])
                if times == 1:
                    peers.all("train", epochs=1, limit_s=_HIVEMIND_LIMIT_S)
                links.set_rate(mbit)
                answers = peers.all("train", epochs=epochs, limit_s=_HIVEMIND_LIMIT_S)
                links.set_rate(_FREE_MBIT)
                peers.all("finish")
                yield {"name": f"hivemind, every {every * times}", "mbit": mbit, **_of_hivemind(answers, times)}


def _of_hivemind(answers: list[Answer], times: int) -> dict[str, float]:
    """Its longest step is the one that averages; the others are counted so many times."""
    seconds = max(times * (each["seconds"] - each["longest_s"]) + each["longest_s"] for each in answers)
    if times == 1:
        seconds = max(each["seconds"] for each in answers)
    return {
        "tokens_per_s": times * sum(each["tokens"] for each in answers) / seconds,
        "updates_per_s": min(each["epochs"] for each in answers) / seconds,
        "longest_s": max(each["longest_s"] for each in answers),
        "peers": min(each["peers"] for each in answers),
    }


def as_text(report: dict[str, Any], rates: list[float]) -> str:
    """The report for people."""
    members = report["members"]
    lines = [f"tokens/s over slow links, {members} members, tiny   ({' to '.join(report['load'])})"]
    for mbit in rates:
        rows = [row for row in report["rows"] if row["mbit"] == mbit]
        own = next(row for row in rows if row["name"] == "ours, fp32")["tokens_per_s"]
        lines.append(f"  {mbit:>3g} Mbit/s {'':14} {'tokens/s':>10} {'ours, fp32, is … times as fast':>32}")
        for row in rows:
            line = f"    {row['name']:22} {row['tokens_per_s']:>10.0f}"
            line += " " * 33 if row["name"] == "ours, fp32" else f" {own / row['tokens_per_s']:>32.2f}"
            lines.append(line + "   " + _details(row))
    return "\n".join(lines)


def _details(row: dict[str, Any]) -> str:
    if "utilisation" in row:
        passes = f", {row['passes']} passes" if row["passes"] > 1 else ""
        step = f"step {1e3 * row['step_s']:.1f} ms, round {row['round_s']:.2f} s{passes}"
        return f"{step}, utilisation {row['utilisation']:.2f}"
    if "free_s" in row:
        return f"step {row['step_s']:.2f} s; {1e3 * row['free_s']:.0f} ms with a free link"
    updates = f"{row['updates_per_s']:.3f} updates/s" if row["updates_per_s"] else "no update in the time given"
    return f"{updates}, longest step {row['longest_s']:.2f} s, {row['peers']} peers"

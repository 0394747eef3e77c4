"""Tokens a second of a swarm of three stages on one machine, against one process and torch.distributed.pipelining.

Same shape of model, cut, micro-batches, optimizer and precision (fp32):

    ours       `python -m trainer worker` three times, one thread each, and a driver; by hub and by chain. All of it
               is there: loader, leases, exactly-once bookkeeping, TLS, signatures, checks for NaN
    one        the model in one process, a loop written by hand: a thread a core that waits without spinning (the
               measure of the others), the same with OpenMP's spinning (better alone, far worse beside other work), and
               a thread a stage
    gloo       torch.distributed.pipelining, three ranks of one thread each, GPipe and 1F1B

One at a time, the others stopped (one process and gloo) or not started yet (ours); one process has a turn before and
behind each of the others, so that what else the machine does is told. A rate in processor time (tokens a second of
processor time, all processes of a contestant) hardly depends on that.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from statistics import mean, median
from typing import Any

from scripts.swarm_bench.call import SWARM_MEMBERS
from scripts.swarm_bench.swarm_processes import SwarmSetting, running_swarm
from scripts.trainer_bench.crew import Answer, Crew, crew, load_average, progress
from scripts.trainer_bench.workspace import make_store, workload_of

ASKED_OF_ONE = 0.7
ASKED_OF_GLOO = 1.0
_STAGES = 3
_OPEN_S = 180.0
_WARM_STEPS = 2
_SCHEDULES = ("GPipe", "1F1B")
_ROUTINGS = ("hub", "chain")


def bench_pipeline(arguments: argparse.Namespace) -> dict[str, Any]:
    """All contestants, the one process in between."""
    if arguments.micro_batches < _STAGES:
        raise SystemExit(f"--micro-batches: expected {_STAGES} or more, as 1F1B does, found {arguments.micro_batches}")
    store = make_store(arguments)
    cores = len(os.sched_getaffinity(0))
    shape = {"batch_size": arguments.micro_batch, "seq_len": arguments.pipeline_seq_len}
    workload = workload_of(store, preset=arguments.pipeline_preset, **shape)
    report: dict[str, Any] = {"load": [load_average()], "workload": workload, "micro_batches": arguments.micro_batches}
    with ExitStack() as stack:
        whole = stack.enter_context(crew("whole", 1, folder=SWARM_MEMBERS, threads=cores, spins=False))
        report["parameters"] = _open_whole(whole, workload, cores, arguments)["parameters"]
        contestants: dict[str, Callable[[], dict[str, Any]]] = {
            "one process, spinning": lambda: _whole_of_threads(cores, workload, arguments),
            f"one process, {_STAGES} threads": lambda: _whole_of_threads(_STAGES, workload, arguments),
            **{f"gloo, {name}": _gloo(name, workload, arguments) for name in _SCHEDULES},
            **{f"ours, {routing}": _ours(routing, store, arguments) for routing in _ROUTINGS},
        }
        report["rows"] = _in_turn(whole, contestants, arguments)
    report["cores"] = cores
    report["load"].append(load_average())
    print(as_text(report))
    return report


def _in_turn(
    whole: Crew, contestants: dict[str, Callable[[], dict[str, Any]]], arguments: argparse.Namespace
) -> dict[str, Any]:
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in contestants}
    turns = [_rates(whole.all("train", seconds=arguments.pipeline_s / 2))]
    for _ in range(arguments.pipeline_turns):
        for name, measure in contestants.items():
            row = measure()
            turns.append(_rates(whole.all("train", seconds=arguments.pipeline_s / 2)))
            row["of_one"] = row["tokens_per_s"] / mean(turn["tokens_per_s"] for turn in turns[-2:])
            row["of_one_cpu"] = row["tokens_per_cpu_s"] / mean(turn["tokens_per_cpu_s"] for turn in turns[-2:])
            progress(f"{name}: {row['tokens_per_s']:.0f} tokens/s, {row['of_one']:.2f} of one process")
            found[name].append(row)
    rows = {name: {key: median(row[key] for row in of) for key in of[0]} for name, of in found.items()}
    one = {key: median(turn[key] for turn in turns) for key in turns[0]}
    return {"one process": {**one, "of_one": 1.0, "of_one_cpu": 1.0}, **rows}


def _rates(answers: list[Answer]) -> dict[str, Any]:
    """Of processes that do the same tokens together."""
    tokens, seconds = answers[0]["tokens"], max(each["seconds"] for each in answers)
    cpu_s = sum(each["session_cpu_s"] for each in answers)
    return {"tokens_per_s": tokens / seconds, "tokens_per_cpu_s": tokens / cpu_s, "loss": answers[-1]["loss"]}


def _open_whole(whole: Crew, workload: dict[str, Any], threads: int, arguments: argparse.Namespace) -> Answer:
    step = {"workload": workload, "threads": threads, "micro_batches": arguments.micro_batches}
    return whole.all("open", timeout_s=_OPEN_S, **step)[0]


def _whole_of_threads(threads: int, workload: dict[str, Any], arguments: argparse.Namespace) -> dict[str, Any]:
    with crew("whole", 1, folder=SWARM_MEMBERS, threads=threads) as other:
        _open_whole(other, workload, threads, arguments)
        return _rates(other.all("train", seconds=arguments.pipeline_s / 2))


def _gloo(schedule: str, workload: dict[str, Any], arguments: argparse.Namespace) -> Callable[[], dict[str, Any]]:
    def measure() -> dict[str, Any]:
        with crew("pipelining", _STAGES, folder=SWARM_MEMBERS) as ranks, tempfile.TemporaryDirectory() as folder:
            place = {"ranks": _STAGES, "store": f"file://{Path(folder) / 'rendezvous'}", "interface": "lo"}
            common = {"workload": workload, "micro_batches": arguments.micro_batches, **place}
            ranks.each("open", [{"rank": rank, **common} for rank in range(_STAGES)], timeout_s=_OPEN_S)
            first = ranks.all("train", schedule=schedule, steps=_WARM_STEPS)
            one_s = max(each["seconds"] for each in first) / _WARM_STEPS
            return _rates(ranks.all("train", schedule=schedule, steps=max(1, round(arguments.pipeline_s / one_s))))

    return measure


def _ours(routing: str, store: Path, arguments: argparse.Namespace) -> Callable[[], dict[str, Any]]:
    tokens = arguments.micro_batches * arguments.micro_batch * arguments.pipeline_seq_len
    options = {
        "model": {"preset": arguments.pipeline_preset},
        "inner": {"seq_len": arguments.pipeline_seq_len, "micro_batch_size": arguments.micro_batch},
        "swarm": {"num_stages": _STAGES, "driver": {"routing": routing}, "stage": {"target_tokens": tokens}},
    }

    def measure() -> dict[str, Any]:
        with running_swarm(SwarmSetting(store=store, options=options)) as swarm:
            for _ in range(_WARM_STEPS):
                swarm.next_step()
            found = swarm.rate(arguments.pipeline_s)
        return {key: found[key] for key in ("tokens_per_s", "tokens_per_cpu_s", "loss")}

    return measure


def as_text(report: dict[str, Any]) -> str:
    """The report for people."""
    workload = report["workload"]
    rows, seq_len = workload["batch_size"], workload["seq_len"]
    title = f"{workload['preset']}, {report['parameters'] / 1e6:.1f} M parameters, micro-batches of {rows} × {seq_len}"
    lines = [f"{title}, {report['micro_batches']} a step, {report['cores']} cores   ({' to '.join(report['load'])})"]
    lines.append(
        f"  {'':24} {'tokens/s':>9} {'of one process':>15} {'of gloo':>8}   {'by processor time':>18} {'of gloo':>8}"
    )
    found = report["rows"]
    gloo = [row for name, row in found.items() if name.startswith("gloo")]
    best = max(row["of_one"] for row in gloo)
    best_cpu = max(row["of_one_cpu"] for row in gloo)
    for name, row in found.items():
        line = f"  {name:24} {row['tokens_per_s']:>9.0f} {row['of_one']:>15.2f} {row['of_one'] / best:>8.2f}"
        line += f"   {row['of_one_cpu']:>18.2f} {row['of_one_cpu'] / best_cpu:>8.2f}"
        if name.startswith("ours"):
            line += f"   asked {ASKED_OF_ONE:g} and {ASKED_OF_GLOO:g}"
        lines.append(line)
    return "\n".join(lines)

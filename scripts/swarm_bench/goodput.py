"""How much gets done while workers are killed, stopped and slowed, against the same swarm left alone.

3 stages of 2 workers, 2 drivers, each a process of its own, as `swarm up` starts them. Quiet and disturbed phases take
turns within one run, beginning and ending with a quiet one, so that what else the machine does meanwhile meets both.
What counts are the tokens that the account says are done. A phase begins when all workers are at work; the processor
time that a restarted worker's start costs is in the disturbed phases (on two cores, most of what is lost).

    python scripts/bench_swarm.py goodput --goodput-s 180

Of each phase it also tells how many micro-batches were lost in it, and for how long at most the account did not move.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from scripts.swarm_bench.disturbing import Disturber, is_at_work, schedule
from scripts.trainer_bench.workspace import make_store
from trainer.model.config import stage_names
from trainer.monitor import SwarmAccount
from trainer.run.swarm.running import LocalSwarm, deal_ports, swarm_specs
from trainer.run.swarm.tree import Child, ProcessTree, RestartPolicy

ASKED = 0.85
_STAGES = 3
_WORKERS = 2
_DRIVERS = 2
_TICK_S = 0.02
_LOOK_S = 1.0
_BEGIN_S = 300.0
_OPTIONS: dict[str, Any] = {
    "run_id": "goodput",
    "seed": 11,
    "strategy": "async_sparta",
    "threads": 1,
    "device": "cpu",
    "model": {"preset": "tiny"},
    "inner": {"lr": 1e-3, "seq_len": 64, "micro_batch_size": 4, "precision": "fp32", "compile": "off"},
    "data": {"plateau": "off", "holdout": 0},
    "discovery": {"announce_interval_s": 1.0, "announcement_lifetime_s": 10.0, "poll_interval_s": 0.3},
    "swarm": {
        "num_stages": _STAGES,
        "stage": {"target_tokens": 2048},
        "sparta": {"every_steps": 10},
        "driver": {"max_in_flight": 16, "ban_s": 1.0, "max_ban_s": 8.0},
        "checkpoint": {"interval_s": 3600.0},
        "join": {"first_peers_s": 3.0},
    },
}


@dataclass(slots=True)
class _Worker:
    """A `Victim` of a process tree."""

    child: Child
    _begun_at: int = 0

    @property
    def name(self) -> str:
        return self.child.spec.name

    @property
    def stage(self) -> str:
        return self.child.spec.stage

    def is_at_work(self) -> bool:
        return is_at_work(self.child.log_path.read_text(encoding="utf-8", errors="replace")[self._begun_at :])

    def send(self, number: int) -> None:
        if self.child.pid is not None:
            os.kill(self.child.pid, number)

    def kill(self) -> None:
        self.child.kill()
        while not self.child.has_ended():
            time.sleep(_TICK_S)
        self._begun_at = self.child.log_path.stat().st_size

    def revive(self) -> None:
        self.child.start()


@dataclass(slots=True)
class Progress:
    """For how long at most a count did not grow, as far as it was looked at."""

    count: int
    grown_s: float
    """When it was seen to have grown last."""
    looked_s: float = 0.0
    longest_s: float = 0.0

    def look(self, count: int, now_s: float) -> None:
        """The count is so high now."""
        self.looked_s = now_s
        self.longest_s = max(self.longest_s, now_s - self.grown_s)
        if count > self.count:
            self.count, self.grown_s = count, now_s


def bench_goodput(arguments: argparse.Namespace) -> dict[str, Any]:
    """Phases of ``goodput_s`` seconds, quiet and disturbed in turn, by the schedule of ``goodput_seed``."""
    store = make_store(arguments)
    with tempfile.TemporaryDirectory(prefix="goodput-") as name:
        folder = Path(name)
        run = folder / "run.yaml"
        own: dict[str, Any] = {"state_dir": str(folder / "home"), "data": {**_OPTIONS["data"], "store": str(store)}}
        own["swarm"] = {**_OPTIONS["swarm"], "checkpoint": {"interval_s": 3600.0, "directory": str(folder / "stages")}}
        own["swarm"]["driver"] = {**_OPTIONS["swarm"]["driver"], "routing": arguments.goodput_routing}
        own["strategy"], own["diloco"] = arguments.goodput_strategy, {"inner_steps": 20}
        if arguments.goodput_strategy == "grad":
            # A worker that is lost is waited for as long as that; with delayed steps the others compute meanwhile.
            own["grad"], own["collective"] = {"delayed": True, "ahead_s": 0.5}, {"stall_timeout_s": 3.0}
        run.write_text(yaml.safe_dump({**_OPTIONS, **own}), encoding="utf-8")
        swarm = LocalSwarm(run=run, stages=stage_names(_STAGES), num_workers=_WORKERS, num_drivers=_DRIVERS)
        tree = ProcessTree(folder, RestartPolicy(enabled=False), tell=lambda _: None, grace_s=20.0)
        with tree:
            for spec in swarm_specs(swarm, deal_ports(swarm), ()):
                tree.add(spec)
            report = _measured(tree, arguments)
    print(_as_text(report))
    return report


def _measured(tree: ProcessTree, arguments: argparse.Namespace) -> dict[str, Any]:
    workers = [_Worker(child) for child in tree.of("worker")]
    keeper = tree.of("driver")[0]
    phases: list[dict[str, Any]] = []
    for number in range(2 * arguments.goodput_turns + 1):
        _until(lambda: all(worker.is_at_work() for worker in workers), "all workers to be at work")
        _until(lambda: _account(keeper).micro_batches.done > 0, "the first micro-batches to be done")
        seed, longest_s = arguments.goodput_seed + number, arguments.goodput_longest_s
        plan = schedule(seed, arguments.goodput_s, longest_s=longest_s) if number % 2 else ()
        disturber = Disturber(plan, workers)
        before, begun_s = _account(keeper), time.monotonic()
        progress = Progress(before.micro_batches.done, begun_s)
        try:
            while (passed_s := time.monotonic() - begun_s) < arguments.goodput_s:
                disturber.tick(passed_s)
                if time.monotonic() - progress.looked_s >= _LOOK_S:
                    progress.look(_account(keeper).micro_batches.done, time.monotonic())
                time.sleep(_TICK_S)
        finally:
            disturber.end()
        after = _account(keeper)
        tokens = after.trained_tokens - before.trained_tokens
        rate = tokens / (time.monotonic() - begun_s)
        # What is known by now, should a machine that is too busy not come to the end.
        print(f"phase {number}, {len(disturber.done)} disturbances: {rate:,.0f} tokens/s", file=sys.stderr, flush=True)
        phases.append(
            {
                "disturbed": bool(plan),
                "disturbances": len(disturber.done),
                "put_off": disturber.num_put_off,
                "lost": after.micro_batches.lost - before.micro_batches.lost,
                "of": after.micro_batches.leased - before.micro_batches.leased,
                "longest_standstill_s": progress.longest_s,
                "tokens_per_s": rate,
            }
        )
    account = _account(keeper)
    return {
        "seconds": arguments.goodput_s,
        "seed": arguments.goodput_seed,
        "phases": phases,
        "ratio": _mean(phases, disturbed=True) / _mean(phases, disturbed=False),
        "micro_batches": account.micro_batches.model_dump(),
        "adds_up": account.micro_batches.adds_up and account.tokens.adds_up,
        "ended_by_themselves": [child.spec.name for child in tree.children if child.look(0.0)],
    }


def _mean(phases: list[dict[str, Any]], *, disturbed: bool) -> float:
    rates = [phase["tokens_per_s"] for phase in phases if phase["disturbed"] is disturbed]
    return float(sum(rates) / len(rates))


def _account(keeper: Child) -> SwarmAccount:
    """As the driver that keeps it tells it; asked until it does."""
    deadline_s = time.monotonic() + _BEGIN_S
    while True:
        try:
            with urllib.request.urlopen(f"{keeper.spec.api_url}/api/swarm/account", timeout=30) as answer:
                return SwarmAccount.model_validate(json.load(answer))
        except (urllib.error.URLError, ConnectionError):
            if keeper.has_ended() or time.monotonic() > deadline_s:
                raise SystemExit(f"{keeper.spec.name} does not tell the account: {keeper.last_words()}") from None
            time.sleep(0.2)


def _until(holds: Callable[[], bool], what: str) -> None:
    deadline_s = time.monotonic() + _BEGIN_S
    while not holds():
        if time.monotonic() > deadline_s:
            raise SystemExit(f"expected {what} within {_BEGIN_S:.0f} s")
        time.sleep(0.1)


def _as_text(report: dict[str, Any]) -> str:
    """The report for people."""
    lines = [f"workers killed, stopped, slowed ten times: tokens/s by phases of {report['seconds']:g} s"]
    for phase in report["phases"]:
        kind = f"disturbed {phase['disturbances']} times" if phase["disturbed"] else "quiet"
        lines.append(
            f"  {kind:20} {phase['tokens_per_s']:>10,.0f}   {phase['lost']} of {phase['of']} lost, "
            f"stood still for {phase['longest_standstill_s']:.0f} s at most"
        )
    counted = report["micro_batches"]
    lines.append(f"  ratio {report['ratio']:.2f}   asked {ASKED:g}")
    lines.append(
        f"  micro-batches: {counted['leased']} leased = {counted['done']} done + {counted['lost']} lost + "
        f"{counted['open']} open"
    )
    return "\n".join(lines)

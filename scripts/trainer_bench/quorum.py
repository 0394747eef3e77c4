"""What closing rounds by a quorum gains: simulated with nodes that come, go and hang, and with three real ones.

The baseline is a barrier, and beside it the default, which asks slower members to come with what they have.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any, Final

import torch

from scripts.trainer_bench.quorum_live import RULES, LiveResult, LiveSetting, live
from scripts.trainer_bench.quorum_simulation import Rule, Scenario, simulate
from tests.support.small_store import text_store

SCENARIOS: Final[Mapping[str, Scenario]] = {
    "500 steps of 1 to 4 s": Scenario(),
    "the same, nobody goes or hangs": Scenario(alive_s=math.inf, hang_share=0.0),
    "30 steps of 15 to 60 s": Scenario(inner_steps=30, slowest_step_s=60.0),
}
CLOSINGS: Final[tuple[tuple[Rule, float], ...]] = (
    ("barrier", 0.0),
    ("invited", 0.0),
    ("quorum", 0.75),
    ("quorum", 0.5),
    ("quorum", 1),
    ("quorum, invited", 0.75),
    ("quorum, invited", 0.5),
)


def bench_quorum(arguments: argparse.Namespace) -> dict[str, Any]:
    """Both tables."""
    report: dict[str, Any] = {"simulated": {}, "live": {}}
    for name, scenario in SCENARIOS.items():
        print(f"simulated, 12 nodes 1 : 2 : 4, {scenario.hours:g} h, {name}", flush=True)
        for rule, quorum in CLOSINGS:
            runs = [asdict(simulate(rule, scenario, quorum, seed)) for seed in range(arguments.quorum_seeds)]
            found = {key: fmean(run[key] for run in runs) for key in runs[0]}
            report["simulated"][f"{name}: {rule} {quorum:g}"] = found
            print(
                f"  {rule:15} {quorum or '':4}  busy {found['utilisation']:.3f}  counted {found['counted_share']:.3f}"
                f"  fresh {found['fresh_share']:.3f}  rounds/h {found['rounds_per_hour']:.1f}"
                f"  lag {found['mean_lag']:.2f}  window {found['grace_s']:.2f} s",
                flush=True,
            )
    if arguments.quorum_live_s:
        report["live"] = _bench_live(arguments)
    return report


def _bench_live(arguments: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(1)
    text_store()
    setting = LiveSetting(
        seconds=arguments.quorum_live_s, step_s=arguments.quorum_step_s, inner_steps=arguments.quorum_inner_steps
    )
    names = arguments.quorum_rules or list(RULES)
    print(f"three nodes 1 : 2 : 4, {setting.seconds:g} s each", flush=True)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(max(1, arguments.quorum_at_once)) as pool:

        def run(name: str) -> tuple[str, LiveResult]:
            place = Path(folder) / name.replace(" ", "-")
            place.mkdir()
            return name, live(name, setting, place)

        found = {}
        for name, result in pool.map(run, names):
            found[name] = asdict(result)
            losses = "  ".join(f"{share}: {loss:.3f}" for share, loss in result.held_out.items())
            print(
                f"  {name:18} counted {result.tokens_counted_per_s:7.1f} tokens/s of {result.tokens_per_s:7.1f}"
                f"  rounds {result.num_rounds}  left out {result.num_left_out}  loss {losses}",
                flush=True,
            )
    return found


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options of this part."""
    parser.add_argument("--quorum-seeds", type=int, default=5, help="simulations of each, for quorum")
    parser.add_argument("--quorum-live-s", type=float, default=360.0, help="of each real run; 0: none, for quorum")
    parser.add_argument("--quorum-step-s", type=float, default=0.5, help="of the fastest node, for quorum")
    parser.add_argument("--quorum-inner-steps", type=int, default=20, help="for quorum")
    parser.add_argument("--quorum-rules", nargs="+", choices=RULES, help="of the real runs; all by default")
    parser.add_argument("--quorum-at-once", type=int, default=1, help="real runs side by side, for quorum")

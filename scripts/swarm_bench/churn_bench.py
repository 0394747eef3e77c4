"""How the rules compare: for stays of several lengths in the simulation, for one of them with real workers.

Then those by which workers move between the stages of a pipeline, simulated alone.
"""

from __future__ import annotations

import argparse
from typing import Any

from scripts.swarm_bench.churn import ChurnPlan, compare
from scripts.swarm_bench.churn_live import measure_live
from scripts.swarm_bench.rebalancing import PipelinePlan
from scripts.swarm_bench.rebalancing import compare as compare_moves
from scripts.trainer_bench.crew import load_average

ASKED = 2.0
_STAYS_S = (12.0, 25.0, 50.0, 100.0)
_PIPELINES = tuple((stay_s, move_s) for stay_s in (900.0, 1800.0, 7200.0) for move_s in (30.0, 300.0))
"""How long workers of a pipeline stay, and how long fetching another stage takes, in seconds."""


def bench_churn(arguments: argparse.Namespace) -> dict[str, Any]:
    """Stays of several lengths, simulated; one of them with real workers."""
    plans = [ChurnPlan(stay_s=stay_s, duration_s=arguments.churn_s) for stay_s in _STAYS_S]
    rows = [{"stay_s": plan.stay_s, **compare(plan, arguments.churn_seeds)} for plan in plans]
    report: dict[str, Any] = {
        "seeds": arguments.churn_seeds,
        "best_per_s": plans[0].num_fast / plans[0].fast_s,
        "rows": rows,
    }
    report["moves"] = [
        compare_moves(PipelinePlan(stay_s=stay_s, move_s=move_s), arguments.churn_seeds)
        for stay_s, move_s in _PIPELINES
    ]
    if arguments.churn_live_s:
        report["load"] = [load_average()]
        report["live"] = measure_live(ChurnPlan(), arguments.churn_live_s)
        report["load"].append(load_average())
    print(as_text(report))
    return report


def as_text(report: dict[str, Any]) -> str:
    """The report for people."""
    title = f"slow workers come and go, micro-batches a second (simulated), means of {report['seeds']} seeds"
    heading = f"{'ours':>8} {'SWARM':>8} {'bottom':>8}   {'over SWARM':>11} {'over bottom':>11}"
    best = f"{report['best_per_s']:g} a second: what the fast workers can do alone"
    lines = [title, f"  {'a slow one stays':18} {heading}   asked {ASKED:g}; {best}"]
    live = [report["live"]] if "live" in report else []
    for row in (*report["rows"], *live):
        if row in live:
            lines.append(f"  with real workers, four times as fast   ({' to '.join(report['load'])})")
        rates = f"{row['ours_per_s']:>8.2f} {row['swarm_per_s']:>8.2f} {row['bottom_per_s']:>8.2f}"
        lines.append(
            f"  {row['stay_s']:>16g} s {rates}   {row['ours_over_swarm']:>11.2f} {row['ours_over_bottom']:>11.2f}"
        )
    return "\n".join([*lines, *_moves_text(report)])


def _moves_text(report: dict[str, Any]) -> list[str]:
    title = "workers of a pipeline come and go (simulated): what the slowest stage does, of the best there could be"
    heading = f"{'nobody':>8} {'SWARM':>8} {'ours':>8}   {'over nobody':>11} {'over SWARM':>11}   moves an hour"
    lines = [title, f"  {'stay, fetching':18} {heading}"]
    for row in report["moves"]:
        shares = f"{row['stay']:>8.3f} {row['swarm']:>8.3f} {row['ours']:>8.3f}"
        ratios = f"{row['ours_over_stay']:>11.2f} {row['ours_over_swarm']:>11.2f}"
        moves = f"{row['swarm_moves_per_h']:.1f} SWARM, {row['ours_moves_per_h']:.1f} ours"
        lines.append(f"  {row['stay_s']:>8g} s {row['move_s']:>6g} s {shares}   {ratios}   {moves}")
    return lines

"""A pipeline whose workers come and go: what it gets done if nobody moves, under SWARM's rule, and under ours.

Like that of `churn.py` a simulation: time is simulated, results depend on the seed alone. Three stages whose rows take
1, 2 and 1 operations; workers whose speeds differ by a factor of four arrive and leave, each staying for a while, and a
newcomer goes to the stage that gets least done (`neediest_stage`). A worker that moves does nothing for `move_s`.
The pipeline does what its slowest stage does; *best* is what it would do if all that are there were spread at will.
Compared are

- ``stay``: nobody moves;
- ``swarm``: every 300 s a worker of the stage with the most to spare goes to the one with the least (SWARM);
- ``ours``: `trainer.run.swarm.rebalancing.Rebalancer`, each worker by itself, with what it last heard of the others.

    python scripts/bench_swarm.py churn
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import Any, Final

from trainer.network.discovery.stage_report import StageReport, StageUid
from trainer.run.config.run import RebalanceConfig
from trainer.run.swarm.lifecycle import neediest_stage
from trainer.run.swarm.rebalancing import Placed, Rebalancer, stage_rates

FLOPS: Final = {"head": 1.0, "body-1": 2.0, "tail": 1.0}
RULES: Final = ("stay", "swarm", "ours")
_STEP_S = 5.0
_SWARM_EVERY_S = 300.0


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelinePlan:
    """What is simulated; times in seconds."""

    num_workers: int = 12
    """That are there on average."""
    stay_s: float = 1800.0
    """How long a worker stays, on average (exponentially distributed)."""
    move_s: float = 60.0
    """Without work while it fetches another stage."""
    noise: float = 0.1
    """Relative error of the rates that are announced."""
    hear_s: float = 10.0
    """How old what workers know of each other is."""
    duration_s: float = 6 * 3600.0
    seed: int = 0


@dataclass(slots=True)
class _Worker:
    key: str
    speed: float  # Operations a second.
    stage: str
    leaves_s: float
    works_from_s: float
    rule: Rebalancer | None = None

    def rate(self) -> float:
        return self.speed / FLOPS[self.stage]


@dataclass(slots=True)
class PipelineResult:
    """What got done, as a share of the best there could be, and how many moves that took."""

    done: float = 0.0
    best: float = 0.0
    moves: int = 0
    empty_s: float = 0.0
    """How long a stage was empty."""

    @property
    def share(self) -> float:
        """Of the best."""
        return self.done / self.best if self.best else 0.0


@dataclass(slots=True)
class _Simulation:
    plan: PipelinePlan
    rule: str
    config: RebalanceConfig
    random: random.Random = field(init=False)
    noise: random.Random = field(init=False)
    workers: dict[str, _Worker] = field(default_factory=dict)
    heard: list[Placed] = field(default_factory=list)
    result: PipelineResult = field(default_factory=PipelineResult)
    births: int = 0

    def __post_init__(self) -> None:
        # Who comes and goes is the same under each rule; noise is apart from it.
        self.random = random.Random(self.plan.seed)
        self.noise = random.Random(self.plan.seed + 1)

    def run(self) -> PipelineResult:
        plan = self.plan
        for _ in range(plan.num_workers):
            self._arrive(0.0)
        next_arrival_s = self.random.expovariate(plan.num_workers / plan.stay_s)
        heard_s, swarm_s, now_s = -plan.hear_s, _SWARM_EVERY_S, 0.0
        while now_s < plan.duration_s:
            while next_arrival_s <= now_s:
                self._arrive(now_s)
                next_arrival_s += self.random.expovariate(plan.num_workers / plan.stay_s)
            self.workers = {key: it for key, it in self.workers.items() if it.leaves_s > now_s}
            if now_s - heard_s >= plan.hear_s:
                heard_s, self.heard = now_s, self._announced(now_s)
                if self.rule == "ours":
                    self._move_as_ours(now_s)
            if self.rule == "swarm" and now_s >= swarm_s:
                swarm_s += _SWARM_EVERY_S
                self._move_as_swarm(now_s)
            self._count(now_s)
            now_s += _STEP_S
        return self.result

    def _arrive(self, now_s: float) -> None:
        speed, stay_s = self.random.uniform(1.0, 4.0), self.random.expovariate(1 / self.plan.stay_s)
        number, self.births = self.births, self.births + 1
        reports = [_report(it) for it in self._announced(now_s)]
        stage = neediest_stage(FLOPS, reports, number)
        key = f"{number:05d}"
        joins_s = now_s + (self.plan.move_s if now_s else 0.0)
        worker = self.workers[key] = _Worker(key, speed, stage, now_s + stay_s, joins_s)
        self._settle(worker, joins_s)

    def _settle(self, worker: _Worker, from_s: float) -> None:
        worker.rule = Rebalancer(
            self.config,
            worker.key,
            worker.stage,
            tuple(FLOPS),
            FLOPS,
            lambda _: self.plan.move_s,
            began_s=from_s,
            spread_s=2 * self.plan.hear_s,
        )

    def _announced(self, now_s: float) -> list[Placed]:
        found = []
        for it in self.workers.values():
            serves = it.works_from_s <= now_s
            error = 1 + self.plan.noise * self.noise.uniform(-1, 1)
            found.append(Placed(it.key, it.stage, it.rate() * error if serves else 0.0, serves))
        return found

    def _move(self, key: str, to: str, now_s: float) -> None:
        worker = self.workers[key]
        worker.stage, worker.works_from_s = to, now_s + self.plan.move_s
        self._settle(worker, worker.works_from_s)
        self.result.moves += 1

    def _move_as_ours(self, now_s: float) -> None:
        for worker in list(self.workers.values()):
            move = worker.rule.look(self.heard, now_s) if worker.rule is not None else None
            if move is not None:
                self._move(worker.key, move.to, now_s)

    def _move_as_swarm(self, now_s: float) -> None:
        """The worker that does least of the stage that does most goes to the stage that does least."""
        rates = stage_rates(FLOPS, self.heard)
        most, least = max(rates, key=rates.__getitem__), min(rates, key=rates.__getitem__)
        there = [it for it in self.heard if it.stage == most and it.is_serving and it.key in self.workers]
        if most != least and len(there) > 1:
            self._move(min(there, key=lambda it: it.rows_per_s).key, least, now_s)

    def _count(self, now_s: float) -> None:
        rates = dict.fromkeys(FLOPS, 0.0)
        for it in self.workers.values():
            if it.works_from_s <= now_s:
                rates[it.stage] += it.rate()
        self.result.done += min(rates.values()) * _STEP_S
        self.result.best += sum(it.speed for it in self.workers.values()) / sum(FLOPS.values()) * _STEP_S
        self.result.empty_s += _STEP_S if min(rates.values()) == 0 else 0.0


def _report(it: Placed) -> StageReport:
    return StageReport(
        uid=str(StageUid(it.stage, 40)),
        incarnation="0" * 16,
        status="serving" if it.is_serving else "joining",
        rows_per_s=it.rows_per_s,
    )


def simulate(rule: str, plan: PipelinePlan, config: RebalanceConfig | None = None) -> PipelineResult:
    """Simulates one of `RULES`."""
    return _Simulation(plan, rule, config or RebalanceConfig()).run()


def compare(plan: PipelinePlan, seeds: int = 5) -> dict[str, Any]:
    """Returns the share of the best under each rule, and moves an hour, over plans that differ in the seed alone."""
    report: dict[str, Any] = {"stay_s": plan.stay_s, "move_s": plan.move_s}
    for rule in RULES:
        found = [simulate(rule, replace(plan, seed=plan.seed + more)) for more in range(seeds)]
        done, best = sum(it.done for it in found), sum(it.best for it in found)
        report[rule] = round(done / best, 3)
        report[f"{rule}_moves_per_h"] = round(sum(it.moves for it in found) / seeds / (plan.duration_s / 3600), 2)
        report[f"{rule}_empty"] = round(sum(it.empty_s for it in found) / seeds / plan.duration_s, 4)
    report["ours_over_stay"] = round(report["ours"] / report["stay"], 2)
    report["ours_over_swarm"] = round(report["ours"] / report["swarm"], 2)
    return report

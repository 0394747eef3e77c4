"""When a worker that runs moves to another stage: where the whole pipeline gets more done, longer than moving takes.

A pipeline does what its slowest stage does, and a stage the sum of what its workers do. A worker looks at that sum with
and without itself, here and there; by the operations of a row in each stage it knows what it would do elsewhere. It
goes if the slowest stage then does `RebalanceConfig.min_gain` more at least, if what is won in `horizon_s` is more than
what it would have done while it moves, and if that has been so for `patience_s` without anybody coming or going in the
two stages. Candidates wait the longer the less their move would bring, so that one goes and the others see it.

The trade-off against a server that assigns stages: rates are the workers' own word, so a stage of liars can draw honest
workers to itself, or keep them away; a rate counts for four times its stage's median at most. SWARM's rule, by which
every 300 s a worker of the least loaded stage goes to the most loaded one, is beside it in `bench_swarm.py churn`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Final

from trainer.network.discovery.stage_report import StageReport
from trainer.run.config.run import RebalanceConfig
from trainer.run.swarm.shape import stage_of

_MAX_RATE_RATIO: Final = 4.0


@dataclass(frozen=True, slots=True)
class Placed:
    """A worker in its stage; of one that only joins the rate is not known yet."""

    key: str
    stage: str
    rows_per_s: float
    is_serving: bool = True


def placed_workers(reports: Mapping[str, StageReport]) -> list[Placed]:
    """Returns the workers that are there or on their way, by their reports and keys; those that leave are not."""
    return [
        Placed(key, stage_of(report), report.rows_per_s, report.status == "serving")
        for key, report in reports.items()
        if report.status != "leaving"
    ]


def stage_rates(names: Iterable[str], workers: Collection[Placed]) -> dict[str, float]:
    """Returns rows a second of each stage: the sum over its workers, each bounded, unknown ones as the slowest known.

    Stages of which no worker's rate is known do as the slowest known worker of all would; with none known, 1 each.
    """
    rates = {}
    for name in names:
        here = [worker.rows_per_s for worker in workers if worker.stage == name]
        measured, unknown = [rate for rate in here if rate > 0], _unknown_rate(name, workers)
        bound = _MAX_RATE_RATIO * median(measured) if measured else unknown
        rates[name] = sum(min(rate, bound) if rate > 0 else unknown for rate in here)
    return rates


def _unknown_rate(stage: str, workers: Collection[Placed]) -> float:
    """Returns what a worker of a stage counts as while its rate is not known, in rows a second."""
    slowest = min((worker.rows_per_s for worker in workers if worker.rows_per_s > 0), default=1.0)
    return min((it.rows_per_s for it in workers if it.stage == stage and it.rows_per_s > 0), default=slowest)


@dataclass(frozen=True, slots=True)
class Move:
    """What it would bring if a worker went to another stage."""

    key: str
    to: str
    before: float  # Rows a second of the slowest stage now, and afterwards.
    after: float


def best_move(
    worker: Placed,
    names: Sequence[str],
    workers: Collection[Placed],
    flops: Mapping[str, float],
    *,
    may_begin: Callable[[str], bool] = lambda _: False,
) -> Move | None:
    """Returns the move of a worker that brings most; None: there is none, or its stage would be left empty.

    One whose rate is not known yet counts as the slowest of its stage, and goes only where nobody is: where a stage is
    empty no rows pass, so no rate would ever be measured.

    Args:
        worker: who would go.
        names: the stages to think of, in order.
        workers: all that are there, this one included.
        flops: operations of a row in each stage, by which its rate elsewhere is foretold.
        may_begin: whether the worker could begin a stage of which nobody serves a state.
    """
    serving = {name: sum(it.is_serving for it in workers if it.stage == name) for name in names}
    if worker.stage not in serving or serving[worker.stage] < 2:
        return None
    rates, is_known = stage_rates(names, workers), worker.rows_per_s > 0
    now = min(rates.values())
    own = min(worker.rows_per_s, rates[worker.stage]) if is_known else _unknown_rate(worker.stage, workers)
    found: Move | None = None
    for name in names:
        if name == worker.stage or not (serving[name] or may_begin(name)) or (rates[name] and not is_known):
            continue
        there = own * flops[worker.stage] / flops[name]
        moved = {**rates, worker.stage: rates[worker.stage] - own, name: rates[name] + there}
        after = min(moved.values())
        if after > now and (found is None or after > found.after):
            found = Move(worker.key, name, now, after)
    return found


@dataclass(slots=True)
class Rebalancer:
    """Decides for one worker; to be asked every few seconds, with a clock in seconds.

    Args:
        config: the rule's thresholds.
        key: the worker's.
        stage: the one it is in.
        names: the stages it knows of.
        flops: operations of a row in each of them.
        move_s: how long it takes to leave here and to serve there.
        may_begin: see `best_move`.
        began_s: when it began to serve here.
        spread_s: how long it takes the others to hear that one has gone.
    """

    config: RebalanceConfig
    key: str
    stage: str
    names: Sequence[str]
    flops: Mapping[str, float]
    move_s: Callable[[str], float]
    may_begin: Callable[[str], bool] = lambda _: False
    began_s: float = 0.0
    spread_s: float = 20.0
    _since_s: float | None = field(default=None, init=False)
    _situation: tuple[object, ...] = field(default=(), init=False)

    def look(self, workers: Collection[Placed], now_s: float) -> Move | None:
        """Returns the move to make now; None: stay."""
        move = self._own_move(workers)
        if move is None or now_s - self.began_s < self.config.stay_s:
            self._since_s = None
            return None
        situation = (move.to, *sorted((it.key, it.is_serving) for it in workers if it.stage in (self.stage, move.to)))
        if self._since_s is None or situation != self._situation:
            self._since_s, self._situation = now_s, situation
        wait_s = self.config.patience_s + self._rank(move, workers) * self.spread_s
        return move if now_s - self._since_s >= wait_s else None

    def _own_move(self, workers: Collection[Placed]) -> Move | None:
        own = next((it for it in workers if it.key == self.key), None)
        if own is None or own.stage != self.stage or not own.is_serving:
            return None
        move = best_move(own, self.names, workers, self.flops, may_begin=self.may_begin)
        return move if move is not None and self._pays(move, own, workers) else None

    def _pays(self, move: Move, own: Placed, workers: Collection[Placed]) -> bool:
        """Whether the gain is worth having, and more than what the worker would have done while it moves."""
        if move.after < (1 + self.config.min_gain) * move.before:
            return False
        rate = stage_rates([self.stage], workers)[self.stage]
        lost = move.before * min(1.0, own.rows_per_s / rate) * self.move_s(move.to)
        return (move.after - move.before) * self.config.horizon_s > lost

    def _rank(self, own: Move, workers: Collection[Placed]) -> int:
        """How many others bring more by moving, or as much and come first by a hash: who is asked first differs."""
        moves = [best_move(it, self.names, workers, self.flops) for it in workers if it.is_serving]
        others = [it for it in moves if it is not None and it.key != self.key]
        return sum((-it.after, _order(it.key)) < (-own.after, _order(self.key)) for it in others)


def _order(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()

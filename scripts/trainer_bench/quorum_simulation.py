"""Rounds of nodes 1 : 2 : 4 fast that come, go and hang, in simulated time: what each way to close a round gets done.

Closing times, windows, lags and weights are those of the library (`trainer.collective.quorum`), fed with simulated
arrivals; what is simulated is how long steps, rounds and absences take. A node is busy while it makes inner steps; it
idles while it waits for a round it has come to with its work. A node that goes takes the work with it that is in no
round, in every rule alike. Its absence is noticed after some seconds, for which a barrier waits.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from tests.support.round_actor import agreement_of
from trainer.collective.messages import Agreement, Member
from trainer.collective.quorum import QuorumHistory, QuorumWatch, freshness

Rule = Literal["barrier", "invited", "quorum", "quorum, invited"]
"""Who waits for all; who asks the others, some seconds after the first, to come with what they have; and the same for a
quorum."""

_HANGS_S: Final = 60.0
_EMPTY: Final = agreement_of(1, 1024)


@dataclass(frozen=True, kw_only=True, slots=True)
class Scenario:
    """What is simulated; seconds are of a step and a round."""

    speeds: Sequence[float] = (4.0, 2.0, 1.0) * 4
    """Steps in ``slowest_step_s``."""
    slowest_step_s: float = 4.0
    inner_steps: int = 500
    round_s: float = 20.0
    invite_after_s: float = 10.0
    noticed_after_s: float = 5.0
    alive_s: float = 4 * 3600.0  # Mean; infinite: nobody goes.
    away_s: float = 1200.0
    hang_share: float = 1e-4  # Of steps, which take a minute more.
    hours: float = 24.0
    max_grace_s: float = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Simulated:
    """What a rule came to."""

    utilisation: float  # Of the time that nodes were there, the share in which they made inner steps.
    counted_share: float  # Steps in committed rounds, of those that the nodes could have made.
    fresh_share: float  # The same, each weighed by its freshness.
    rounds_per_hour: float
    mean_lag: float  # Of contributions.
    grace_s: float  # Mean time between quorum and close.


@dataclass(slots=True)
class _Node:
    name: str
    step_s: float
    chance: random.Random
    scenario: Scenario
    begun_s: float = 0.0
    ready_s: float = 0.0
    gone_s: float = math.inf
    back_s: float = 0.0
    lag: int = 0
    each_s: float = 1.0
    hangs_s: float = 0.0
    hang_from_s: float = 0.0
    busy_s: float = 0.0
    alive_s: float = 0.0

    def begin(self, at_s: float) -> None:
        """Begins the steps of a round."""
        steps = self.scenario.inner_steps
        self.begun_s = at_s
        self.each_s = self.step_s * self.chance.lognormvariate(0.0, 0.05)
        self.hangs_s = _HANGS_S * _poisson(steps * self.scenario.hang_share, self.chance)
        self.hang_from_s = self.chance.random() * steps * self.each_s  # Of the time that steps take without it.
        self.ready_s = at_s + steps * self.each_s + self.hangs_s

    def appear(self, at_s: float) -> None:
        """Comes with the others' state, for some hours."""
        self.gone_s = at_s + (
            self.chance.expovariate(1 / self.scenario.alive_s) if self.scenario.alive_s < math.inf else math.inf
        )
        self.lag = 0
        self.begin(at_s)

    def steps_at(self, at_s: float) -> float:
        """Whole steps of this round's that are done at a time."""
        return min(self.scenario.inner_steps, math.floor(self._stepping_s(at_s) / self.each_s + 1e-9))

    def next_step_s(self, at_s: float) -> float:
        """When the step under way at a time is done."""
        stepping_s = self.each_s * max(1, math.ceil(self._stepping_s(at_s) / self.each_s - 1e-9))
        return self.begun_s + stepping_s + (self.hangs_s if stepping_s > self.hang_from_s else 0.0)

    def _stepping_s(self, at_s: float) -> float:
        """Seconds of this round's steps until a time, without those that it hung."""
        since_s = max(0.0, at_s - self.begun_s)
        return since_s - min(self.hangs_s, max(0.0, since_s - self.hang_from_s))


@dataclass(slots=True)
class _Tally:
    counted: float = 0.0
    fresh: float = 0.0
    lags: list[int] = field(default_factory=list)
    graces_s: list[float] = field(default_factory=list)
    rounds: int = 0


def simulate(rule: Rule, scenario: Scenario, quorum: float = 0.0, seed: int = 0) -> Simulated:
    """Simulates a run; the same seed has nodes go and hang alike under each rule, as far as their rounds allow."""
    nodes = [
        _Node(f"{number:064x}", scenario.slowest_step_s / speed, random.Random(f"{seed} {number}"), scenario)
        for number, speed in enumerate(scenario.speeds)
    ]
    for node in nodes:
        node.appear(0.0)
    tally, history = _Tally(), QuorumHistory()
    now_s, end_s = 0.0, 3600.0 * scenario.hours
    while now_s < end_s:
        now_s = _round(rule, quorum, nodes, now_s, scenario, tally, history)
    could = sum(node.alive_s / node.step_s for node in nodes)
    return Simulated(
        utilisation=sum(node.busy_s for node in nodes) / sum(node.alive_s for node in nodes),
        counted_share=tally.counted / could,
        fresh_share=tally.fresh / could,
        rounds_per_hour=tally.rounds / (now_s / 3600.0),
        mean_lag=sum(tally.lags) / max(1, len(tally.lags)),
        grace_s=sum(tally.graces_s) / max(1, len(tally.graces_s)),
    )


def _round(
    rule: Rule,
    quorum: float,
    nodes: Sequence[_Node],
    opens_s: float,
    scenario: Scenario,
    tally: _Tally,
    history: QuorumHistory,
) -> float:
    """One round, from the end of the one before; returns when it is over."""
    present = [node for node in nodes if node.back_s <= opens_s]
    if not present:
        return min(node.back_s for node in nodes)
    arrivals = {node.name: max(node.ready_s, opens_s) for node in present}
    if rule.endswith("invited"):
        asked_s = min(arrivals.values()) + scenario.invite_after_s
        for node in present:
            arrivals[node.name] = min(arrivals[node.name], max(opens_s, node.next_step_s(asked_s)))
    staying = [node for node in present if node.gone_s > arrivals[node.name]]
    closes_s = _closes(rule, quorum, staying, present, arrivals, scenario, history, tally)
    ends_s = closes_s + scenario.round_s
    members = []
    for node in present:
        came = arrivals[node.name] <= closes_s and node in staying
        steps = node.steps_at(arrivals[node.name]) if came else 0.0
        if node.gone_s <= ends_s:  # Whatever it was at: gone, with its work.
            _leave(node, opens_s, min(arrivals[node.name], node.gone_s), scenario)
            continue
        if came:
            tally.counted += steps
            tally.fresh += steps * freshness(node.lag)
            tally.lags.append(node.lag)
            _spend(node, opens_s, ends_s, arrivals[node.name])
            node.lag = 0
            node.begin(ends_s)
        else:
            node.lag += 1
            _spend(node, opens_s, ends_s, min(node.ready_s, ends_s))
        members.append(Member(peer_id=node.name, address="127.0.0.1:1", certificate=None, weight=float(came), lag=0))
    for node in nodes:
        if opens_s < node.back_s <= ends_s:
            node.alive_s += ends_s - node.back_s
            node.appear(ends_s)
            node.back_s = 0.0
    if members:
        history.committed(_agreement(members, tally.rounds), closes_s)
    tally.rounds += 1
    return ends_s


def _closes(
    rule: Rule,
    quorum: float,
    staying: Sequence[_Node],
    present: Sequence[_Node],
    arrivals: dict[str, float],
    scenario: Scenario,
    history: QuorumHistory,
    tally: _Tally,
) -> float:
    """When the round closes."""
    if not staying:
        return max(node.gone_s for node in present) + scenario.noticed_after_s
    last_s = max(arrivals[node.name] for node in staying)
    gone_s = [node.gone_s + scenario.noticed_after_s for node in present if node not in staying]
    if not rule.startswith("quorum"):
        return max([last_s, *(each_s for each_s in gone_s if each_s < last_s + scenario.noticed_after_s)])
    watch = QuorumWatch(quorum, scenario.max_grace_s, history, len(present))
    for node in sorted(staying, key=lambda each: arrivals[each.name]):
        at_s = arrivals[node.name]
        if watch.is_over(at_s):
            break
        before_s = watch.closes_at_s
        watch.came(node.name, node.lag, at_s)
        if before_s is None and watch.closes_at_s is not None:
            tally.graces_s.append(watch.closes_at_s - at_s)
    return min(last_s, watch.closes_at_s) if watch.closes_at_s is not None else last_s


def _poisson(mean: float, chance: random.Random) -> int:
    count, left = 0, chance.expovariate(1.0)
    while left < mean:
        count, left = count + 1, left + chance.expovariate(1.0)
    return count


def _agreement(members: Sequence[Member], round_index: int) -> Agreement:
    return _EMPTY.model_copy(update={"members": tuple(members), "round_index": round_index})


def _spend(node: _Node, opens_s: float, ends_s: float, busy_until_s: float) -> None:
    node.alive_s += ends_s - opens_s
    node.busy_s += max(0.0, busy_until_s - max(opens_s, node.begun_s))


def _leave(node: _Node, opens_s: float, busy_until_s: float, scenario: Scenario) -> None:
    _spend(node, opens_s, node.gone_s, busy_until_s)
    node.back_s = node.gone_s + node.chance.expovariate(1 / scenario.away_s)

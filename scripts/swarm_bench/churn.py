"""A stage whose slow workers come and go: how much gets done under three rules of who gets the next micro-batch.

An event simulation, not a measurement: time is simulated, results depend on the seed alone. Four fast workers take 1 s
for a micro-batch, four slow ones 10 s; each serves one after another. A slow worker leaves after a while, what it had
goes back to be granted anew, and it joins again at once under a new name, as far as anybody can tell another worker.
Eight micro-batches are under way all the time. Compared are

- ``swarm``: a newcomer is put at the top of the queue and taken for fast (throughput 1.0 a second);
- ``bottom``: newcomers at the bottom, but still taken for fast;
- ``ours``: `trainer.pipeline.driver.balancer.Balancer`.

    python scripts/bench_swarm.py churn
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from dataclasses import dataclass, field
from typing import Any, Protocol

from trainer.pipeline.driver.balancer import Balancer, Reservation


@dataclass(frozen=True, kw_only=True, slots=True)
class ChurnPlan:
    """What is simulated; times in seconds."""

    num_fast: int = 4
    num_slow: int = 4
    fast_s: float = 1.0
    slow_s: float = 10.0
    jitter: float = 0.1
    """Service times vary by so much either way."""
    stay_s: float = 25.0
    """How long a slow worker stays: uniformly between half of it and one and a half."""
    in_flight: int = 8
    duration_s: float = 600.0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class ChurnResult:
    """What got done."""

    per_s: float
    """Micro-batches a second."""
    by_slow: float
    """Share of them that slow workers did."""
    given_back: int
    """Granted to slow workers that left."""


class Rule(Protocol):
    """Who gets the next one."""

    def add(self, worker: str) -> None:
        """A worker has joined."""

    def remove(self, worker: str) -> None:
        """A worker has left."""

    def grant(self, now: float) -> Any:
        """A ticket with a ``worker``; None: nobody now."""

    def done(self, ticket: Any, now: float) -> None:
        """It was done."""

    def failed(self, ticket: Any, now: float) -> None:
        """Its worker has left."""


@dataclass(slots=True)
class _Ticket:
    worker: str
    granted_s: float


class QueueRule:
    """Least virtual runtime with an optimistic first estimate, as SWARM has it; newcomers at the top or the bottom.

    Args:
        at_bottom: newcomers enter at the end of the queue (spec P-18).
    """

    smoothing = 0.2
    first_throughput = 1.0

    def __init__(self, at_bottom: bool) -> None:
        self._at_bottom = at_bottom
        self._runtime_s: dict[str, float] = {}
        self._throughput: dict[str, float] = {}
        self._num_measured: dict[str, int] = {}

    def add(self, worker: str) -> None:
        """Top: level with the first of the queue; bottom: with the last."""
        place = max if self._at_bottom else min
        self._runtime_s[worker] = place(self._runtime_s.values(), default=0.0)
        self._throughput[worker] = self.first_throughput
        self._num_measured[worker] = 0

    def remove(self, worker: str) -> None:
        """Forgets it."""
        del self._runtime_s[worker], self._throughput[worker], self._num_measured[worker]

    def grant(self, now: float) -> _Ticket | None:
        """The first of the queue, charged with its estimate."""
        if not self._runtime_s:
            return None
        worker = min(self._runtime_s, key=lambda name: (self._runtime_s[name], name))
        self._runtime_s[worker] += 1.0 / self._throughput[worker]
        return _Ticket(worker, now)

    def done(self, ticket: _Ticket, now: float) -> None:
        """The moving average of its throughput, by the time there and back; the first measurement counts alone."""
        worker = ticket.worker
        if worker in self._throughput:
            self._num_measured[worker] += 1
            weight = self.smoothing / (1 - (1 - self.smoothing) ** self._num_measured[worker])
            measured = 1.0 / max(now - ticket.granted_s, 1e-9)
            self._throughput[worker] += weight * (measured - self._throughput[worker])

    def failed(self, ticket: _Ticket, now: float) -> None:
        """Nothing is learnt of a worker that is gone."""


class OurRule:
    """The balancer of trainer/pipeline/driver."""

    def __init__(self) -> None:
        self._balancer = Balancer()

    def add(self, worker: str) -> None:
        """See `Balancer.add`."""
        self._balancer.add(worker)

    def remove(self, worker: str) -> None:
        """See `Balancer.remove`."""
        self._balancer.remove(worker)

    def grant(self, now: float) -> Reservation | None:
        """See `Balancer.acquire`."""
        return self._balancer.acquire(1.0, now)

    def done(self, ticket: Reservation, now: float) -> None:
        """Measured as one request."""
        self._balancer.measured(ticket, 1.0, ticket.reserved_s, now)
        self._balancer.done(ticket)

    def failed(self, ticket: Reservation, now: float) -> None:
        """See `Balancer.failed`."""
        self._balancer.failed(ticket, now)


RULES = ("swarm", "bottom", "ours")


def rule_of(name: str) -> Rule:
    """One of `RULES`, without workers."""
    return OurRule() if name == "ours" else QueueRule(at_bottom=name == "bottom")


@dataclass(slots=True)
class _Server:
    name: str
    service_s: float
    queue: deque[Any] = field(default_factory=deque)


class _Simulation:
    """Events in the order of their times: a worker is done with the first of its queue, or it leaves."""

    def __init__(self, plan: ChurnPlan, rule: Rule) -> None:
        self._plan = plan
        self._rule = rule
        self._random = random.Random(plan.seed)
        self._servers: dict[str, _Server] = {}
        self._events: list[tuple[float, int, str, str]] = []
        self._num_events = 0
        self._waiting = plan.in_flight
        self._done = 0
        self._done_by_slow = 0
        self._given_back = 0

    def run(self) -> ChurnResult:
        """Until the end of the plan."""
        plan = self._plan
        for number in range(plan.num_fast):
            self._join(f"fast-{number}", plan.fast_s, 0.0)
        for number in range(plan.num_slow):
            self._join(f"slow-{number}.0", plan.slow_s, 0.0)
        self._grant_all(0.0)
        while self._events and self._events[0][0] <= plan.duration_s:
            now, _, kind, name = heapq.heappop(self._events)
            if name in self._servers:
                (self._serve if kind == "done" else self._leave)(name, now)
            self._grant_all(now)
        return ChurnResult(self._done / plan.duration_s, self._done_by_slow / max(1, self._done), self._given_back)

    def _join(self, name: str, service_s: float, now: float) -> None:
        self._servers[name] = _Server(name, service_s)
        self._rule.add(name)
        if name.startswith("slow"):
            self._at(now + self._plan.stay_s * self._random.uniform(0.5, 1.5), "leave", name)

    def _leave(self, name: str, now: float) -> None:
        server = self._servers.pop(name)
        self._rule.remove(name)
        for ticket in server.queue:
            self._rule.failed(ticket, now)
        self._waiting += len(server.queue)
        self._given_back += len(server.queue)
        place, _, life = name.partition(".")
        self._join(f"{place}.{int(life) + 1}", server.service_s, now)

    def _serve(self, name: str, now: float) -> None:
        server = self._servers[name]
        self._rule.done(server.queue.popleft(), now)
        self._waiting += 1
        self._done += 1
        self._done_by_slow += name.startswith("slow")
        self._begin(server, now)

    def _begin(self, server: _Server, now: float) -> None:
        if server.queue:
            factor = self._random.uniform(1 - self._plan.jitter, 1 + self._plan.jitter)
            self._at(now + server.service_s * factor, "done", server.name)

    def _grant_all(self, now: float) -> None:
        while self._waiting and (ticket := self._rule.grant(now)) is not None:
            self._waiting -= 1
            server = self._servers[ticket.worker]
            server.queue.append(ticket)
            if len(server.queue) == 1:
                self._begin(server, now)

    def _at(self, time_s: float, kind: str, name: str) -> None:
        self._num_events += 1
        heapq.heappush(self._events, (time_s, self._num_events, kind, name))


def simulate(rule: str, plan: ChurnPlan) -> ChurnResult:
    """Simulates one rule.

    Args:
        rule: one of `RULES`.
        plan: what happens.
    """
    return _Simulation(plan, rule_of(rule)).run()


def compare(plan: ChurnPlan, seeds: int = 5) -> dict[str, float]:
    """Micro-batches a second under each rule, means over seeds, and ours over the others'.

    Args:
        plan: what happens; its seed is the first.
        seeds: how many plans that differ in nothing else.
    """
    means: dict[str, float] = {}
    for rule in RULES:
        plans = [
            ChurnPlan(**{name: getattr(plan, name) for name in plan.__dataclass_fields__} | {"seed": plan.seed + more})
            for more in range(seeds)
        ]
        means[rule] = sum(simulate(rule, one).per_s for one in plans) / seeds
    return {
        **{f"{rule}_per_s": round(value, 3) for rule, value in means.items()},
        "ours_over_swarm": round(means["ours"] / means["swarm"], 2),
        "ours_over_bottom": round(means["ours"] / means["bottom"], 2),
    }

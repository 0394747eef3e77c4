"""Which worker of a stage gets the next micro-batch: the one with the least virtual runtime.

A worker's virtual runtime is the time of it that was used. It is charged with the estimate when a micro-batch is
granted, so that two requests in a row do not take the same worker for free, and corrected to what it took when it is
done. Shares are then in the ratio of speeds, measured here and not as workers tell of themselves: the time from its
last answer, or from the request where that came later, until its answer; so requests that wait in line at a worker
count once. Of that time and of the work done in it moving sums are kept, whose ratio is the estimate.

A newcomer enters at the bottom, with the slowest estimate known: one that enters at the top, or is taken for fast,
draws micro-batches from workers known to be better, and where slow workers join and leave all the time that is most of
them. At the bottom alone a fast one would wait for as long as the slowest takes. So it is given *one* micro-batch to
prove itself, one newcomer at a time (until it has taken ``patience`` times as long as a usual one; it may go on, but
keeps the next no longer), at most one in ``probe_every`` micro-batches, and at most a quarter of those under way at
newcomers. With the first answer it is known, its estimate is what it took, and its place is where the others are.
Where no known worker may be taken instead, it gets another one every ``held_up_s``: its first may be held up in another
stage, and would hold up all others too.
Workers that were banned prove themselves anew in the same way, with the estimate they had.

Pure: times are arguments, seconds of any one clock. Each choice looks at all workers of the stage, 0.1 ms of 1,000.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field

__all__ = ["Balancer", "BalancerConfig", "Grant", "WorkerLoad"]

_DEFAULT_S_PER_UNIT = 1.0
"""While nothing is known of anybody; the same for all, so its value does not matter."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BalancerConfig:
    """How much is granted to whom."""

    max_in_flight_per_worker: int = 4
    smoothing: float = 0.2
    """What the newest measurement counts for in the moving sums."""
    probe_every: int = 4
    """Micro-batches granted from one newcomer's first to the next's."""
    patience: float = 3.0
    """How many times as long as a usual worker a newcomer may take before the next one is tried beside it."""
    held_up_s: float = 2.0
    """From one micro-batch to the next at a newcomer that has answered none, in a stage without known workers."""


@dataclass(slots=True)
class Grant:
    """A micro-batch's place at a worker, from its first request there to the last."""

    worker: str
    units: float
    """Work it is expected to be: rows times the cost of what is done with them."""
    granted_s: float
    charged_s: float
    spent_s: float = 0.0
    """What its requests took, as far as they have been answered."""
    is_probe: bool = False
    open: bool = True


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """A worker as the balancer sees it."""

    worker: str
    runtime_s: float
    """Virtual: from the least of the stage."""
    s_per_unit: float
    proven: bool
    in_flight: int
    num_done: int


@dataclass(slots=True, eq=False)
class _Worker:
    name: str
    runtime_s: float
    s_per_unit: float
    number: int
    """Newcomers prove themselves in the order in which they came."""
    proven: bool = False
    busy_s: float = 0.0
    units: float = 0.0
    answered_s: float = float("-inf")
    rests_until_s: float = float("-inf")
    num_done: int = 0
    grants: list[Grant] = field(default_factory=list)


class Balancer:
    """The workers of one stage.

    Args:
        config: how much is granted to whom.
    """

    def __init__(self, config: BalancerConfig) -> None:
        self._config = config
        self._workers: dict[str, _Worker] = {}
        self._since_probe = config.probe_every
        self._num_added = 0

    def __contains__(self, worker: str) -> bool:
        return worker in self._workers

    def __len__(self) -> int:
        return len(self._workers)

    @property
    def workers(self) -> tuple[str, ...]:
        """Their names."""
        return tuple(self._workers)

    # -- who is there --------------------------------------------------------------------------------------------------

    def add(self, worker: str) -> None:
        """A newcomer: at the bottom, taken for as slow as the slowest. One that is there already is left alone."""
        if worker in self._workers:
            return
        others = [other for other in self._workers.values() if other.proven]
        bottom_s = max((other.runtime_s for other in self._workers.values()), default=0.0)
        slowest = max((other.s_per_unit for other in others), default=_DEFAULT_S_PER_UNIT)
        self._workers[worker] = _Worker(worker, bottom_s, slowest, self._num_added)
        self._num_added += 1

    def remove(self, worker: str) -> None:
        """It has left; what it was granted may still end."""
        self._workers.pop(worker, None)

    def distrust(self, worker: str) -> None:
        """It has to prove itself again before it gets more than one micro-batch at a time."""
        if worker in self._workers:
            self._workers[worker].proven = False

    def rest(self, worker: str, until_s: float) -> None:
        """It asked to be left in peace for a while."""
        if worker in self._workers:
            self._workers[worker].rests_until_s = until_s

    def next_rested_s(self, now: float) -> float | None:
        """When the first of those that rest is back; None: nobody rests."""
        return min((w.rests_until_s for w in self._workers.values() if w.rests_until_s > now), default=None)

    # -- granting ------------------------------------------------------------------------------------------------------

    def acquire(self, units: float, now: float, barred: Callable[[str], bool] = lambda _worker: False) -> Grant | None:
        """Grants the next micro-batch.

        Args:
            units: work it is expected to be; positive.
            now: the time.
            barred: workers that must not get it.

        Returns:
            Whose it is; None: nobody may have it now, those there are being full, resting or barred.
        """
        allowed = [worker for worker in self._workers.values() if not barred(worker.name)]
        free = [worker for worker in allowed if worker.rests_until_s <= now]
        proven = [worker for worker in free if worker.proven and len(worker.grants) < self._limit]
        if not any(worker.proven for worker in allowed):
            return self._granted_to_newcomer(free, units, now)
        trial = [worker for worker in free if not worker.proven and not worker.grants]
        if trial and self._may_probe(now):
            return self._grant(min(trial, key=lambda worker: worker.number), units, now)
        if not proven:
            return None
        return self._grant(min(proven, key=lambda worker: (worker.runtime_s, worker.number)), units, now)

    def measured(self, grant: Grant, units: float, asked_s: float, now: float) -> None:
        """A request of it was answered.

        Args:
            grant: the micro-batch's.
            units: what this request was of its work.
            asked_s: when it was sent.
            now: when the answer was here.
        """
        worker = self._workers.get(grant.worker)
        since_s = asked_s if worker is None else max(asked_s, worker.answered_s)
        if worker is not None:
            worker.answered_s = now
        self.told(grant, units, max(0.0, now - since_s))

    def told(self, grant: Grant, units: float, took_s: float) -> None:
        """As `measured`, of a time that was found out otherwise."""
        grant.spent_s += took_s
        worker = self._workers.get(grant.worker)
        if worker is None or units <= 0:
            return
        keep = 1.0 - self._config.smoothing if worker.num_done else 0.0
        worker.busy_s = keep * worker.busy_s + took_s
        worker.units = keep * worker.units + units
        worker.s_per_unit = max(worker.busy_s / worker.units, 1e-9)
        worker.num_done += 1
        if not worker.proven:
            self._found_out(worker)

    def done(self, grant: Grant) -> None:
        """All of its requests were answered: what was charged becomes what it took."""
        worker = self._close(grant)
        if worker is not None:
            worker.runtime_s += grant.spent_s - grant.charged_s

    def failed(self, grant: Grant, now: float) -> None:
        """It came to nothing: what was charged stays charged, or what was waited for if that was more."""
        worker = self._close(grant)
        if worker is not None:
            worker.runtime_s += max(0.0, now - grant.granted_s - grant.charged_s)

    def released(self, grant: Grant) -> None:
        """It was not asked to do anything after all: nothing is charged."""
        worker = self._close(grant)
        if worker is not None:
            worker.runtime_s -= grant.charged_s

    def resume(self, grant: Grant, now: float) -> None:
        """Takes a released place again, however many its worker has: that is where the micro-batch has been before."""
        worker = self._workers.get(grant.worker)
        if worker is None or grant.open:
            return
        grant.open, grant.granted_s, grant.charged_s = True, now, grant.units * worker.s_per_unit
        worker.runtime_s += grant.charged_s
        worker.grants.append(grant)

    def estimate_s(self, worker: str, units: float) -> float:
        """How long it would take for so much work, by what is known; 0 for one that is not there."""
        known = self._workers.get(worker)
        return 0.0 if known is None else known.s_per_unit * units

    def waits(self) -> dict[str, tuple[float, int]]:
        """Since when nothing has come from each that has micro-batches under way, and how many; by worker."""
        return {
            worker.name: (max(worker.answered_s, min(grant.granted_s for grant in worker.grants)), len(worker.grants))
            for worker in self._workers.values()
            if worker.grants
        }

    def loads(self) -> tuple[WorkerLoad, ...]:
        """All of them, the next one first."""
        least_s = min((worker.runtime_s for worker in self._workers.values()), default=0.0)
        loads = [
            WorkerLoad(w.name, w.runtime_s - least_s, w.s_per_unit, w.proven, len(w.grants), w.num_done)
            for w in self._workers.values()
        ]
        return tuple(sorted(loads, key=lambda load: (load.runtime_s, load.worker)))

    # -- inside --------------------------------------------------------------------------------------------------------

    @property
    def _limit(self) -> int:
        return self._config.max_in_flight_per_worker

    def _granted_to_newcomer(self, free: list[_Worker], units: float, now: float) -> Grant | None:
        """To the one with the fewest micro-batches; of several, to the one that came first."""
        before_s = now - self._config.held_up_s
        room = [
            worker
            for worker in free
            if len(worker.grants) < self._limit and all(grant.granted_s <= before_s for grant in worker.grants)
        ]
        if not room:
            return None
        return self._grant(min(room, key=lambda worker: (len(worker.grants), worker.number)), units, now)

    def _grant(self, worker: _Worker, units: float, now: float) -> Grant:
        if worker.rests_until_s > float("-inf"):  # What it missed while it rested is not made up for all at once.
            worker.rests_until_s = float("-inf")
            worker.runtime_s = max(worker.runtime_s, self._least_s(worker, worker.runtime_s))
        charged_s = units * worker.s_per_unit
        grant = Grant(worker.name, units, now, charged_s, is_probe=not worker.proven)
        worker.runtime_s += charged_s
        worker.grants.append(grant)
        self._since_probe = 0 if grant.is_probe else self._since_probe + 1
        return grant

    def _close(self, grant: Grant) -> _Worker | None:
        """Ends a grant; its worker, if that is still the one it was made for."""
        grant.open = False
        worker = self._workers.get(grant.worker)
        if worker is None or not any(other is grant for other in worker.grants):
            return None
        worker.grants = [other for other in worker.grants if other is not grant]
        return worker

    def _may_probe(self, now: float) -> bool:
        if self._since_probe < self._config.probe_every:
            return False
        under_way = sum(len(worker.grants) for worker in self._workers.values())
        probes = [worker.grants[0] for worker in self._workers.values() if not worker.proven and worker.grants]
        if len(probes) >= max(1, under_way // 4):
            return False
        usual_s = statistics.median([w.s_per_unit for w in self._workers.values() if w.proven] or [float("inf")])
        return all(now - probe.granted_s > self._config.patience * usual_s * probe.units for probe in probes)

    def _found_out(self, worker: _Worker) -> None:
        """Its speed is known: its place is among the others, and its charges are what they would have been.

        Its first answer puts it level with the least used, plus what it has been granted at what that will cost.
        """
        worker.proven = True
        alone_s = worker.runtime_s - sum(grant.charged_s for grant in worker.grants)
        for grant in worker.grants:
            grant.charged_s = grant.units * worker.s_per_unit
        level_s = self._least_s(worker, alone_s)
        worker.runtime_s = level_s + sum(grant.charged_s for grant in worker.grants)

    def _least_s(self, but: _Worker, otherwise_s: float) -> float:
        """The least virtual runtime of the proven others."""
        others = [worker.runtime_s for worker in self._workers.values() if worker.proven and worker is not but]
        return min(others, default=otherwise_s)

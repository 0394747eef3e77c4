"""Which worker of a stage gets the next micro-batch: the one with the least virtual runtime (spec P-17).

That is the time of it that was used: charged with the estimate when a micro-batch is assigned, corrected to the
measured time when it is done. A newcomer enters at the bottom, with the slowest estimate known (spec P-18), and gets
*one* micro-batch to prove itself: one newcomer at a time, one per `_PROBE_EVERY` micro-batches, a quarter of those in
flight at most; then its place is level with the others. A worker that was banned proves itself again.

Pure: times are arguments, in seconds of any one clock. Each choice looks at all workers of the stage: 0.1 ms for 1,000.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field

_DEFAULT_S_PER_UNIT = 1.0  # While no worker is known; the same for all, so its value does not matter.
_SMOOTHING = 0.2  # Weight of the newest measurement in the moving sums.
_PROBE_EVERY = 4  # Micro-batches from one newcomer's first to the next newcomer's.
_PATIENCE = 3.0
"""Times a usual worker's time, after which a newcomer that has not answered keeps no other from its turn."""
_HELD_UP_S = 2.0
"""Where no worker is proven, a newcomer gets another one so often: its first may be held up in another stage."""


@dataclass(slots=True, eq=False)
class Reservation:
    """A micro-batch's place at a worker, from its first request there to the last."""

    worker: str
    units: float  # Expected work: rows times the cost of what is done with them.
    reserved_s: float
    charged_s: float
    spent_s: float = 0.0
    open: bool = True


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """A worker as the balancer sees it."""

    worker: str
    runtime_s: float  # Virtual runtime above the least of the stage.
    s_per_unit: float
    proven: bool
    in_flight: int
    num_done: int


@dataclass(slots=True, eq=False)
class _Worker:
    name: str
    runtime_s: float
    s_per_unit: float
    number: int  # Newcomers prove themselves in the order in which they came.
    proven: bool = False
    busy_s: float = 0.0
    units: float = 0.0
    answered_s: float = float("-inf")
    rests_until_s: float = float("-inf")
    num_done: int = 0
    reservations: list[Reservation] = field(default_factory=list)


class Balancer:
    """Shares micro-batches out to the workers of one stage."""

    def __init__(self, max_in_flight_per_worker: int = 4) -> None:
        self._limit = max_in_flight_per_worker
        self._workers: dict[str, _Worker] = {}
        self._since_probe = _PROBE_EVERY
        self._num_added = 0

    def add(self, worker: str) -> None:
        """Adds a newcomer at the bottom, taken for as slow as the slowest; does nothing if it is there already."""
        if worker in self._workers:
            return
        others = self._workers.values()
        bottom_s = max((other.runtime_s for other in others), default=0.0)
        slowest = max((other.s_per_unit for other in others if other.proven), default=_DEFAULT_S_PER_UNIT)
        self._workers[worker] = _Worker(worker, bottom_s, slowest, self._num_added)
        self._num_added += 1

    def remove(self, worker: str) -> None:
        """Removes a worker that has left; its micro-batches may still end."""
        self._workers.pop(worker, None)

    def distrust(self, worker: str) -> None:
        """Has a worker prove itself again before it gets more than one micro-batch at a time."""
        if worker in self._workers:
            self._workers[worker].proven = False

    def rest(self, worker: str, until_s: float) -> None:
        """Gives a worker nothing until then."""
        if worker in self._workers:
            self._workers[worker].rests_until_s = until_s

    def next_rested_s(self, now: float) -> float | None:
        """Returns when the first of the resting workers is back."""
        return min((w.rests_until_s for w in self._workers.values() if w.rests_until_s > now), default=None)

    def acquire(
        self, units: float, now: float, barred: Callable[[str], bool] = lambda _worker: False
    ) -> Reservation | None:
        """Reserves a place for a micro-batch of so much work; None: all workers are full, resting or barred."""
        allowed = [worker for worker in self._workers.values() if not barred(worker.name)]
        free = [w for w in allowed if w.rests_until_s <= now and len(w.reservations) < self._limit]
        if not any(worker.proven for worker in allowed):
            held_up_s = now - _HELD_UP_S
            room = [worker for worker in free if all(it.reserved_s <= held_up_s for it in worker.reservations)]
            chosen = min(room, key=lambda worker: (len(worker.reservations), worker.number), default=None)
        else:
            trial = [worker for worker in free if not worker.proven and not worker.reservations]
            if trial and self._may_probe(now):
                chosen = min(trial, key=lambda worker: worker.number)
            else:
                proven = [worker for worker in free if worker.proven]
                chosen = min(proven, key=lambda worker: (worker.runtime_s, worker.number), default=None)
        return None if chosen is None else self._reserve(chosen, units, now)

    def measured(self, reservation: Reservation, units: float, asked_s: float, now: float) -> None:
        """Counts a request that was answered now; ``units`` is its part of the micro-batch's work."""
        worker = self._workers.get(reservation.worker)
        since_s = asked_s if worker is None else max(asked_s, worker.answered_s)
        if worker is not None:
            worker.answered_s = now
        self.timed(reservation, units, max(0.0, now - since_s))

    def timed(self, reservation: Reservation, units: float, took_s: float) -> None:
        """Counts a request whose time was found out otherwise, see `measured`."""
        reservation.spent_s += took_s
        worker = self._workers.get(reservation.worker)
        if worker is None or units <= 0:
            return
        keep = 1.0 - _SMOOTHING if worker.num_done else 0.0
        worker.busy_s = keep * worker.busy_s + took_s
        worker.units = keep * worker.units + units
        worker.s_per_unit = max(worker.busy_s / worker.units, 1e-9)
        worker.num_done += 1
        if not worker.proven:
            self._prove(worker)

    def done(self, reservation: Reservation) -> None:
        """Ends a reservation whose requests were all answered: it is charged with the actual time."""
        self._close(reservation, reservation.spent_s - reservation.charged_s)

    def failed(self, reservation: Reservation, now: float) -> None:
        """Ends a reservation that came to nothing: it is charged with the estimate, or the time waited if longer."""
        self._close(reservation, max(0.0, now - reservation.reserved_s - reservation.charged_s))

    def released(self, reservation: Reservation) -> None:
        """Ends a reservation that was not used: nothing is charged."""
        self._close(reservation, -reservation.charged_s)

    def resume(self, reservation: Reservation, now: float) -> None:
        """Takes a released place again, however full the worker is, since the micro-batch has been there before."""
        worker = self._workers.get(reservation.worker)
        if worker is None or reservation.open:
            return
        reservation.open, reservation.reserved_s = True, now
        reservation.charged_s = reservation.units * worker.s_per_unit
        worker.runtime_s += reservation.charged_s
        worker.reservations.append(reservation)

    def estimate_s(self, worker: str, units: float) -> float:
        """Returns how long a worker would take for so much work; 0 for one that is not there."""
        known = self._workers.get(worker)
        return 0.0 if known is None else known.s_per_unit * units

    def waits(self) -> dict[str, tuple[float, int]]:
        """Returns, by worker with micro-batches, since when nothing has come from it and how many it has."""
        return {
            name: (max(worker.answered_s, min(it.reserved_s for it in worker.reservations)), len(worker.reservations))
            for name, worker in self._workers.items()
            if worker.reservations
        }

    def loads(self) -> tuple[WorkerLoad, ...]:
        """Returns the load of all workers, the next one first."""
        least_s = min((worker.runtime_s for worker in self._workers.values()), default=0.0)
        loads = [
            WorkerLoad(w.name, w.runtime_s - least_s, w.s_per_unit, w.proven, len(w.reservations), w.num_done)
            for w in self._workers.values()
        ]
        return tuple(sorted(loads, key=lambda load: (load.runtime_s, load.worker)))

    def _reserve(self, worker: _Worker, units: float, now: float) -> Reservation:
        if worker.rests_until_s > float("-inf"):  # A worker that rested does not catch up all at once.
            worker.rests_until_s = float("-inf")
            worker.runtime_s = max(worker.runtime_s, self._least_s(worker, worker.runtime_s))
        charged_s = units * worker.s_per_unit
        reservation = Reservation(worker.name, units, now, charged_s)
        worker.runtime_s += charged_s
        worker.reservations.append(reservation)
        self._since_probe = self._since_probe + 1 if worker.proven else 0
        return reservation

    def _close(self, reservation: Reservation, correction_s: float) -> None:
        """Ends a reservation; corrects its worker's runtime, if that is still the one it was made for."""
        reservation.open = False
        worker = self._workers.get(reservation.worker)
        if worker is not None and reservation in worker.reservations:
            worker.reservations.remove(reservation)
            worker.runtime_s += correction_s

    def _may_probe(self, now: float) -> bool:
        if self._since_probe < _PROBE_EVERY:
            return False
        under_way = sum(len(worker.reservations) for worker in self._workers.values())
        probes = [w.reservations[0] for w in self._workers.values() if not w.proven and w.reservations]
        if len(probes) >= max(1, under_way // 4):
            return False
        usual_s = statistics.median([w.s_per_unit for w in self._workers.values() if w.proven] or [float("inf")])
        return all(now - probe.reserved_s > _PATIENCE * usual_s * probe.units for probe in probes)

    def _prove(self, worker: _Worker) -> None:
        """Marks a worker as proven, level with the least used one plus the cost of its reservations at its speed."""
        worker.proven = True
        alone_s = worker.runtime_s - sum(it.charged_s for it in worker.reservations)
        for reservation in worker.reservations:
            reservation.charged_s = reservation.units * worker.s_per_unit
        worker.runtime_s = self._least_s(worker, alone_s) + sum(it.charged_s for it in worker.reservations)

    def _least_s(self, but: _Worker, otherwise_s: float) -> float:
        """Returns the least virtual runtime of the other proven workers."""
        others = [worker.runtime_s for worker in self._workers.values() if worker.proven and worker is not but]
        return min(others, default=otherwise_s)

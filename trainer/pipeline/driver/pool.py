"""A stage's workers, and which of them gets the next micro-batch; waits while the stage has none.

Keys cost nothing, so workers that have counted nothing yet share a record with their host: what they do wrong bans
their host for those that come after them, for longer each time, as long as the stage has other workers. A worker that
counts something clears its host's record, and a host's bans do not concern workers that have counted before.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass

from trainer.network.rpc.config import split_address
from trainer.network.rpc.dialing import address_group
from trainer.pipeline.driver.balancer import Balancer, Reservation
from trainer.pipeline.driver.config import DriverConfig
from trainer.pipeline.driver.failure_detector import DOUBTS, Bans
from trainer.pipeline.driver.results import StageView, Verdict
from trainer.pipeline.driver.workers import StageWorker

logger = logging.getLogger(__name__)

_REST_S = 0.1
_MAX_REST_S = 2.0
_LEAVE_S = 3.0
_LOG_STALL_S = 30.0
_SILENT = frozenset({"unavailable", "failed", "refused", "hop"})
"""Reasons of verdicts on workers that were not heard from."""


@dataclass(frozen=True, slots=True)
class Placement:
    """A micro-batch's place at a worker."""

    worker: StageWorker
    reservation: Reservation


class StagePool:
    """The workers of one stage; ``clock`` is any monotonic one, in seconds."""

    def __init__(self, stage: str, config: DriverConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self.stage = stage
        self.on_ban: Callable[[StageWorker, float, str], None] = lambda _worker, _seconds, _reason: None
        """Told of each ban that begins: for how long, and why."""
        self._clock = clock
        self.balancer = Balancer(config.max_in_flight_per_worker)
        self._bans, self._host_bans = Bans(config), Bans(config)
        self._have_counted: set[str] = set()
        self._hosts: dict[str, str] = {}
        self._workers: dict[str, StageWorker] = {}
        self._blamed: dict[str, str] = {}
        """Incarnation of each banned worker, by key: one that restarts is not announced as serving for a while."""
        self._busy_in_a_row: Counter[str] = Counter()
        self._changed = asyncio.Event()
        self._stalled_since_s: float | None = None
        self._logged_stall_s = float("-inf")
        self._stalled_s = 0.0

    def update(self, workers: Iterable[StageWorker]) -> None:
        """Replaces the stage's workers by those announced now."""
        now = self._clock()
        found = {worker.key: worker for worker in workers}
        for key in self._workers.keys() - found.keys():
            self.balancer.remove(key)
            del self._busy_in_a_row[key]
        for key, worker in found.items():
            known = self._workers.get(key)
            if known is not None and known.incarnation != worker.incarnation:
                self.balancer.distrust(key)
            if self._blamed.get(key, worker.incarnation) != worker.incarnation:
                self._bans.restarted(key)
                del self._blamed[key]
            self.balancer.add(key)
        if found != self._workers:
            self._workers, self._hosts = found, {key: _host(worker) for key, worker in found.items()}
            self._wake()
        self._bans.tidy(now, set(found))
        self._host_bans.tidy(now, set(self._hosts.values()))
        self._have_counted = {key for key in self._have_counted if key in found or self._bans.is_banned(key, now)}
        self._blamed = {key: it for key, it in self._blamed.items() if self._bans.is_banned(key, now)}

    def current(self, worker: StageWorker) -> StageWorker:
        """Returns the worker as announced now; unchanged if it is no longer announced."""
        return self._workers.get(worker.key, worker)

    def is_banned(self, worker: StageWorker) -> bool:
        """Whether it gets no work now."""
        return self._bans.is_banned(worker.key, self._clock())

    def workers(self) -> tuple[StageWorker, ...]:
        """Returns all announced workers."""
        return tuple(self._workers.values())

    def usable(self) -> tuple[StageWorker, ...]:
        """Returns the workers that are not banned; where there are none, the stage is stalled."""
        return tuple(worker for worker in self._workers.values() if not self.is_banned(worker))

    def to_be_asked(self) -> tuple[StageWorker, ...]:
        """Returns, where all workers are banned, those that are banned for silence only and may answer by now."""
        if self.usable():
            return ()
        now = self._clock()
        return tuple(worker for key, worker in self._workers.items() if self._bans.may_be_asked(key, now))

    def answers(self, worker: StageWorker) -> None:
        """Ends a ban for silence of a worker that has answered a request for its status."""
        was_banned = self.is_banned(worker)
        self._bans.answers(worker.key, self._clock())
        if was_banned and not self.is_banned(worker):
            logger.info("%s answers again, and its stage has nobody else: it gets work", worker)
            self._wake()

    async def acquire(self, units: float, *, avoid: Collection[str], left_s: Callable[[], float]) -> Placement | None:
        """Waits for a worker for a micro-batch of ``units`` of work; returns None if that may be sent no longer.

        Workers whose keys are in ``avoid`` had it and failed; they get it all the same where there are no others.
        ``left_s`` is read again and again, since leases are renewed.
        """
        while (limit_s := left_s()) > 0:
            now = self._clock()
            self._note_stall(now)
            placement = self._chosen(units, avoid, now)
            if placement is not None:
                return placement
            changed = self._changed
            with suppress(TimeoutError):
                async with asyncio.timeout(min(limit_s, self._next_change_s(now))):
                    await changed.wait()
        return None

    def measured(self, placement: Placement, units: float, asked_s: float) -> None:
        """Counts a request that was answered just now."""
        self.balancer.measured(placement.reservation, units, asked_s, self._clock())
        self._bans.succeeded(placement.worker.key)
        del self._busy_in_a_row[placement.worker.key]

    def counted(self, placement: Placement) -> None:
        """Clears a worker, and its host, that has answered a request to count."""
        worker = placement.worker
        self._bans.counted(worker.key)
        self._host_bans.counted(_host(worker))
        self._have_counted.add(worker.key)

    def timed(self, placement: Placement, units: float, took_s: float) -> None:
        """Counts a micro-batch that was counted, and took so much of its worker's time."""
        self.balancer.timed(placement.reservation, units, took_s)
        self.counted(placement)
        del self._busy_in_a_row[placement.worker.key]

    def done(self, placement: Placement) -> None:
        """Ends a placement whose requests were all answered."""
        self.balancer.done(placement.reservation)
        self._wake()

    def recovered(self, placement: Placement) -> None:
        """Ends a placement that was counted after all; the time says nothing of its worker's speed."""
        self.counted(placement)
        self.balancer.failed(placement.reservation, self._clock())
        self._wake()

    def released(self, placement: Placement) -> None:
        """Ends a placement that was not used, or failed through no fault of its worker."""
        self.balancer.released(placement.reservation)
        self._wake()

    def resumed(self, placement: Placement) -> None:
        """Takes a placement again that was released while another stage was waited for."""
        self.balancer.resume(placement.reservation, self._clock())

    def failed(self, placement: Placement, verdict: Verdict, asked_s: float) -> None:
        """Ends a placement whose request has failed and is not repeated."""
        self.blame(placement.worker, verdict, asked_s)
        if verdict.blame in ("rest", "leave"):
            self.released(placement)
        else:
            self.balancer.failed(placement.reservation, self._clock())
            self._wake()

    def blame(self, worker: StageWorker, verdict: Verdict, asked_s: float) -> None:
        """Has a worker rest, or bans it, for a failed request."""
        key, now, blame = worker.key, self._clock(), verdict.blame
        if blame == "rest":
            self._busy_in_a_row[key] += 1
            rest_s = _REST_S * 2.0 ** min(self._busy_in_a_row[key] - 1, 8)
            self.balancer.rest(key, now + min(_MAX_REST_S, rest_s))
        elif blame == "leave":
            self.balancer.rest(key, now + _LEAVE_S)
        elif blame == "long-ban":
            was_caught = self._bans.is_caught(key, now)
            until_s = self._bans.malformed(key, now=now)
            if not was_caught:
                logger.error("%s answers what no honest worker answers: no work for %.0f s", worker, until_s - now)
                self.on_ban(worker, until_s - now, f"answers what no honest worker answers ({verdict.reason})")
        elif blame != "none":
            was_banned = self._bans.is_banned(key, now)
            if blame == "ban":
                until_s = self._bans.failed(key, asked_s=asked_s, now=now, is_silent=verdict.reason in _SILENT)
            else:
                doubts = DOUBTS if blame == "firm-ban" else 1
                until_s = self._bans.doubted(key, asked_s=asked_s, now=now, doubts=doubts)
            if until_s > now:
                self._blamed[key] = worker.incarnation
                if not was_banned:
                    logger.warning("%s: no work for %.0f s (%s)", worker, until_s - now, verdict.reason)
                    self.on_ban(worker, until_s - now, verdict.reason)
        if blame in ("ban", "firm-ban", "long-ban"):
            self.balancer.distrust(key)
            if key not in self._have_counted:
                self._host_bans.failed(_host(worker), asked_s=asked_s, now=now)
        self._wake()

    def status(self) -> StageView:
        """Returns the stage's state."""
        now = self._clock()
        names = {key: worker.uid for key, worker in self._workers.items()}
        return StageView(self.stage, self.balancer.loads(), names, self._bans.banned(now), self._stalled_for_s())

    def stalled_s(self) -> float:
        """Returns the seconds in all for which something waited here for a stage without workers."""
        return self._stalled_s + self._stalled_for_s()

    def _stalled_for_s(self) -> float:
        return 0.0 if self._stalled_since_s is None else self._clock() - self._stalled_since_s

    def _chosen(self, units: float, avoid: Collection[str], now: float) -> Placement | None:
        """Chooses among workers that did not have it, whose host is not banned; if there are none, among the others."""
        free = {key for key in self._workers if not self._bans.is_banned(key, now)}
        others = free - set(avoid)
        unblamed = {
            key for key in others if key in self._have_counted or not self._host_bans.is_banned(self._hosts[key], now)
        }
        allowed = unblamed or others or free
        reservation = self.balancer.acquire(units, now, lambda key: key not in allowed)
        return None if reservation is None else Placement(self._workers[reservation.worker], reservation)

    def _next_change_s(self, now: float) -> float:
        """Returns the seconds until a ban or a rest ends, which wakes nobody."""
        ends = [self._bans.until_s(key) for key in self._workers]
        ends += [self._host_bans.until_s(host) for host in set(self._hosts.values())]
        rested_s = self.balancer.next_rested_s(now)
        if rested_s is not None:
            ends.append(rested_s)
        return max(0.001, min([1.0, *(end - now for end in ends if end > now)]))

    def _note_stall(self, now: float) -> None:
        if self.usable():
            if self._stalled_since_s is not None:
                self._stalled_s += now - self._stalled_since_s
                self._stalled_since_s, self._logged_stall_s = None, float("-inf")
                logger.info("stage %s has a worker again", self.stage)
            return
        if self._stalled_since_s is None:
            self._stalled_since_s = now
        if now - self._logged_stall_s >= _LOG_STALL_S:
            self._logged_stall_s = now
            left = {key: left_s for key, left_s in self._bans.banned(now).items() if key in self._workers}
            banned = ", ".join(f"{self._workers[key].uid} ({left_s:.0f} s)" for key, left_s in left.items())
            why = f" (banned: {banned})" if banned else ""
            logger.warning("stage %s has no worker to send to%s; everything waits for one", self.stage, why)

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


def _host(worker: StageWorker) -> str:
    return address_group(split_address(worker.peer.address)[0])

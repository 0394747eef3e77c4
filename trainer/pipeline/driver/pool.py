"""A stage's workers, and who of them gets the next micro-batch; waits while the stage has nobody.

The one place where balancer, bans and announcements meet. All of it belongs to the driver's event loop.

Keys cost nothing, so a worker that has counted nothing yet shares its host's fate: what such workers do amiss bans
their host for those that come after them, for longer each time, as long as the stage has somebody else. One that counts
something clears its host's name, and a host's bans do not concern those that have counted before.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from trainer.network.rpc.config import split_address
from trainer.network.rpc.remote_address import address_group
from trainer.pipeline.driver.balancer import Balancer, BalancerConfig, Grant
from trainer.pipeline.driver.config import DriverConfig
from trainer.pipeline.driver.failure_detector import DOUBTS, Bans
from trainer.pipeline.driver.results import StageStatus, Verdict
from trainer.pipeline.driver.workers import StageWorker

__all__ = ["Placement", "StagePool"]

logger = logging.getLogger(__name__)

_REST_S = 0.1
_MAX_REST_S = 2.0
_LEAVE_S = 3.0
_SAY_STALLED_S = 30.0
_SILENT = frozenset({"unavailable", "failed", "refused", "hop"})
"""Reasons of verdicts on workers of which nothing was heard."""


@dataclass(frozen=True, slots=True)
class Placement:
    """A micro-batch's place at a worker."""

    worker: StageWorker
    grant: Grant


class StagePool:
    """The workers of one stage.

    Args:
        stage: its name.
        config: of the driver.
        clock: seconds; any monotonic one.
    """

    def __init__(self, stage: str, config: DriverConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self.stage = stage
        self._clock = clock
        self._balancer = Balancer(BalancerConfig(max_in_flight_per_worker=config.max_in_flight_per_worker))
        self._bans = Bans(ban_s=config.ban_s, max_ban_s=config.max_ban_s, malformed_ban_s=config.malformed_ban_s)
        self._host_bans = Bans(ban_s=config.ban_s, max_ban_s=config.max_ban_s, malformed_ban_s=config.malformed_ban_s)
        self._have_counted: set[str] = set()
        self._hosts: dict[str, str] = {}
        self._workers: dict[str, StageWorker] = {}
        self._blamed: dict[str, str] = {}
        """Incarnation of each that is banned, by key: one that restarts is not announced as serving for a while."""
        self._busy_in_a_row: dict[str, int] = {}
        self._changed = asyncio.Event()
        self._stalled_since_s: float | None = None
        self._said_stalled_s = float("-inf")
        self._stalled_s = 0.0

    # -- who is there --------------------------------------------------------------------------------------------------

    def update(self, workers: Iterable[StageWorker]) -> None:
        """These are the stage's workers now."""
        now = self._clock()
        found = {worker.key: worker for worker in workers}
        for key in self._workers.keys() - found.keys():
            self._balancer.remove(key)
            self._busy_in_a_row.pop(key, None)
        for key, worker in found.items():
            known = self._workers.get(key)
            if known is not None and known.incarnation != worker.incarnation:
                self._balancer.distrust(key)
            if self._blamed.get(key, worker.incarnation) != worker.incarnation:
                self._bans.restarted(key)
                del self._blamed[key]
            self._balancer.add(key)
        if found != self._workers:
            self._workers, self._hosts = found, {key: _host(worker) for key, worker in found.items()}
            self._wake()
        self._bans.tidy(now, set(found))
        self._host_bans.tidy(now, set(self._hosts.values()))
        self._have_counted = {key for key in self._have_counted if key in found or self._bans.is_banned(key, now)}
        self._blamed = {key: it for key, it in self._blamed.items() if self._bans.is_banned(key, now)}

    def current(self, worker: StageWorker) -> StageWorker:
        """The same worker as it is announced now; as it was where it is no longer announced."""
        return self._workers.get(worker.key, worker)

    def is_banned(self, worker: StageWorker) -> bool:
        """Whether it gets no work now."""
        return self._bans.is_banned(worker.key, self._clock())

    def workers(self) -> tuple[StageWorker, ...]:
        """All that are announced."""
        return tuple(self._workers.values())

    def waits(self) -> dict[str, tuple[float, int]]:
        """See `Balancer.waits`."""
        return self._balancer.waits()

    def usable(self) -> tuple[StageWorker, ...]:
        """Those that are not banned."""
        now = self._clock()
        return tuple(worker for key, worker in self._workers.items() if not self._bans.is_banned(key, now))

    def to_be_asked(self) -> tuple[StageWorker, ...]:
        """Where all of the stage are banned: those that are so for silence only, and may answer by now."""
        if not self.is_stalled:
            return ()
        now = self._clock()
        return tuple(worker for key, worker in self._workers.items() if self._bans.may_be_asked(key, now))

    def answers(self, worker: StageWorker) -> None:
        """It was asked how it is doing, and has answered."""
        now = self._clock()
        was_banned = self._bans.is_banned(worker.key, now)
        self._bans.answers(worker.key, now)
        if was_banned and not self._bans.is_banned(worker.key, now):
            logger.info("%s answers again, and its stage has nobody else: it gets work", worker)
            self._wake()

    @property
    def is_stalled(self) -> bool:
        """Whether there is nobody to send to: no worker, or all of them banned."""
        now = self._clock()
        return all(self._bans.is_banned(key, now) for key in self._workers)

    # -- granting ------------------------------------------------------------------------------------------------------

    async def acquire(self, units: float, *, avoid: Collection[str], left_s: Callable[[], float]) -> Placement | None:
        """The worker that gets a micro-batch; waits for one.

        Args:
            units: work it is expected to be.
            avoid: keys of workers that had it and failed; taken all the same where there are no others.
            left_s: seconds it may still be sent; asked again and again, since leases are renewed.

        Returns:
            None: it may be sent no longer.
        """
        while (limit_s := left_s()) > 0:
            now = self._clock()
            self._note_stall(now)
            placement = self._chosen(units, avoid, now)
            if placement is not None:
                return placement
            await self._wait(min(limit_s, self._next_change_s(now)))
        return None

    def measured(self, placement: Placement, units: float, asked_s: float) -> None:
        """A request of it was answered just now."""
        self._balancer.measured(placement.grant, units, asked_s, self._clock())
        self._bans.succeeded(placement.worker.key)
        self._busy_in_a_row.pop(placement.worker.key, None)

    def counted(self, placement: Placement) -> None:
        """What was answered well was a request to count."""
        self._has_counted(placement.worker)

    def told(self, placement: Placement, units: float, took_s: float) -> None:
        """It was counted, and is taken to have used so much of its worker's time."""
        self._balancer.told(placement.grant, units, took_s)
        self._has_counted(placement.worker)
        self._busy_in_a_row.pop(placement.worker.key, None)

    def estimate_s(self, placement: Placement, units: float) -> float:
        """How long its worker takes for so much work, by what is known."""
        return self._balancer.estimate_s(placement.worker.key, units)

    def done(self, placement: Placement) -> None:
        """All of its requests were answered."""
        if placement.grant.open:
            self._balancer.done(placement.grant)
            self._wake()

    def recovered(self, placement: Placement) -> None:
        """It was counted after all: the worker is banned no longer; what it took says nothing of its speed."""
        self._has_counted(placement.worker)
        if placement.grant.open:
            self._balancer.failed(placement.grant, self._clock())
        self._wake()

    def released(self, placement: Placement) -> None:
        """It was asked for nothing, or has been asked in vain through no fault of its own."""
        if placement.grant.open:
            self._balancer.released(placement.grant)
            self._wake()

    def resumed(self, placement: Placement) -> None:
        """It was released while another stage was waited for, and its worker goes on with it now."""
        self._balancer.resume(placement.grant, self._clock())

    def failed(self, placement: Placement, verdict: Verdict, asked_s: float) -> None:
        """A request of it failed, and it is not asked again."""
        self.blame(placement.worker, verdict, asked_s)
        if not placement.grant.open:
            return
        if verdict.blame in ("rest", "leave"):
            self._balancer.released(placement.grant)
        else:
            self._balancer.failed(placement.grant, self._clock())
        self._wake()

    def blame(self, worker: StageWorker, verdict: Verdict, asked_s: float) -> None:
        """Draws the consequences of a failed request for whoever is sent there next.

        Args:
            worker: who failed.
            verdict: how.
            asked_s: when the request was sent.
        """
        key, now = worker.key, self._clock()
        if verdict.blame == "rest":
            times = self._busy_in_a_row[key] = self._busy_in_a_row.get(key, 0) + 1
            self._balancer.rest(key, now + min(_MAX_REST_S, _REST_S * 2.0 ** min(times - 1, 8)))
        elif verdict.blame == "leave":
            self._balancer.rest(key, now + _LEAVE_S)
        elif verdict.blame in ("doubt", "ban", "firm-ban"):
            was_banned = self._bans.is_banned(key, now)
            if verdict.blame == "ban":
                until_s = self._bans.failed(key, asked_s=asked_s, now=now, is_silent=verdict.reason in _SILENT)
            else:
                doubts = DOUBTS if verdict.blame == "firm-ban" else 1
                until_s = self._bans.doubted(key, asked_s=asked_s, now=now, doubts=doubts)
            if until_s > now:
                self._blamed[key] = worker.incarnation
            if not was_banned and until_s > now:
                logger.warning("%s: no work for %.0f s (%s)", worker, until_s - now, verdict.reason)
        elif verdict.blame == "long-ban":
            was_caught = self._bans.is_caught(key, now)
            until_s = self._bans.malformed(key, now=now)
            if not was_caught:
                logger.error("%s answers what no honest worker answers: no work for %.0f s", worker, until_s - now)
        if verdict.blame in ("ban", "firm-ban", "long-ban"):
            self._balancer.distrust(key)
            if key not in self._have_counted:
                self._host_bans.failed(_host(worker), asked_s=asked_s, now=now)
        self._wake()

    def status(self) -> StageStatus:
        """For those who watch."""
        now = self._clock()
        names = {key: worker.uid for key, worker in self._workers.items()}
        since_s = self._stalled_since_s
        stalled_s = 0.0 if since_s is None else now - since_s
        return StageStatus(self.stage, self._balancer.loads(), names, self._bans.banned(now), stalled_s)

    @property
    def stalled_s(self) -> float:
        """Seconds in all that something waited here for a stage with nobody in it."""
        return self._stalled_s + (0.0 if self._stalled_since_s is None else self._clock() - self._stalled_since_s)

    # -- inside --------------------------------------------------------------------------------------------------------

    def _chosen(self, units: float, avoid: Collection[str], now: float) -> Placement | None:
        """The next one that did not have it; where there is none of these, one that had it."""
        free = {key for key in self._workers if not self._bans.is_banned(key, now)}
        others = free - set(avoid)
        allowed = {key for key in others if not self._shares_a_ban(key, now)} or others or free
        grant = self._balancer.acquire(units, now, lambda key: key not in allowed)
        return None if grant is None else Placement(self._workers[grant.worker], grant)

    def _has_counted(self, worker: StageWorker) -> None:
        self._bans.counted(worker.key)
        self._host_bans.counted(_host(worker))
        self._have_counted.add(worker.key)

    def _shares_a_ban(self, key: str, now: float) -> bool:
        return key not in self._have_counted and self._host_bans.is_banned(self._hosts[key], now)

    def _next_change_s(self, now: float) -> float:
        """Seconds until something changes of which nobody tells: a ban or a rest ends."""
        ends = [self._bans.until_s(key) for key in self._workers]
        ends += [self._host_bans.until_s(host) for host in set(self._hosts.values())]
        rested_s = self._balancer.next_rested_s(now)
        if rested_s is not None:
            ends.append(rested_s)
        return max(0.001, min([1.0, *(end - now for end in ends if end > now)]))

    def _note_stall(self, now: float) -> None:
        if not self.is_stalled:
            self._end_stall(now)
            return
        if self._stalled_since_s is None:
            self._stalled_since_s = now
        if now - self._said_stalled_s >= _SAY_STALLED_S:
            self._said_stalled_s = now
            banned = ", ".join(f"{self._workers[key].uid} ({left_s:.0f} s)" for key, left_s in self._banned_here(now))
            why = f" (banned: {banned})" if banned else ""
            logger.warning("stage %s has no worker to send to%s; everything waits for one", self.stage, why)

    def _banned_here(self, now: float) -> list[tuple[str, float]]:
        return [(key, left_s) for key, left_s in self._bans.banned(now).items() if key in self._workers]

    def _end_stall(self, now: float) -> None:
        if self._stalled_since_s is not None:
            self._stalled_s += now - self._stalled_since_s
            self._stalled_since_s = None
            self._said_stalled_s = float("-inf")
            logger.info("stage %s has a worker again", self.stage)

    async def _wait(self, timeout_s: float) -> None:
        changed = self._changed
        try:
            async with asyncio.timeout(timeout_s):
                await changed.wait()
        except TimeoutError:
            return

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


def _host(worker: StageWorker) -> str:
    return address_group(split_address(worker.peer.address)[0])

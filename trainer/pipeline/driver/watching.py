"""What a driver learns by asking workers for their status: who is silent, and who has taken a step.

A worker that is stopped or cut off fails only when a request times out, after a minute by default. So one that has
given no answer for `_ASK_AFTER_S` is asked for its status, which a live one answers within milliseconds however much it
has to compute. Where all workers of a stage are banned, those banned for silence are asked too.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass

from trainer.errors import PeerUnavailableError, RpcError
from trainer.network.rpc import Endpoint
from trainer.pipeline.driver.pool import StagePool
from trainer.pipeline.driver.workers import StageWorker
from trainer.pipeline.worker.status import STATUS, StatusAnswer, StatusAsk

logger = logging.getLogger(__name__)

_POLL_S = 0.01
_MAX_POLL_S = 0.5
_ASK_AFTER_S = 5.0
_ANSWER_S = 3.0


@dataclass(eq=False, repr=False)
class StallDetector:
    """Watches the workers of all stages: asks those quiet for half of ``name_after_s``, and names them after it."""

    endpoint: Endpoint
    pools: Mapping[str, StagePool]
    clock: Callable[[], float] = time.monotonic
    _: KW_ONLY
    name_after_s: float = 10.0
    look_s: float = 1.0

    def __post_init__(self) -> None:
        self._heard_s: dict[str, float] = {}  # When workers last answered a request for their status, by key.
        self._silent: dict[str, tuple[StageWorker, float]] = {}
        """Workers that were named, and since when nothing came from them, by key."""

    async def watch(self) -> None:
        """Looks again and again, until it is cancelled."""
        while True:
            try:
                await self.look()
            except Exception:  # The driver's work does not depend on it.
                logger.exception("the stall detector failed, and tries again")
            await asyncio.sleep(self.look_s)

    async def look(self) -> None:
        """Asks workers that have been quiet for a while, and logs what has changed."""
        there = {worker.key: (pool, worker) for pool in self.pools.values() for worker in pool.workers()}
        for key in self._silent.keys() - there.keys():  # They are no longer announced.
            worker, since_s = self._silent.pop(key)
            logger.warning("%s is gone: nothing came from it for %.0f s", worker.uid, self.clock() - since_s)
        self._heard_s = {key: heard_s for key, heard_s in self._heard_s.items() if key in there}
        waits = {
            key: (max(since_s, self._heard_s.get(key, since_s)), num_waiting)
            for pool in self.pools.values()
            for key, (since_s, num_waiting) in pool.balancer.waits().items()
            if key in there
        }
        now, quiet_s = self.clock(), min(_ASK_AFTER_S, self.name_after_s / 2)
        quiet = [key for key, (since_s, _) in waits.items() if now - since_s >= quiet_s]
        banned = [worker.key for pool in self.pools.values() for worker in pool.to_be_asked()]
        asked = list(dict.fromkeys([*quiet, *self._silent, *banned]))
        answers = await asyncio.gather(*(self._answers(there[key][1]) for key in asked))
        for key, answered in zip(asked, answers, strict=True):
            pool, worker = there[key]
            now = self.clock()
            if answered:
                self._heard_s[key] = now
                if key in self._silent:
                    logger.warning("%s answers again, after %.0f s", worker.uid, now - self._silent.pop(key)[1])
                if key in banned:
                    pool.answers(worker)
            elif key in waits and key not in self._silent:
                since_s, num_waiting = waits[key]
                if now - since_s >= self.name_after_s:
                    self._silent[key] = (worker, since_s)
                    text = "%s has not answered for %.0f s; micro-batches wait for it (%d)"
                    logger.warning(text, worker.uid, now - since_s, num_waiting)

    def silent(self) -> dict[str, float]:
        """Returns the seconds without an answer of the workers that were named, by key."""
        now = self.clock()
        return {key: now - since_s for key, (_, since_s) in self._silent.items()}

    async def _answers(self, worker: StageWorker) -> bool:
        """Whether anything comes back; a refusal is an answer too."""
        try:
            await self.endpoint.call(worker.unpinned().peer, STATUS, StatusAsk(), StatusAnswer, timeout_s=_ANSWER_S)
        except RpcError as error:
            return not isinstance(error, PeerUnavailableError)
        return True


@dataclass(eq=False, repr=False)
class StepBarrier:
    """Synchronous driving: nothing of a step is sent before every stage has taken the step before.

    So losses and gradients are those of one process, step by step; it costs the latency of the whole pipeline per step.
    """

    endpoint: Endpoint
    pools: Mapping[str, StagePool]
    timeout_s: float

    def __post_init__(self) -> None:
        self.begun_tokens = 0  # Of the current step: sent, and not lost.
        self._before: dict[StageWorker, int] = {}

    @property
    def is_ready(self) -> bool:
        """Whether the versions that the step begins with are known."""
        return bool(self._before)

    async def prepare(self) -> None:
        """Asks the workers for their versions, once every stage has a worker."""
        while not all(pool.usable() for pool in self.pools.values()):
            await asyncio.sleep(_MAX_POLL_S / 10)
        workers = self._workers()
        versions = await asyncio.gather(*map(self._version, workers))
        self._before = {worker: found for worker, found in zip(workers, versions, strict=True) if found is not None}
        if not self._before:
            await asyncio.sleep(_MAX_POLL_S)

    async def passed(self) -> None:
        """Waits until all workers have taken the step, but for banned ones; logs those that do not.

        A stage's version is that of its foremost worker: one that took the step before late, or was not known when this
        one began, has not taken this one by that.
        """
        before: dict[str, int] = {}
        for worker, version in self._before.items():
            before[worker.stage] = max(version, before.get(worker.stage, version))
        usable = [worker for worker in self._workers() if worker.stage in before]
        await asyncio.gather(*(self._step_taken(worker, before[worker.stage]) for worker in usable))
        self.begun_tokens = 0
        self._before = {}

    def _workers(self) -> list[StageWorker]:
        return [worker for pool in self.pools.values() for worker in pool.usable()]

    async def _step_taken(self, worker: StageWorker, before: int) -> None:
        deadline_s, pause_s = time.monotonic() + self.timeout_s, _POLL_S
        while time.monotonic() < deadline_s and (found := await self._version(worker)) is not None:
            if found > before:
                return
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _MAX_POLL_S)
        logger.warning("%s has not taken the step within %.0f s; going on", worker, self.timeout_s)

    async def _version(self, worker: StageWorker) -> int | None:
        """Returns the version of a worker's weights; None if it does not answer."""
        try:
            reply = await self.endpoint.call(worker.peer, STATUS, StatusAsk(), StatusAnswer, timeout_s=self.timeout_s)
        except RpcError:
            return None
        return reply.body.version

"""Optimizer steps as a driver sees them: the loss of each, and the barrier between them in synchronous runs."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass

from trainer.errors import RpcError
from trainer.network.rpc import Endpoint
from trainer.pipeline.driver.config import DriverConfig
from trainer.pipeline.driver.pool import StagePool
from trainer.pipeline.driver.workers import StageWorker
from trainer.pipeline.worker.status import STATUS, StatusAnswer, StatusAsk

__all__ = ["StepBarrier", "StepLoss"]

logger = logging.getLogger(__name__)

_POLL_S = 0.01
_MAX_POLL_S = 0.5


@dataclass(frozen=True, slots=True)
class StepLoss:
    """The loss of one step."""

    step: int
    """How many steps this driver had seen before."""
    loss: float
    """Mean over the labels that count."""
    num_tokens: int
    micro_batches: int


class StepBarrier:
    """Synchronous driving: nothing of a step is sent before every stage has taken the step before.

    So each micro-batch sees the weights that it would see in one process, and losses and gradients are the same, step
    by step. It costs the latency of the whole pipeline per step; it serves comparisons rather than training.
    """

    def __init__(self, endpoint: Endpoint, pools: Mapping[str, StagePool], config: DriverConfig) -> None:
        self.begun_tokens = 0
        """Of the current step: sent, and not lost."""
        self._endpoint = endpoint
        self._pools = pools
        self._timeout_s = config.request_timeout_s
        self._before: dict[StageWorker, int] = {}

    @property
    def is_ready(self) -> bool:
        """Whether the versions that the step begins with are known."""
        return bool(self._before)

    async def prepare(self) -> None:
        """Asks the workers for their versions, once every stage has a worker."""
        while not all(pool.usable() for pool in self._pools.values()):
            await asyncio.sleep(_MAX_POLL_S / 10)
        workers = self._workers()
        versions = await asyncio.gather(*map(self._version, workers))
        self._before = {worker: found for worker, found in zip(workers, versions, strict=True) if found is not None}
        if not self._before:
            await asyncio.sleep(_MAX_POLL_S)

    async def passed(self) -> None:
        """Waits until all workers that began the step have taken it; logs those that take over `request_timeout_s`.

        A banned worker is not waited for: it gets nothing of the next step either.
        """
        usable = set(self._workers())
        await asyncio.gather(*(self._step_taken(*each) for each in self._before.items() if each[0] in usable))
        self.begun_tokens = 0
        self._before = {}

    def _workers(self) -> list[StageWorker]:
        return [worker for pool in self._pools.values() for worker in pool.usable()]

    async def _step_taken(self, worker: StageWorker, before: int) -> None:
        deadline_s, pause_s = time.monotonic() + self._timeout_s, _POLL_S
        while time.monotonic() < deadline_s and (found := await self._version(worker)) is not None:
            if found > before:
                return
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _MAX_POLL_S)
        logger.warning("%s has not taken the step within %.0f s; going on", worker, self._timeout_s)

    async def _version(self, worker: StageWorker) -> int | None:
        """Returns the version of a worker's weights; None if it does not answer."""
        try:
            reply = await self._endpoint.call(worker.peer, STATUS, StatusAsk(), StatusAnswer, timeout_s=self._timeout_s)
        except RpcError:
            return None
        return reply.body.version

"""Synchronous driving: nothing of a step is sent before every stage has taken the step before.

Then each micro-batch sees the weights that it would see in one process, and losses and gradients are the same, step by
step. It costs a pipeline's whole length a step, and is for comparisons rather than for training.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping

from trainer.errors import RpcError
from trainer.network.rpc import Endpoint
from trainer.pipeline.driver.config import DriverConfig
from trainer.pipeline.driver.pool import StagePool
from trainer.pipeline.driver.workers import StageWorker
from trainer.pipeline.worker.status import STATUS, StatusAnswer, StatusAsk

__all__ = ["StepBarrier"]

logger = logging.getLogger(__name__)

_POLL_S = 0.01
_MAX_POLL_S = 0.5


class StepBarrier:
    """Knows what weights a step begins with, and waits for those after it.

    Args:
        endpoint: asks workers how far they are.
        pools: of the stages.
        config: of the driver.
    """

    def __init__(self, endpoint: Endpoint, pools: Mapping[str, StagePool], config: DriverConfig) -> None:
        self.begun_tokens = 0
        """Of the step under way: sent, and not lost."""
        self._endpoint = endpoint
        self._pools = pools
        self._timeout_s = config.request_timeout_s
        self._before: dict[StageWorker, int] = {}

    @property
    def is_ready(self) -> bool:
        """Whether it is known what weights the step begins with."""
        return bool(self._before)

    async def prepare(self) -> None:
        """Asks the workers what weights they have; waits until every stage has one."""
        while not all(pool.usable() for pool in self._pools.values()):
            await asyncio.sleep(_MAX_POLL_S / 10)
        workers = self._workers()
        versions = await asyncio.gather(*map(self._version, workers))
        self._before = {worker: found for worker, found in zip(workers, versions, strict=True) if found is not None}
        if not self._before:
            await asyncio.sleep(_MAX_POLL_S)

    async def passed(self) -> None:
        """Waits until all who began the step have taken it; `request_timeout_s` at most, and then says who has not.

        A worker that is banned is not waited for: it gets nothing of the next step either.
        """
        usable = set(self._workers())
        awaited = [self._has_stepped(worker, was + 1) for worker, was in self._before.items() if worker in usable]
        for behind in filter(None, await asyncio.gather(*awaited)):
            logger.warning("%s has not taken the step within %.0f s; going on", behind, self._timeout_s)
        self.begun_tokens = 0
        self._before = {}

    def _workers(self) -> list[StageWorker]:
        return [worker for pool in self._pools.values() for worker in pool.usable()]

    async def _has_stepped(self, worker: StageWorker, version: int) -> StageWorker | None:
        """Returns the worker if it did not."""
        deadline_s, pause_s = time.monotonic() + self._timeout_s, _POLL_S
        while time.monotonic() < deadline_s:
            found = await self._version(worker)
            if found is None or found >= version:
                return worker if found is None else None
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _MAX_POLL_S)
        return worker

    async def _version(self, worker: StageWorker) -> int | None:
        """Steps behind its weights; None: it does not say."""
        try:
            reply = await self._endpoint.call(worker.peer, STATUS, StatusAsk(), StatusAnswer, timeout_s=self._timeout_s)
        except RpcError:
            return None
        return reply.body.version

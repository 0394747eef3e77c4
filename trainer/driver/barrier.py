"""Synchronous driving: nothing of a step is sent before every stage has taken the step before.

Then each micro-batch sees the weights that it would see in one process, and losses and gradients are the same, step by
step. It costs a pipeline's whole length a step, and is for comparisons rather than for training.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping

from trainer.driver.config import DriverConfig
from trainer.driver.pool import StagePool
from trainer.driver.results import MicroBatchResult
from trainer.driver.workers import StageWorker
from trainer.errors import RpcError
from trainer.rpc import Endpoint
from trainer.worker.status import STATUS, StatusAnswer, StatusAsk

__all__ = ["StepBarrier"]

logger = logging.getLogger(__name__)

_POLL_S = 0.01
_MAX_POLL_S = 0.5


class StepBarrier:
    """Knows what a step was computed with, and waits for the weights after it.

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
        self._versions: dict[str, int] = {}

    def done(self, result: MicroBatchResult) -> None:
        """A micro-batch of the step is counted."""
        for hop in result.hops:
            self._versions[hop.stage] = max(hop.version, self._versions.get(hop.stage, 0))

    async def passed(self) -> None:
        """Waits until all workers have taken the step; not longer than a request may take, and then says who has not.

        A worker that is banned is not waited for: it gets nothing of the next step either.
        """
        awaited = [
            self._has_stepped(worker, self._versions[stage] + 1)
            for stage, pool in self._pools.items()
            if stage in self._versions
            for worker in pool.usable()
        ]
        for behind in filter(None, await asyncio.gather(*awaited)):
            logger.warning("%s has not taken the step within %.0f s; going on", behind, self._timeout_s)
        self.begun_tokens = 0
        self._versions.clear()

    async def _has_stepped(self, worker: StageWorker, version: int) -> StageWorker | None:
        """Returns the worker if it did not."""
        deadline_s, pause_s = time.monotonic() + self._timeout_s, _POLL_S
        while (left_s := deadline_s - time.monotonic()) > 0:
            try:
                reply = await self._endpoint.call(worker.peer, STATUS, StatusAsk(), StatusAnswer, timeout_s=left_s)
            except RpcError:
                return worker
            if reply.body.version >= version:
                return None
            await asyncio.sleep(min(pause_s, left_s))
            pause_s = min(2 * pause_s, _MAX_POLL_S)
        return worker

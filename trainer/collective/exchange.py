"""One pass as a member goes through it: it reduces its own task, and trades parts for results with all other reducers.

All streams run at once. A reducer that does not deliver costs the member that task and nothing else: the vote says what
is missing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from trainer.collective.arithmetic import Arithmetic
from trainer.collective.messages import ExchangeOpen, Plan, Task
from trainer.collective.reduction import Reduction
from trainer.collective.results import HeldResults, TaskResult
from trainer.errors import CodecError, PeerUnavailableError, RpcError
from trainer.network.rpc import Endpoint, Peer, Stream
from trainer.network.rpc.boundary import peer_boundary

__all__ = ["EXCHANGE", "Exchange", "PassOutcome"]

logger = logging.getLogger(__name__)

EXCHANGE = "round/exchange"


@dataclass(slots=True)
class PassOutcome:
    """What a member saw in a pass."""

    failed: dict[str, str] = field(default_factory=dict)
    """Reducers that did not deliver, and why."""


class Exchange:
    """One pass.

    Args:
        plan: who reduces what.
        arithmetic: of the round.
        endpoint: to the others.
        peers: how to reach them.
        results: where results go.
        reductions: this node's own tasks in this pass, by key.
        stall_timeout_s: silence after which a reducer is given up.
        timeout_s: how long the pass may take.
    """

    def __init__(
        self,
        plan: Plan,
        arithmetic: Arithmetic,
        endpoint: Endpoint,
        peers: Mapping[str, Peer],
        results: HeldResults,
        reductions: Mapping[str, Reduction],
        *,
        stall_timeout_s: float,
        timeout_s: float,
    ) -> None:
        self._plan = plan
        self._plan_digest = plan.fingerprint()
        self._arithmetic = arithmetic
        self._endpoint = endpoint
        self._peers = peers
        self._results = results
        self._reductions = reductions
        self._stall_timeout_s = stall_timeout_s
        self._timeout_s = timeout_s

    async def run(self) -> PassOutcome:
        """Goes through the pass; what fails is in the outcome."""
        outcome = PassOutcome()
        async with asyncio.TaskGroup() as group:
            for task in self._plan.fresh:
                result = self._results.begin(task)
                if task.key in self._reductions:
                    group.create_task(self._own(self._reductions[task.key], result))
                else:
                    group.create_task(self._trade(task, result, outcome))
        return outcome

    async def _own(self, reduction: Reduction, result: TaskResult) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(reduction.run())
            for part in reduction.parts:
                result.add(part, await reduction.result(part))

    async def _trade(self, task: Task, result: TaskResult, outcome: PassOutcome) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._trade_parts(task, result)
        except (RpcError, CodecError, TimeoutError) as error:
            if isinstance(error, PeerUnavailableError):
                for reduction in self._reductions.values():
                    await reduction.lose(task.reducer, str(error)[:200])
            outcome.failed[task.reducer] = str(error)[:200] or type(error).__name__
            logger.info("round: reducer %s did not deliver: %s", task.reducer[:8], outcome.failed[task.reducer])

    async def _trade_parts(self, task: Task, result: TaskResult) -> None:
        opening = ExchangeOpen(plan=self._plan_digest, agreement=self._plan.agreement, task=task.key)
        async with self._endpoint.open_stream(
            self._peers[task.reducer],
            EXCHANGE,
            opening,
            timeout_s=self._timeout_s,
            stall_timeout_s=self._stall_timeout_s,
        ) as stream:
            sending = asyncio.create_task(self._send_parts(task, stream))
            try:
                await self._receive_results(task, stream, result)
            finally:
                sending.cancel()
                with suppress(asyncio.CancelledError, RpcError):
                    await sending

    async def _send_parts(self, task: Task, stream: Stream) -> None:
        for part in range(task.first_part, task.last_part):
            await stream.send(part, await asyncio.to_thread(self._arithmetic.encode_own, part))
        await stream.end()

    async def _receive_results(self, task: Task, stream: Stream, result: TaskResult) -> None:
        while not result.complete:
            frame = await stream.receive()
            if frame is None:
                raise CodecError(f"task {task.key}: the results ended before all parts had come")
            with peer_boundary(f"reducer {task.reducer[:8]}"):
                await asyncio.to_thread(result.add, frame.index, frame.payload)

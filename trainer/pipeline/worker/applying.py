"""`Applying`: requests whose effect must be had once, as tasks that outlive the connections they came by.

The first request for a micro-batch starts a task; those that follow wait for the same. A task whose last caller has
gone is ended, unless the micro-batch is being counted by then; its answer is kept for whoever asks again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeAlias

from trainer.errors import PipelineError, RefusedError
from trainer.pipeline.protocol import messages
from trainer.pipeline.protocol.tensors import TensorAnswer, size_bytes_of
from trainer.pipeline.worker.link import refusal_of
from trainer.pipeline.worker.replies import Known, ReplyCache, Slot

__all__ = ["Applying", "StageReplies", "StageReply"]

StageReply: TypeAlias = TensorAnswer[messages.StageAnswer]
StageReplies: TypeAlias = ReplyCache[StageReply]

_OWN_FAULTS = frozenset({"malformed", "nonfinite", "no-input", "stale", "busy", "expired"})
"""What may be wrong with one request and not with the next for the same micro-batch."""
_MAX_TURNS = 4


class Applying:
    """Runs them. For the event loop alone.

    Args:
        replies: what is counted.
    """

    def __init__(self, replies: StageReplies) -> None:
        self._replies = replies
        self._tasks: dict[Slot, asyncio.Task[StageReply]] = {}

    async def once(
        self, kind: str, key: str, owner: str, apply_before_s: float, work: Callable[[Slot], Awaitable[StageReply]]
    ) -> StageReply:
        """Has a micro-batch counted, or gives the answer from when it was.

        Args:
            kind: of the request.
            key: of the micro-batch.
            owner: the driver whose it is.
            apply_before_s: on the cache's clock.
            work: has it counted, and makes the answer; called if nobody else is at it.

        Raises:
            RefusedError: it was not counted, or the answer is gone.
        """
        for _ in range(_MAX_TURNS):
            found = self._replies.begin(kind, key, apply_before_s, owner=owner)
            if isinstance(found, Known):
                return found.reply
            task = self._tasks.get(found)
            is_first = task is None
            if task is None:
                task = asyncio.get_running_loop().create_task(self._carry_out(found, work))
                self._tasks[found] = task
                task.add_done_callback(partial(self._over, found))
            try:
                return await self._wait(found, task, apply_before_s)
            except RefusedError as error:
                # What others sent under this name, or their time, may be at fault: this request gets its own try.
                if is_first or error.reason not in _OWN_FAULTS:
                    raise
        raise RefusedError("busy", f"{key} is asked for by too many at once; try again")

    async def _wait(self, slot: Slot, task: asyncio.Task[StageReply], apply_before_s: float) -> StageReply:
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if self._replies.leave(slot, apply_before_s):
                task.cancel()
            raise

    async def _carry_out(self, slot: Slot, work: Callable[[Slot], Awaitable[StageReply]]) -> StageReply:
        try:
            reply = await work(slot)
            self._replies.settle(slot, reply, size_bytes_of(reply.tensors))
        except PipelineError as error:
            raise refusal_of(error) from error
        else:
            return reply
        finally:
            self._replies.fail(slot)

    def _over(self, slot: Slot, task: asyncio.Task[StageReply]) -> None:
        """Also of a task that was cancelled before it began, and of one whose callers have all gone."""
        del self._tasks[slot]
        self._replies.fail(slot)
        if not task.cancelled():
            task.exception()

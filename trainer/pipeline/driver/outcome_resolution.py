"""Resolves the outcome of a request whose answer did not come, by asking the worker that may have counted it.

The same request is sent again: a worker answers a repetition as it answered the first time, and counts nothing twice.
A process that took its place in the meantime counts it itself, what the other had counted having died with it. Where
the repetition is refused, or after `patience_s`, the worker is asked whether it has counted the micro-batch, and
told not to count it any more: whoever answers that under the worker's key is the only process that could.

    counted, with the answer ── as if nothing had happened
    counted, answer gone ────── lost: nobody knows its gradient any more
    not counted, or gone ────── another worker may do it
    unclear ─────────────────── lost, or left to the ledger server where the lease is over
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Literal

from trainer.errors import MalformedAnswerError, PeerUnavailableError, RefusedError, RpcError
from trainer.pipeline.driver.asking import Answered, StageCaller
from trainer.pipeline.driver.failure_detector import Deaths
from trainer.pipeline.driver.results import verdict_of
from trainer.pipeline.driver.workers import StageWorker
from trainer.pipeline.protocol.work import MicroBatch, boottime_s

__all__ = ["Cleared", "OutcomeResolution", "patience_s"]

Asking = Callable[[StageWorker], Awaitable[Answered]]

_FIRST_PAUSE_S = 0.05
_MAX_PAUSE_S = 2.0
_QUESTION_S = 5.0
_PATIENCE_S = 15.0


@dataclass(frozen=True, slots=True)
class Cleared:
    """What is known now."""

    fate: Literal["answered", "answer-gone", "not-counted", "gone", "unclear"]
    answered: Answered | None = None


def patience_s(unclear_s: float) -> float:
    """Seconds for which a request is only sent again, before the worker is told not to count it any more."""
    return min(_PATIENCE_S, unclear_s / 2)


class OutcomeResolution:
    """Asks until it is clear.

    Args:
        caller: sends the questions.
        deaths: knows whether a worker is gone for good.
        unclear_s: how long to go on.
    """

    def __init__(self, caller: StageCaller, deaths: Deaths, unclear_s: float) -> None:
        self._caller = caller
        self._deaths = deaths
        self._unclear_s = unclear_s

    async def clear(self, worker: StageWorker, micro_batch: MicroBatch, ask: Asking) -> Cleared:
        """Finds out.

        Args:
            worker: who may have counted it.
            micro_batch: which.
            ask: sends the same request again.
        """
        begun_s, pause_s, is_counted = time.monotonic(), _FIRST_PAUSE_S, False
        while (left_s := self._left_s(micro_batch, begun_s)) > 0:
            try:
                async with asyncio.timeout(left_s):
                    return Cleared("answered", await ask(worker))
            except (RpcError, TimeoutError) as failure:
                error = failure
                may_come = _may_come(error)
                is_silent = isinstance(error, PeerUnavailableError | TimeoutError)
            if is_silent and await self._deaths.found(worker, min(_QUESTION_S, left_s)) == "gone":
                return Cleared("gone")
            if not may_come or not self._is_patient(micro_batch, begun_s):
                says = await self._is_counted(worker, micro_batch, begun_s)
                if says is False or (says is True and _is_gone_for_good(error)):
                    return Cleared("answer-gone" if says else "not-counted")
                is_counted = is_counted or says is True
            worker = worker.unpinned()
            await asyncio.sleep(min(pause_s, max(0.0, self._left_s(micro_batch, begun_s))))
            pause_s = min(2 * pause_s, _MAX_PAUSE_S)
        return Cleared("answer-gone" if is_counted else "unclear")

    async def _is_counted(self, worker: StageWorker, micro_batch: MicroBatch, begun_s: float) -> bool | None:
        """What it says of itself; None: nothing."""
        left_s = self._left_s(micro_batch, begun_s)
        if left_s <= 0:
            return None
        timeout_s = min(_QUESTION_S, left_s)
        try:
            said = await self._caller.applied(worker, micro_batch, refuse_from_now=True, timeout_s=timeout_s)
        except RpcError:
            return None
        return said.credit is not None

    def _is_patient(self, micro_batch: MicroBatch, begun_s: float) -> bool:
        limit_s = patience_s(self._unclear_s)
        return time.monotonic() - begun_s < limit_s <= micro_batch.send_before_s - boottime_s()

    def _left_s(self, micro_batch: MicroBatch, begun_s: float) -> float:
        left_s = self._unclear_s - (time.monotonic() - begun_s)
        return min(left_s, micro_batch.send_before_s - boottime_s())


def _is_gone_for_good(error: RpcError | TimeoutError) -> bool:
    """Whether an answer that was given once will not be given again, or not better."""
    return isinstance(error, MalformedAnswerError) or (
        isinstance(error, RefusedError) and error.reason in ("already-applied", "counted-for-another")
    )


def _may_come(error: RpcError | TimeoutError) -> bool:
    """Whether the same request may yet be answered there: nobody was heard, or it was told to come again."""
    if isinstance(error, PeerUnavailableError | TimeoutError):
        return True
    return verdict_of(error).blame == "rest"

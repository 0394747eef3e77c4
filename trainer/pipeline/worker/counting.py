"""`Counter`: the moment in which a micro-batch is counted, in the compute thread.

Between `ReplyCache.claim` and `ReplyCache.counted` there is nothing but adding up (some milliseconds). If time runs out
within them, or the adding fails halfway, the accumulators are not to be believed any more, and are dropped whole.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from trainer.errors import RefusedError
from trainer.pipeline.stage import StageReplica
from trainer.pipeline.worker.replies import Receipt, ReplyCache, Slot
from trainer.pipeline.worker.sharing import SharedThrough

__all__ = ["Counted", "Counter"]

logger = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")


@dataclass(frozen=True, slots=True)
class Counted(Generic[ResultT]):
    """A result whose gradient is counted."""

    result: ResultT
    receipt: Receipt


class Counter:
    """Counts, and forgets when it must. For the compute thread alone.

    Args:
        replica: whose accumulators they are.
        replies: what has been counted.
        shared: what of it would outlive the worker.
    """

    def __init__(self, replica: StageReplica, replies: ReplyCache, shared: SharedThrough) -> None:  # type: ignore[type-arg]
        self._replica = replica
        self._replies = replies
        self._shared = shared

    def count(self, slot: Slot, compute: Callable[[Callable[[], None]], ResultT]) -> Counted[ResultT]:
        """Computes a micro-batch's gradient and counts it.

        Args:
            slot: of the micro-batch.
            compute: gets what it must call right before it adds up.

        Raises:
            RefusedError: ``expired``, nothing was counted; ``tainted``, all is dropped.
            TrainerError: the computation's own; nothing was counted.
        """
        self._replies.check_wanted(slot)
        try:
            result = compute(lambda: self._replies.claim(slot))
        except BaseException:
            if self._replies.is_claimed(slot):
                self.forget("adding up failed")
            raise
        receipt = self._replies.counted(slot)
        if receipt is None:
            self.forget(f"{slot.key} was added up too late; was this process stopped?")
            raise RefusedError(
                "tainted", f"{slot.key} was counted too late: this worker drops all it had not stepped with"
            )
        return Counted(result, receipt)

    def forget(self, why: str) -> None:
        """What is accumulated is dropped, and this worker is another incarnation from now on."""
        dropped = self._replica.drop()
        self._shared.start_over()
        num_known = self._replies.taint()
        logger.warning(
            "%d micro-batches of %d tokens are dropped (%d of them acknowledged): %s",
            dropped.num_micro_batches,
            dropped.num_tokens,
            num_known,
            why,
        )

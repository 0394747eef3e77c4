"""Work that ends after so many tokens: what ``--max-steps`` means to a driver."""

from __future__ import annotations

from trainer.pipeline.work import MicroBatch, Settlement, Work

__all__ = ["BoundedWork"]


class BoundedWork:
    """Hands out another `Work`'s micro-batches until they have so many tokens.

    Args:
        work: the other.
        max_tokens: labels that count; 0: no bound.
    """

    def __init__(self, work: Work, max_tokens: int) -> None:
        self._work = work
        self._max_tokens = max_tokens
        self._num_tokens = 0

    async def next(self) -> MicroBatch | None:
        """See `trainer.pipeline.work.Work`."""
        if 0 < self._max_tokens <= self._num_tokens:
            return None
        micro_batch = await self._work.next()
        if micro_batch is not None:
            self._num_tokens += micro_batch.num_tokens
        return micro_batch

    def settle(self, settlement: Settlement) -> None:
        """See `trainer.pipeline.work.Work`."""
        if settlement.outcome == "lost":
            self._num_tokens -= settlement.num_tokens
        self._work.settle(settlement)

    def hand_back(self, micro_batch: MicroBatch) -> None:
        """See `trainer.pipeline.work.Work`."""
        self._num_tokens -= micro_batch.num_tokens
        self._work.hand_back(micro_batch)

"""`ChunkedCollective`: rounds whose vectors travel in chunk order, with a residual that decays (SparseLoCo).

    collective = with_chunk_order(peer_collective, lambda round_index: layout.shapes, decay=0.95)
    result = collective.reduce(contribution)          # as any collective, over a codec that is sparse

A vector of tensors has 64 × 64 blocks of a matrix scattered over it; the codec looks at runs of 4,096 values. This
reorders what goes out and what comes back (one core does some 500 million values a second), so that engines cut, encode
and reduce plain vectors, and the strategy keeps its state in the order of its tensors, in which a vocabulary can grow.
The residual is multiplied by ``decay`` on its way out: ``m = decay·e + Δ`` (arXiv 2508.15706). A round that fails
returns nothing, so the residual decays only where a round was committed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace

import torch
from torch import Tensor

from trainer.compression.sparse import ChunkOrder
from trainer.outer.engine.collective import Collective, Contribution, RoundResult
from trainer.outer.engine.daemon_call import start_daemon


class ChunkedCollective:
    """Another collective's rounds, in chunk order; the caller closes that one by closing this one.

    ``shapes`` returns those of the tensors that a round's vector consists of, by its number; they may grow.
    """

    def __init__(
        self, collective: Collective, shapes: Callable[[int], Sequence[Sequence[int]]], decay: float = 1.0
    ) -> None:
        self._collective = collective
        self._shapes = shapes
        self._decay = decay

    def reduce(self, contribution: Contribution) -> RoundResult:
        """Takes part in one round; see `trainer.outer.engine.collective.Collective`."""
        order = ChunkOrder.of(self._shapes(contribution.round_index))
        residual = contribution.residual
        vector, filled = self._vector(order, contribution)
        result = self._collective.reduce(
            replace(
                contribution,
                vector=vector,
                filled=filled,
                # Nothing of a sparse round is measured from the last result, which is as long as the vector.
                reference=torch.zeros(1).expand(order.num_values),
                residual=None if residual is None else order.chunked(residual).mul_(self._decay),
            )
        )
        return replace(
            result,
            vector=order.natural(result.vector),
            residual=None if result.residual is None else order.natural(result.residual),
        )

    def requested(self) -> bool:
        """See `trainer.outer.engine.collective.Collective`."""
        return self._collective.requested()

    def close(self) -> None:
        """See `trainer.outer.engine.collective.Collective`."""
        self._collective.close()

    @staticmethod
    def _vector(order: ChunkOrder, contribution: Contribution) -> tuple[Tensor, Future[None] | None]:
        if contribution.filled is None:
            return order.chunked(contribution.vector), None
        vector = torch.empty_like(contribution.vector)

        def fill() -> None:
            contribution.wait_until_filled()
            order.chunked(contribution.vector, out=vector)

        return vector, start_daemon(fill, "chunk-order")


def with_chunk_order(
    collective: Collective, shapes: Callable[[int], Sequence[Sequence[int]]], decay: float | None
) -> Collective:
    """Returns a collective whose vectors travel in chunk order; the same collective for None."""
    return collective if decay is None else ChunkedCollective(collective, shapes, decay)

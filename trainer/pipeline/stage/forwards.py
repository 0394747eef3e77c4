"""`Forwards`: forward passes, and the graphs that their backward passes find again or have made anew.

Cached or computed again: a graph is used where the weights are those of the forward pass and the input is the same;
both ways then give the same bits (on a CPU). Else the forward pass is run again from the input at the weights of now, a
third more compute.

Batches: several forward passes become one batch only where no graph is kept. Micro-batches come back one at a time, so
a common graph would have to be run again for each of them, which costs more than it saved. (On one CPU core rows of 512
tokens gain nothing by a batch, rows of 64 a third.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from trainer.errors import NonFiniteActivationError, PipelineError
from trainer.pipeline.stage.config import StageConfig
from trainer.pipeline.stage.graph_cache import CachedForward, GraphCache
from trainer.pipeline.stage.passes import StagePasses

__all__ = ["Forwards", "Graph"]

_Request = tuple[str, Tensor]
_Answer = Tensor | NonFiniteActivationError


@dataclass(frozen=True, slots=True, eq=False)
class Graph:
    """A forward pass to go back through, once."""

    leaf: Tensor
    y: Tensor
    recomputed: bool
    """It was made for this backward pass."""


class Forwards:
    """The forward passes of a stage.

    Args:
        passes: its arithmetic.
        config: whether graphs are kept, and how much.
    """

    def __init__(self, passes: StagePasses, config: StageConfig) -> None:
        self._passes = passes
        self._cache = GraphCache(config.max_cached_bytes)
        self._keeps_graphs = config.backward == "cached" and config.max_cached_bytes > 0
        self._changes = 0

    @property
    def size_bytes(self) -> int:
        """Kept for backward passes to come."""
        return self._cache.size_bytes

    def run(self, key: str, x: Tensor, version: int) -> Tensor:
        """Runs a micro-batch; see `StageReplica.forward`.

        Raises:
            NonFiniteActivationError: the output is not finite; nothing is kept.
        """
        leaf = self._passes.leaf(x)
        if not self._keeps_graphs:
            y = self._passes.output(leaf, key=key)
            self._cache.put(key, CachedForward(leaf, None, self._weights(), version, 0))
            return y
        y, graph_bytes = self._passes.graph(leaf, key=key)
        self._cache.put(key, CachedForward(leaf, y, self._weights(), version, graph_bytes))
        return y.detach()

    def run_many(self, requests: Sequence[_Request], version: int) -> list[_Answer]:
        """Runs several micro-batches; see `StageReplica.forward_many`."""
        if self._keeps_graphs:
            return [self._run_or_error(key, x, version) for key, x in requests]
        answers: dict[int, _Answer] = {}
        in_order = sorted(range(len(requests)), key=lambda index: requests[index][1].shape[1])
        for _, group in groupby(in_order, key=lambda index: requests[index][1].shape[1]):
            indices = list(group)
            batch = [requests[index] for index in indices]
            answers.update(zip(indices, self._run_batch(batch, version), strict=True))
        return [answers[index] for index in range(len(requests))]

    def graph(self, key: str, x: Tensor | None, grad_y: Tensor) -> Graph:
        """A graph of a micro-batch at the weights of now; what was kept of it is not kept any more.

        Args:
            key: as it was run under.
            x: its input; None: what was kept.
            grad_y: what it is wanted for.

        Raises:
            PipelineError: there is no input, or the gradient is of other rows or positions; nothing is forgotten.
            NonFiniteActivationError: the output is not finite.
        """
        kept = self._cache.get(key)
        given = None if x is None else self._passes.leaf(x)
        if kept is not None and given is not None and not torch.equal(given.detach(), kept.x.detach()):
            kept = None
        leaf = given if kept is None else kept.x
        if leaf is None:
            raise PipelineError(f"expected the input of {key}, found neither it nor a forward pass here; send it again")
        if grad_y.shape[:2] != leaf.shape[:2]:
            raise PipelineError(
                f"expected a gradient of {list(leaf.shape[:2])} rows and positions for {key}, found "
                f"{list(grad_y.shape)}; is it of another micro-batch?"
            )
        self._cache.take(key)
        if kept is not None and kept.y is not None and kept.weights == self._weights():
            return Graph(kept.x, kept.y, recomputed=False)
        leaf = self._passes.leaf(leaf)
        y, _ = self._passes.graph(leaf, key=key)
        return Graph(leaf, y, recomputed=True)

    def weights_changed(self) -> None:
        """Drops all graphs; inputs stay."""
        self._changes += 1
        self._cache.drop_graphs()

    def keep_versions(self, first: int, last: int) -> None:
        """Forgets forward passes of other versions."""
        self._cache.keep_versions(first, last)

    def forget(self, key: str) -> None:
        """Forgets one forward pass."""
        self._cache.take(key)

    def clear(self) -> None:
        """Forgets all."""
        self._cache.clear()

    def _weights(self) -> int:
        """Grows with every change of the weights: those that were told, and those in place, which torch counts."""
        return self._changes + sum(parameter._version for parameter in self._passes.parameters)

    def _run_or_error(self, key: str, x: Tensor, version: int) -> _Answer:
        try:
            return self.run(key, x, version)
        except NonFiniteActivationError as error:
            return error

    def _run_batch(self, requests: Sequence[_Request], version: int) -> Sequence[_Answer]:
        """One length, no graphs; a batch that is not finite is run one by one to find out whose fault it is."""
        if len(requests) == 1:
            return [self._run_or_error(*requests[0], version)]
        leaves = [self._passes.leaf(x) for _, x in requests]
        try:
            outputs = self._passes.output(torch.cat([leaf.detach() for leaf in leaves]), key=requests[0][0])
        except NonFiniteActivationError:
            return [self._run_or_error(key, x, version) for key, x in requests]
        for (key, _), leaf in zip(requests, leaves, strict=True):
            self._cache.put(key, CachedForward(leaf, None, self._weights(), version, 0))
        return torch.split(outputs, [leaf.shape[0] for leaf in leaves])

"""Forward passes, and the graphs that their backward passes find again or have computed again.

A kept graph is used while weights and input are those of its forward pass; cached and recomputed gradients then have
the same bits (on a CPU). Otherwise the forward pass is run again from the input with the current weights, which costs a
third more compute.

The cache is bounded by bytes. An entry is an input and, while it is of use, the output with its graph: some twenty
times the input a layer. Above the bound, whole entries are dropped: the oldest of the driver that holds most. That
driver sends the input again. So a driver that floods the cache drops its own entries, and those of a driver that died
go when others need the memory.

Several forward passes are computed as one batch only where no graph is kept. Micro-batches come back one at a time, so
a common graph would have to be run again for each of them, which costs more than the batch saves. (On one CPU core rows
of 512 tokens gain nothing by a batch, rows of 64 a third.)
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from trainer.errors import NonFiniteActivationError, PipelineError
from trainer.pipeline.stage.config import StageConfig
from trainer.pipeline.stage.passes import StagePasses

__all__ = ["ENTRY_BYTES", "CachedForward", "ForwardRunner", "GraphCache"]

ENTRY_BYTES = 2048
"""Of an entry's Python objects: names, tensors and nodes without their values."""

_Request = tuple[str, Tensor]
_Answer = Tensor | NonFiniteActivationError


@dataclass(frozen=True, slots=True, eq=False)
class CachedForward:
    """What is kept of one forward pass."""

    x: Tensor
    """The input, a leaf of the graph."""
    y: Tensor | None
    """The output with its graph; None: to be computed again."""
    weights: int
    """Counts changes of the weights; tells which ones the graph saw."""
    version: int
    """Of the stage, at the forward pass."""
    graph_bytes: int
    """Kept for the graph beside ``x``."""

    @property
    def size_bytes(self) -> int:
        """Bytes of the whole entry."""
        return ENTRY_BYTES + self.x.nbytes + self.graph_bytes

    def without_graph(self) -> CachedForward:
        """Returns the input alone, no longer part of a graph."""
        return replace(self, x=self.x.detach(), y=None, graph_bytes=0)


class GraphCache:
    """Forward passes by key, the oldest first. The part of a key after its first space names the owner.

    Args:
        max_bytes: of all entries.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._entries: OrderedDict[str, CachedForward] = OrderedDict()
        self._bytes_by_owner: Counter[str] = Counter()
        self.size_bytes = 0
        """Of all entries now."""

    def put(self, key: str, entry: CachedForward) -> None:
        """Keeps a forward pass in place of an earlier one of that key, and drops others to stay within the bound.

        Of an entry that alone exceeds the bound the input is kept, or nothing.
        """
        self.take(key)
        if entry.size_bytes > self._max_bytes:
            entry = entry.without_graph()
        if entry.size_bytes > self._max_bytes:
            return
        self._entries[key] = entry
        self._count(key, entry.size_bytes)
        while self.size_bytes > self._max_bytes:
            owner = max(self._bytes_by_owner, key=lambda name: self._bytes_by_owner[name])
            self.take(next(key for key in self._entries if _owner_of(key) == owner))

    def get(self, key: str) -> CachedForward | None:
        """Returns the entry under a key and keeps it."""
        return self._entries.get(key)

    def take(self, key: str) -> CachedForward | None:
        """Removes and returns the entry under a key."""
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._count(key, -entry.size_bytes)
        return entry

    def drop_graphs(self) -> None:
        """Drops all graphs and keeps the inputs."""
        for key, entry in self._entries.items():
            self._entries[key] = entry.without_graph()
            self._count(key, -entry.graph_bytes)

    def keep_versions(self, first: int, last: int) -> None:
        """Drops entries of versions outside ``first`` to ``last``."""
        for key in [key for key, entry in self._entries.items() if not first <= entry.version <= last]:
            self.take(key)

    def clear(self) -> None:
        """Drops everything."""
        self._entries.clear()
        self._bytes_by_owner.clear()
        self.size_bytes = 0

    def _count(self, key: str, size_bytes: int) -> None:
        self.size_bytes += size_bytes
        owner = _owner_of(key)
        self._bytes_by_owner[owner] += size_bytes
        if not self._bytes_by_owner[owner]:
            del self._bytes_by_owner[owner]


def _owner_of(key: str) -> str:
    return key.partition(" ")[2]


class ForwardRunner:
    """Runs a stage's forward passes and keeps what their backward passes need.

    Args:
        passes: the stage's arithmetic.
        config: whether graphs are kept, and how much.
    """

    def __init__(self, passes: StagePasses, config: StageConfig) -> None:
        self.cache = GraphCache(config.max_cached_bytes)
        self._passes = passes
        self._keeps_graphs = config.backward == "cached" and config.max_cached_bytes > 0
        self._num_changes = 0

    def run(self, key: str, x: Tensor, version: int) -> Tensor:
        """Runs one micro-batch; see `StageReplica.forward`.

        Raises:
            NonFiniteActivationError: the output is not finite; nothing is kept.
        """
        leaf = self._passes.leaf(x)
        if not self._keeps_graphs:
            y = self._passes.output(leaf, key=key)
            self.cache.put(key, CachedForward(leaf, None, self._weights(), version, 0))
            return y
        y, graph_bytes = self._passes.graph(leaf, key=key)
        self.cache.put(key, CachedForward(leaf, y, self._weights(), version, graph_bytes))
        return y.detach()

    def run_many(self, requests: Sequence[_Request], version: int) -> list[_Answer]:
        """Runs several micro-batches of one length; see `StageReplica.forward_many`."""
        if self._keeps_graphs or len(requests) < 2:
            return [self._run_or_error(key, x, version) for key, x in requests]
        leaves = [self._passes.leaf(x) for _, x in requests]
        try:
            outputs = self._passes.output(torch.cat([leaf.detach() for leaf in leaves]), key=requests[0][0])
        except NonFiniteActivationError:  # One by one, to find the culprit.
            return [self._run_or_error(key, x, version) for key, x in requests]
        for (key, _), leaf in zip(requests, leaves, strict=True):
            self.cache.put(key, CachedForward(leaf, None, self._weights(), version, 0))
        return list(torch.split(outputs, [leaf.shape[0] for leaf in leaves]))

    def graph(self, key: str, x: Tensor | None, grad_y: Tensor) -> tuple[Tensor, Tensor, bool]:
        """Returns a micro-batch's graph at the current weights, to be run backward once, and drops its cache entry.

        Args:
            key: as given to `run`.
            x: the input; None: the one that was kept.
            grad_y: the gradient to run backward.

        Returns:
            Leaf and output, and whether the graph was computed again.

        Raises:
            PipelineError: there is no input, or the gradient is of other rows or positions; nothing is dropped.
            NonFiniteActivationError: the output is not finite.
        """
        kept = self.cache.get(key)
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
        self.cache.take(key)
        if kept is not None and kept.y is not None and kept.weights == self._weights():
            return kept.x, kept.y, False
        leaf = self._passes.leaf(leaf)
        y, _ = self._passes.graph(leaf, key=key)
        return leaf, y, True

    def weights_changed(self) -> None:
        """Drops all graphs and keeps the inputs."""
        self._num_changes += 1
        self.cache.drop_graphs()

    def _weights(self) -> int:
        """Grows with every change of the weights: those reported, and those in place, which torch counts."""
        return self._num_changes + sum(parameter._version for parameter in self._passes.parameters)

    def _run_or_error(self, key: str, x: Tensor, version: int) -> _Answer:
        try:
            return self.run(key, x, version)
        except NonFiniteActivationError as error:
            return error

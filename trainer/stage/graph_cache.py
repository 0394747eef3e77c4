"""`GraphCache`: what forward passes left for the backward passes to come, bounded by bytes.

An entry is an input and, while it is of use, the output with its graph: 8 to 10 times the input a layer. Over the bound
the oldest graph goes first, then the oldest input; whoever asks for what is gone sends the input again. So a driver
that died costs memory until others need it, and never more than the bound.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, replace

from torch import Tensor

__all__ = ["CachedForward", "GraphCache"]


@dataclass(frozen=True, slots=True, eq=False)
class CachedForward:
    """One forward pass."""

    x: Tensor
    """The input, a leaf of the graph."""
    y: Tensor | None
    """The output with its graph; None: to be computed again."""
    weights: int
    """Which weights the graph saw."""
    version: int
    """The stage's version then."""
    graph_bytes: int
    """Kept for the graph beside ``x``."""

    @property
    def size_bytes(self) -> int:
        """Bytes it keeps."""
        return self.x.nbytes + self.graph_bytes

    def without_graph(self) -> CachedForward:
        """The input alone, no longer part of a graph."""
        return replace(self, x=self.x.detach(), y=None, graph_bytes=0)


class GraphCache:
    """Forward passes by key, the oldest first.

    Args:
        max_bytes: kept at most.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._entries: OrderedDict[str, CachedForward] = OrderedDict()
        self.size_bytes = 0
        """Kept now."""

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, key: str, entry: CachedForward) -> None:
        """Keeps a forward pass, in the place of an earlier one of that key, and makes room for it."""
        self.take(key)
        self._entries[key] = entry
        self.size_bytes += entry.size_bytes
        if self.size_bytes > self._max_bytes:
            self._drop_graphs(self.size_bytes - self._max_bytes)
        while self.size_bytes > self._max_bytes:
            self.take(next(iter(self._entries)))

    def take(self, key: str) -> CachedForward | None:
        """Hands over what there is under a key, and forgets it."""
        entry = self._entries.pop(key, None)
        if entry is not None:
            self.size_bytes -= entry.size_bytes
        return entry

    def drop_graphs(self) -> None:
        """Keeps inputs alone: the weights have changed."""
        self._drop_graphs(self.size_bytes)

    def drop_older(self, version: int) -> None:
        """Forgets forward passes of before a version."""
        for key in [key for key, entry in self._entries.items() if entry.version < version]:
            self.take(key)

    def clear(self) -> None:
        """Forgets all."""
        self._entries.clear()
        self.size_bytes = 0

    def _drop_graphs(self, wanted_bytes: int) -> None:
        """Frees so many bytes of graphs, or all there are."""
        for key, entry in self._entries.items():
            if wanted_bytes <= 0:
                return
            if entry.y is not None:
                self._entries[key] = entry.without_graph()
                self.size_bytes -= entry.graph_bytes
                wanted_bytes -= entry.graph_bytes

"""What forward passes left for the backward passes to come, bounded by bytes.

An entry is an input and, while it is of use, the output with its graph: some twenty times the input a layer. Above the
bound, whole entries are dropped: the oldest of the driver that holds most. A driver whose entry was dropped sends the
input again. So a driver that floods the cache drops its own entries, and those of a driver that died go as others need
the memory.

`GraphSizes` measures how many bytes a forward pass keeps: everything autograd saves, each piece of memory once, without
parameters, tables and the input. It measures once for each shape of input, because watching costs a tenth of a forward
pass; scratch memory of kernels is not in it.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

__all__ = ["ENTRY_BYTES", "CachedForward", "GraphCache", "GraphSizes"]

_MAX_SHAPES = 256
"""Remembered; strangers choose the shapes."""


class GraphSizes:
    """Bytes by shape of input.

    Args:
        module: what is run.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._by_shape: dict[torch.Size, int] = {}

    def measured(self, x: Tensor, run: Callable[[Tensor], Tensor]) -> tuple[Tensor, int]:
        """Runs the module; returns its output, and the bytes its graph keeps beside ``x``."""
        known = self._by_shape.get(x.shape)
        if known is not None:
            return run(x), known
        kept: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, _unchanged):
            y = run(x)
        for there_anyway in (x, *self._module.parameters(), *self._module.buffers()):
            kept.pop(there_anyway.untyped_storage().data_ptr(), None)
        if len(self._by_shape) >= _MAX_SHAPES:
            self._by_shape.clear()
        self._by_shape[x.shape] = sum(kept.values())
        return y, self._by_shape[x.shape]


def _unchanged(tensor: Tensor) -> Tensor:
    return tensor


ENTRY_BYTES = 2048
"""Of an entry beside its tensors' values: names, tensors and nodes as objects."""


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
        return ENTRY_BYTES + self.x.nbytes + self.graph_bytes

    def without_graph(self) -> CachedForward:
        """The input alone, no longer part of a graph."""
        return replace(self, x=self.x.detach(), y=None, graph_bytes=0)


class GraphCache:
    """Forward passes by key, the oldest first. Whose one is, follows the first space in its key.

    Args:
        max_bytes: kept at most.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._entries: OrderedDict[str, CachedForward] = OrderedDict()
        self._by_owner: Counter[str] = Counter()
        self.size_bytes = 0
        """Kept now."""

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, key: str, entry: CachedForward) -> None:
        """Keeps a forward pass, in the place of an earlier one of that key, and makes room for it.

        Of one that alone is too large the input is kept, or nothing.
        """
        self.take(key)
        if entry.size_bytes > self._max_bytes:
            entry = entry.without_graph()
        if entry.size_bytes > self._max_bytes:
            return
        self._entries[key] = entry
        self._count(key, entry.size_bytes)
        while self.size_bytes > self._max_bytes:
            owner = max(self._by_owner, key=lambda name: self._by_owner[name])
            self.take(next(key for key in self._entries if _owner_of(key) == owner))

    def get(self, key: str) -> CachedForward | None:
        """What there is under a key; it stays."""
        return self._entries.get(key)

    def take(self, key: str) -> CachedForward | None:
        """Hands over what there is under a key, and forgets it."""
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._count(key, -entry.size_bytes)
        return entry

    def drop_graphs(self) -> None:
        """Keeps inputs alone: the weights have changed."""
        for key, entry in self._entries.items():
            self._entries[key] = entry.without_graph()
            self._count(key, -entry.graph_bytes)

    def keep_versions(self, first: int, last: int) -> None:
        """Forgets forward passes of versions that are not from ``first`` to ``last``."""
        for key in [key for key, entry in self._entries.items() if not first <= entry.version <= last]:
            self.take(key)

    def clear(self) -> None:
        """Forgets all."""
        self._entries.clear()
        self._by_owner.clear()
        self.size_bytes = 0

    def _count(self, key: str, size_bytes: int) -> None:
        self.size_bytes += size_bytes
        owner = _owner_of(key)
        self._by_owner[owner] += size_bytes
        if not self._by_owner[owner]:
            del self._by_owner[owner]


def _owner_of(key: str) -> str:
    return key.partition(" ")[2]

"""The graphs, or inputs, of forward passes that backward passes find again or have computed again, bounded by bytes.

Above the bound, whole entries are dropped: the oldest of the driver that holds most, which sends the input again. So a
driver that floods the cache drops its own entries, and those of a driver that died go when others need the memory. An
entry is an input and, while it is of use, the output with its graph: some twenty times the input a layer.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass, replace

from torch import Tensor

ENTRY_BYTES = 2048  # Of an entry's Python objects: names, tensors and nodes without their values.


@dataclass(frozen=True, slots=True, eq=False)
class CachedForward:
    """What is kept of one forward pass: the input, a leaf, and the graph's bytes beside it."""

    x: Tensor
    y: Tensor | None  # The output with its graph; None: to be computed again.
    weights: int  # Counts changes of the weights; tells which ones the graph saw.
    version: int
    graph_bytes: int

    @property
    def size_bytes(self) -> int:
        """Bytes of the whole entry."""
        return ENTRY_BYTES + self.x.nbytes + self.graph_bytes

    def without_graph(self) -> CachedForward:
        """Returns the input alone, no longer part of a graph."""
        return replace(self, x=self.x.detach(), y=None, graph_bytes=0)


class GraphCache:
    """Forward passes by key, the oldest first. The part of a key after its first space names the owner."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._entries: OrderedDict[str, CachedForward] = OrderedDict()
        self._bytes_by_owner: Counter[str] = Counter()

    @property
    def size_bytes(self) -> int:
        """Bytes of all entries."""
        return self._bytes_by_owner.total()

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

    def _count(self, key: str, size_bytes: int) -> None:
        owner = _owner_of(key)
        self._bytes_by_owner[owner] += size_bytes
        if not self._bytes_by_owner[owner]:
            del self._bytes_by_owner[owner]


def _owner_of(key: str) -> str:
    return key.partition(" ")[2]

"""The memory budget of a worker: how many bytes it holds for requests under way, of each driver and of all.

What a request will occupy is computed from its message: its tensors as they come, as they are computed with, and what
is made of them, until it is answered.

A request is admitted if its driver then holds no more than is still free, as in the queue
(`trainer.pipeline.worker.waiting`): one driver that floods gets half, two a third each, and there is always room for
another. A request is refused before a byte of its tensors is read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from trainer.errors import RefusedError
from trainer.network.rpc import PeerId

__all__ = ["MemoryBudget"]


class MemoryBudget:
    """For one event loop.

    Args:
        max_bytes: of all drivers.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._by_owner: Counter[PeerId] = Counter()
        self._size_bytes = 0

    @property
    def size_bytes(self) -> int:
        """Held now."""
        return self._size_bytes

    @contextmanager
    def held(self, owner: PeerId, size_bytes: int) -> Iterator[None]:
        """Holds room within the block.

        Raises:
            RefusedError: ``busy``: there is none.
        """
        left_bytes, own_bytes = self._max_bytes - self._size_bytes - size_bytes, self._by_owner[owner]
        if left_bytes < (own_bytes + size_bytes if own_bytes else 0):
            raise RefusedError(
                "busy",
                f"expected room for {size_bytes >> 20} MiB, found {self._size_bytes >> 20} MiB of requests here, "
                f"{own_bytes >> 20} MiB of this driver; try again in 1.0 s",
            )
        self._size_bytes += size_bytes
        self._by_owner[owner] += size_bytes
        try:
            yield
        finally:
            self._size_bytes -= size_bytes
            self._by_owner[owner] -= size_bytes
            if not self._by_owner[owner]:
                del self._by_owner[owner]

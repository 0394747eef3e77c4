"""Who fetches which chunk: shares that shrink towards the end, and work taken over from whoever is slow.

While chunks are left, a donor takes the next run of them, at most `max_run` and at most half of an even share of what
is left, so that all finish at about the same time. When none is left, whoever is idle takes over a chunk that another
donor still owes; the first to bring it wins. So one slow donor delays the end by one chunk at most.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

__all__ = ["ChunkPool"]

_MAX_HOLDERS = 2
"""How many may fetch one chunk at a time: more would only crowd each other."""


class ChunkPool:
    """The chunks still missing and who fetches them.

    Args:
        missing: their indices.
        max_run: most chunks of one request.
    """

    def __init__(self, missing: Iterable[int], max_run: int) -> None:
        self._waiting = deque(missing)
        self._max_run = max_run
        self._holders: dict[int, list[str]] = {}

    @property
    def num_missing(self) -> int:
        """Chunks not yet there."""
        return len(self._waiting) + len(self._holders)

    def take(self, donor: str, num_workers: int) -> list[int]:
        """The next chunks for a donor to bring; none if there is nothing it could help with now.

        Args:
            donor: its name; may have several requests under way.
            num_workers: requests that can be under way in all.
        """
        if self._waiting:
            run = max(1, min(self._max_run, len(self._waiting) // (2 * max(1, num_workers))))
            taken = [self._waiting.popleft() for _ in range(run)]
        else:
            owed = [
                index
                for index, holders in self._holders.items()
                if donor not in holders and len(holders) < _MAX_HOLDERS
            ]
            taken = owed[:1]
        for index in taken:
            self._holders.setdefault(index, []).append(donor)
        return taken

    def is_missing(self, index: int) -> bool:
        """Whether a chunk that was taken has not come from anybody yet."""
        return index in self._holders

    def done(self, index: int) -> bool:
        """Notes that a chunk is there; False if somebody was faster."""
        return self._holders.pop(index, None) is not None

    def give_back(self, donor: str, indices: Iterable[int]) -> None:
        """Notes that a donor will not bring these; whoever asks next gets those nobody else is bringing."""
        for index in sorted(indices, reverse=True):
            holders = self._holders.get(index)
            if holders is None or donor not in holders:
                continue
            holders.remove(donor)
            if not holders:
                del self._holders[index]
                self._waiting.appendleft(index)

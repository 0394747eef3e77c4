"""How fast a driver gets its micro-batches done, and so how many it needs to hold for a while."""

from __future__ import annotations

import math
from collections import deque

__all__ = ["Pace"]

_WINDOW_S = 30.0
_SHORTEST_S = 10.0
"""What few micro-batches took says little; until then they count as having taken so long."""
_MOST = 8192


class Pace:
    """Micro-batches a second, of the last half minute. Times are of any one clock, in seconds."""

    def __init__(self) -> None:
        self._ended_s: deque[float] = deque(maxlen=_MOST)
        self._began_s = math.inf

    def begun(self, now_s: float) -> None:
        """One is begun."""
        self._began_s = min(self._began_s, now_s)

    def ended(self, now_s: float) -> None:
        """One is through."""
        self._ended_s.append(now_s)

    def per_s(self, now_s: float) -> float:
        """Its speed; 0: nothing has ended of late."""
        while self._ended_s and self._ended_s[0] <= now_s - _WINDOW_S:
            self._ended_s.popleft()
        return len(self._ended_s) / min(_WINDOW_S, max(_SHORTEST_S, now_s - self._began_s))

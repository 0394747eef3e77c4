"""Says that nobody is heard of, where somebody was to be: once that has lasted, and every minute while it lasts."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from trainer.network.discovery.protocol import Discovery

__all__ = ["Unheard"]

logger = logging.getLogger(__name__)

_REPEAT_S = 60.0


class Unheard:
    """Watches how many others are known.

    Args:
        discovery: knows whom it asks in vain.
        whom: who is missing, for the message.
        after_s: seconds without anybody before it is said: those that start together are not there at once.
        clock: seconds of any clock.
    """

    def __init__(
        self, discovery: Discovery, whom: str, after_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._discovery = discovery
        self._whom = whom
        self._after_s = after_s
        self._clock = clock
        self._due_s: float | None = None

    def look(self, num_others: int) -> None:
        """So many are known now; to be called every few seconds or more often."""
        now_s = self._clock()
        if num_others or self._due_s is None:
            self._due_s = now_s + self._after_s
        elif now_s >= self._due_s and (silence := self._discovery.silence()):
            logger.warning("%s: no %s has been heard of", silence, self._whom)
            self._due_s = now_s + _REPEAT_S

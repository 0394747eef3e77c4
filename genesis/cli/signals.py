"""SIGINT and SIGTERM ask a run to finish the commit in hand; a second one ends it on the spot."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["StopRequest", "stop_on_signals"]

logger = logging.getLogger("genesis")


class StopRequest(threading.Event):
    """Set by the first signal; remembers which."""

    signal_number: int = 0

    @property
    def exit_code(self) -> int:
        """128 + the signal's number, as a shell expects; 0 if none came."""
        return 128 + self.signal_number if self.signal_number else 0


@contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    """Within it, the first SIGINT or SIGTERM sets the request and the second raises KeyboardInterrupt."""
    request = StopRequest()

    def handle(number: int, frame: FrameType | None) -> None:
        if request.is_set():
            raise KeyboardInterrupt
        request.signal_number = number
        request.set()
        logger.warning("stopping: finishing the commit in hand (once more to stop at once)")

    previous = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield request
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)

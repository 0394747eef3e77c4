"""Waiting in tests for what comes about in another process or thread."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_until(holds: Callable[[], object], what: str = "", within_s: float = 60.0) -> None:
    """Looks every 20 ms whether it holds.

    Raises:
        AssertionError: it does not within ``within_s``.
    """
    end = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < end, what or f"did not come about within {within_s} s"
        time.sleep(0.02)

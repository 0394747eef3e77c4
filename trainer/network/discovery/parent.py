"""Ends child processes with their parent, however the parent ends; apart, because it is imported where starts count."""

from __future__ import annotations

import ctypes
import sys

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None) if sys.platform == "linux" else None
"""Loaded here, so that nothing is loaded between fork and exec."""


def die_with_parent(signal_number: int) -> None:
    """Makes the kernel send this process a signal when the thread that started it ends (Linux; elsewhere nothing)."""
    if _libc is not None:
        _libc.prctl(_PR_SET_PDEATHSIG, signal_number)

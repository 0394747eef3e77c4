"""How much of the server a client may take, and for how long.

The defaults: 512 connections hold at most 0.3 GB of unsent chunks and 1,024 descriptors; a client must take 256 KiB
within the stall time-out, 4 kB/s, which the slowest home line does and a client that reads nothing does not.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

from genesis.errors import UsageError
from genesis.open_files import raise_open_files

__all__ = ["ServeLimits", "fit_descriptors"]

logger = logging.getLogger(__name__)

_SPARE_DESCRIPTORS = 64
"""For the process itself: standard streams, event loop, listening socket, libraries."""


@dataclass(frozen=True, slots=True)
class ServeLimits:
    """Bounds on connections."""

    max_connections: int = 512
    """Served at once; a further one gets the place of one that waits for its client, or is answered 503."""
    max_refusals: int = 64
    """Connections beyond `max_connections` that are still read, to be told 503; any further one is cut at once."""
    max_parked: int = 256
    """Connections that have lost their place before they sent a whole request head, and are not told so at once."""
    park_s: float = 10.0
    """How long these are kept open, so that clients that open new ones for those that end do it that seldom."""
    idle_timeout_s: float = 30.0
    """For a whole request head to come, and for the next one on a connection kept alive."""
    stall_timeout_s: float = 60.0
    """For a chunk to be taken by a client that reads."""
    grace_s: float = 10.0
    """For answers under way when the server is asked to stop."""

    def __post_init__(self) -> None:
        if self.max_connections < 1:
            raise UsageError(f"expected at least 1 connection, found {self.max_connections}")
        if self.max_parked < 0 or self.park_s < 0:
            raise UsageError(f"expected max_parked and park_s of 0 or more, found {self.max_parked} and {self.park_s}")
        if min(self.idle_timeout_s, self.stall_timeout_s) <= 0 or self.grace_s < 0:
            raise UsageError(
                f"expected time-outs above 0 s, found idle {self.idle_timeout_s}, stall {self.stall_timeout_s}, "
                f"grace {self.grace_s}"
            )


def fit_descriptors(limits: ServeLimits) -> ServeLimits:
    """Raises this process's limit of open files to what ``limits`` may need, or lowers ``limits`` to what it has.

    A connection takes two descriptors, its socket and the object it is sent.
    """
    needed = 2 * limits.max_connections + limits.max_refusals + _SPARE_DESCRIPTORS
    granted = raise_open_files(needed + limits.max_parked)
    if granted >= needed:
        return replace(limits, max_parked=min(limits.max_parked, granted - needed))
    fitting = max(1, (granted - limits.max_refusals - _SPARE_DESCRIPTORS) // 2)
    logger.warning(
        "%d connections need %d open files and the limit is %d: serving %d; raise it with 'ulimit -n'",
        limits.max_connections,
        needed,
        granted,
        fitting,
    )
    return replace(limits, max_connections=fitting, max_parked=0)

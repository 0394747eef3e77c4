"""`Evaluations`: the share of a worker's time that drivers may have for what trains nothing.

A token bucket in seconds of compute, one for each driver and one for all of them: a driver whose evaluations took more
than its share is refused until time has made up for it. A driver that compares workers as `DriverConfig.audit_every`
says uses some hundredth of that.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable

from trainer.errors import RefusedError
from trainer.network.rpc import PeerId

__all__ = ["Evaluations"]

_SHARE, _SHARE_OF_ALL = 0.25, 0.5
"""Seconds of compute a second, of one driver and of all."""
_BURST_S = 10.0
_MAX_DRIVERS = 1024
_ALL = ""


class Evaluations:
    """For one event loop.

    Args:
        clock: seconds; any monotonic one.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._buckets: OrderedDict[PeerId, tuple[float, float]] = OrderedDict()
        """Seconds of compute that are left, and when that was."""

    def check(self, driver: PeerId) -> None:
        """Whether a driver may have an evaluation now.

        Raises:
            RefusedError: ``busy``.
        """
        for owner, share, who in ((driver, _SHARE, "this driver"), (_ALL, _SHARE_OF_ALL, "all drivers")):
            left_s = self._left_s(owner, share)
            if left_s <= 0:
                raise RefusedError(
                    "busy",
                    f"expected evaluations to take {share:.0%} of the time at most, found that those of {who} took "
                    f"more; try again in {-left_s / share + 0.1:.1f} s",
                )

    def spent(self, driver: PeerId, compute_s: float) -> None:
        """An evaluation for a driver took so long."""
        for owner, share in ((driver, _SHARE), (_ALL, _SHARE_OF_ALL)):
            self._buckets[owner] = (self._left_s(owner, share) - compute_s, self._clock())
            self._buckets.move_to_end(owner)
        while len(self._buckets) > _MAX_DRIVERS:
            self._buckets.popitem(last=False)

    def _left_s(self, owner: PeerId, share: float) -> float:
        left_s, at_s = self._buckets.get(owner, (_BURST_S, self._clock()))
        return min(_BURST_S, left_s + share * (self._clock() - at_s))

"""What this node says of itself now, signed afresh when it changes and before it grows old."""

from __future__ import annotations

import time
from collections.abc import Callable

from trainer.network.discovery.announcement import Announcement, sign_announcement
from trainer.network.rpc.identity import Identity

__all__ = ["OwnRecord"]


class OwnRecord:
    """Holds the announcement last set and its current wire form.

    Args:
        identity: this node's key.
        repeat_after_s: age, in seconds, at which it is signed again with a new time.
        lifetime_s: seconds until a signed one expires.
        clock: seconds since 1970.
    """

    def __init__(
        self, identity: Identity, *, repeat_after_s: float, lifetime_s: float, clock: Callable[[], float] = time.time
    ) -> None:
        self._identity = identity
        self._repeat_after_s = repeat_after_s
        self._lifetime_s = lifetime_s
        self._clock = clock
        self._content: Announcement | None = None
        self._signed: Announcement | None = None
        self._wire = b""

    def set(self, announcement: Announcement) -> None:
        """Says this from now on.

        Raises:
            DiscoveryError: it is not this node's, or too long.
        """
        now = self._clock()
        if self._signed is not None:  # Two records of one moment could not be told apart.
            now = max(now, self._signed.sent_at + 1e-3)
        signed = announcement.stamped(now, self._lifetime_s)
        self._wire = sign_announcement(signed, self._identity)
        self._content, self._signed = announcement, signed

    def current(self) -> tuple[Announcement, bytes] | None:
        """What to say now and its wire form; None before the first `set`."""
        if self._content is None or self._signed is None:
            return None
        age_s = self._clock() - self._signed.sent_at
        # A clock that was set back makes the record seem sent in the future: others would drop it.
        if age_s >= self._repeat_after_s or age_s < -1.0:
            self._signed = self._content.stamped(self._clock(), self._lifetime_s)
            self._wire = sign_announcement(self._signed, self._identity)
        return self._signed, self._wire

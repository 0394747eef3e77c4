"""The announcements that are believed now: bounded, each the newest of its node, none that has expired.

A full table refuses newcomers and keeps those it has, so that making up identities cannot push known peers out. An
announcement counts as newer by the time its own node wrote into it; nobody else can sign one.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from trainer.discovery.announcement import Announcement, AnnouncementRefusedError, verify_announcement

__all__ = ["KnownPeer", "PeerTable"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class KnownPeer:
    """A believed announcement and the bytes that prove it."""

    announcement: Announcement
    wire: bytes


class PeerTable:
    """What is known of the other nodes of a run.

    Args:
        run_id: only announcements for it are taken.
        own_peer_id: this node, of whom nothing is kept.
        max_peers: most nodes remembered.
        max_clock_skew_s: how far ahead other clocks may be.
        clock: seconds since 1970.
    """

    def __init__(
        self,
        run_id: str,
        own_peer_id: str,
        *,
        max_peers: int,
        max_clock_skew_s: float,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.refused: Counter[str] = Counter()
        """How many records were refused, by reason; ``full`` besides those of `AnnouncementRefusedError`."""
        self._run_id = run_id
        self._own_peer_id = own_peer_id
        self._max_peers = max_peers
        self._max_clock_skew_s = max_clock_skew_s
        self._clock = clock
        self._known: dict[str, KnownPeer] = {}
        self._verified: dict[bytes, str] = {}

    def offer(self, wire: bytes, *, subkey: str | None = None) -> Announcement | None:
        """Takes a record if it is believed and newer than what is known of its node.

        Args:
            wire: the record as it came.
            subkey: the peer id it was filed under, if it was.

        Returns:
            The announcement if it was news, else None; refusals are counted in `refused`.
        """
        now = self._clock()
        if wire in self._verified and subkey in (None, self._verified[wire]):
            return None  # Most of what a look-up or an exchange brings.
        try:
            announcement = verify_announcement(
                wire, now=now, max_clock_skew_s=self._max_clock_skew_s, run_id=self._run_id, subkey=subkey
            )
        except AnnouncementRefusedError as error:
            self.refused[error.reason] += 1
            return None
        except Exception:
            # One record that nobody foresaw must not keep the others of its look-up out.
            logger.warning("a record cannot be handled", exc_info=True)
            self.refused["malformed"] += 1
            return None
        if announcement.peer_id == self._own_peer_id:
            return None
        return self._take(KnownPeer(announcement, wire), now)

    def _take(self, new: KnownPeer, now: float) -> Announcement | None:
        peer_id = new.announcement.peer_id
        known = self._known.get(peer_id)
        if known is not None and known.announcement.sent_at >= new.announcement.sent_at:
            return None
        if known is None and len(self._known) >= self._max_peers:
            self._forget_expired(now)
            if len(self._known) >= self._max_peers:
                self.refused["full"] += 1
                return None
        self._forget(peer_id)
        self._known[peer_id] = new
        self._verified[new.wire] = peer_id
        return new.announcement

    def known(self) -> tuple[KnownPeer, ...]:
        """All that are alive now, by peer id."""
        self._forget_expired(self._clock())
        return tuple(self._known[peer_id] for peer_id in sorted(self._known))

    def announcements(self) -> tuple[Announcement, ...]:
        """All that are alive now, by peer id."""
        return tuple(peer.announcement for peer in self.known())

    def _forget_expired(self, now: float) -> None:
        expired = [peer_id for peer_id, peer in self._known.items() if peer.announcement.expires_at <= now]
        for peer_id in expired:
            self._forget(peer_id)

    def _forget(self, peer_id: str) -> None:
        peer = self._known.pop(peer_id, None)
        if peer is not None:
            del self._verified[peer.wire]

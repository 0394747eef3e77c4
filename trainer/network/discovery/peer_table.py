"""The announcements that are believed now: bounded, shared out by address, each the newest of its node.

An identity costs nothing, and a signature shows only that somebody holds the key. So the table has two parts, as
Bitcoin's address manager has (*new* and *tried*):

- **Candidates**, a quarter of the table: heard of, and not reached yet. Nobody is told of them.
- **Reached** peers: a signed answer of the node itself has come from the address that it announces. These are what the
  trainer sees, and what others are told.

Both are open to all while there is room. When a part is full, whoever comes takes a place of the group that holds the
most: candidates are grouped by who brought them, reached peers by the host they are at (an IPv4 address or IPv6 /64).
Among reached peers those that have never been of use go first, longest without contact first. A peer of use gives way
to one that was of more use behind the same address, or where its host holds more than a quarter of the table to one of
a smaller group. So a host full of made-up nodes pushes out its own, and a peer this node works with stays.

A record counts for at most `lifetime_s` since it was new here or its node was last in contact, whatever it says.
The trade-off: a node nobody can reach is seen only where it calls, in runs that have such nodes (`keeps_callers`).
"""

from __future__ import annotations

import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from trainer.network.discovery.announcement import Announcement, AnnouncementRefusedError, verify_announcement
from trainer.network.rpc.config import split_address
from trainer.network.rpc.remote_address import address_group

__all__ = ["DIRECT", "TOLD", "KnownPeer", "PeerTable"]

DIRECT = "direct:"
"""Begins the `source` of a record that its own node has brought; the host it called from follows."""
TOLD = "told:"
"""Begins the `source` of a record that another node has passed on; that node's host follows."""

_CANDIDATE_SHARE = 4
_MIN_CANDIDATES = 16
_GROUP_SHARE = 4
"""A group holds more than its share above this part of the table; it matters only when the table is full."""
_USE_INTERVAL_S = 1.0
"""Of use counts once in so long, however often it was."""
_RECHECK_LIFETIMES = 5.0
"""After so long without contact a reached peer is to be reached again."""
_CONTACTS_PER_PEER = 2
_MAX_DROPPED = 4096

K = TypeVar("K")
V = TypeVar("V")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class KnownPeer:
    """A believed announcement and the bytes that prove it."""

    announcement: Announcement
    wire: bytes


@dataclass(slots=True)
class _Entry:
    known: KnownPeer
    source: str
    """Whom it came from, as candidates are shared out."""
    group: str
    """The host it announces."""
    heard_s: float
    contact_s: float | None = None
    """When it last answered from the announced address; None: it has not."""
    uses: int = 0
    used_s: float = float("-inf")
    retry_s: float = 0.0
    """When a candidate may be tried (again)."""

    @property
    def evidence_s(self) -> float:
        return self.heard_s if self.contact_s is None else max(self.heard_s, self.contact_s)


class PeerTable:
    """What is known of the other nodes of a run.

    Args:
        run_id: only announcements for it are taken.
        own_peer_id: this node, of whom nothing is kept.
        max_peers: most reached peers; a quarter as many candidates come on top.
        max_clock_skew_s: how far ahead other clocks may be.
        lifetime_s: longest time an announcement counts without a newer one or a contact.
        objection: why an address is not to be dialled; empty: it may be.
        allowed_peers: identities that may be in the run; empty: all.
        keeps_callers: keep nodes without a stage that call this one and cannot be reached.
        clock: seconds since 1970.
    """

    def __init__(
        self,
        run_id: str,
        own_peer_id: str,
        *,
        max_peers: int,
        max_clock_skew_s: float,
        lifetime_s: float = 60.0,
        objection: Callable[[str], str] = lambda _: "",
        allowed_peers: frozenset[str] = frozenset(),
        keeps_callers: bool = False,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.refused: Counter[str] = Counter()
        """How many records were refused, by reason: those of `AnnouncementRefusedError`, ``address``, ``peer`` (not on
        the list of those that may come), ``full``; ``unreachable`` are candidates that were dropped."""
        self._run_id = run_id
        self._own_peer_id = own_peer_id
        self._max_peers = max_peers
        self._max_candidates = max(_MIN_CANDIDATES, max_peers // _CANDIDATE_SHARE)
        self._max_clock_skew_s = max_clock_skew_s
        self._lifetime_s = lifetime_s
        self._objection = objection
        self._allowed_peers = allowed_peers
        self._keeps_callers = keeps_callers
        self._clock = clock
        self._entries: dict[str, _Entry] = {}
        self._first_expiry_s = float("inf")
        """No entry expires before this; contact puts off expiry, so it may be too early, never too late."""
        self._verified: dict[bytes, str] = {}
        self._answers: OrderedDict[str, tuple[str, float]] = OrderedDict()
        """By peer id: the address it last answered from, and when; also of peers that are not in the table."""
        self._calls: OrderedDict[str, float] = OrderedDict()
        """When it last called this node."""
        self._dropped: OrderedDict[bytes, None] = OrderedDict()
        """Records whose nodes were not reached: not looked at again, until their nodes say something newer."""

    # -- what is heard -------------------------------------------------------------------------------------------------

    def offer(self, wire: bytes, *, source: str = "", subkey: str | None = None) -> Announcement | None:
        """Takes a record if it is believed and newer than what is known of its node.

        Args:
            wire: the record as it came.
            source: whom it came from, as candidates are shared out; empty: nobody in particular (a DHT).
            subkey: the peer id it was filed under, if it was.

        Returns:
            The announcement if it was news, else None; refusals are counted in `refused`.
        """
        now = self._clock()
        if self.holds(wire) and subkey in (None, self._verified[wire]):
            return None  # Most of what a look-up or an exchange brings.
        if wire in self._dropped:
            return None
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
        if self._allowed_peers and announcement.peer_id not in self._allowed_peers:
            self.refused["peer"] += 1
            return None
        is_welcome = self.is_of_use(announcement.peer_id) or self._is_caller(announcement, now)
        if self._objection(announcement.address) and not is_welcome:
            self.refused["address"] += 1
            return None
        return self._take(KnownPeer(announcement, wire), source, now)

    def holds(self, wire: bytes) -> bool:
        """Whether this very record is known and believed."""
        return wire in self._verified

    def is_new(self, wire: bytes) -> bool:
        """Whether a look at this record is anything but a waste: it is neither held nor was it dropped."""
        return wire not in self._verified and wire not in self._dropped

    def _take(self, new: KnownPeer, source: str, now: float) -> Announcement | None:
        said = new.announcement
        before = self._entries.get(said.peer_id)
        if before is not None and before.known.announcement.sent_at >= said.sent_at:
            return None
        self._forget_expired(now)
        before = self._entries.get(said.peer_id)
        entry = _Entry(new, source, address_group(split_address(said.address)[0]), now)
        if before is not None:
            entry.uses, entry.used_s = before.uses, before.used_s
            old = before.known.announcement
            if (old.address, old.certificate_pem) == (said.address, said.certificate_pem):
                entry.contact_s, entry.source, entry.retry_s = before.contact_s, before.source, before.retry_s
        answered = self._answers.get(said.peer_id)
        if answered is not None and answered[0] == said.address and now - answered[1] < self._lifetime_s:
            entry.contact_s = answered[1]
        self._forget(said.peer_id)
        if entry.contact_s is None:
            self._make_room_candidate(entry)
        elif not self._make_room_reached(entry):
            self.refused["full"] += 1
            return None
        self._put(entry)
        return said

    # -- what is experienced -------------------------------------------------------------------------------------------

    def answered(self, peer_id: str, address: str) -> None:
        """A signed answer of the node has come from this address."""
        now = self._clock()
        _note(self._answers, peer_id, (address, now), _CONTACTS_PER_PEER * self._max_peers)
        entry = self._entries.get(peer_id)
        if entry is None or entry.known.announcement.address != address:
            return
        if entry.contact_s is None:
            self._entries.pop(peer_id)
            self._forget_expired(now)
            if not self._make_room_reached(entry):
                self.refused["full"] += 1
                del self._verified[entry.known.wire]
                return
            self._put(entry)
        entry.contact_s = now

    def called(self, peer_id: str) -> None:
        """The node has called this one."""
        _note(self._calls, peer_id, self._clock(), _CONTACTS_PER_PEER * self._max_peers)

    def used(self, peer_id: str) -> None:
        """The node has been of use: it did something for this one, or was served something by it."""
        entry, now = self._entries.get(peer_id), self._clock()
        if entry is not None and now - entry.used_s >= _USE_INTERVAL_S:
            entry.uses += 1
            entry.used_s = now

    def unreachable(self, peer_id: str, address: str) -> None:
        """The node does not answer at the address it announces: it is no longer told of, and is forgotten.

        Its word is kept where it has been of use, since it may live and only be out of reach, and where it calls this
        node and such are kept.
        """
        entry = self._entries.get(peer_id)
        if entry is None or entry.known.announcement.address != address:
            return
        self._forget(peer_id)
        self._answers.pop(peer_id, None)
        self.refused["unreachable"] += 1
        now = self._clock()
        if not (entry.uses or self._is_caller(entry.known.announcement, now)):
            _note(self._dropped, entry.known.wire, None, _MAX_DROPPED)
            return
        entry.contact_s, entry.retry_s = None, now + self._lifetime_s
        self._forget_expired(now)
        self._make_room_candidate(entry)
        self._put(entry)

    def retry_later(self, peer_id: str, after_s: float) -> None:
        """A candidate could not be asked now; it is tried again after a while."""
        entry = self._entries.get(peer_id)
        if entry is not None:
            entry.retry_s = self._clock() + after_s

    def _is_caller(self, announcement: Announcement, now: float) -> bool:
        called_s = self._calls.get(announcement.peer_id)
        is_kept = self._keeps_callers and announcement.stage is None
        return is_kept and called_s is not None and now - called_s < self._lifetime_s

    # -- what is known -------------------------------------------------------------------------------------------------

    def known(self) -> tuple[KnownPeer, ...]:
        """All that are alive now and have been reached, by peer id: whom others are told of."""
        self._forget_expired(self._clock())
        return tuple(entry.known for _, entry in sorted(self._entries.items()) if entry.contact_s is not None)

    def heard_of(self) -> tuple[KnownPeer, ...]:
        """The same and the candidates, by peer id: what their nodes say, not whom to connect to."""
        self._forget_expired(self._clock())
        return tuple(entry.known for _, entry in sorted(self._entries.items()))

    def announcements(self) -> tuple[Announcement, ...]:
        """All that are alive now and have been reached, or call this node where such are kept, by peer id."""
        now = self._clock()
        self._forget_expired(now)
        return tuple(
            entry.known.announcement
            for _, entry in sorted(self._entries.items())
            if entry.contact_s is not None or self._is_caller(entry.known.announcement, now)
        )

    def to_reach(self) -> list[tuple[Announcement, str]]:
        """Candidates, whoever was brought by itself and the newest first; then reached peers long without contact.

        Returns:
            What each announces, and the host it announces (`address_group`).
        """
        now = self._clock()
        self._forget_expired(now)
        limit_s = now - _RECHECK_LIFETIMES * self._lifetime_s
        candidates = [it for it in self._entries.values() if it.contact_s is None and it.retry_s <= now]
        candidates.sort(key=lambda entry: (not entry.source.startswith(DIRECT), -entry.heard_s))
        quiet = [it for it in self._entries.values() if it.contact_s is not None and it.contact_s < limit_s]
        return [(entry.known.announcement, entry.group) for entry in [*candidates, *quiet]]

    def is_of_use(self, peer_id: str) -> bool:
        """Whether a peer is known that has ever been of use."""
        entry = self._entries.get(peer_id)
        return entry is not None and entry.uses > 0

    # -- who has to go -------------------------------------------------------------------------------------------------

    def _make_room_candidate(self, new: _Entry) -> None:
        """Makes room for a candidate: in the source that has brought the most, there in the host with the most."""
        candidates = [entry for entry in self._entries.values() if entry.contact_s is None]
        if len(candidates) < self._max_candidates:
            return
        by_source = Counter(entry.source for entry in candidates)
        by_source[new.source] += new.source in by_source
        largest = max(by_source.values())
        pool = [entry for entry in candidates if by_source[entry.source] == largest]
        by_group = Counter(entry.group for entry in pool)
        self._evict(min(pool, key=lambda entry: (entry.uses > 0, -by_group[entry.group], entry.heard_s)))

    def _make_room_reached(self, new: _Entry) -> bool:
        """Makes room for a peer that has been reached; whether there is any."""
        reached = [entry for entry in self._entries.values() if entry.contact_s is not None]
        if len(reached) < self._max_peers:
            return True
        size = Counter(entry.group for entry in [*reached, new])
        share = max(1, self._max_peers // _GROUP_SHARE)
        no_smaller = [entry for entry in reached if size[entry.group] >= size[new.group]]
        idle = [entry for entry in no_smaller if not entry.uses]
        if idle:
            self._evict(min(idle, key=lambda entry: (-size[entry.group], entry.evidence_s)))
            return True
        lesser = [
            entry
            for entry in no_smaller
            if (entry.uses < new.uses if entry.group == new.group else size[entry.group] > max(share, size[new.group]))
        ]
        if lesser:
            self._evict(min(lesser, key=lambda entry: (-size[entry.group], entry.uses, entry.evidence_s)))
        return bool(lesser)

    def _evict(self, entry: _Entry) -> None:
        self.refused["full"] += 1
        self._forget(entry.known.announcement.peer_id)

    def _forget_expired(self, now: float) -> None:
        if now < self._first_expiry_s:
            return
        expired = [peer_id for peer_id, entry in self._entries.items() if self._expires_s(entry) <= now]
        for peer_id in expired:
            self._forget(peer_id)
        self._first_expiry_s = min(map(self._expires_s, self._entries.values()), default=float("inf"))

    def _expires_s(self, entry: _Entry) -> float:
        return min(entry.known.announcement.expires_at, entry.evidence_s + self._lifetime_s)

    def _put(self, entry: _Entry) -> None:
        peer_id = entry.known.announcement.peer_id
        self._entries[peer_id] = entry
        self._verified[entry.known.wire] = peer_id
        self._first_expiry_s = min(self._first_expiry_s, self._expires_s(entry))

    def _forget(self, peer_id: str) -> None:
        entry = self._entries.pop(peer_id, None)
        if entry is not None:
            self._verified.pop(entry.known.wire, None)


def _note(table: OrderedDict[K, V], key: K, value: V, max_entries: int) -> None:
    """Sets an entry, as the newest; forgets the oldest beyond the bound."""
    table[key] = value
    table.move_to_end(key)
    if len(table) > max_entries:
        table.popitem(last=False)

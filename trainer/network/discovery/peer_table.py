"""The table of valid announcements: the newest of each node, bounded in number and shared out by address.

*Candidates*, a quarter of the table, were announced; *reached* peers have sent a signed answer from the address they
announce, and only these are shown and passed on. When a part is full, a newcomer takes a place of the group that holds
the most: of candidates by source, of reached peers by host, first of those that were never of use. A peer of use gives
way only to one of more use behind the same address or, where its host has more than a quarter, to a smaller group's.
So a host full of made-up nodes evicts its own. A record counts for `lifetime_s` after its node was last in contact.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field

from trainer.network.discovery.announcement import (
    Announcement,
    AnnouncementRefusedError,
    KnownPeer,
    verify_announcement,
)
from trainer.network.rpc.config import split_address
from trainer.network.rpc.dialing import address_group
from trainer.network.rpc.token_buckets import remember

DIRECT = "direct:"  # Prefix of the `source` of a record sent by its own node; the host it called from follows.
TOLD = "told:"  # Prefix of the `source` of a record that another node passed on; that node's host follows.

_CANDIDATE_SHARE = 4
_MIN_CANDIDATES = 16
_GROUP_SHARE = 4
"""A group above this fraction of the table holds more than its share; it matters only when the table is full."""
_USE_INTERVAL_S = 1.0
_RECHECK_LIFETIMES = 5.0  # After so many lifetimes without contact a reached peer is to be reached again.
_CONTACTS_PER_PEER = 2
_MAX_DROPPED = 4096

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Entry:
    known: KnownPeer
    source: str  # The sender of the record, by which candidates are grouped.
    group: str  # The announced host, by which reached peers are grouped.
    heard_s: float
    contact_s: float | None = None  # When it last answered from the announced address; None: never.
    uses: int = 0
    used_s: float = float("-inf")
    retry_s: float = 0.0

    @property
    def evidence_s(self) -> float:
        return self.heard_s if self.contact_s is None else max(self.heard_s, self.contact_s)


@dataclass(slots=True)
class PeerTable:
    """The known nodes of a run."""

    run_id: str
    own_peer_id: str
    _: KW_ONLY
    max_peers: int  # Most reached peers; a quarter as many candidates come on top.
    max_clock_skew_s: float
    lifetime_s: float = 60.0  # Longest time an announcement counts without a newer one or a contact.
    objection: Callable[[str], str] = lambda _: ""  # Returns why an address must not be dialled; empty: it may be.
    allowed_peers: frozenset[str] = frozenset()  # Identities that may join the run; empty: all.
    keeps_callers: bool = False  # Keep nodes without a stage that call this one and cannot be reached.
    clock: Callable[[], float] = time.time
    refused: Counter[str] = field(default_factory=Counter, init=False)
    """Refused records by reason: those of `AnnouncementRefusedError`, ``address``, ``peer`` (not allowed), ``full``
    (evicted too); ``unreachable`` are candidates that were dropped."""
    _entries: dict[str, _Entry] = field(default_factory=dict, init=False)
    _first_expiry_s: float = field(default=float("inf"), init=False)
    """No entry expires before this; contact postpones expiry, so it may be too early, never too late."""
    _verified: dict[bytes, str] = field(default_factory=dict, init=False)
    """Peer id by wire form, of the records in the table."""
    _answers: OrderedDict[str, tuple[str, float]] = field(default_factory=OrderedDict, init=False)
    """By peer id: the address it last answered from, and when; also of peers outside the table."""
    _calls: OrderedDict[str, float] = field(default_factory=OrderedDict, init=False)
    _dropped: OrderedDict[bytes, None] = field(default_factory=OrderedDict, init=False)
    """Records of unreachable nodes: ignored until their nodes announce something newer."""

    def offer(self, wire: bytes, *, source: str = "", subkey: str | None = None) -> Announcement | None:
        """Adds a record if it is valid and newer than the known one of its node; returns it if it was news.

        Candidates are grouped by ``source``, the sender; ``subkey`` is the peer id it was stored under, if it was.
        """
        now = self.clock()
        # Most records of a look-up or an exchange are known.
        if wire in self._dropped or (wire in self._verified and subkey in (None, self._verified[wire])):
            return None
        try:
            announcement = verify_announcement(
                wire, now=now, max_clock_skew_s=self.max_clock_skew_s, run_id=self.run_id, subkey=subkey
            )
        except AnnouncementRefusedError as error:
            self.refused[error.reason] += 1
            return None
        except Exception:
            # An unforeseen record must not keep the others of its look-up out.
            logger.warning("a record cannot be handled", exc_info=True)
            self.refused["malformed"] += 1
            return None
        peer_id = announcement.peer_id
        if peer_id == self.own_peer_id:
            return None
        if self.allowed_peers and peer_id not in self.allowed_peers:
            self.refused["peer"] += 1
            return None
        is_welcome = self.is_of_use(peer_id) or self._is_caller(announcement, now)
        if self.objection(announcement.address) and not is_welcome:
            self.refused["address"] += 1
            return None
        before = self._entries.get(peer_id)
        if before is not None and before.known.announcement.sent_at >= announcement.sent_at:
            return None
        return announcement if self._add(KnownPeer(announcement, wire), source, now) else None

    def is_new(self, wire: bytes) -> bool:
        """Returns whether a record is neither in the table nor dropped, so that verifying it is no waste."""
        return wire not in self._verified and wire not in self._dropped

    def _add(self, new: KnownPeer, source: str, now: float) -> bool:
        announcement, peer_id = new.announcement, new.announcement.peer_id
        self._forget_expired(now)
        entry = _Entry(new, source, address_group(split_address(announcement.address)[0]), now)
        before = self._forget(peer_id)
        if before is not None:
            entry.uses, entry.used_s = before.uses, before.used_s
            old = before.known.announcement
            if (old.address, old.certificate_pem) == (announcement.address, announcement.certificate_pem):
                entry.contact_s, entry.source, entry.retry_s = before.contact_s, before.source, before.retry_s
        answered = self._answers.get(peer_id)
        if answered is not None and answered[0] == announcement.address and now - answered[1] < self.lifetime_s:
            entry.contact_s = answered[1]
        return self._put(entry)

    def answered(self, peer_id: str, address: str) -> None:
        """Notes a signed answer of a node from this address."""
        now = self.clock()
        remember(self._answers, peer_id, (address, now), _CONTACTS_PER_PEER * self.max_peers)
        entry = self._entries.get(peer_id)
        if entry is None or entry.known.announcement.address != address:
            return
        was_candidate, entry.contact_s = entry.contact_s is None, now
        if was_candidate:
            self._forget(peer_id)
            self._forget_expired(now)
            self._put(entry)

    def called(self, peer_id: str) -> None:
        """Notes that a node has called this one."""
        remember(self._calls, peer_id, self.clock(), _CONTACTS_PER_PEER * self.max_peers)

    def used(self, peer_id: str) -> None:
        """Notes that a node was of use: it served this one, or was served by it."""
        entry, now = self._entries.get(peer_id), self.clock()
        if entry is not None and now - entry.used_s >= _USE_INTERVAL_S:
            entry.uses += 1
            entry.used_s = now

    def unreachable(self, peer_id: str, address: str) -> None:
        """Forgets a node that does not answer at its announced address; one of use, or a caller, stays a candidate."""
        entry = self._entries.get(peer_id)
        if entry is None or entry.known.announcement.address != address:
            return
        self._forget(peer_id)
        self._answers.pop(peer_id, None)
        self.refused["unreachable"] += 1
        now = self.clock()
        if not (entry.uses or self._is_caller(entry.known.announcement, now)):
            remember(self._dropped, entry.known.wire, None, _MAX_DROPPED)
            return
        entry.contact_s, entry.retry_s = None, now + self.lifetime_s
        self._forget_expired(now)
        self._put(entry)

    def retry_later(self, peer_id: str, after_s: float) -> None:
        """Postpones the next call to a candidate."""
        entry = self._entries.get(peer_id)
        if entry is not None:
            entry.retry_s = self.clock() + after_s

    def known(self) -> tuple[KnownPeer, ...]:
        """Returns the reached peers, sorted by peer id: the records to pass on."""
        return tuple(entry.known for entry in self._current() if entry.contact_s is not None)

    def heard_of(self) -> tuple[KnownPeer, ...]:
        """Returns reached peers and candidates, sorted by peer id: statements, not nodes to connect to."""
        return tuple(entry.known for entry in self._current())

    def announcements(self) -> tuple[Announcement, ...]:
        """Returns the peers that were reached, or call this node where callers are kept, sorted by peer id."""
        now = self.clock()
        return tuple(
            entry.known.announcement
            for entry in self._current()
            if entry.contact_s is not None or self._is_caller(entry.known.announcement, now)
        )

    def to_reach(self) -> list[tuple[Announcement, str]]:
        """Returns the nodes to call and their hosts: candidates, first by their own word, then peers long silent."""
        now = self.clock()
        self._forget_expired(now)
        entries = self._entries.values()
        candidates = [it for it in entries if it.contact_s is None and it.retry_s <= now]
        candidates.sort(key=lambda entry: (not entry.source.startswith(DIRECT), -entry.heard_s))
        limit_s = now - _RECHECK_LIFETIMES * self.lifetime_s
        quiet = [it for it in entries if it.contact_s is not None and it.contact_s < limit_s]
        return [(entry.known.announcement, entry.group) for entry in [*candidates, *quiet]]

    def is_of_use(self, peer_id: str) -> bool:
        """Returns whether a peer is in the table and was ever of use."""
        entry = self._entries.get(peer_id)
        return entry is not None and entry.uses > 0

    def _is_caller(self, announcement: Announcement, now: float) -> bool:
        called_s = self._calls.get(announcement.peer_id)
        is_kept = self.keeps_callers and announcement.stage is None
        return is_kept and called_s is not None and now - called_s < self.lifetime_s

    def _current(self) -> list[_Entry]:
        self._forget_expired(self.clock())
        return [entry for _, entry in sorted(self._entries.items())]

    def _put(self, entry: _Entry) -> bool:
        """Puts an entry into its part of the table, where room can be made for it; returns whether it is there."""
        if entry.contact_s is None:
            self._make_room_candidate(entry)
        elif not self._make_room_reached(entry):
            self.refused["full"] += 1
            return False
        peer_id = entry.known.announcement.peer_id
        self._entries[peer_id] = entry
        self._verified[entry.known.wire] = peer_id
        self._first_expiry_s = min(self._first_expiry_s, self._expires_s(entry))
        return True

    def _make_room_candidate(self, new: _Entry) -> None:
        """Makes room for a candidate: evicts one of the source with the most, there of the host with the most."""
        candidates = [entry for entry in self._entries.values() if entry.contact_s is None]
        if len(candidates) < max(_MIN_CANDIDATES, self.max_peers // _CANDIDATE_SHARE):
            return
        by_source = Counter(entry.source for entry in candidates)
        by_source[new.source] += new.source in by_source
        largest = max(by_source.values())
        pool = [entry for entry in candidates if by_source[entry.source] == largest]
        by_group = Counter(entry.group for entry in pool)
        self._evict(min(pool, key=lambda entry: (entry.uses > 0, -by_group[entry.group], entry.heard_s)))

    def _make_room_reached(self, new: _Entry) -> bool:
        reached = [entry for entry in self._entries.values() if entry.contact_s is not None]
        if len(reached) < self.max_peers:
            return True
        size = Counter(entry.group for entry in [*reached, new])
        share = max(1, self.max_peers // _GROUP_SHARE)
        no_smaller = [entry for entry in reached if size[entry.group] >= size[new.group]]
        lesser = [entry for entry in no_smaller if not entry.uses] or [
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
        for peer_id in [peer_id for peer_id, entry in self._entries.items() if self._expires_s(entry) <= now]:
            self._forget(peer_id)
        self._first_expiry_s = min(map(self._expires_s, self._entries.values()), default=float("inf"))

    def _expires_s(self, entry: _Entry) -> float:
        return min(entry.known.announcement.expires_at, entry.evidence_s + self.lifetime_s)

    def _forget(self, peer_id: str) -> _Entry | None:
        entry = self._entries.pop(peer_id, None)
        if entry is not None:
            self._verified.pop(entry.known.wire, None)
        return entry

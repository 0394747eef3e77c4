"""How much peers may have a node do, hold and remember: each of them, each address, and all together.

An identity costs nothing, so identities that this node knows nothing of share what their address may take, half of
everything, and leave a quarter of everything to the proven. A peer is proven once it has answered a call of this node,
or has had `MIN_GOOD_CALLS` calls of its own answered in good order over `MIN_TENURE_S`; so an honest swarm behind one
address does not share with the strangers behind the same address.

A call that does not fit is refused at once. Where a limit is reached, a newcomer is not refused if another call stands
still: it gets the slot of the one that has stood still for longest, of the address and holder that have most. A frame
of a stream waits on the peer's side of the connection: `ByteBudget` never blocks, its users leave the next one unread.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TypeAlias

from trainer.errors import RefusedError
from trainer.network.rpc.config import split_address
from trainer.network.rpc.dialing import address_group
from trainer.network.rpc.messages import PeerId, Reason
from trainer.network.rpc.token_buckets import TokenBuckets, count_down, remember

MIN_GOOD_CALLS = 8
MIN_TENURE_S = 30.0
KEPT_S = 600.0  # How long a peer stays proven after the last contact, unless it lets an answer of this node stall.
MAX_PER_ADDRESS = 64  # Proven peers; those that came first stay.
MAX_PROVEN = 1024
_MAX_STALLS = 4
_GREYLISTED_S = 60.0
_MAX_GREYLIST = 4096
_DISCOVERY_METHODS = "announce/"
_BUCKETS_PER_WINDOW = 8
_ADDRESS_PART = 0.25

_Listener: TypeAlias = Callable[[PeerId, str, str], None]  # Takes a peer's id, an address and a method; must not raise.


@dataclass(frozen=True, slots=True)
class Contacts:
    """The listeners of one endpoint, called on its event loop."""

    when_answered: list[_Listener] = field(default_factory=list)
    """A peer's signed answer has come; the address is the one that was called, as it was given."""
    when_served: list[_Listener] = field(default_factory=list)
    """A peer's call was served without being refused; the address is its host, as `address_group` names it."""


@dataclass(frozen=True, slots=True)
class Share:
    """Under which key limits count something."""

    key: str  # A proven peer's identity; of all others the address.
    is_proven: bool


class Standing:
    """The proven peers of one endpoint, and the addresses whose strangers let answers stall; ``now``: monotonic."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._proven: OrderedDict[PeerId, tuple[str, float]] = OrderedDict()
        self._by_address: Counter[str] = Counter()
        self._stalls: OrderedDict[str, tuple[int, float]] = OrderedDict()
        """By address: connections that were closed because their callers took nothing, and when the last one was."""

    def __len__(self) -> int:
        return len(self._proven)

    def is_proven(self, peer_id: PeerId) -> bool:
        """Returns whether the peer has a share of its own."""
        self._expire()
        return peer_id in self._proven

    def share(self, peer_id: PeerId, address: str) -> Share:
        """Returns what a call of ``peer_id`` from ``address`` (a group of `address_group`) counts for."""
        return Share(peer_id, True) if self.is_proven(peer_id) else Share(address, False)

    def prove(self, peer_id: PeerId, address: str) -> None:
        """Records that the peer is useful now; without effect where its address has its number of proven peers."""
        self._expire()
        if peer_id in self._proven:
            address, _ = self._proven[peer_id]
        elif len(self._proven) >= MAX_PROVEN or self._by_address[address] >= MAX_PER_ADDRESS:
            return
        else:
            self._by_address[address] += 1
        remember(self._proven, peer_id, (address, self._now()), MAX_PROVEN)

    def answered(self, peer_id: PeerId, address: str, method: str) -> None:
        """Proves a peer by its answer at ``host:port``, except to peer exchange: discovery calls all who announce."""
        if not method.startswith(_DISCOVERY_METHODS):
            self.prove(peer_id, address_group(split_address(address)[0]))

    def disprove(self, peer_id: PeerId) -> None:
        """Takes the share of its own away."""
        found = self._proven.pop(peer_id, None)
        if found is not None:
            count_down(self._by_address, found[0])

    def let_stall(self, address: str) -> None:
        """Records that a stranger at ``address`` took nothing of an answer for too long."""
        num_stalls, last_s = self._stalls.get(address, (0, self._now()))
        recent = num_stalls if self._now() - last_s < _GREYLISTED_S else 0
        remember(self._stalls, address, (recent + 1, self._now()), _MAX_GREYLIST)

    def is_greylisted(self, address: str) -> bool:
        """Returns whether strangers at ``address`` have recently let answers stall."""
        num_stalls, last_s = self._stalls.get(address, (0, 0.0))
        return num_stalls >= _MAX_STALLS and self._now() - last_s < _GREYLISTED_S

    def _expire(self) -> None:
        while self._proven:
            peer_id = next(iter(self._proven))
            if self._proven[peer_id][1] + KEPT_S > self._now():
                return
            self.disprove(peer_id)


def _unproven_part(total: int) -> int:
    """How much of ``total`` all peers that are not proven may take together: three quarters, rounded up."""
    return total - total // 4


class ByteBudget:
    """Counts bytes held for peers; says whether more fit."""

    def __init__(self, max_total_bytes: int, max_bytes_per_share: int) -> None:
        self._max_total_bytes = max_total_bytes
        self._max_bytes_per_share = max_bytes_per_share
        self._by_share: Counter[Share] = Counter()
        self.total_bytes = 0  # Held now.

    def has_room(self, share: Share, size_bytes: int) -> bool:
        """Returns whether ``size_bytes`` more fit."""
        max_bytes = self._max_total_bytes if share.is_proven else _unproven_part(self._max_total_bytes)
        fits_share = self._by_share[share] + size_bytes <= self._max_bytes_per_share
        return fits_share and self.total_bytes + size_bytes <= max_bytes

    def take(self, share: Share, size_bytes: int) -> None:
        """Counts bytes that are held from now on, whether there was room or not."""
        self._by_share[share] += size_bytes
        self.total_bytes += size_bytes

    def give(self, share: Share, size_bytes: int) -> None:
        """Counts them as no longer held."""
        self.total_bytes -= size_bytes
        count_down(self._by_share, share, size_bytes)


@dataclass(frozen=True, eq=False, slots=True)
class Slot:
    """The place of one call or stream in progress."""

    share: Share
    holder: str  # An identity, or a connection whose caller is not known yet.
    stalled_since: Callable[[], float | None]
    """Since when the other side has not taken or sent what it has to (the event loop's clock); None: it moves."""
    end: Callable[[], None]  # Ends what holds it; called once at most, and returns at once.
    keep_s: float = 0.0  # How long it may stand still before a newcomer gets its place.
    borne_s: float = 0.0  # How much longer than others it may stand still while its place is not needed.


class Slots:
    """Bounds the calls or streams in progress at once; ``max_per_address``: of all strangers at one address."""

    def __init__(self, what: str, max_total: int, max_per_holder: int, max_per_address: int) -> None:
        self._what = what
        self._max_total = max_total
        self._max_per_holder = max_per_holder
        self._max_per_address = max_per_address
        self._held: set[Slot] = set()
        self._by_share: Counter[Share] = Counter()
        self._by_holder: Counter[str] = Counter()
        self._num_unproven = 0

    def __len__(self) -> int:
        return len(self._held)

    def take(self, slot: Slot) -> Slot:
        """Takes a slot, where none is left in the place of the one that has stalled for longest, or is ``busy``."""
        if self._by_holder[slot.holder] >= self._max_per_holder:
            raise self._busy()
        if not slot.share.is_proven:
            if self._by_share[slot.share] >= self._max_per_address:
                self._shed_one(held for held in self._held if held.share == slot.share)
            if self._num_unproven >= _unproven_part(self._max_total):
                self._shed_one(held for held in self._held if not held.share.is_proven)
        if len(self._held) >= self._max_total:
            self._shed_one(self._held)
        self._held.add(slot)
        self._by_share[slot.share] += 1
        self._by_holder[slot.holder] += 1
        self._num_unproven += not slot.share.is_proven
        return slot

    def give(self, slot: Slot) -> bool:
        """Counts a slot as free; returns whether it was held."""
        if slot not in self._held:
            return False
        self._held.remove(slot)
        count_down(self._by_share, slot.share)
        count_down(self._by_holder, slot.holder)
        self._num_unproven -= not slot.share.is_proven
        return True

    def shed(self, slot: Slot) -> None:
        """Ends what holds a slot, and counts it as free."""
        if self.give(slot):
            slot.end()

    def stalled(self, before_s: float) -> list[Slot]:
        """Returns those that have stood still since ``before_s`` or longer, and are borne no longer."""
        standing = ((slot, slot.stalled_since()) for slot in self._held)
        return [slot for slot, since in standing if since is not None and since + slot.borne_s <= before_s]

    def _shed_one(self, candidates: Iterable[Slot]) -> None:
        now_s = asyncio.get_running_loop().time()
        stalled = []
        for slot in candidates:
            since_s = slot.stalled_since()
            if since_s is not None and now_s - since_s >= slot.keep_s:
                num_held = self._by_share[slot.share], self._by_holder[slot.holder]
                stalled.append((not slot.share.is_proven, *num_held, now_s - since_s, id(slot), slot))
        if not stalled:
            raise self._busy()
        self.shed(max(stalled)[-1])

    def _busy(self) -> RefusedError:
        return RefusedError(
            Reason.BUSY,
            f"expected at most {self._max_per_holder} {self._what} of one peer, {self._max_per_address} of one address "
            f"and {self._max_total} of all at once, found more; try again later",
        )


class ReplayGuard:
    """Remembers the requests that could still be replayed, so that none is obeyed twice; clocks may differ.

    A request is remembered by (sender, nonce) until it is too old for the clock check anyway, in buckets of an eighth
    of that time, which go whole. When full, new requests are refused and nothing is forgotten early, because a
    forgotten request can be replayed; so the bound per sender is also its rate. A clock that is set back reopens
    nothing: what expired once stays refused.

    Senders that are not proven share a token bucket with all others of their address. It lets a quarter of all that is
    remembered through, spread over time, so that a newcomer behind the address of a flood gets in within a few tries.
    """

    def __init__(
        self, *, window_s: float, max_entries: int, max_entries_per_peer: int, now: Callable[[], float] = time.time
    ) -> None:
        self._window_s = window_s
        self._bucket_s = window_s / _BUCKETS_PER_WINDOW
        self._max_entries = max_entries
        self._max_entries_per_peer = max_entries_per_peer
        self._now = now
        self._buckets: dict[int, dict[PeerId, set[bytes]]] = {}
        self._entries_of: Counter[PeerId] = Counter()
        self._num_entries = 0
        self._unproven_of: Counter[int] = Counter()
        most = max(1.0, max_entries * _ADDRESS_PART)
        # An entry stays for as long as two windows and a bucket, if its sender's clock is a window ahead.
        self._allowances = TokenBuckets(most / 4, most * 3 / 4 / (2 * window_s + self._bucket_s), now)
        self._expired_bucket = -1

    def __len__(self) -> int:
        return self._num_entries

    def check_clock(self, sent_at: float) -> None:
        """Refuses a request that was not sent within the window (``clock``); cheap, so before the signature."""
        difference_s = sent_at - self._now()
        if abs(difference_s) > self._window_s or self._bucket_of(sent_at) <= self._expired_bucket:
            raise RefusedError(
                Reason.CLOCK,
                f"expected clocks at most {self._window_s:g} s apart, found yours {abs(difference_s):.1f} s "
                f"{'ahead' if difference_s > 0 else 'behind'}; set both by NTP",
            )

    def remember(self, sender: PeerId, nonce: bytes, sent_at: float, share: Share) -> None:
        """Takes a checked request, unless it came before (``replayed``) or no more can be remembered (``rate``)."""
        self._expire()
        for senders in self._buckets.values():
            if nonce in senders.get(sender, ()):
                raise RefusedError(Reason.REPLAYED, "expected a new request, found one that came before")
        if (
            self._num_entries >= self._max_entries
            or self._entries_of[sender] >= self._max_entries_per_peer
            or (not share.is_proven and self._unproven_of.total() >= _unproven_part(self._max_entries))
            or (not share.is_proven and not self._allowances.take(share.key))
        ):
            raise RefusedError(
                Reason.RATE,
                f"expected at most {self._max_entries_per_peer} requests of a node ({self._max_entries} of all) "
                f"within {self._window_s:g} s, found more; call less often",
            )
        bucket = self._bucket_of(sent_at)
        self._buckets.setdefault(bucket, {}).setdefault(sender, set()).add(nonce)
        self._unproven_of[bucket] += not share.is_proven
        self._entries_of[sender] += 1
        self._num_entries += 1

    def _bucket_of(self, sent_at: float) -> int:
        return int((sent_at + self._window_s) / self._bucket_s)

    def _expire(self) -> None:
        current = int(self._now() / self._bucket_s)
        for bucket in [bucket for bucket in self._buckets if bucket < current]:
            del self._unproven_of[bucket]
            for sender, nonces in self._buckets.pop(bucket).items():
                self._num_entries -= len(nonces)
                count_down(self._entries_of, sender, len(nonces))
        self._expired_bucket = max(self._expired_bucket, current - 1)

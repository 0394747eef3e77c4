"""What a driver holds of the ledger: its leases, what of them it has not begun, and what it has yet to report.

Plain state without a network, so that what may be handed out, and what is owed to the keeper, can be tested.
`Throughput` measures how fast the driver gets micro-batches done, and so how many it has to hold.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from trainer.pipeline.protocol.work import LeaseTerm, MicroBatch, MicroBatchId, MicroBatchKey, Settlement

__all__ = ["Bundle", "HeldLease", "LeaseCache", "Throughput"]

_WINDOW_S = 30.0
_SHORTEST_S = 10.0
"""Few micro-batches say little of the speed; until then they count as having taken so long."""
_MOST_TIMES = 8192
_BUNDLE_BYTES = 40_000
"""Of settlements in one call, whose whole message may have 64 KiB."""
_BUNDLE_COUNT = 256


class Throughput:
    """Micro-batches per second over the last half minute. Times are of any one clock, in seconds."""

    def __init__(self) -> None:
        self._ended_s: deque[float] = deque(maxlen=_MOST_TIMES)
        self._began_s = math.inf

    def begun(self, now_s: float) -> None:
        """Notes that one is begun."""
        self._began_s = min(self._began_s, now_s)

    def ended(self, now_s: float) -> None:
        """Notes that one has ended."""
        self._ended_s.append(now_s)

    def per_s(self, now_s: float) -> float:
        """Returns the speed; 0: nothing has ended of late."""
        while self._ended_s and self._ended_s[0] <= now_s - _WINDOW_S:
            self._ended_s.popleft()
        return len(self._ended_s) / min(_WINDOW_S, max(_SHORTEST_S, now_s - self._began_s))


@dataclass(slots=True, eq=False)
class HeldLease:
    """A lease this driver has."""

    token: str
    term: LeaseTerm
    begun: set[MicroBatchKey] = field(default_factory=set)
    """Given to the routing, which has not reported yet what became of them."""


@dataclass(frozen=True, slots=True)
class Bundle:
    """What is reported to the keeper in one call about one lease."""

    token: str
    settlements: tuple[Settlement, ...]
    handed_back: tuple[MicroBatchKey, ...]


@dataclass(slots=True)
class _Unreported:
    settlements: dict[MicroBatchKey, Settlement] = field(default_factory=dict)
    handed_back: dict[MicroBatchKey, None] = field(default_factory=dict)
    report_from_s: dict[MicroBatchKey, float] = field(default_factory=dict)
    """When to repeat settlements that the keeper did not accept yet."""


class LeaseCache:
    """A driver's side of the ledger."""

    def __init__(self) -> None:
        self.leases: dict[str, HeldLease] = {}
        """Live ones, by token."""
        self._lapsed: dict[str, tuple[HeldLease, float]] = {}
        """Those that ran out, and when that was found: what was begun of them may still be settled."""
        self.unread: deque[tuple[HeldLease, MicroBatchId]] = deque()
        """Leased, rows not read yet."""
        self.ready: deque[tuple[HeldLease, MicroBatch]] = deque()
        """Read, not begun."""
        self._unreported: dict[str, _Unreported] = {}
        self._lease_of: dict[MicroBatchKey, HeldLease] = {}

    @property
    def num_ahead(self) -> int:
        """Micro-batches that are not begun."""
        return len(self.unread) + len(self.ready)

    @property
    def num_begun(self) -> int:
        """Micro-batches that the routing has."""
        return len(self._lease_of)

    @property
    def num_unreported(self) -> int:
        """Settlements and returns that the keeper has not acknowledged."""
        return sum(len(each.settlements) + len(each.handed_back) for each in self._unreported.values())

    def add(self, token: str, micro_batches: Iterable[MicroBatchId], send_before_s: float) -> None:
        """Adds a lease."""
        lease = self.leases[token] = HeldLease(token, LeaseTerm(send_before_s))
        self.unread.extend((lease, each) for each in micro_batches)

    def begin(self, now_s: float) -> MicroBatch | None:
        """Hands out the first micro-batch that is read and whose lease is live."""
        for position, (lease, micro_batch) in enumerate(self.ready):
            if now_s < lease.term.send_before_s:
                del self.ready[position]
                lease.begun.add(micro_batch.key)
                self._lease_of[micro_batch.key] = lease
                return micro_batch
        return None

    def settle(self, settlement: Settlement) -> bool:
        """Keeps a settlement to report; returns False if its lease is over or it was settled before."""
        lease = self._end(settlement.micro_batch)
        if lease is not None:
            self._unreported_of(lease).settlements[settlement.micro_batch] = settlement
        return lease is not None

    def hand_back(self, key: MicroBatchKey) -> None:
        """Gives back one that was begun, but that no stage was asked to apply."""
        lease = self._end(key)
        if lease is not None:
            self._unreported_of(lease).handed_back[key] = None

    def hand_back_all(self) -> None:
        """Gives back all that is not begun."""
        for lease in self.leases.values():
            self._hand_back_unbegun(lease)

    def lapse(self, now_s: float) -> list[str]:
        """Gives up leases that have run out: what was not begun is handed back, what was begun may still be settled.

        None of them is renewed any more: the routing may have left what it had begun to the keeper, which asks the
        workers once the lease is over for the keeper too. Returns their tokens.
        """
        over = [lease for lease in self.leases.values() if lease.term.send_before_s <= now_s]
        for lease in over:
            self._hand_back_unbegun(lease)
            del self.leases[lease.token]
            self._lapsed[lease.token] = (lease, now_s)
        return [lease.token for lease in over]

    def forget_lapsed(self, until_s: float = math.inf) -> list[str]:
        """Forgets leases that were found to have run out by then; returns their tokens."""
        over = [lease for lease, since_s in self._lapsed.values() if since_s <= until_s]
        for lease in over:
            del self._lapsed[lease.token]
            self._forget_begun(lease)
        return [lease.token for lease in over]

    def hand_back_unread(self, lease: HeldLease, micro_batch: MicroBatchId) -> None:
        """Gives back one whose rows cannot be read here."""
        if self._takes_from_unread(lease, micro_batch):
            self._unreported_of(lease).handed_back[str(micro_batch)] = None

    def have_read(self, lease: HeldLease, micro_batch: MicroBatch) -> None:
        """Keeps one whose rows were read, to be handed out if the lease is still held."""
        if self._takes_from_unread(lease, micro_batch.id):
            self.ready.append((lease, micro_batch))

    def drop(self, token: str) -> int:
        """Forgets a lease that is over; returns how many that were begun of it are not settled."""
        lease = self.leases.pop(token, None)
        if lease is None:
            return 0
        self._take_unbegun(lease)
        self._forget_begun(lease)
        lease.term.send_before_s = 0.0
        return len(lease.begun)

    def bundle(self, now_s: float, *, single: bool = False) -> Bundle | None:
        """Returns what to report next, if ``single`` one micro-batch only, to find out which of several is refused."""
        for token, unreported in self._unreported.items():
            settlements: list[Settlement] = []
            size_bytes = 0
            for key, settlement in unreported.settlements.items():
                if unreported.report_from_s.get(key, now_s) > now_s:
                    continue
                size_bytes += len(settlement.model_dump_json())
                if settlements and (single or size_bytes > _BUNDLE_BYTES or len(settlements) >= _BUNDLE_COUNT):
                    break
                settlements.append(settlement)
            back = list(unreported.handed_back)[: 1 if single else _BUNDLE_COUNT]
            if single and settlements:
                back = []
            if settlements or back:
                return Bundle(token, tuple(settlements), tuple(back))
        return None

    def reported(self, bundle: Bundle, unheard: Iterable[MicroBatchKey], repeat_from_s: float) -> None:
        """Forgets what the keeper has acknowledged, and leases of which nothing is left.

        Settlements of ``unheard`` micro-batches are repeated from then on.
        """
        unreported = self._unreported[bundle.token]
        kept = {each.micro_batch for each in bundle.settlements}.intersection(unheard)
        unreported.report_from_s.update(dict.fromkeys(kept, repeat_from_s))
        for settlement in bundle.settlements:
            if settlement.micro_batch not in kept:
                unreported.settlements.pop(settlement.micro_batch, None)
                unreported.report_from_s.pop(settlement.micro_batch, None)
        for key in bundle.handed_back:
            unreported.handed_back.pop(key, None)
        if unreported.settlements or unreported.handed_back:
            return
        del self._unreported[bundle.token]
        lease = self.leases.get(bundle.token)
        if lease is not None and not lease.begun and not any(each is lease for each, _ in (*self.unread, *self.ready)):
            del self.leases[bundle.token]

    def shards(self) -> list[int]:
        """Returns the shards of what is held, the latest leased first."""
        held = [each.id.shard for _, each in self.ready] + [each.shard for _, each in self.unread]
        return list(dict.fromkeys(reversed(held)))

    # -- inside --------------------------------------------------------------------------------------------------------

    def _hand_back_unbegun(self, lease: HeldLease) -> None:
        for micro_batch in self._take_unbegun(lease):
            self._unreported_of(lease).handed_back[str(micro_batch)] = None

    def _take_unbegun(self, lease: HeldLease) -> list[MicroBatchId]:
        """Takes out all of a lease that is not begun."""
        taken = [each for holder, each in self.unread if holder is lease]
        taken += [each.id for holder, each in self.ready if holder is lease]
        self.unread = deque(each for each in self.unread if each[0] is not lease)
        self.ready = deque(each for each in self.ready if each[0] is not lease)
        return taken

    def _forget_begun(self, lease: HeldLease) -> None:
        for key in lease.begun:
            if self._lease_of.get(key) is lease:  # It may have come back in another lease.
                del self._lease_of[key]

    def _takes_from_unread(self, lease: HeldLease, micro_batch: MicroBatchId) -> bool:
        """Takes the first unread one; returns False if it is another, its lease having been dropped meanwhile."""
        is_first = bool(self.unread) and self.unread[0] == (lease, micro_batch)
        if is_first:
            self.unread.popleft()
        return is_first

    def _end(self, key: MicroBatchKey) -> HeldLease | None:
        lease = self._lease_of.pop(key, None)
        if lease is not None:
            lease.begun.discard(key)
        return lease

    def _unreported_of(self, lease: HeldLease) -> _Unreported:
        return self._unreported.setdefault(lease.token, _Unreported())

"""How much peers may have a node do and hold at once: each of them, each address, and all together.

A call or stream that does not fit is refused at once. A frame of a stream waits on the peer's side of the connection:
`ByteBudget` never blocks, its users leave the next frame unread.

Peers that are not proven (`trainer.network.rpc.standing`) share what their address may take, half of everything, and
leave a quarter of everything to the proven. Where a limit is reached, a newcomer is not refused if another call stands
still: it gets the slot of the one that has stood still for longest, of the address and holder that have most. So slots
that are taken and left unused keep no newcomer out.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from trainer.errors import RefusedError
from trainer.network.rpc.messages import Reason
from trainer.network.rpc.standing import Share
from trainer.network.rpc.token_buckets import count_down

__all__ = ["ByteBudget", "Claim", "Slot", "Slots", "unproven_part"]


def unproven_part(total: int) -> int:
    """Returns how much of ``total`` all peers that are not proven may take together: three quarters, rounded up."""
    return total - total // 4


class ByteBudget:
    """Counts bytes held for peers; says whether more fit."""

    def __init__(self, max_total_bytes: int, max_bytes_per_share: int) -> None:
        self._max_total_bytes = max_total_bytes
        self._max_bytes_per_share = max_bytes_per_share
        self._by_share: Counter[Share] = Counter()
        self._total_bytes = 0

    @property
    def total_bytes(self) -> int:
        """Held now."""
        return self._total_bytes

    def has_room(self, share: Share, size_bytes: int) -> bool:
        """Returns whether ``size_bytes`` more fit."""
        max_bytes = self._max_total_bytes if share.is_proven else unproven_part(self._max_total_bytes)
        return (
            self._total_bytes + size_bytes <= max_bytes
            and self._by_share[share] + size_bytes <= self._max_bytes_per_share
        )

    def take(self, share: Share, size_bytes: int) -> None:
        """Counts bytes that are held from now on, whether there was room or not."""
        self._by_share[share] += size_bytes
        self._total_bytes += size_bytes

    def give(self, share: Share, size_bytes: int) -> None:
        """Counts them as no longer held."""
        self._total_bytes -= size_bytes
        count_down(self._by_share, share, size_bytes)


@dataclass(frozen=True, eq=False, slots=True)
class Claim:
    """A request for a slot."""

    share: Share
    holder: str
    """An identity, or a connection whose caller is not known yet."""
    stalled_since: Callable[[], float | None]
    """Since when the other side has not taken or sent what it has to (the event loop's clock); None: it moves."""
    shed: Callable[[], None]
    """Ends it; called once at most, and returns at once."""
    keep_s: float = 0.0
    """How long it may stand still before a newcomer gets its place."""
    borne_s: float = 0.0
    """How much longer than others it may stand still while its place is not needed."""


class Slot:
    """One call or stream in progress; given back once, by its holder or by `Slots` when it is shed."""

    def __init__(self, claim: Claim, slots: Slots) -> None:
        self.claim = claim
        self._slots = slots

    def give(self) -> None:
        """Gives it back; may be called again."""
        self._slots.drop(self)

    def shed(self) -> None:
        """Ends what holds it, and gives it back."""
        if self._slots.drop(self):
            self.claim.shed()


class Slots:
    """Bounds the calls or streams in progress at once.

    Args:
        what: their name, for messages.
        max_total: in all.
        max_per_holder: of one holder.
        max_per_address: of all peers of one address that are not proven.
    """

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

    def take(self, claim: Claim) -> Slot:
        """Returns a slot; where none is left, that of the one that has stalled for longest.

        Raises:
            RefusedError: ``busy``.
        """
        if self._by_holder[claim.holder] >= self._max_per_holder:
            raise self._busy()
        if not claim.share.is_proven:
            if self._by_share[claim.share] >= self._max_per_address:
                self._shed_one(slot for slot in self._held if slot.claim.share == claim.share)
            if self._num_unproven >= unproven_part(self._max_total):
                self._shed_one(slot for slot in self._held if not slot.claim.share.is_proven)
        if len(self._held) >= self._max_total:
            self._shed_one(self._held)
        slot = Slot(claim, self)
        self._held.add(slot)
        self._by_share[claim.share] += 1
        self._by_holder[claim.holder] += 1
        self._num_unproven += not claim.share.is_proven
        return slot

    def drop(self, slot: Slot) -> bool:
        """Counts a slot as free; returns whether it was held."""
        if slot not in self._held:
            return False
        self._held.remove(slot)
        claim = slot.claim
        count_down(self._by_share, claim.share)
        count_down(self._by_holder, claim.holder)
        self._num_unproven -= not claim.share.is_proven
        return True

    def stalled(self, before_s: float) -> list[Slot]:
        """Returns those that have stood still since ``before_s`` or longer, and are borne no longer."""
        standing = ((slot, slot.claim.stalled_since()) for slot in self._held)
        return [slot for slot, since in standing if since is not None and since + slot.claim.borne_s <= before_s]

    def _shed_one(self, candidates: Iterable[Slot]) -> None:
        now_s = asyncio.get_running_loop().time()
        stalled = []
        for slot in candidates:
            claim, since_s = slot.claim, slot.claim.stalled_since()
            if since_s is not None and now_s - since_s >= claim.keep_s:
                num_held = self._by_share[claim.share], self._by_holder[claim.holder]
                stalled.append((not claim.share.is_proven, *num_held, now_s - since_s, id(slot), slot))
        if not stalled:
            raise self._busy()
        max(stalled)[-1].shed()

    def _busy(self) -> RefusedError:
        return RefusedError(
            Reason.BUSY,
            f"expected at most {self._max_per_holder} {self._what} of one peer, {self._max_per_address} of one address "
            f"and {self._max_total} of all at once, found more; try again later",
        )

"""For whom the rounds of one coordinator wait: for those that say they come, and less and less if they do not.

    waited for in vain   a member: once more at the next round, then after 1, 2, 4, … rounds; others: after 1, 2, 4, …
    has come             the backoff is over, and it has one of its own from now on

Guarantees: `_MAX_KNOWN` members and backoffs are remembered at most, so memory does not grow with identities, which
are free; those that never were in a round share one backoff by host. The trade-off: two honest newcomers of one host
share it too, and wait for each other's misses.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from trainer.network.rpc import Peer
from trainer.network.rpc.config import split_address
from trainer.network.rpc.dialing import address_group

_MAX_KNOWN: Final = 1024
_MAX_BACKOFF_ROUNDS: Final = 1 << 10


@dataclass(slots=True)
class _Backoff:
    next_round: int = 0  # Not waited for before that one.
    num_rounds: int = 1  # To be left out when it is waited for in vain once more.


class LatecomerBackoff:
    """Limits how often the rounds of one coordinator wait for peers that say they are coming, and do not.

    A peer that was waited for in vain is waited for again only 1, 2, 4, … rounds later. The first miss of one that has
    been in a round with this node costs nothing: a node that stood still for a moment would lose the next round's work
    too. Since identities are free, peers that never were in a round share one backoff by host.
    """

    def __init__(self) -> None:
        self._members: OrderedDict[str, None] = OrderedDict()
        self._backoffs: OrderedDict[str, _Backoff] = OrderedDict()

    def may_wait(self, peer: Peer, round_index: int) -> bool:
        """Returns whether a round waits for a peer that says it is coming, or fetching the state."""
        return round_index >= self._backoffs.get(self._key(peer), _Backoff()).next_round

    def joined(self, members: Iterable[str]) -> None:
        """Clears the backoff of members of a round, and gives each its own from now on."""
        for peer_id in members:
            self._backoffs.pop(peer_id, None)
            self._members[peer_id] = None
            self._members.move_to_end(peer_id)
        while len(self._members) > _MAX_KNOWN:
            self._members.popitem(last=False)

    def missed(self, round_index: int, peers: Iterable[Peer]) -> None:
        """Backs off from peers that were waited for and did not come."""
        for key in {self._key(peer) for peer in peers}:
            backoff = self._backoffs.setdefault(key, _Backoff(num_rounds=0 if key in self._members else 1))
            backoff.next_round = round_index + 1 + backoff.num_rounds
            backoff.num_rounds = min(max(1, 2 * backoff.num_rounds), _MAX_BACKOFF_ROUNDS)
        while len(self._backoffs) > _MAX_KNOWN:
            self._backoffs.popitem(last=False)

    def _key(self, peer: Peer) -> str:
        peer_id = peer.peer_id or ""
        return peer_id if peer_id in self._members else address_group(split_address(peer.address)[0])

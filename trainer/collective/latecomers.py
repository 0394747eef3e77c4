"""`Latecomers`: which of the peers that are fetching the run's state a round waits for.

While members wait for a round's beginning the state they hold is the newest and does not change; so a peer that fetches
it meanwhile is a member of that round, however short inner loops are. Anybody can say that it fetches. So a peer that
was waited for in vain is waited for again only 1, 2, 4, … rounds later; and since identities are free, those that have
never been in a round with this node share that patience by host. Who has been in one has it for itself.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from trainer.network.rpc import Peer
from trainer.network.rpc.config import split_address
from trainer.network.rpc.remote_address import address_group

__all__ = ["Latecomers"]

_MOST_KNOWN = 1024
_MOST_ROUNDS = 1 << 10


@dataclass(slots=True)
class _Patience:
    next_round: int = 0
    """Not waited for before that one."""
    num_rounds: int = 1
    """To be left out when it is waited for in vain once more."""


class Latecomers:
    """One node's patience with others, for the rounds that it coordinates; lives in the event loop."""

    def __init__(self) -> None:
        self._members: OrderedDict[str, None] = OrderedDict()
        self._tried: OrderedDict[str, _Patience] = OrderedDict()

    def may_wait(self, peer: Peer, round_index: int) -> bool:
        """Whether a round waits for a peer that says it is fetching the state."""
        return round_index >= self._tried.get(self._key(peer), _Patience()).next_round

    def began(self, members: Iterable[str]) -> None:
        """These have been in a round with this node; whoever was waited for is worth it again."""
        for peer_id in members:
            self._tried.pop(peer_id, None)
            self._members[peer_id] = None
            self._members.move_to_end(peer_id)
        while len(self._members) > _MOST_KNOWN:
            self._members.popitem(last=False)

    def in_vain(self, round_index: int, peers: Iterable[Peer]) -> None:
        """These were waited for and did not come."""
        for key in {self._key(peer) for peer in peers}:
            patience = self._tried.setdefault(key, _Patience())
            patience.next_round = round_index + 1 + patience.num_rounds
            patience.num_rounds = min(2 * patience.num_rounds, _MOST_ROUNDS)
        while len(self._tried) > _MOST_KNOWN:
            self._tried.popitem(last=False)

    def _key(self, peer: Peer) -> str:
        peer_id = peer.peer_id or ""
        return peer_id if peer_id in self._members else address_group(split_address(peer.address)[0])

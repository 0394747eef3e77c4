"""Which peers have proven useful, and so have shares of their own in what a node can hold; and who is told of contacts.

An identity costs nothing, so identities that this node knows nothing of share what their address may take. A peer is
proven once it has answered a call of this node, or has had `MIN_GOOD_CALLS` calls of its own answered in good order
over `MIN_TENURE_S` (`trainer.network.rpc.connections` counts them by connection). It stays so for `KEPT_S` after the
last exchange, unless it lets an answer of this node stall. An honest swarm behind one address thereby does not share
with the strangers behind the same address. An address can have `MAX_PER_ADDRESS` proven peers; those that came first
stay.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from trainer.network.rpc.config import split_address
from trainer.network.rpc.messages import PeerId
from trainer.network.rpc.remote_address import address_group

__all__ = [
    "KEPT_S",
    "MAX_PER_ADDRESS",
    "MAX_PROVEN",
    "MIN_GOOD_CALLS",
    "MIN_TENURE_S",
    "Contact",
    "Contacts",
    "Share",
    "Standing",
]

Contact: TypeAlias = Callable[[PeerId, str, str], None]
"""Takes a peer's id, an address and a method; must not raise."""


class Contacts:
    """The listeners of one endpoint, called on its event loop."""

    def __init__(self) -> None:
        self.when_answered: list[Contact] = []
        """A peer's signed answer has come; the address is the one that was called, as it was given."""
        self.when_served: list[Contact] = []
        """A peer's call was served without being refused; the address is its host, as `address_group` names it."""

    def answered(self, peer_id: PeerId, address: str, method: str) -> None:
        """Tells of an answer."""
        for listener in self.when_answered:
            listener(peer_id, address, method)

    def served(self, peer_id: PeerId, host: str, method: str) -> None:
        """Tells of a call that was served."""
        for listener in self.when_served:
            listener(peer_id, host, method)


MIN_GOOD_CALLS = 8
MIN_TENURE_S = 30.0
KEPT_S = 600.0
MAX_PER_ADDRESS = 64
MAX_PROVEN = 1024
_MAX_STALLS = 4
_GREYLISTED_S = 60.0
_MAX_GREYLIST = 4096
_DISCOVERY_METHODS = "announce/"


@dataclass(frozen=True, slots=True)
class Share:
    """Under which key limits count something."""

    key: str
    """A proven peer's identity; of all others the address."""
    is_proven: bool


class Standing:
    """The proven peers of one endpoint.

    Args:
        now: seconds of a clock that never goes back.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._proven: OrderedDict[PeerId, tuple[str, float]] = OrderedDict()
        self._by_address: Counter[str] = Counter()
        self._stalls: OrderedDict[str, tuple[int, float]] = OrderedDict()
        """By address: connections that were closed because their callers took nothing, and when the last one was."""

    def __len__(self) -> int:
        return len(self._proven)

    def is_proven(self, peer_id: PeerId) -> bool:
        """Whether the peer has a share of its own."""
        self._expire()
        return peer_id in self._proven

    def share(self, peer_id: PeerId, address: str) -> Share:
        """What counts for ``peer_id`` that calls from ``address`` (a group of `address_group`)."""
        return Share(peer_id, True) if self.is_proven(peer_id) else Share(address, False)

    def prove(self, peer_id: PeerId, address: str) -> None:
        """Records that the peer is useful now; without effect where its address has its number of proven peers."""
        self._expire()
        if peer_id not in self._proven:
            if len(self._proven) >= MAX_PROVEN or self._by_address[address] >= MAX_PER_ADDRESS:
                return
            self._by_address[address] += 1
        else:
            address, _ = self._proven[peer_id]
        self._proven[peer_id] = (address, self._now())
        self._proven.move_to_end(peer_id)

    def answered(self, peer_id: PeerId, address: str, method: str) -> None:
        """Proves a peer by its answer to a call of this node.

        An answer to peer exchange proves nothing: discovery calls whoever announces itself.

        Args:
            peer_id: who answered.
            address: ``host:port`` that was called.
            method: what it was asked.
        """
        if not method.startswith(_DISCOVERY_METHODS):
            self.prove(peer_id, address_group(split_address(address)[0]))

    def disprove(self, peer_id: PeerId) -> None:
        """Takes the share of its own away."""
        found = self._proven.pop(peer_id, None)
        if found is not None:
            self._by_address[found[0]] -= 1
            if not self._by_address[found[0]]:
                del self._by_address[found[0]]

    def let_stall(self, address: str) -> None:
        """Records that a stranger at ``address`` took nothing of an answer for too long."""
        num_stalls, last_s = self._stalls.pop(address, (0, self._now()))
        recent = num_stalls if self._now() - last_s < _GREYLISTED_S else 0
        self._stalls[address] = (recent + 1, self._now())
        while len(self._stalls) > _MAX_GREYLIST:
            self._stalls.popitem(last=False)

    def is_greylisted(self, address: str) -> bool:
        """Whether strangers at ``address`` have let answers stall of late."""
        num_stalls, last_s = self._stalls.get(address, (0, 0.0))
        return num_stalls >= _MAX_STALLS and self._now() - last_s < _GREYLISTED_S

    def _expire(self) -> None:
        while self._proven:
            peer_id = next(iter(self._proven))
            if self._proven[peer_id][1] + KEPT_S > self._now():
                return
            self.disprove(peer_id)

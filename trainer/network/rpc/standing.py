"""Which peers have proven useful, and so have shares of their own in what a node can hold; and who is told of contacts.

An identity costs nothing, so identities that this node knows nothing of share what their address may take. A peer is
proven once it has answered a call of this node, or has had `MIN_GOOD_CALLS` calls of its own answered in good order
over `MIN_TENURE_S` (`trainer.network.rpc.connections` counts them by connection). It stays so for `KEPT_S` after the
last contact, unless it lets an answer of this node stall. So an honest swarm behind one address does not share with the
strangers behind the same address. An address can have `MAX_PER_ADDRESS` proven peers; those that came first stay.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

from trainer.network.rpc.config import split_address
from trainer.network.rpc.messages import PeerId
from trainer.network.rpc.remote_address import address_group
from trainer.network.rpc.token_buckets import count_down, remember

__all__ = [
    "KEPT_S",
    "MAX_PER_ADDRESS",
    "MAX_PROVEN",
    "MIN_GOOD_CALLS",
    "MIN_TENURE_S",
    "Contacts",
    "Share",
    "Standing",
]

MIN_GOOD_CALLS = 8
MIN_TENURE_S = 30.0
KEPT_S = 600.0
MAX_PER_ADDRESS = 64
MAX_PROVEN = 1024
_MAX_STALLS = 4
_GREYLISTED_S = 60.0
_MAX_GREYLIST = 4096
_DISCOVERY_METHODS = "announce/"

_Listener: TypeAlias = Callable[[PeerId, str, str], None]
"""Takes a peer's id, an address and a method; must not raise."""


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
        """Returns whether the peer has a share of its own."""
        self._expire()
        return peer_id in self._proven

    def share(self, peer_id: PeerId, address: str) -> Share:
        """Returns what a call of ``peer_id`` from ``address`` (a group of `address_group`) counts for."""
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
        """Proves a peer by its answer to a call of ``method`` at ``address`` (``host:port``).

        An answer to peer exchange proves nothing, because discovery calls anyone who announces itself.
        """
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

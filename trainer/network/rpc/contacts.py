"""Who has answered this node, and whom it has answered: told to whoever wants to know which peers are of use."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from trainer.network.rpc.messages import PeerId

__all__ = ["Contact", "Contacts"]

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

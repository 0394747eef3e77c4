"""Who else is in the run, as discovery knows it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from trainer.network.rpc import Peer

__all__ = ["Directory"]


class Directory(Protocol):
    """What a round asks of discovery; the answers are kept fresh by others and cost nothing."""

    def peers(self) -> Mapping[str, Peer]:
        """Nodes that train by the same terms and are thought to be alive, by id, without this one."""

    def holds_most_held_state(self) -> bool:
        """Whether the state most nodes hold, as far as they say, is this node's."""

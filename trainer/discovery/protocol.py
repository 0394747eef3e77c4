"""What discovery is to the rest of the trainer: say where I am, tell me who else is there."""

from __future__ import annotations

from typing import Protocol

from trainer.discovery.announcement import Announcement

__all__ = ["Discovery"]


class Discovery(Protocol):
    """Finds the nodes of a run. All methods belong to the node's one event loop."""

    async def start(self) -> None:
        """Begins to look, and to answer; returns at once."""
        ...

    async def announce(self, announcement: Announcement) -> None:
        """Says this from now on, repeating it before it expires, until told something else.

        Args:
            announcement: this node's; `sent_at` and `expires_at` are filled in on each repetition.

        Raises:
            DiscoveryError: it is not this node's, or too long.
        """
        ...

    async def peers(self) -> tuple[Announcement, ...]:
        """The other nodes of the run: verified, unexpired, without this one, ordered by peer id; never waits long."""
        ...

    async def close(self) -> None:
        """Stops announcing and looking; ends what was started."""
        ...

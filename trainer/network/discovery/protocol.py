"""What discovery is to the rest of the trainer: say where I am, tell me who else is there."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from trainer.network.discovery.announcement import Announcement
from trainer.network.discovery.stage_report import StageUid

__all__ = ["Discovery", "is_asked_for"]


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

    def look_for(self, stages: Collection[str] | None) -> None:
        """Looks for the workers of these stages only, from now on; None, as at first: of all.

        Nodes that hold no stage, such as drivers, are looked for always.

        Args:
            stages: their names.

        Raises:
            DiscoveryError: the run has no such stage, as far as this is known here.
        """
        ...

    async def peers(self) -> tuple[Announcement, ...]:
        """The other nodes of the run that are looked for, by peer id: verified, unexpired, without this one.

        Never waits long.
        """
        ...

    def heard(self) -> tuple[Announcement, ...]:
        """What the same and other nodes say of themselves, also those that are not reached (any more), by peer id.

        Signed words, and nothing to connect to: whether a node lives that this one cannot reach, and as which process.
        """
        ...

    def silence(self) -> str:
        """Why nobody may have been heard of, in words: who of those it was to begin at does not answer.

        Empty where nobody is to be expected: none were named, or they are this node itself.
        """
        ...

    async def close(self) -> None:
        """Stops announcing and looking; ends what was started."""
        ...


def is_asked_for(announcement: Announcement, stages: Collection[str] | None) -> bool:
    """Whether `Discovery.look_for` these stages, None: all, means this node too."""
    if stages is None or announcement.stage is None:
        return True
    return StageUid.parse(announcement.stage.uid).stage in stages

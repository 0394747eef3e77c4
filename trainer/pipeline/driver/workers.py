"""The workers of a pipeline as a driver knows them, and where it hears of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Protocol

from trainer.network.discovery.announcement import Announcement
from trainer.network.discovery.stage_report import StageUid
from trainer.network.rpc.messages import Peer


@dataclass(frozen=True, slots=True)
class StageWorker:
    """A worker that takes micro-batches, as last announced."""

    stage: str
    uid: str  # Its name for people, such as ``body3.0.55``.
    peer: Peer
    incarnation: str  # Of its process; may be out of date.

    @property
    def key(self) -> str:
        """What balancer and bans know it by."""
        return self.peer.peer_id or self.peer.address

    def unpinned(self) -> StageWorker:
        """Returns it with any certificate accepted, since it may have restarted: its answer is signed by its key."""
        return replace(self, peer=Peer(self.peer.peer_id, self.peer.address))

    def __str__(self) -> str:
        return f"{self.uid} ({self.key[:12]} at {self.peer.address})"


@dataclass(frozen=True, slots=True)
class LastWord:
    """The newest announcement under a worker's key, whatever it announces."""

    incarnation: str  # Of the process; empty: it holds no stage any more.
    address: str
    heard_s: float  # When it was new here, by `time.monotonic`.


class StageDirectory(Protocol):
    """The workers that are announced."""

    @property
    def silence_s(self) -> float:
        """Seconds for which a live worker that others hear never goes without a new announcement."""

    def workers(self) -> Iterable[StageWorker]:
        """Returns all workers of all stages that take micro-batches now, without waiting."""

    def last_word(self, key: str) -> LastWord | None:
        """Returns what was last heard under a worker's key; None: nothing, or it has expired."""


def workers_in(announcements: Iterable[Announcement]) -> tuple[StageWorker, ...]:
    """Returns the workers among some announcements that take micro-batches."""
    return tuple(
        StageWorker(StageUid.parse(said.stage.uid).stage, said.stage.uid, said.peer(), said.stage.incarnation)
        for said in announcements
        if said.stage is not None and said.stage.status == "serving"
    )

"""The workers of a pipeline as a driver knows them, and where it hears of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Protocol

from trainer.network.discovery.announcement import Announcement
from trainer.network.discovery.stage_report import StageUid
from trainer.network.rpc.messages import Peer

__all__ = ["LastWord", "StageDirectory", "StageWorker", "workers_in"]


@dataclass(frozen=True, slots=True)
class StageWorker:
    """A worker that takes micro-batches, as it was last announced."""

    stage: str
    uid: str
    """Its name for people, such as ``body3.0.55``."""
    peer: Peer
    """Where it is; its `peer_id` is what it is known by."""
    incarnation: str
    """Of its process; may be out of date."""

    @property
    def key(self) -> str:
        """What it is known by to balancer and bans."""
        return self.peer.peer_id or self.peer.address

    def unpinned(self) -> StageWorker:
        """The same, to be asked whatever certificate it shows, since it may have restarted after it was announced.

        Its answer, signed by its key, vouches for the certificate.
        """
        return replace(self, peer=Peer(self.peer.peer_id, self.peer.address))

    def __str__(self) -> str:
        return f"{self.uid} ({self.key[:12]} at {self.peer.address})"


@dataclass(frozen=True, slots=True)
class LastWord:
    """The newest announcement under a worker's key, whatever it says that it does."""

    incarnation: str
    """Of the process; empty: it holds no stage any more."""
    address: str
    heard_s: float
    """When it was new here, by `time.monotonic`."""


class StageDirectory(Protocol):
    """Who is there."""

    @property
    def silence_s(self) -> float:
        """Seconds for which a worker that lives, and that others hear, never goes without a new announcement."""
        ...

    def workers(self) -> Iterable[StageWorker]:
        """All workers that take micro-batches now, of all stages; returns at once."""
        ...

    def last_word(self, key: str) -> LastWord | None:
        """What was last heard under a worker's key; None: nothing, or what was heard has run out."""
        ...


def workers_in(announcements: Iterable[Announcement]) -> tuple[StageWorker, ...]:
    """Those of some announcements that speak of a worker that takes micro-batches."""
    return tuple(
        StageWorker(StageUid.parse(said.stage.uid).stage, said.stage.uid, said.peer(), said.stage.incarnation)
        for said in announcements
        if said.stage is not None and said.stage.status == "serving"
    )

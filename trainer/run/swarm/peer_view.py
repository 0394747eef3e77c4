"""A worker's view of its peers: other workers of its stage, drivers of the run, workers of other stages."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any

from trainer.network.discovery import Announcement
from trainer.network.discovery.stage_report import StageReport, StageUid
from trainer.network.rpc import Peer, PeerId
from trainer.outer.sparta import frontier_of
from trainer.run.node.network import Network
from trainer.run.node.peer_book import peer_of
from trainer.run.swarm.compatibility import SwarmTerms
from trainer.run.swarm.keeper import KeeperSearch

__all__ = ["RunPeerView", "StagePeerView", "is_of_stage"]


def is_of_stage(stage: str, said: Announcement) -> bool:
    """Whether somebody says to hold this stage."""
    return said.stage is not None and StageUid.parse(said.stage.uid).stage == stage


class StagePeerView:
    """Any thread may ask; also the rounds of the others, for SPARTA (`trainer.outer.sparta.OtherRounds`).

    Args:
        network: hears them; nodes of its kind are of the stage (`is_of_stage`).
    """

    def __init__(self, network: Network[Any]) -> None:
        self._network = network

    def reports(self) -> list[StageReport]:
        """What each says of itself."""
        return [said.stage for said in self._network.alike() if said.stage is not None]

    def serving(self) -> list[StageReport]:
        """Of those that are at work."""
        return [report for report in self.reports() if report.status == "serving"]

    def is_anybody_joining(self) -> bool:
        """Whether there is somebody to hand a state to."""
        return any(report.status == "joining" for report in self.reports())

    def peers(self) -> tuple[Peer, ...]:
        """Where they are."""
        return tuple(peer_of(said) for said in self._network.alike() if said.stage is not None)

    def frontier(self) -> int:
        """The round those at work are in; see `trainer.outer.sparta.OtherRounds`."""
        return frontier_of([report.round_index for report in self.serving()])

    def move_to(self, round_index: int) -> None:
        """See `trainer.outer.sparta.OtherRounds`."""
        self._network.collective.move_to(round_index)


class RunPeerView:
    """Whom a worker does anything for: those that announce the same run file. Any thread may ask.

    Args:
        network: hears them.
        terms: of the run.
        keeper: finds who keeps the account.
    """

    def __init__(self, network: Network[Any], terms: SwarmTerms, keeper: KeeperSearch) -> None:
        self._network = network
        self._terms = terms
        self._keeper = keeper

    def drivers(self) -> Set[PeerId]:
        """Keys of the drivers."""
        return {said.peer_id for said in self._drivers()}

    def keeper(self) -> PeerId | None:
        """Key of the keeper of the account; None: it is not announced."""
        found = self._keeper.find(self._drivers())
        return None if found is None else found.peer_id

    def reports(self) -> list[StageReport]:
        """What each of the workers says of itself, whatever its stage."""
        heard = self._network.announcements
        return [said.stage for said in heard if said.stage is not None and self._terms.fits(said)]

    def workers(self, stage: str) -> Mapping[PeerId, Peer]:
        """A stage's workers, by key."""
        heard = self._network.announcements
        return {said.peer_id: peer_of(said) for said in heard if is_of_stage(stage, said) and self._terms.fits(said)}

    def _drivers(self) -> list[Announcement]:
        return [said for said in self._network.announcements if said.stage is None and self._terms.fits(said)]

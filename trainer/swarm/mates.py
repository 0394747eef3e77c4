"""`StageMates`: a stage's other workers, as this one hears of them."""

from __future__ import annotations

from typing import Any

from trainer.discovery import Announcement
from trainer.node.network import Network
from trainer.node.peer_book import peer_of
from trainer.pipeline.names import StageUid
from trainer.pipeline.report import StageReport
from trainer.rpc import Peer
from trainer.sparta import frontier_of

__all__ = ["StageMates", "is_of_stage"]


def is_of_stage(stage: str, said: Announcement) -> bool:
    """Whether somebody says to hold this stage."""
    return said.stage is not None and StageUid.parse(said.stage.uid).stage == stage


class StageMates:
    """Any thread may ask; also the rounds of the others, for SPARTA (`trainer.sparta.OtherRounds`).

    Args:
        network: hears them; its fellows are of the stage (`is_of_stage`).
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
        """The round those at work are in; see `trainer.sparta.OtherRounds`."""
        return frontier_of([report.round_index for report in self.serving()])

    def move_to(self, round_index: int) -> None:
        """See `trainer.sparta.OtherRounds`."""
        self._network.collective.move_to(round_index)

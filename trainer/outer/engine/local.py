"""A node alone: its own pseudo-gradient is the agreed one (spec T-15)."""

from __future__ import annotations

from trainer.outer.engine.collective import Contribution, RoundReport, RoundResult

__all__ = ["LocalCollective"]


class LocalCollective:
    """A round of one.

    Args:
        member: this node's name in the report.
    """

    def __init__(self, member: str = "self") -> None:
        self._member = member

    def reduce(self, contribution: Contribution) -> RoundResult:
        """The contribution itself, uncoded."""
        report = RoundReport(round_index=contribution.round_index, members=(self._member,), weights=(1.0,))
        return RoundResult(vector=contribution.vector, report=report)

    def requested(self) -> bool:
        """Nobody waits."""
        return False

    def close(self) -> None:
        """Nothing to give up."""

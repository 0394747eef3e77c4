"""The rounds of one node: which succeeded, and how the last one went.

A round that found nobody is no failure where nobody is there, and is one where another node was known: then the node
trained on without the others, which is what the success rate is to show.
"""

from __future__ import annotations

from collections import deque

from trainer.monitor.facts import RoundFacts
from trainer.monitor.status import LastRound, SyncSuccess

__all__ = ["RoundHistory"]

_WINDOW = 100


class RoundHistory:
    """Counts of a node's rounds, and whether each of the latest 100 attempts succeeded."""

    def __init__(self) -> None:
        self._attempts: deque[bool] = deque(maxlen=_WINDOW)
        self.num_done = 0
        self.num_alone = 0
        self.num_failed = 0
        self.last: LastRound | None = None

    def add(self, report: RoundFacts, *, knew_others: bool) -> None:
        """A round that ended with a result."""
        is_alone = len(report.members) < 2
        self.num_done += 1
        self.num_alone += is_alone
        if knew_others or not is_alone:
            self._attempts.append(not is_alone)
        self.last = LastRound(
            round_index=report.round_index,
            num_members=len(report.members),
            num_dropped=len(report.dropped),
            completeness=report.completeness,
            sent_bytes=report.sent_bytes,
            received_bytes=report.received_bytes,
            seconds=report.seconds,
            rule=report.rule,
        )

    def add_failed(self) -> None:
        """A round that ended without one."""
        self.num_failed += 1
        self._attempts.append(False)

    def success(self) -> SyncSuccess:
        """The latest attempts."""
        reason = None
        if not self._attempts:
            reason = "no other node was there in any round" if self.num_alone else "no round yet"
        return SyncSuccess(num_attempted=len(self._attempts), num_succeeded=sum(self._attempts), reason=reason)

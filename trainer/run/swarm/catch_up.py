"""State catch-up: a new worker waits for a round to begin, takes up the state of its stage, and is then current.

A worker that comes back from a checkpoint of the state that the others' round began from is current at once: after a
restart of all, nobody waits for a round's end.

No worker serves with weights of its own making while others have better ones: a worker whose fetch failed, or that
finds no donor, keeps waiting and asking. Threads and network are passed in as functions, so that tests run every path
with a clock of their own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median_low

from trainer.network.discovery.stage_report import StageReport
from trainer.outer.sparta import frontier_of
from trainer.run.config.swarm import JoinConfig
from trainer.run.swarm.joining import JoinWindow

__all__ = ["StateCatchUp"]

logger = logging.getLogger(__name__)

_LOOK_S = 0.25
_RETRY_S = 2.0
_TOLD_EVERY_S = 60.0


@dataclass(slots=True, kw_only=True)
class StateCatchUp:
    """One joining, or joining again."""

    config: JoinConfig
    others: Callable[[], Sequence[StageReport]]
    """The stage's other workers that serve."""
    take_up: Callable[[], bool]
    """Takes up the others' state; False: there was none to be had, or it did not fit."""
    may_be_first: Callable[[], bool]
    """Whether a worker that finds nobody serving its stage may; may raise what ends it."""
    round_index: Callable[[], int]
    """The round that is next here."""
    is_current: Callable[[], bool]
    """Whether this worker came back from a checkpoint of the very state that the others' round began from."""
    is_over: Callable[[], bool]
    """Whether to give up: the worker is asked to stop. May raise what ends it."""
    clock: Callable[[], float]
    sleep: Callable[[float], None]
    _told_s: float = -_TOLD_EVERY_S

    def run(self) -> bool:
        """Waits until this worker may serve.

        Returns:
            Whether it may: it is current, or alone in its stage. False: it is asked to stop.
        """
        window = JoinWindow(self.config)
        self._told_s = -_TOLD_EVERY_S
        while not self.is_over():
            others = self.others()
            if not others:
                if self.may_be_first():
                    return True
                self.sleep(_LOOK_S)
                continue
            if self.is_current():
                return True
            frontier, position = _place_of(others)
            if not window.is_open(frontier, position, self.clock()):
                self._tell("their state is taken up when", frontier, position)
                self.sleep(_LOOK_S)
                continue
            took_up = self.take_up()
            if took_up and not self._is_left_behind():
                return True
            what = "what was taken up is too old by now" if took_up else "none hands out a state yet"
            self._tell(f"{what}; they are asked again in {_RETRY_S:g} s, then when", frontier, position)
            self.sleep(_RETRY_S)
        return False

    def _tell(self, what: str, frontier: int, position: float) -> None:
        """What is waited for, and what ends the waiting at the latest; now and then."""
        if self.clock() - self._told_s < _TOLD_EVERY_S:
            return
        self._told_s = self.clock()
        logger.info(
            "waiting for the stage's state: %s the next round of the others begins (round %d is %.0f %% through), or "
            "when it has not moved for %g s",
            what,
            frontier,
            100 * position,
            self.config.idle_s,
        )

    def _is_left_behind(self) -> bool:
        frontier = frontier_of([report.round_index for report in self.others()])
        return frontier - self.round_index() > self.config.max_rounds_behind


def _place_of(others: Sequence[StageReport]) -> tuple[int, float]:
    """The round the others are in, and how far; by medians, so that one of them cannot keep newcomers out."""
    frontier = frontier_of([report.round_index for report in others])
    positions = [report.round_position for report in others if report.round_index == frontier]
    return frontier, median_low(positions) if positions else 0.0

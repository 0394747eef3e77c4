"""How a worker comes and goes: catching up with its stage, coming back after it lost touch, and graceful shutdown.

Threads, network and clock are passed in as functions, so that tests run every path with a clock of their own.

Newcomers take up the stage's state during the first tenth of a round (spec P-43): later they would begin with work that
the others have long done. A stage on which nobody works has no rounds to wait for, so a round that does not move for
`JoinConfig.idle_s` counts as a beginning. A worker that finds no donor keeps asking: none serves its own first weights
while others have better ones. After a restart of all, a worker whose checkpoint has the state from which the others'
round began is current at once, and one that comes later with a newer state keeps it (`is_ahead`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from statistics import median_low

from trainer.errors import CheckpointError, TrainerError
from trainer.network.discovery.stage_report import StageReport
from trainer.outer.sparta import frontier_of
from trainer.run.config.swarm import JoinConfig

__all__ = ["JoinWindow", "RejoinDelay", "StateCatchUp", "is_ahead", "shut_down_gracefully", "version_of_state"]

logger = logging.getLogger(__name__)

_LOOK_S = 0.25
_RETRY_S = 2.0
_LOG_EVERY_S = 60.0
_FIRST_DELAY_S, _MAX_DELAY_S = 0.5, 16.0
_SETTLED_S = 30.0
"""A worker that has served for so long without losing touch comes back without delay."""
_ANSWER_LOOK_S = 0.1
_MIN_SAVE_S = 5.0
"""For saving, however long the rest of a shutdown has taken."""


class JoinWindow:
    """Decides from a stage's round whether a newcomer may take up its state now."""

    def __init__(self, config: JoinConfig) -> None:
        self._config = config
        self._seen: tuple[int, float] | None = None
        self._since_s = 0.0

    def is_open(self, round_index: int, position: float, now_s: float) -> bool:
        """Whether the state may be taken up while the others are so far (0 to 1) in this round."""
        seen = (round_index, position)
        if seen != self._seen:
            self._seen, self._since_s = seen, now_s
        return position < self._config.window or now_s - self._since_s >= self._config.idle_s


@dataclass(slots=True, kw_only=True)
class StateCatchUp:
    """A worker that joins its stage, for the first time or again."""

    config: JoinConfig
    others: Callable[[], Sequence[StageReport]]
    """The stage's other workers that serve."""
    take_up: Callable[[], bool]
    """Takes up the others' state; False: none was to be had, or it did not fit."""
    may_be_first: Callable[[], bool]
    """Whether a worker that finds nobody serving its stage may serve; may raise what ends it."""
    round_index: Callable[[], int]
    """This worker's next round."""
    is_current: Callable[[], bool]
    """Whether this worker came back from a checkpoint of the state from which the others' round began."""
    is_over: Callable[[], bool]
    """Whether to give up: the worker is asked to stop. May raise what ends it."""
    clock: Callable[[], float]
    sleep: Callable[[float], None]
    _logged_s: float = -_LOG_EVERY_S

    def run(self) -> bool:
        """Waits until this worker may serve: it is current, or alone in its stage. False: it is asked to stop."""
        window = JoinWindow(self.config)
        while not self.is_over():
            others = self.others()
            if not others:
                if self.may_be_first():
                    return True
                self.sleep(_LOOK_S)
                continue
            if self.is_current():
                return True
            frontier, position = _round_place(others)
            if not window.is_open(frontier, position, self.clock()):
                self._log("their state is taken up when", frontier, position)
                self.sleep(_LOOK_S)
                continue
            took_up = self.take_up()
            if took_up and not self._is_behind():
                return True
            what = "the state that was taken up is too old by now" if took_up else "none hands out a state yet"
            self._log(f"{what}; they are asked again in {_RETRY_S:g} s, then when", frontier, position)
            self.sleep(_RETRY_S)
        return False

    def _log(self, what: str, frontier: int, position: float) -> None:
        """Logs once a minute what the worker waits for, and what ends the waiting."""
        if self.clock() - self._logged_s < _LOG_EVERY_S:
            return
        self._logged_s = self.clock()
        logger.info(
            "waiting for the stage's state: %s the next round of the others begins (round %d is %.0f %% through), or "
            "when it has not moved for %g s",
            what,
            frontier,
            100 * position,
            self.config.idle_s,
        )

    def _is_behind(self) -> bool:
        frontier = frontier_of([report.round_index for report in self.others()])
        return frontier - self.round_index() > self.config.max_rounds_behind


def _round_place(others: Sequence[StageReport]) -> tuple[int, float]:
    """The others' round, and how far it is; medians, so that no single worker can keep newcomers out."""
    frontier = frontier_of([report.round_index for report in others])
    positions = [report.round_position for report in others if report.round_index == frontier]
    return frontier, median_low(positions) if positions else 0.0


class RejoinDelay:
    """How long a worker that lost touch waits before it takes up the others' state again.

    Nothing at first, then twice as long each time, up to 16 s, while it loses touch within half a minute. What others
    announce may make it lose touch, and each state that it takes up costs them 12 bytes a parameter.
    """

    def __init__(self) -> None:
        self._joined_s = float("-inf")
        self._delay_s = 0.0

    def joined(self, now_s: float) -> None:
        """Notes that the worker serves from now on."""
        self._joined_s = now_s

    def next_s(self, now_s: float) -> float:
        """Seconds to wait, now that it has lost touch."""
        if now_s - self._joined_s >= _SETTLED_S:
            self._delay_s = 0.0
            return 0.0
        self._delay_s = min(max(2 * self._delay_s, _FIRST_DELAY_S), _MAX_DELAY_S)
        return self._delay_s


def version_of_state(num_steps: int, versions: Collection[int]) -> int:
    """The stage's version that belongs to a state which was taken up.

    That of the worker that made it. The state itself says how many optimizer steps are in it; the version differs from
    that by the steps that the stage made without that worker. So of the versions that its holders announce, the nearest
    counts: announcements cost nothing, and no number of them makes it worse.
    """
    return min(versions, key=lambda version: (abs(version - num_steps), version), default=num_steps)


def is_ahead(version: int, others: Collection[StageReport]) -> bool:
    """Whether a worker that comes back with a checkpoint of this version keeps it beside those that serve.

    It does if its version is nearer to the newest of the others than to the oldest, and at most half of the stage,
    itself counted, is behind it: one worker's word overrules no majority.
    """
    if not others:
        return False
    versions = [report.version for report in others]
    num_behind = sum(other < version for other in versions)
    return version - min(versions) > max(versions) - version and 2 * num_behind <= len(versions) + 1


def shut_down_gracefully(
    *,
    leave_s: float,
    num_unanswered: Callable[[], int],
    refuse: Callable[[], None],
    save: Callable[[float], None],
    share: Callable[[float], None],
    clock: Callable[[], float],
    sleep: Callable[[float], None],
) -> None:
    """Answers what is under way, counts nothing more, steps and saves, and shares the work in a last round.

    Whatever was acknowledged is in the state that is saved. The worker saves first because it can do that alone. The
    last round is early, so its outer step weighs as little as the work in it (`trainer.outer.diloco.outer`).

    Args:
        leave_s: for all of it; half of it is for answers.
        num_unanswered: requests that were accepted and not answered yet.
        refuse: from then on nothing is counted.
        save: steps with what was counted and saves what is not on disk, within so many seconds.
        share: has a round with the others, if there are any, within so many seconds.
        clock: monotonic seconds.
        sleep: waits so many seconds.

    Raises:
        CheckpointError: the state could not be saved; it was shared if that was possible.
    """

    def wait_for_answers(until_s: float) -> None:
        while num_unanswered() and clock() < until_s:
            sleep(_ANSWER_LOOK_S)

    leave_by_s = clock() + leave_s
    wait_for_answers(leave_by_s - leave_s / 2)
    refuse()
    unsaved: CheckpointError | None = None
    try:
        save(max(_MIN_SAVE_S, leave_by_s - clock()))
    except CheckpointError as error:
        unsaved = error
    try:
        share(max(0.0, leave_by_s - clock()))
    except TrainerError as error:
        logger.warning("leaving without a last round: %s", error)
    wait_for_answers(leave_by_s)
    if unsaved is not None:
        raise unsaved

"""When a worker joins its stage, which one it takes, and when it has to begin again; decisions without a network.

Newcomers come in during the first tenth of a round (spec P-43), since whoever takes up a state late begins with work
the others have long done, and they may be at most five rounds behind. A stage on which nobody works has no rounds to
wait for, so a place in the round that does not move for `JoinConfig.idle_s` is as good as a beginning. After a stop of
all, the first to come back need not be the one that knows most: who comes later with more keeps it (`is_ahead`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from trainer.model.plan import StagePlan
from trainer.network.discovery.stage_report import StageReport, StageUid
from trainer.run.config.swarm import JoinConfig

__all__ = ["JoinWindow", "RejoinDelay", "is_ahead", "neediest_stage", "version_of_state"]

_FIRST_DELAY_S, _MAX_DELAY_S = 0.5, 16.0
_SETTLED_S = 30.0
"""A worker that has served for so long without losing touch begins again with no delay."""


class JoinWindow:
    """Tells, from what is heard of a stage's round, whether a newcomer may take up its state now.

    Args:
        config: the options.
    """

    def __init__(self, config: JoinConfig) -> None:
        self._config = config
        self._seen: tuple[int, float] | None = None
        self._since_s = 0.0

    def is_open(self, round_index: int, position: float, now_s: float) -> bool:
        """Whether to go ahead.

        Args:
            round_index: the round the others are in.
            position: how far they are in it, 0 to 1.
            now_s: on any clock that only goes on.
        """
        seen = (round_index, position)
        if seen != self._seen:
            self._seen, self._since_s = seen, now_s
        return position < self._config.window or now_s - self._since_s >= self._config.idle_s


class RejoinDelay:
    """How long a worker that lost touch waits before it takes up the others' state again.

    Nothing at first; from then on twice as long each time, up to 16 s, for as long as it loses touch within half a
    minute. What makes it lose touch may be what others say, and each state it takes up costs them 12 bytes a parameter.
    """

    def __init__(self) -> None:
        self._joined_s = float("-inf")
        self._delay_s = 0.0

    def joined(self, now_s: float) -> None:
        """It serves from now on."""
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

    That of the worker that made it. A state says how many optimizer steps are in it, which is as true as its weights
    are; the version differs from that by the steps the stage made without that worker. So of what its holders announce,
    the version nearest to the steps counts: announcements cost nothing, and no number of them makes it worse.

    Args:
        num_steps: optimizer steps behind the state.
        versions: of those that say they hold this state.
    """
    return min(versions, key=lambda version: (abs(version - num_steps), version), default=num_steps)


def is_ahead(version: int, others: Collection[StageReport]) -> bool:
    """Whether a worker that comes back from its checkpoint belongs to the newer part of its stage.

    It does where it is nearer to the newest of the others than to the oldest, and at most half of the stage, itself
    counted, is behind it: one worker's word overrules no majority.

    Args:
        version: its own.
        others: of the stage, those that serve.
    """
    if not others:
        return False
    versions = [report.version for report in others]
    num_behind = sum(other < version for other in versions)
    return version - min(versions) > max(versions) - version and 2 * num_behind <= len(versions) + 1


def neediest_stage(plan: StagePlan, reports: Iterable[StageReport], own_number: int = 0) -> str:
    """The stage a newcomer helps most: that with the least rate of all, or without anybody.

    A stage's rate is the sum of what its workers say they get done; those that say nothing yet count as the slowest
    that do. Of equally needy stages ``own_number`` points at one, so that newcomers that come together spread.

    Args:
        plan: of the run.
        reports: of its workers, joining ones included: they are on their way to help.
        own_number: any number of the newcomer's own.
    """
    by_stage: dict[str, list[float]] = {name: [] for name in plan.names}
    for report in reports:
        stage = StageUid.parse(report.uid).stage
        if report.status != "leaving" and stage in by_stage:
            by_stage[stage].append(report.rows_per_s)
    empty = [name for name, rates in by_stage.items() if not rates]
    if empty:
        return empty[own_number % len(empty)]
    known = [rate for rates in by_stage.values() for rate in rates if rate > 0]
    slowest = min(known, default=1.0)
    totals = {name: sum(rate or slowest for rate in rates) for name, rates in by_stage.items()}
    least = min(totals.values())
    neediest = _of_least(totals, least)
    return neediest[own_number % len(neediest)]


def _of_least(totals: dict[str, float], least: float) -> Sequence[str]:
    return [name for name, total in totals.items() if total <= least * (1 + 1e-9)]

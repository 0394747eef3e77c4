"""`StageProgress`: how far the workers of a stage are with its next step, as each of them tells the others.

What others say is bounded, since a worker that says too much makes the others step with too little: a report counts for
at most four times the larger of the median report and one's own tokens, a version that is further ahead than can be
followed counts for nothing, and so does a report that is older than five exchanges. A worker that lies within these
bounds can make a stage of n honest workers step at n / (n + 4) of its target.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass

from trainer.pipeline.messages import ProgressReport
from trainer.rpc import PeerId

__all__ = ["StageProgress"]

_MAX_RATIO = 4
_MAX_AGE_EXCHANGES = 5
_MIN_MAX_AGE_S = 3.0


@dataclass(frozen=True, slots=True)
class _Heard:
    report: ProgressReport
    at_s: float


class StageProgress:
    """What the others said last. Any thread may call it.

    Args:
        interval_s: between two exchanges.
        max_lead: versions another worker may be ahead and still be followed.
        clock: seconds.
    """

    def __init__(self, interval_s: float, max_lead: int, clock: Callable[[], float]) -> None:
        self._max_age_s = max(_MIN_MAX_AGE_S, _MAX_AGE_EXCHANGES * interval_s)
        self._max_lead = max_lead
        self._clock = clock
        self._lock = threading.Lock()
        self._heard: dict[PeerId, _Heard] = {}
        self._changed_s = clock()

    @property
    def changed_s(self) -> float:
        """When another worker last said that it had got further."""
        return self._changed_s

    def hear(self, peer_id: PeerId, report: ProgressReport) -> bool:
        """Another worker of the stage says how far it is; returns whether that is news."""
        now_s = self._clock()
        with self._lock:
            before = self._heard.get(peer_id)
            self._heard[peer_id] = _Heard(report, now_s)
            is_news = before is None or before.report != report
            if is_news:
                self._changed_s = now_s
            return is_news

    def keep(self, peer_ids: Collection[PeerId]) -> None:
        """Forgets all others: they are no workers of the stage any more."""
        with self._lock:
            for peer_id in [peer_id for peer_id in self._heard if peer_id not in peer_ids]:
                del self._heard[peer_id]

    def stage_tokens(self, version: int, own_tokens: int) -> int:
        """Tokens the stage has towards the step behind ``version``, as far as others are believed."""
        others = sorted(report.num_tokens for report in self._recent() if report.version == version)
        if not others:
            return own_tokens
        everyone = sorted([own_tokens, *others])
        most = _MAX_RATIO * max(own_tokens, everyone[(len(everyone) - 1) // 2])
        return own_tokens + sum(min(tokens, most) for tokens in others)

    def newest_version(self, version: int) -> int:
        """The version to follow: the highest that is ahead, and not too far; ``version`` if none is."""
        ahead = [report.version for report in self._recent() if version < report.version <= version + self._max_lead]
        return max(ahead, default=version)

    def is_left_behind(self, version: int) -> bool:
        """Whether most of the others are too far ahead to be followed: their state has to be fetched."""
        recent = self._recent()
        return 2 * sum(report.version > version + self._max_lead for report in recent) > len(recent)

    def _recent(self) -> list[ProgressReport]:
        oldest_s = self._clock() - self._max_age_s
        with self._lock:
            return [
                heard.report for heard in self._heard.values() if heard.at_s >= oldest_s and not heard.report.joining
            ]

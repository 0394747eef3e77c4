"""`StageProgress`: how far the workers of a stage are with its next step, as each of them tells the others.

What others say is bounded, since a worker that says too much makes the others step with too little:

- tokens: a report counts for at most four times the larger of the median report and one's own tokens;
- a version that most of the others have reached is followed, one that is further ahead than can be followed is not;
- a version that only some have reached is followed by one step, and only when half of the target is seen to be counted,
  or two exchanges' time after one's own last step (whoever did it all alone cannot be told from a liar);
- a report that is older than five exchanges counts for nothing.

So while liars are fewer than half of the others, they can make a stage of n honest workers step at n / (2 n + 8) of its
target, and with less than that once in two exchanges' time. Of two workers each has to believe the other.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass

from trainer.network.rpc import PeerId
from trainer.pipeline.protocol.messages import ProgressReport

__all__ = ["StageProgress"]

_MAX_RATIO = 4
_MAX_AGE_EXCHANGES = 5
_MIN_MAX_AGE_S = 3.0
_SEEN_SHARE = 1 / 2
"""Of the target: so much is seen at least of what made another worker step, or it is not followed at once. The rest may
have been counted since it told last."""
_PATIENCE_EXCHANGES = 2


@dataclass(frozen=True, slots=True)
class _Heard:
    report: ProgressReport
    at_s: float
    before: ProgressReport | None
    """The last one of an earlier version: what it went on with."""

    def tokens(self, version: int) -> int | None:
        """What it had towards the step behind that version, nothing if it is not there yet; None: it never said."""
        if self.report.version < version:
            return 0
        for report in (self.report, self.before):
            if report is not None and report.version == version:
                return report.num_tokens
        return None


class StageProgress:
    """What the others said last. Any thread may call it.

    Args:
        interval_s: between two exchanges.
        max_lead: versions another worker may be ahead and still be followed.
        clock: seconds.
    """

    def __init__(self, interval_s: float, max_lead: int, clock: Callable[[], float]) -> None:
        self._max_age_s = max(_MIN_MAX_AGE_S, _MAX_AGE_EXCHANGES * interval_s)
        self._patience_s = _PATIENCE_EXCHANGES * interval_s
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
            last = self._heard.get(peer_id)
            is_news = last is None or last.report != report
            before = None if last is None else last.report if last.report.version < report.version else last.before
            self._heard[peer_id] = _Heard(report, now_s, before)
            if is_news:
                self._changed_s = now_s
            return is_news

    def keep(self, peer_ids: Collection[PeerId]) -> None:
        """Forgets all others: they are no workers of the stage any more."""
        with self._lock:
            for peer_id in [peer_id for peer_id in self._heard if peer_id not in peer_ids]:
                del self._heard[peer_id]

    def stage_tokens(self, version: int, own_tokens: int) -> int:
        """Tokens the stage has towards the step behind ``version``, as far as others are believed.

        Those of a worker that has taken this step count too.
        """
        others = [tokens for heard in self._recent() if (tokens := heard.tokens(version)) is not None]
        if not others:
            return own_tokens
        everyone = sorted([own_tokens, *others])
        most = _MAX_RATIO * max(own_tokens, everyone[(len(everyone) - 1) // 2])
        return own_tokens + sum(min(tokens, most) for tokens in others)

    def version_to_follow(self, version: int, own_tokens: int, target_tokens: int, waited_s: float) -> int:
        """Where others are, as far as they are believed; ``version`` if that is no further.

        Args:
            version: one's own.
            own_tokens: counted towards the step behind it.
            target_tokens: of the stage, for one step.
            waited_s: since one's own last step.
        """
        versions = sorted(heard.report.version for heard in self._recent())
        ahead = [other for other in versions if version < other <= version + self._max_lead]
        if not ahead:
            return version
        median = versions[(len(versions) - 1) // 2]
        if version < median <= version + self._max_lead:
            return median
        seen = self.stage_tokens(version, own_tokens) >= _SEEN_SHARE * target_tokens
        return version + 1 if seen or waited_s > self._patience_s else version

    def is_left_behind(self, version: int) -> bool:
        """Whether most of the others are too far ahead to be followed: their state has to be fetched."""
        recent = self._recent()
        return 2 * sum(heard.report.version > version + self._max_lead for heard in recent) > len(recent)

    def _recent(self) -> list[_Heard]:
        oldest_s = self._clock() - self._max_age_s
        with self._lock:
            return [heard for heard in self._heard.values() if heard.at_s >= oldest_s and not heard.report.joining]

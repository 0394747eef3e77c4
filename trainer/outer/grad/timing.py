"""When a round begins, and when a member's gradients go into it, from the progress of all and the speed of late.

Members begin to agree on a round shortly before its target is reached, by the speed measured, so that nobody stands
still for that; what each then has goes in when the target *is* reached, or a while after it should have been. A round
that others wait for begins at once. A replica that has something, and to which nothing has been added for a while,
begins one with what there is.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

_SMOOTHING: Final = 0.5
_PATIENCE: Final = 2.0
_SLACK_S: Final = 0.5
"""A member waits ``_PATIENCE`` times the time ahead and so long for the target, once it has agreed to a round."""
_RETRY_S: Final = 0.5


@dataclass(frozen=True, slots=True)
class Progress:
    """Tokens towards the next step: one replica's, and those of all, itself included, as far as is known."""

    own_tokens: int
    all_tokens: int


class RoundTimer:
    """Decides for one replica; ``clock`` is monotonic. For one thread.

    Args:
        target_tokens: of a step, over all replicas.
        ahead_s: so long before the target a round begins.
        auto_step_s: after so long without anything new a round begins with what there is.
        clock: in seconds.
    """

    def __init__(self, target_tokens: int, ahead_s: float, auto_step_s: float, clock: Callable[[], float]) -> None:
        self._target_tokens = target_tokens
        self._ahead_s = ahead_s
        self._auto_step_s = auto_step_s
        self._clock = clock
        self._tokens_per_s = 0.0  # Of all replicas; 0: not known yet.
        self._began_s = self._changed_s = clock()
        self._seen = Progress(0, 0)
        self._fill_by_s = math.inf
        self._not_before_s = -math.inf

    def configure(self, target_tokens: int, auto_step_s: float) -> None:
        """Goes on by another target and time-out."""
        self._target_tokens, self._auto_step_s = target_tokens, auto_step_s

    def note(self, progress: Progress) -> None:
        """Takes the progress of now."""
        if progress != self._seen:
            self._seen, self._changed_s = progress, self._clock()

    @property
    def share(self) -> float:
        """How much of the target is done, 0 to 1."""
        return min(1.0, self._seen.all_tokens / self._target_tokens)

    @property
    def is_reached(self) -> bool:
        """Whether the target is."""
        return self._seen.all_tokens >= self._target_tokens

    @property
    def is_idle(self) -> bool:
        """Whether there is something to step with, and nothing has been added for a while."""
        return self._seen.own_tokens > 0 and self._clock() - self._changed_s > self._auto_step_s

    @property
    def remaining_s(self) -> float:
        """Returns the time until the target is reached, by the speed of late; infinite where that is not known."""
        left_tokens = max(0, self._target_tokens - self._seen.all_tokens)
        return left_tokens / self._tokens_per_s if self._tokens_per_s > 0 else math.inf

    def is_time_to_begin(self, *, others_wait: bool) -> bool:
        """Returns whether to begin a round now."""
        if self._clock() < self._not_before_s:
            return False
        if others_wait or self.is_idle:
            return True
        # Without own tokens it is for those who have some to begin.
        return self._seen.own_tokens > 0 and (self.is_reached or self.remaining_s <= self._ahead_s)

    def begin(self) -> int:
        """Notes that a round begins; returns the tokens this replica expects to have when the target is reached."""
        self._fill_by_s = self._clock() + _PATIENCE * self._ahead_s + _SLACK_S
        own, all_tokens = self._seen.own_tokens, max(1, self._seen.all_tokens)
        return max(own, round(own * self._target_tokens / all_tokens)) if own else 0

    def is_time_to_fill(self) -> bool:
        """Returns whether what has been added up goes into the round now."""
        return self.is_reached or self.is_idle or self._clock() >= self._fill_by_s

    def filled(self) -> None:
        """Measures the speed since the last time, and counts from 0."""
        now_s = self._clock()
        passed_s = now_s - self._began_s
        if passed_s > 0 and self._seen.all_tokens:
            speed = self._seen.all_tokens / passed_s
            self._tokens_per_s += (_SMOOTHING if self._tokens_per_s else 1.0) * (speed - self._tokens_per_s)
        self._began_s = now_s

    def failed(self) -> None:
        """Notes that a round had no result: it is tried again a moment later."""
        self._not_before_s = self._clock() + _RETRY_S

"""Whether a node is fit to take part: what makes it withdraw, and when it has withdrawn once too often.

A node that fails rounds while the others go on, that lags, or whose loss or gradients are nonsense is of no use to the
others where it stands. It takes itself out, takes up the others' state and comes back. If that does not help, three
times in a row, something is wrong that the others' state does not mend (memory, a link, a clock, a build): it says what
it has found each time and ends with exit code 1. It ends itself and nobody else: no signal is sent, to no process group
and no child of another. A round with others' work in it proves a node fit, and so does an hour without a withdrawal.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Final

from trainer.errors import UnfitNodeError
from trainer.run.config.run import HealthConfig

_STEADY_S: Final = 3600.0
_JOINING_S: Final = 60.0
_MIN_OTHERS: Final = 2
"""Other nodes by whose losses this node's can be judged."""


@dataclass(slots=True)
class Health:
    """Counts the withdrawals of one node; any one thread at a time."""

    config: HealthConfig
    clock: Callable[[], float] = time.monotonic
    noted: Callable[[], None] = lambda: None  # Called at each withdrawal.
    _reasons: list[str] = field(default_factory=list, init=False)
    _last_s: float = field(default=float("-inf"), init=False)
    _skipped: int = field(default=0, init=False)
    _failed: int = field(default=0, init=False)

    def withdraw(self, reason: str) -> None:
        """Notes that the node takes itself out; raises `UnfitNodeError` if it has done so too often in a row."""
        now_s = self.clock()
        if now_s - self._last_s >= _STEADY_S:
            self._reasons.clear()
        self._last_s, self._skipped, self._failed = now_s, 0, 0
        self._reasons.append(reason)
        self.noted()
        limit = self.config.max_withdrawals
        if limit and len(self._reasons) >= limit:
            told = "; then ".join(self._reasons)
            raise UnfitNodeError(
                f"expected this node to be of use once it had taken up the others' state, found that it had to take "
                f"itself out {len(self._reasons)} times in a row: {told}. Look at its memory, its link and its clock; "
                "health.max_withdrawals=0 lets it try for ever"
            )

    def missed_first_round(self, reason: str) -> None:
        """Notes that the others went on without this node before it was in a round of theirs; raises as `withdraw`.

        Where a round takes a second, the others may have had several before they hear of a newcomer. What it misses
        within a minute of the last withdrawal is the same attempt to join, and does not count.
        """
        if self.clock() - self._last_s >= _JOINING_S:
            self.withdraw(reason)

    def shared(self) -> None:
        """Notes a round that had others' work in it and was committed here."""
        self._reasons.clear()
        self._failed = 0

    def round_failed(self, *, others_went_on: bool) -> str:
        """Notes a round without a result; returns why to withdraw, or nothing."""
        self._failed = self._failed + 1 if others_went_on else 0
        if self._failed < self.config.max_failed_rounds:
            return ""
        return f"{self._failed} rounds in a row failed here while the others went on"

    def step(self, *, is_skipped: bool) -> str:
        """Notes a step that was skipped, since loss or gradient were not finite, or was not; returns as above."""
        self._skipped = self._skipped + 1 if is_skipped else 0
        if not self.config.max_skipped_steps or self._skipped < self.config.max_skipped_steps:
            return ""
        return f"loss or gradient were not finite at {self._skipped} steps in a row"

    def loss(self, own: float | None, others: Sequence[float]) -> str:
        """Compares this node's smoothed loss with the others'; returns as above."""
        if own is None or len(others) < _MIN_OTHERS or not self.config.max_loss_ratio:
            return ""
        usual = median(others)
        if usual <= 0 or own <= self.config.max_loss_ratio * usual:
            return ""
        return f"its loss is {own:.3f} where {usual:.3f} is usual"

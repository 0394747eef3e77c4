"""What a node has done since it was started: the sums that its report to others is made of.

The training thread adds, the event loop that reports reads; a lock is held for some additions. FLOPs follow from the
tokens by the arithmetic behind model FLOPs utilisation: nothing that is computed again counts, nor what a skipped step
computed. Of rounds the latest four are kept, all are counted.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from trainer.monitor.facts import RoundFacts, StepFacts

_KEPT_ROUNDS: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundNote:
    """One round; ``error`` says why it has no result. Times are in seconds, `ended_at` since 1970."""

    round_index: int
    ended_at: float
    stage: str = ""  # Whose round it was, at a node that has several.
    num_members: int = 0
    num_dropped: int = 0
    completeness: float = 0.0
    seconds: float = 0.0
    phases: tuple[float, float, float] = (0.0, 0.0, 0.0)  # Until all agreed, the tensors, the vote.
    sent_bytes: int = 0
    received_bytes: int = 0
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkDone:
    """The sums at a moment."""

    num_steps: int = 0
    num_tokens: int = 0
    active_s: float = 0.0
    rounds_shared: int = 0
    rounds_alone: int = 0
    rounds_failed: int = 0
    withdrawals: int = 0
    rounds: tuple[RoundNote, ...] = ()
    checkpoint_at: float | None = None  # Seconds since 1970; None: none was made yet.


@dataclass(slots=True)
class WorkTally:
    """Adds up one process's work; ``clock`` is in seconds since 1970."""

    clock: Callable[[], float] = time.time
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)
    _num_steps: int = field(default=0, init=False)
    _num_tokens: int = field(default=0, init=False)
    _active_s: float = field(default=0.0, init=False)
    _shared: int = field(default=0, init=False)
    _alone: int = field(default=0, init=False)
    _failed: int = field(default=0, init=False)
    _withdrawals: int = field(default=0, init=False)
    _rounds: deque[RoundNote] = field(default_factory=lambda: deque(maxlen=_KEPT_ROUNDS), init=False)
    _checkpoint_at: float | None = field(default=None, init=False)

    def step(self, step: StepFacts) -> None:
        """Adds a step; one that applied nothing took time and counts for nothing else."""
        with self._lock:
            self._num_steps += 1
            self._active_s += step.seconds if math.isfinite(step.seconds) else 0.0
            self._num_tokens += 0 if step.skipped else step.num_tokens

    def round(self, report: RoundFacts, stage: str = "") -> None:
        """Adds a round that ended with a result, of a stage at a node that has several."""
        note = RoundNote(
            round_index=report.round_index,
            ended_at=self.clock(),
            stage=stage,
            num_members=len(report.members),
            num_dropped=len(report.dropped),
            completeness=report.completeness,
            seconds=report.seconds,
            phases=report.phases,
            sent_bytes=report.sent_bytes,
            received_bytes=report.received_bytes,
        )
        with self._lock:
            self._shared += len(report.members) > 1
            self._alone += len(report.members) < 2
            self._rounds.append(note)

    def round_failed(self, round_index: int, reason: str, stage: str = "") -> None:
        """Adds a round without a result; ``stage`` as for `round`."""
        note = RoundNote(round_index=round_index, ended_at=self.clock(), stage=stage, error=reason or "no result")
        with self._lock:
            self._failed += 1
            self._rounds.append(note)

    def withdrew(self) -> None:
        """Notes that the node has taken itself out, to take up the others' state."""
        with self._lock:
            self._withdrawals += 1

    def saved(self) -> None:
        """Notes a checkpoint."""
        with self._lock:
            self._checkpoint_at = self.clock()

    def done(self) -> WorkDone:
        """Returns the sums as of now."""
        with self._lock:
            return WorkDone(
                num_steps=self._num_steps,
                num_tokens=self._num_tokens,
                active_s=self._active_s,
                rounds_shared=self._shared,
                rounds_alone=self._alone,
                rounds_failed=self._failed,
                withdrawals=self._withdrawals,
                rounds=tuple(self._rounds),
                checkpoint_at=self._checkpoint_at,
            )

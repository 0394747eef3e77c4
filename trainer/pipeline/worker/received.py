"""Requests with their time of receipt, and a detector of times when this process was suspended.

`apply_within_s` counts from when the message is parsed, before a byte of a tensor is read. A process that was suspended
for a minute receives on resuming what was sent to it meanwhile. `SuspendDetector` beats on the event loop four times a
second; a late beat tells from when to when nothing was read. What is received within a second afterwards may have been
sent at any time in between, and is dated to its beginning; what was in fact sent later is refused as late.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from pydantic import PrivateAttr

from trainer.pipeline.protocol.messages import BackwardAsk, ChainAsk, EvaluateAsk, ForwardAsk, StageAsk, TailAsk
from trainer.pipeline.protocol.work import boottime_s

_BEAT_S = 0.25
_SUSPENDED_S = 1.0  # A beat so late means a suspension; a loop that computes too long is late by tenths of a second.
_READING_S = 1.0  # Time to read what has piled up.


class SuspendDetector:
    """Detects suspensions of this process. For its event loop alone."""

    def __init__(self, clock: Callable[[], float] = boottime_s) -> None:
        self._clock = clock
        self._beat_s: float | None = None
        self._suspended_s = self._resumed_s = float("-inf")

    async def run(self) -> None:
        """Beats until it is cancelled."""
        try:
            while True:
                self.beat()
                await asyncio.sleep(_BEAT_S)
        finally:
            self._beat_s = None

    def beat(self) -> None:
        """Notes that the event loop runs."""
        now_s = self._clock()
        if self._beat_s is not None and now_s - self._beat_s > _SUSPENDED_S:
            # Suspended again while it was still reading: what it reads may be from before the first time.
            again = self._beat_s - self._resumed_s < _READING_S
            self._suspended_s = self._suspended_s if again else self._beat_s
            self._resumed_s = now_s
        self._beat_s = now_s

    def sent_by_s(self, received_s: float) -> float:
        """Returns the earliest time at which something received then may have reached this machine."""
        if self._beat_s is not None:
            self.beat()  # This very request may have woken the loop.
        return self._suspended_s if self._suspended_s <= received_s < self._resumed_s + _READING_S else received_s


class ReceivedAsk(StageAsk):
    """A request with its time of receipt."""

    _received_s: float = PrivateAttr(default_factory=boottime_s)

    @property
    def waited_s(self) -> float:
        """Seconds since its receipt, on CLOCK_BOOTTIME."""
        return boottime_s() - self._received_s

    def date(self, suspend_detector: SuspendDetector) -> None:
        """Moves the receipt to before a suspension of this process."""
        self._received_s = suspend_detector.sent_by_s(self._received_s)


class ReceivedForward(ForwardAsk, ReceivedAsk):
    """A forward pass."""


class ReceivedBackward(BackwardAsk, ReceivedAsk):
    """A backward pass."""


class ReceivedTail(TailAsk, ReceivedAsk):
    """A tail's pass."""


class ReceivedChain(ChainAsk, ReceivedAsk):
    """A chain."""


class ReceivedEvaluate(EvaluateAsk, ReceivedAsk):
    """An evaluation."""

"""Requests with the time they were received, and a detector of times when this process was suspended.

`apply_within_s` counts from the receipt of the message, not of its last tensor: a worker may be stopped while tensors
lie in its socket. The time is noted when the message is parsed, before a byte of a tensor is read.

A process that was suspended for a minute receives what was sent to it when it goes on. `SuspendDetector` beats on the
event loop four times a second; a late beat says from when to when nothing was read. What is received within a second
after that may have been sent at any time within, and is dated to its beginning. Requests that were in fact sent later
are told that they are late, and come again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from pydantic import PrivateAttr

from trainer.pipeline.protocol.messages import BackwardAsk, ChainAsk, EvaluateAsk, ForwardAsk, StageAsk, TailAsk
from trainer.pipeline.protocol.work import boottime_s

__all__ = [
    "ReceivedAsk",
    "ReceivedBackward",
    "ReceivedChain",
    "ReceivedEvaluate",
    "ReceivedForward",
    "ReceivedTail",
    "SuspendDetector",
]

_BEAT_S = 0.25
_STOPPED_S = 1.0
"""A beat so much late is a stop; a loop that computes too long at a time is late by tenths of a second."""
_READING_S = 1.0
"""How long it takes to read what has piled up."""


class SuspendDetector:
    """One process's. For its event loop alone.

    Args:
        clock: seconds; CLOCK_BOOTTIME but in tests.
    """

    def __init__(self, clock: Callable[[], float] = boottime_s) -> None:
        self._clock = clock
        self._beat_s: float | None = None
        self._stopped_s = self._resumed_s = float("-inf")

    async def run(self) -> None:
        """Beats until it is cancelled."""
        try:
            while True:
                self.beat()
                await asyncio.sleep(_BEAT_S)
        finally:
            self._beat_s = None

    def beat(self) -> None:
        """The event loop goes on."""
        now_s = self._clock()
        if self._beat_s is not None and now_s - self._beat_s > _STOPPED_S:
            # Stopped again while it was still reading: what it reads may be from before the first time.
            again = self._beat_s - self._resumed_s < _READING_S
            self._stopped_s = self._stopped_s if again else self._beat_s
            self._resumed_s = now_s
        self._beat_s = now_s

    def sent_by_s(self, received_s: float) -> float:
        """The earliest time at which what was received then may have reached this machine."""
        if self._beat_s is not None:
            self.beat()  # It may be this very request that wakes the loop.
        return self._stopped_s if self._stopped_s <= received_s < self._resumed_s + _READING_S else received_s


class ReceivedAsk(StageAsk):
    """A request, and when it came."""

    _received_s: float = PrivateAttr(default_factory=boottime_s)

    @property
    def waited_s(self) -> float:
        """Seconds since its receipt, on CLOCK_BOOTTIME."""
        return boottime_s() - self._received_s

    def date(self, pulse: SuspendDetector) -> None:
        """Takes into account that this process may have been stopped."""
        self._received_s = pulse.sent_by_s(self._received_s)


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

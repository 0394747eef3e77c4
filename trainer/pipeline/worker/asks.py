"""Requests that know when they came: `apply_within_s` counts from the receipt of the message, not of its last tensor.

A worker may be stopped while tensors lie in its socket; counting from when the handler begins would give such a
request its whole time again. The time is noted when the message is parsed, before a byte of a tensor is read, and dated
back if the message itself may have lain there (`trainer.pipeline.worker.pulse`).
"""

from __future__ import annotations

from pydantic import PrivateAttr

from trainer.pipeline.protocol.messages import BackwardAsk, ChainAsk, EvaluateAsk, ForwardAsk, StageAsk, TailAsk
from trainer.pipeline.protocol.work import boottime_s
from trainer.pipeline.worker.pulse import Pulse

__all__ = [
    "ReceivedAsk",
    "ReceivedBackward",
    "ReceivedChain",
    "ReceivedEvaluate",
    "ReceivedForward",
    "ReceivedTail",
]


class ReceivedAsk(StageAsk):
    """A request, and when it came."""

    _received_s: float = PrivateAttr(default_factory=boottime_s)

    @property
    def waited_s(self) -> float:
        """Seconds since its receipt, on CLOCK_BOOTTIME."""
        return boottime_s() - self._received_s

    def date(self, pulse: Pulse) -> None:
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

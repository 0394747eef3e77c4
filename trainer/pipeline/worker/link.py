"""What comes in: requests with their time of receipt, and `StageLink`, which converts tensors between wire and stage.

Names, types and shapes must be exactly what the codec expects of so many rows and positions; ids and labels must be of
the vocabulary, because an id beyond it is an exception on a CPU and the end of the process on a GPU; values must be
finite. All checks run before anything is queued, in one of two threads unless that takes longer than the work.

`apply_within_s` counts from when the message is parsed, before a byte of a tensor is read. A process that was suspended
for a minute receives on resuming what was sent to it meanwhile. `SuspendDetector` beats on the event loop four times a
second; a late beat tells from when to when nothing was read. What is received within a second afterwards may have been
sent at any time in between, and is dated to its beginning; what was in fact sent later is refused as late.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from pydantic import PrivateAttr
from torch import Tensor

from trainer.compression.activations import IDS, ActivationCodec, LinkMeter, ids_spec
from trainer.errors import CodecError, NonFiniteActivationError, PipelineError, RefusedError, StaleGradientError
from trainer.pipeline.protocol.messages import BackwardAsk, ChainAsk, EvaluateAsk, StageAsk, TailAsk
from trainer.pipeline.protocol.wire import ACTIVATION, GRADIENT, LABELS, part_of
from trainer.pipeline.protocol.work import boottime_s
from trainer.pipeline.stage import StageShape

_BEAT_S = 0.25
_SUSPENDED_S = 1.0  # A beat so late means a suspension; a loop that computes too long is late by tenths of a second.
_READING_S = 1.0  # Time to read what has piled up.
_INLINE_BYTES = 1 << 17  # Smaller tensors are converted in the event loop: 0.1 ms.

ResultT = TypeVar("ResultT")


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
    """A request with its time of receipt; a forward pass has no more fields."""

    _received_s: float = PrivateAttr(default_factory=boottime_s)

    @property
    def waited_s(self) -> float:
        """Seconds since its receipt, on CLOCK_BOOTTIME."""
        return boottime_s() - self._received_s

    def date(self, suspend_detector: SuspendDetector) -> None:
        """Moves the receipt to before a suspension of this process."""
        self._received_s = suspend_detector.sent_by_s(self._received_s)


class ReceivedBackward(BackwardAsk, ReceivedAsk):
    """A backward pass."""


class ReceivedTail(TailAsk, ReceivedAsk):
    """A tail's pass."""


class ReceivedChain(ChainAsk, ReceivedAsk):
    """A chain."""


class ReceivedEvaluate(EvaluateAsk, ReceivedAsk):
    """An evaluation."""


def refusal_of(error: PipelineError | CodecError) -> RefusedError:
    """Returns the refusal of a request that failed with ``error``."""
    if isinstance(error, NonFiniteActivationError):
        return RefusedError("nonfinite", str(error))
    if isinstance(error, StaleGradientError):
        return RefusedError("stale", str(error))
    return RefusedError("malformed", str(error))


class StageLink:
    """Input and output of one stage; ``meter`` measures what is sent."""

    def __init__(self, shape: StageShape, codec: ActivationCodec, meter: LinkMeter | None = None) -> None:
        self.shape = shape
        self.codec = codec
        self._meter = meter
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="genesis-link")

    def close(self) -> None:
        """Ends the threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def gradient_bytes(self, num_rows: int, num_positions: int) -> int:
        """Returns the bytes of a gradient on the wire."""
        return self.codec.wire_bytes(num_rows, num_positions, self.shape.dim, GRADIENT)

    def max_request_bytes(self, num_tokens: int) -> int:
        """Returns the most bytes the tensors of any request of so many tokens may have on the wire."""
        activation = self.codec.wire_bytes(1, num_tokens, self.shape.dim, ACTIVATION)
        return activation + self.gradient_bytes(1, num_tokens) + 10 * num_tokens

    def decoded_bytes(self, ask: StageAsk) -> int:
        """Returns the bytes of a request's tensors once decoded."""
        names = [spec.name for spec in ask.tensors]
        num_hidden = sum(any(f"{name}.".startswith(f"{what}.") for name in names) for what in (ACTIVATION, GRADIENT))
        num_integers = sum(name in (IDS, LABELS) for name in names)
        return num_hidden * _hidden_bytes(ask, self.shape) + 8 * num_integers * ask.num_rows * ask.num_positions

    def held_bytes(self, ask: StageAsk, num_made: int) -> int:
        """Returns the bytes a request occupies: tensors received, decoded, and ``num_made`` outputs or gradients."""
        received = sum(spec.size_bytes for spec in ask.tensors)
        return received + self.decoded_bytes(ask) + num_made * _hidden_bytes(ask, self.shape)

    def check_names(self, tensors: Mapping[str, Tensor], *others: str) -> None:
        """Checks that a request has no tensors but its input and ``others``; raises RefusedError (``malformed``)."""
        is_head = self.shape.kind == "head"
        allowed = [*others, *([IDS] if is_head or self.codec.needs_ids else []), *([] if is_head else [ACTIVATION])]
        belonging = {name for what in allowed for name in part_of(what, tensors)}
        if len(belonging) < len(tensors):
            unknown = sorted(tensors.keys() - belonging)
            raise RefusedError("malformed", f"expected no tensors but {', '.join(allowed)}, found {unknown} too")

    async def input_of(self, ask: StageAsk, tensors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor | None]:
        """Returns the stage's input, and the ids where the codec needs them.

        Raises:
            RefusedError: ``malformed`` or ``nonfinite``.
        """

        def decode() -> tuple[Tensor, Tensor | None]:
            if self.shape.kind == "head":
                ids = _integers(ask, tensors, IDS)
                self.shape.check_input(ids)
                return ids, ids
            needed_ids = _integers(ask, tensors, IDS) if self.codec.needs_ids else None
            sent = part_of(ACTIVATION, tensors)
            self.codec.check(sent, ask.num_rows, ask.num_positions, self.shape.dim, ACTIVATION)
            x = self.codec.decode(sent, needed_ids)
            self.shape.check_input(x)
            return x, needed_ids

        return await self._offload(self.decoded_bytes(ask), decode)

    async def gradient_of(self, ask: StageAsk, tensors: Mapping[str, Tensor]) -> Tensor:
        """Returns the gradient of the stage's output; errors as `input_of`."""

        def decode() -> Tensor:
            sent = part_of(GRADIENT, tensors)
            self.codec.check(sent, ask.num_rows, ask.num_positions, self.shape.dim, GRADIENT)
            return self.codec.grad_decode(sent)

        return await self._offload(_hidden_bytes(ask, self.shape), decode)

    def labels_of(self, ask: StageAsk, tensors: Mapping[str, Tensor]) -> Tensor:
        """Returns the labels, int64; raises RefusedError (``malformed``)."""
        try:
            labels = _integers(ask, tensors, LABELS)
            self.shape.check_labels(labels, labels)
        except PipelineError as error:
            raise refusal_of(error) from error
        return labels

    async def activation(self, y: Tensor, ids: Tensor | None) -> dict[str, Tensor]:
        """Returns a stage's output in wire form; raises RefusedError if it is not finite, or no codec's."""

        def encode() -> dict[str, Tensor]:
            needed = ids if self.codec.needs_ids else None
            encoded = self.codec.encode(y, needed)
            if self._meter is not None:
                self._meter.activation(y, needed, encoded)
            return encoded.tensors

        return await self._offload(y.numel() * 4, encode)

    async def gradient(self, gradient: Tensor) -> dict[str, Tensor]:
        """Returns the gradient of a stage's input in wire form; errors as `activation`."""

        def encode() -> dict[str, Tensor]:
            encoded = self.codec.grad_encode(gradient)
            if self._meter is not None:
                self._meter.gradient(encoded)
            return encoded.tensors

        return await self._offload(gradient.numel() * 4, encode)

    async def _offload(self, size_bytes: int, function: Callable[[], ResultT]) -> ResultT:
        try:
            if size_bytes < _INLINE_BYTES:
                return function()
            return await asyncio.get_running_loop().run_in_executor(self._threads, function)
        except (PipelineError, CodecError) as error:
            raise refusal_of(error) from error


def _hidden_bytes(ask: StageAsk, shape: StageShape) -> int:
    return 4 * ask.num_rows * ask.num_positions * shape.dim


def _integers(ask: StageAsk, tensors: Mapping[str, Tensor], name: str) -> Tensor:
    tensor, spec = tensors.get(name), ids_spec(ask.num_rows, ask.num_positions)
    if tensor is None or (str(tensor.dtype), tuple(tensor.shape)) != (f"torch.{spec.dtype}", tuple(spec.shape)):
        raise PipelineError(f"{name}: expected int32 {[ask.num_rows, ask.num_positions]}")
    return tensor.long()

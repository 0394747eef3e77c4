"""`StageLink`: between the wire's form of tensors and the stage's, checked on the way in.

Names, types and shapes must be exactly what the codec says of so many rows and positions; ids and labels must be of the
vocabulary, since one beyond it is an exception on a CPU and the end of the process on a GPU; values must be finite.
All that happens before anything is queued, in one of two threads where it takes longer than handing it over.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from torch import Tensor

from trainer.compression.activations import ActivationCodec, LinkMeter, ids_spec
from trainer.errors import CodecError, NonFiniteActivationError, PipelineError, RefusedError, StaleGradientError
from trainer.pipeline.protocol.messages import StageAsk
from trainer.pipeline.protocol.wire import ACTIVATION, GRADIENT, IDS, LABELS, part_of
from trainer.pipeline.stage import StageShape

__all__ = ["StageLink", "refusal_of"]

_INLINE_BYTES = 1 << 17
"""Less than this is worked through where it is: 0.1 ms."""

ResultT = TypeVar("ResultT")


def refusal_of(error: PipelineError | CodecError) -> RefusedError:
    """What a request is refused with, because of what went wrong with it."""
    if isinstance(error, NonFiniteActivationError):
        return RefusedError("nonfinite", str(error))
    if isinstance(error, StaleGradientError):
        return RefusedError("stale", str(error))
    return RefusedError("malformed", str(error))


class StageLink:
    """What one stage takes in and gives out.

    Args:
        shape: of the stage's input.
        codec: of activations and gradients, on both sides of the stage.
        meter: told what is sent; None: nobody.
    """

    def __init__(self, shape: StageShape, codec: ActivationCodec, meter: LinkMeter | None = None) -> None:
        self.shape = shape
        self.codec = codec
        self._meter = meter
        self._executor = ThreadPoolExecutor(2, thread_name_prefix="genesis-link")

    def close(self) -> None:
        """Ends the threads."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    def activation_bytes(self, num_tokens: int) -> int:
        """Of an activation on the wire, at most."""
        return self.codec.wire_bytes(1, num_tokens, self.shape.dim, ACTIVATION) + num_tokens

    def gradient_bytes(self, num_rows: int, num_positions: int) -> int:
        """Of a gradient on the wire."""
        return self.codec.wire_bytes(num_rows, num_positions, self.shape.dim, GRADIENT)

    def request_bytes(self, num_tokens: int) -> int:
        """Of all tensors of any request of so many tokens, at most."""
        gradient = self.codec.wire_bytes(1, num_tokens, self.shape.dim, GRADIENT) + num_tokens
        return self.activation_bytes(num_tokens) + gradient + 8 * num_tokens

    def decoded_bytes(self, ask: StageAsk) -> int:
        """Of the tensors that come with a request, as the stage computes with them."""
        names = [spec.name for spec in ask.tensors]
        num_hidden = sum(any(f"{name}.".startswith(f"{what}.") for name in names) for what in (ACTIVATION, GRADIENT))
        num_integers = sum(name in (IDS, LABELS) for name in names)
        return num_hidden * self.hidden_bytes(ask) + 8 * num_integers * ask.num_rows * ask.num_positions

    def hidden_bytes(self, ask: StageAsk) -> int:
        """Of a stage's output, or the gradient of one, in fp32."""
        return 4 * ask.num_rows * ask.num_positions * self.shape.dim

    def held_bytes(self, ask: StageAsk, num_made: int) -> int:
        """What a request has a worker hold until it is answered: its tensors as they came, decoded, and what is made.

        Args:
            ask: the request.
            num_made: outputs and gradients made or received on its behalf that are there at a time.
        """
        received = sum(spec.size_bytes for spec in ask.tensors)
        return received + self.decoded_bytes(ask) + num_made * self.hidden_bytes(ask)

    @property
    def takes_ids(self) -> bool:
        """Whether ids come with an input."""
        return self.shape.kind == "head" or self.codec.needs_ids

    def check_names(self, tensors: Mapping[str, Tensor], *others: str) -> None:
        """Whether there is nothing that does not belong here.

        Args:
            tensors: of a request.
            others: what may be there beside an input: ``gradient``, ``labels``.

        Raises:
            RefusedError: ``malformed``.
        """
        allowed = [*others, *([IDS] if self.takes_ids else []), *([] if self.shape.kind == "head" else [ACTIVATION])]
        belonging = {name for what in allowed for name in part_of(what, tensors)}
        if len(belonging) < len(tensors):
            unknown = sorted(tensors.keys() - belonging)
            raise RefusedError("malformed", f"expected no tensors but {', '.join(allowed)}, found {unknown} too")

    async def input_of(self, ask: StageAsk, tensors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor | None]:
        """The stage's input, and the ids where the codec needs them.

        Raises:
            RefusedError: ``malformed`` or ``nonfinite``.
        """

        def decode() -> tuple[Tensor, Tensor | None]:
            ids = self._ids(ask, tensors)
            if self.shape.kind == "head":
                if ids is None:
                    raise PipelineError("expected ids, found none")
                self.shape.check_input(ids)
                return ids, ids
            sent = part_of(ACTIVATION, tensors)
            self.codec.check(sent, ask.num_rows, ask.num_positions, self.shape.dim, ACTIVATION)
            x = self.codec.decode(sent, ids)
            self.shape.check_input(x)
            return x, ids

        return await self._offload(self.decoded_bytes(ask), decode)

    async def gradient_of(self, ask: StageAsk, tensors: Mapping[str, Tensor]) -> Tensor:
        """The gradient of the stage's output.

        Raises:
            RefusedError: ``malformed`` or ``nonfinite``.
        """

        def decode() -> Tensor:
            sent = part_of(GRADIENT, tensors)
            self.codec.check(sent, ask.num_rows, ask.num_positions, self.shape.dim, GRADIENT)
            return self.codec.grad_decode(sent)

        return await self._offload(self.hidden_bytes(ask), decode)

    def labels_of(self, ask: StageAsk, tensors: Mapping[str, Tensor]) -> Tensor:
        """The labels, int64.

        Raises:
            RefusedError: ``malformed``.
        """
        labels = tensors.get(LABELS)
        try:
            if labels is None or _form(labels) != _form_of_ids(ask):
                raise PipelineError(f"labels: expected int32 {[ask.num_rows, ask.num_positions]}")
            self.shape.check_labels(labels, labels)
        except PipelineError as error:
            raise refusal_of(error) from error
        return labels.long()

    async def activation(self, y: Tensor, ids: Tensor | None) -> dict[str, Tensor]:
        """A stage's output in the wire's form.

        Raises:
            RefusedError: ``nonfinite``, or the codec cannot hold it.
        """

        def encode() -> dict[str, Tensor]:
            needed = ids if self.codec.needs_ids else None
            encoded = self.codec.encode(y, needed)
            if self._meter is not None:
                self._meter.activation(y, needed, encoded)
            return encoded.tensors

        return await self._offload(y.numel() * 4, encode)

    async def gradient(self, gradient: Tensor) -> dict[str, Tensor]:
        """The gradient of a stage's input in the wire's form; errors as `activation`."""

        def encode() -> dict[str, Tensor]:
            encoded = self.codec.grad_encode(gradient)
            if self._meter is not None:
                self._meter.gradient(encoded)
            return encoded.tensors

        return await self._offload(gradient.numel() * 4, encode)

    def _ids(self, ask: StageAsk, tensors: Mapping[str, Tensor]) -> Tensor | None:
        if not self.takes_ids:
            return None
        ids = tensors.get(IDS)
        if ids is None or _form(ids) != _form_of_ids(ask):
            raise PipelineError(f"ids: expected int32 {[ask.num_rows, ask.num_positions]}")
        return ids.long()

    async def _offload(self, size_bytes: int, function: Callable[[], ResultT]) -> ResultT:
        try:
            if size_bytes < _INLINE_BYTES:
                return function()
            return await asyncio.get_running_loop().run_in_executor(self._executor, function)
        except (PipelineError, CodecError) as error:
            raise refusal_of(error) from error


def _form(tensor: Tensor) -> tuple[str, tuple[int, ...]]:
    return str(tensor.dtype), tuple(tensor.shape)


def _form_of_ids(ask: StageAsk) -> tuple[str, tuple[int, ...]]:
    spec = ids_spec(ask.num_rows, ask.num_positions)
    return f"torch.{spec.dtype}", tuple(spec.shape)

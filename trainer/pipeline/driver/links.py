"""What travels between two stages, by name, type and shape: all a driver has to know of it to hand it on.

A driver decodes activations and gradients only to compare them with another worker's
(`trainer.pipeline.driver.auditing`). It looks whether what a worker answers has exactly the tensors that the run's
codec makes (`ActivationCodec.specs`), and, where they are floating point, whether they are finite; then it hands them
on under the names they came with (`trainer.pipeline.protocol.wire`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from trainer.compression.activations.codec import Direction, Encoded
from trainer.errors import MalformedAnswerError
from trainer.network.transfer.descriptor import TensorSpec
from trainer.network.transfer.tensor_bytes import all_finite, specs_of
from trainer.pipeline.protocol.wire import IDS, wire_ids
from trainer.pipeline.protocol.work import MicroBatch

__all__ = ["LinkForm", "SpecsCodec", "check_parcel"]


class SpecsCodec(Protocol):
    """What is needed of a `trainer.compression.activations.ActivationCodec`."""

    @property
    def needs_ids(self) -> bool:
        """Whether every stage needs the micro-batch's ids."""

    def specs(self, num_rows: int, num_positions: int, dim: int, direction: Direction) -> tuple[TensorSpec, ...]:
        """Exactly the tensors that travel."""

    def encode(self, activation: Tensor, ids: Tensor | None = None) -> Encoded:
        """The activation's tensors."""

    def decode(self, tensors: Mapping[str, Tensor], ids: Tensor | None = None) -> Tensor:
        """The activation, fp32[B, S, dim]."""

    def grad_decode(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """The gradient, fp32[B, S, dim]."""


@dataclass(frozen=True, slots=True)
class LinkForm:
    """The form of a run's links."""

    codec: SpecsCodec
    dim: int
    """Width of the model."""

    def specs(self, micro_batch: MicroBatch, direction: Direction) -> tuple[TensorSpec, ...]:
        """What an activation or a gradient of a micro-batch consists of, by name."""
        num_rows, num_positions = micro_batch.input_ids.shape
        return tuple(sorted(self.codec.specs(num_rows, num_positions, self.dim, direction), key=lambda spec: spec.name))

    def input_of(self, micro_batch: MicroBatch, activation: Mapping[str, Tensor] | None) -> dict[str, Tensor]:
        """What a stage gets: the head the ids, all others the activation and, where the codec needs them, the ids.

        Args:
            micro_batch: whose.
            activation: of the stage before; None: it is the head.
        """
        if activation is None:
            return {IDS: wire_ids(micro_batch.input_ids)}
        return {**activation, **({IDS: wire_ids(micro_batch.input_ids)} if self.codec.needs_ids else {})}


def check_parcel(tensors: Mapping[str, Tensor], expected: Iterable[TensorSpec], who: str) -> None:
    """Compares tensors with what they have to be.

    Raises:
        MalformedAnswerError: they differ, or hold NaN or infinities.
    """
    wanted, found = tuple(expected), specs_of(tensors)
    if found != wanted:
        raise MalformedAnswerError(f"{who}: expected {_listed(wanted)}, found {_listed(found)}")
    for name, tensor in tensors.items():
        if not all_finite(tensor):
            raise MalformedAnswerError(f"{who}: expected finite values, found others in {name!r}")


def _listed(specs: tuple[TensorSpec, ...]) -> str:
    return ", ".join(f"{spec.name} {spec.dtype}{list(spec.shape)}" for spec in specs) or "no tensors"

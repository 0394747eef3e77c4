"""How the values of an activation or gradient are written: fp32, fp16 or int8.

* ``fp32``: one tensor, lossless.
* ``fp16``: each row of the batch times a power of two that brings its largest magnitude to 2^14 … 2^15, and that power
  beside it; the relative error is at most 2^-11 for values down to 2^-28 of the row's largest. Gradients, which as
  they are would vanish below 6e-8, keep their digits, and nothing overflows.
* ``int8``: blocks of 1,024 values under one scale each (`trainer.compression.vectors.Int8Codec`); an error of at most
  1/254 of the block's largest magnitude.

Guarantees: what is not finite is refused at both ends; the tensors' names, types and shapes follow from the values'
shape alone (`specs`), and `unpack` takes exactly these; a scale that no honest sender made is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, Literal, Protocol

import torch
from torch import Tensor

from trainer.compression.vectors import BLOCK_VALUES, Int8Codec
from trainer.errors import CodecError, NonFiniteActivationError
from trainer.network.transfer.descriptor import TensorSpec
from trainer.network.transfer.tensor_bytes import specs_of

__all__ = ["PACKINGS", "PackingName", "ValuePacking", "check_finite", "check_specs"]

PackingName = Literal["fp32", "fp16", "int8"]
Shape = tuple[int, int, int]
"""Rows, positions, values of a position."""

_FP16_EXPONENT: Final = 15
_MAX_EXPONENT: Final = 126 - _FP16_EXPONENT
"""Scales from 2^-111 to 2^111: their reciprocals are fp32 numbers too."""


class ValuePacking(Protocol):
    """Values to tensors and back."""

    @property
    def rounding(self) -> float:
        """Relative error (Euclidean, of a whole tensor) above which it is not this packing's doing."""
        ...

    def pack(self, name: str, values: Tensor) -> dict[str, Tensor]:
        """CPU tensors of fp32[B, S, K], ready to be sent.

        Raises:
            NonFiniteActivationError: NaN or infinity among them.
        """
        ...

    def unpack(self, name: str, tensors: Mapping[str, Tensor], device: torch.device) -> Tensor:
        """fp32[B, S, K] of tensors that `check_specs` has passed.

        Raises:
            CodecError: no honest sender made them.
            NonFiniteActivationError: NaN or infinity among the values.
        """
        ...

    def specs(self, name: str, shape: Shape) -> tuple[TensorSpec, ...]:
        """The tensors of values of that shape, by name."""
        ...


def check_specs(tensors: Mapping[str, Tensor], specs: tuple[TensorSpec, ...]) -> None:
    """Refuses tensors that are not exactly the expected ones, on the CPU.

    Raises:
        CodecError: the message names the first difference.
    """
    found = {spec.name: spec for spec in specs_of(tensors)}
    expected = {spec.name: spec for spec in specs}
    for name in sorted(found.keys() | expected.keys()):
        if found.get(name) != expected.get(name) or tensors[name].device.type != "cpu":
            raise CodecError(
                f"tensor {name!r}: expected {_spelt(expected.get(name))}, found {_spelt(found.get(name))}; is the "
                "sender's run file this one's?"
            )


class _Fp32:
    rounding: Final = 0.0

    def pack(self, name: str, values: Tensor) -> dict[str, Tensor]:
        """See `ValuePacking.pack`."""
        check_finite(name, values)
        return {name: values.to("cpu").contiguous()}

    def unpack(self, name: str, tensors: Mapping[str, Tensor], device: torch.device) -> Tensor:
        """See `ValuePacking.unpack`; shares memory with what came where it lies on the same device."""
        values = tensors[name].to(device)
        check_finite(name, values)
        return values

    def specs(self, name: str, shape: Shape) -> tuple[TensorSpec, ...]:
        """See `ValuePacking.specs`."""
        return (TensorSpec(name=name, dtype="float32", shape=shape),)


class _Fp16:
    rounding: Final = 2.0**-11

    def pack(self, name: str, values: Tensor) -> dict[str, Tensor]:
        """See `ValuePacking.pack`."""
        check_finite(name, values)
        flat = values.flatten(1)
        largest = flat.abs().amax(1) if flat.shape[1] else flat.new_zeros(len(flat))
        exponents = torch.frexp(largest).exponent.clamp(-_MAX_EXPONENT, _MAX_EXPONENT + 2 * _FP16_EXPONENT)
        scales = torch.exp2((exponents - _FP16_EXPONENT).float())
        halves = (flat / scales[:, None]).half().view_as(values)
        return {name: halves.to("cpu").contiguous(), f"{name}.scales": scales.to("cpu")}

    def unpack(self, name: str, tensors: Mapping[str, Tensor], device: torch.device) -> Tensor:
        """See `ValuePacking.unpack`."""
        scales = tensors[f"{name}.scales"]
        if not bool(((scales > 0) & torch.isfinite(scales)).all()):
            raise CodecError(f"{name}: expected scales above 0, found others; drop the message")
        values = tensors[name].to(device).float() * scales.to(device)[:, None, None]
        check_finite(name, values)
        return values

    def specs(self, name: str, shape: Shape) -> tuple[TensorSpec, ...]:
        """See `ValuePacking.specs`."""
        scales = TensorSpec(name=f"{name}.scales", dtype="float32", shape=(shape[0],))
        return TensorSpec(name=name, dtype="float16", shape=shape), scales


class _Int8:
    rounding: Final = 2.0**-6
    """Normal values have 0.0075; blocks with an outlier more."""

    _codec = Int8Codec()

    def pack(self, name: str, values: Tensor) -> dict[str, Tensor]:
        """See `ValuePacking.pack`."""
        check_finite(name, values)
        flat = values.to("cpu").contiguous().view(-1)
        encoded = torch.frombuffer(bytearray(self._codec.encode(flat)), dtype=torch.int8)
        split = encoded.numel() - flat.numel()
        return {name: encoded[split:].view(values.shape), f"{name}.scales": encoded[:split].view(torch.float32)}

    def unpack(self, name: str, tensors: Mapping[str, Tensor], device: torch.device) -> Tensor:
        """See `ValuePacking.unpack`."""
        levels, scales = tensors[name].contiguous(), tensors[f"{name}.scales"].contiguous()
        encoded = torch.cat((scales.view(torch.int8), levels.view(-1)))
        values = self._codec.decode(encoded.numpy().data, levels.numel()).view(levels.shape).to(device)
        check_finite(name, values)
        return values

    def specs(self, name: str, shape: Shape) -> tuple[TensorSpec, ...]:
        """See `ValuePacking.specs`."""
        levels = TensorSpec(name=name, dtype="int8", shape=shape)
        num_blocks = -(-levels.num_values // BLOCK_VALUES)
        return levels, TensorSpec(name=f"{name}.scales", dtype="float32", shape=(num_blocks,))


PACKINGS: Final = MappingProxyType[PackingName, ValuePacking]({"fp32": _Fp32(), "fp16": _Fp16(), "int8": _Int8()})
"""By name."""


def check_finite(name: str, values: Tensor) -> None:
    """Refuses values among which there is NaN or infinity.

    Raises:
        NonFiniteActivationError: there is.
    """
    if values.numel() == 0:
        return
    lowest, highest = torch.aminmax(values)
    if not bool(torch.isfinite(lowest) & torch.isfinite(highest)):
        raise NonFiniteActivationError(f"{name}: expected finite values, found NaN or infinity; nothing of it counts")


def _spelt(spec: TensorSpec | None) -> str:
    return "none" if spec is None else f"{spec.dtype} {list(spec.shape)}"

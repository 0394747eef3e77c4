"""How the values of an activation or gradient are written, and the token ids beside them.

* ``fp32``: one tensor, lossless.
* ``fp16``: each row of the batch is multiplied by a power of two that brings its largest magnitude to 2^14 … 2^15, and
  that power travels beside it. The relative error is at most 2^-11 for values down to 2^-28 of the row's largest:
  gradients, which would otherwise vanish below 6e-8, keep their digits, and nothing overflows.
* ``int8``: blocks of 1,024 values under one scale each (`trainer.compression.vectors.Int8Codec`); the error is at most
  1/254 of the block's largest magnitude.

Guarantees: non-finite values are refused at both ends; the tensors' names, types and shapes follow from the values'
shape alone (`ValuePacking.specs`), and `unpack` takes exactly these; a scale that no honest sender made is refused.

Token ids name the fixed rows that the far end adds, so one wrong id is one wrong position. As another channel of the
activation they would not survive half precision (fp16 makes 50,264 of it 50,272, bf16 makes 257 into 256); hence a
tensor of their own, int32, 4 bytes a position.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar, Final, Literal

import torch
from torch import Tensor

from trainer.compression.vectors import BLOCK_VALUES, Int8Codec
from trainer.errors import CodecError, NonFiniteActivationError
from trainer.network.transfer.descriptor import TensorSpec
from trainer.network.transfer.tensor_bytes import specs_of

__all__ = ["IDS", "PACKINGS", "PackingName", "ValuePacking", "check_finite", "check_ids", "check_specs", "ids_spec"]

IDS: Final = "ids"
"""Name of the ids' tensor beside a message."""
PackingName = Literal["fp32", "fp16", "int8"]
Shape = tuple[int, int, int]
"""Rows, positions, values of a position."""

_FP16_EXPONENT: Final = 15
_MAX_EXPONENT: Final = 126 - _FP16_EXPONENT
"""Scales from 2^-111 to 2^111: their reciprocals are fp32 numbers too."""


class ValuePacking(ABC):
    """Writes values as tensors and reads them back."""

    rounding: ClassVar[float]
    """Largest relative error (Euclidean, of a whole tensor) that the packing itself causes."""

    def pack(self, name: str, values: Tensor) -> dict[str, Tensor]:
        """Returns CPU tensors of fp32[B, S, K], ready to be sent.

        Raises:
            NonFiniteActivationError: NaN or infinity among the values.
        """
        check_finite(name, values)
        return self._pack(name, values)

    def unpack(self, name: str, tensors: Mapping[str, Tensor], device: torch.device) -> Tensor:
        """Returns fp32[B, S, K] from tensors that passed `check_specs`; fp32 shares their memory on the same device.

        Raises:
            CodecError: no honest sender made them.
            NonFiniteActivationError: NaN or infinity among the values.
        """
        values = self._unpack(name, tensors, device)
        check_finite(name, values)
        return values

    @abstractmethod
    def specs(self, name: str, shape: Shape) -> tuple[TensorSpec, ...]:
        """Returns the tensors of values of that shape."""

    @abstractmethod
    def _pack(self, name: str, values: Tensor) -> dict[str, Tensor]: ...

    @abstractmethod
    def _unpack(self, name: str, tensors: Mapping[str, Tensor], device: torch.device) -> Tensor: ...


class _Fp32(ValuePacking):
    rounding: ClassVar[float] = 0.0

    def specs(self, name: str, shape: Shape) -> tuple[TensorSpec, ...]:
        return (TensorSpec(name=name, dtype="float32", shape=shape),)

    def _pack(self, name: str, values: Tensor) -> dict[str, Tensor]:
        return {name: values.to("cpu").contiguous()}

    def _unpack(self, name: str, tensors: Mapping[str, Tensor], device: torch.device) -> Tensor:
        return tensors[name].to(device)


class _Fp16(ValuePacking):
    rounding: ClassVar[float] = 2.0**-11

    def specs(self, name: str, shape: Shape) -> tuple[TensorSpec, ...]:
        scales = TensorSpec(name=f"{name}.scales", dtype="float32", shape=(shape[0],))
        return TensorSpec(name=name, dtype="float16", shape=shape), scales

    def _pack(self, name: str, values: Tensor) -> dict[str, Tensor]:
        flat = values.flatten(1)
        largest = flat.abs().amax(1) if flat.shape[1] else flat.new_zeros(len(flat))
        exponents = torch.frexp(largest).exponent.clamp(-_MAX_EXPONENT, _MAX_EXPONENT + 2 * _FP16_EXPONENT)
        scales = torch.exp2((exponents - _FP16_EXPONENT).float())
        halves = (flat / scales[:, None]).half().view_as(values)
        return {name: halves.to("cpu").contiguous(), f"{name}.scales": scales.to("cpu")}

    def _unpack(self, name: str, tensors: Mapping[str, Tensor], device: torch.device) -> Tensor:
        scales = tensors[f"{name}.scales"]
        if not bool(((scales > 0) & torch.isfinite(scales)).all()):
            raise CodecError(f"{name}: expected scales above 0, found others; drop the message")
        return tensors[name].to(device).float() * scales.to(device)[:, None, None]


class _Int8(ValuePacking):
    rounding: ClassVar[float] = 2.0**-6
    """Normal values have 0.0075; blocks with an outlier more."""

    _codec = Int8Codec()

    def specs(self, name: str, shape: Shape) -> tuple[TensorSpec, ...]:
        levels = TensorSpec(name=name, dtype="int8", shape=shape)
        num_blocks = -(-levels.num_values // BLOCK_VALUES)
        return levels, TensorSpec(name=f"{name}.scales", dtype="float32", shape=(num_blocks,))

    def _pack(self, name: str, values: Tensor) -> dict[str, Tensor]:
        flat = values.to("cpu").contiguous().view(-1)
        encoded = torch.frombuffer(bytearray(self._codec.encode(flat)), dtype=torch.int8)
        split = encoded.numel() - flat.numel()
        return {name: encoded[split:].view(values.shape), f"{name}.scales": encoded[:split].view(torch.float32)}

    def _unpack(self, name: str, tensors: Mapping[str, Tensor], device: torch.device) -> Tensor:
        levels, scales = tensors[name].contiguous(), tensors[f"{name}.scales"].contiguous()
        encoded = torch.cat((scales.view(torch.int8), levels.view(-1)))
        return self._codec.decode(encoded.numpy().data, levels.numel()).view(levels.shape).to(device)


PACKINGS: Final = MappingProxyType[PackingName, ValuePacking]({"fp32": _Fp32(), "fp16": _Fp16(), "int8": _Int8()})


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
                f"tensor {name!r}: expected {_described(expected.get(name))}, found {_described(found.get(name))}; do "
                "both nodes use the same run file?"
            )


def check_finite(name: str, values: Tensor) -> None:
    """Refuses NaN and infinity.

    Raises:
        NonFiniteActivationError: a value is not finite.
    """
    if values.numel() == 0:
        return
    lowest, highest = torch.aminmax(values)
    if not bool(torch.isfinite(lowest) & torch.isfinite(highest)):
        raise NonFiniteActivationError(f"{name}: expected finite values, found NaN or infinity; nothing of it counts")


def ids_spec(num_rows: int, num_positions: int) -> TensorSpec:
    """Returns the expected tensor of a micro-batch's ids."""
    return TensorSpec(name=IDS, dtype="int32", shape=(num_rows, num_positions))


def check_ids(ids: Tensor, num_ids: int) -> None:
    """Refuses a tensor that does not hold token ids.

    Raises:
        CodecError: not int32 or int64 of two dimensions, empty, or an id outside of 0 to ``num_ids`` − 1.
    """
    if ids.dtype not in (torch.int32, torch.int64) or ids.ndim != 2 or ids.numel() == 0:
        raise CodecError(f"ids: expected whole numbers [rows, positions], found {ids.dtype} {list(ids.shape)}")
    lowest, highest = (int(value) for value in torch.aminmax(ids))
    if lowest < 0 or highest >= num_ids:
        raise CodecError(f"ids: expected 0 to {num_ids - 1}, found {lowest} to {highest}")


def _described(spec: TensorSpec | None) -> str:
    return "none" if spec is None else f"{spec.dtype} {list(spec.shape)}"

"""Activations and their gradients on a link: what is sent of them, and what the far end decodes.

    codec = activation_codec("subspace+int8", basis, fixed_table_of(config))
    sent = codec.encode(hidden, ids)                       # tensors by name, on the CPU; the ids travel beside them
    codec.check(tensors, num_rows, num_positions, dim, "activation")      # by shape and type, before any work
    hidden = codec.decode(tensors, ids)
    gradient = codec.grad_decode(codec.grad_encode(gradient).tensors)

A subspace codec sends ``c = (x − e[ids])·U`` of an activation and decodes ``e[ids] + c·Uᵀ``, which is x itself, to 2e-8
of its norm, if a constrained model made it. Of a gradient it sends ``g·U``, the derivative by ``c``, which decodes to
the gradient's part within the subspace: the part that the stage before would keep (`SubspaceConstraint`). Packings
(`packing`) are independent of that: ``subspace+fp16`` sends 2 · dim / rank times fewer bytes than fp32.

A codec keeps no state; a basis' products are taken in fp32 also under autocast. Measured on one core of an EPYC, in
MB/s of fp32 activation [4, 512, 1024] with rank 64 (16 times fewer values):

|               | encode | decode | gradient: encode | decode |
|---------------|--------|--------|------------------|--------|
| fp32          | 34,000 | 31,000 | 34,000           | 33,000 |
| fp16          |  6,200 |  5,300 |  6,800           |  7,400 |
| int8          |  5,200 |  4,100 |  4,100           |  4,500 |
| subspace      |  8,000 |  7,400 |  8,300           | 16,800 |
| subspace+fp16 |  7,200 |  7,900 |  7,300           | 15,000 |
| subspace+int8 |  6,600 |  7,100 |  6,900           | 12,900 |

(fp32 only looks for NaN. A basis that is not of coordinates encodes 1,800 and decodes 2,100.) A link of 80 Mbit/s
carries 640 MB/s of activations as ``subspace+int8``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal, cast, get_args

import torch
from torch import Tensor
from torch.nn import functional

from trainer.compression.activations.packing import (
    PACKINGS,
    PackingName,
    ValuePacking,
    check_finite,
    check_ids,
    check_specs,
)
from trainer.errors import CodecError, TrainerUsageError
from trainer.model.subspace.basis import Basis, Projector, projector
from trainer.network.transfer.descriptor import TensorSpec

__all__ = [
    "ACTIVATION_CODECS",
    "ActivationCodec",
    "ActivationCodecName",
    "Direction",
    "Encoded",
    "activation_codec",
]

ActivationCodecName = Literal["fp32", "fp16", "int8", "subspace", "subspace+fp16", "subspace+int8"]
ACTIVATION_CODECS: Final[tuple[str, ...]] = get_args(ActivationCodecName)

Direction = Literal["activation", "gradient"]
"""What travels; also the name of its tensor, and with ``.scales`` that of the tensor beside it."""

_PREFIX = "subspace"


@dataclass(frozen=True, slots=True, eq=False)
class Encoded:
    """The tensors that are sent for one activation or gradient."""

    tensors: dict[str, Tensor]
    """By name, contiguous, on the CPU. They may share memory with what was encoded."""
    raw_bytes: int
    """Size of the values in fp32."""
    wire_bytes: int
    """Size of the tensors, ids not included."""


@dataclass(frozen=True, slots=True, eq=False)
class _Subspace:
    """The affine subspace that holds the residual stream of a constrained model."""

    dim: int
    rank: int
    basis: Projector
    fixed: Tensor
    """fp32[vocabulary, dim]."""
    fixed_coefficients: Tensor
    """fp32[vocabulary, rank], so that encoding reads rank values of a fixed row instead of all."""

    def rows(self, table: Tensor, ids: Tensor | None, like: Tensor) -> Tensor:
        """Returns the rows of the ids in one of the two tables, fp32[B, S, …]."""
        if ids is None:
            raise CodecError("expected the token ids with a subspace's activations, found none")
        check_ids(ids, self.fixed.shape[0])
        if ids.shape != like.shape[:2]:
            raise CodecError(f"ids: expected one for each position of {list(like.shape)}, found {list(ids.shape)}")
        return functional.embedding(ids.to(table.device), table)


@dataclass(frozen=True, slots=True, eq=False)
class ActivationCodec:
    """Encodes and decodes activations and gradients of a link; made by `activation_codec`. Thread-safe."""

    name: str
    """One of `ACTIVATION_CODECS`."""
    rounding: float
    """Largest relative error of a tensor that the packing causes; 0: lossless."""
    device: torch.device
    """Device of decoded tensors."""
    packing: ValuePacking
    subspace: _Subspace | None

    @property
    def needs_ids(self) -> bool:
        """Whether activations (not gradients) are sent relative to their tokens' fixed rows."""
        return self.subspace is not None

    def encode(self, activation: Tensor, ids: Tensor | None = None) -> Encoded:
        """Prepares an activation for the wire.

        Args:
            activation: fp32, or narrower, [B, S, dim], on any device.
            ids: int[B, S], its tokens; only if `needs_ids`.

        Raises:
            CodecError: the shapes do not match, or an id has no fixed row.
            NonFiniteActivationError: a value is not finite.
        """
        values = _checked(activation)
        if self.subspace is not None:
            values = self._in_full("activation", values, self.subspace)
            fixed = self.subspace.rows(self.subspace.fixed_coefficients, ids, values)
            values = self.subspace.basis.coefficients(values).sub_(fixed)
        return self._packed("activation", values, activation.numel())

    def decode(self, tensors: Mapping[str, Tensor], ids: Tensor | None = None) -> Tensor:
        """Decodes an activation to fp32[B, S, dim] on `device`; it may share memory with ``tensors``.

        Args:
            tensors: from `encode`, or from a stranger.
            ids: as for `encode`.

        Raises:
            CodecError: other tensors than `encode` makes, or ids that do not match them.
            NonFiniteActivationError: a value is not finite.
        """
        values = self._unpacked("activation", tensors)
        if self.subspace is None:
            return values
        _check_width(values, self.subspace.rank)
        return self.subspace.basis.add_span_(values, self.subspace.rows(self.subspace.fixed, ids, values))

    def grad_encode(self, gradient: Tensor) -> Encoded:
        """Prepares the gradient by an activation, fp32 or narrower, [B, S, dim], for the wire.

        Raises:
            CodecError: the shape is not one of the link's.
            NonFiniteActivationError: a value is not finite.
        """
        values = _checked(gradient)
        if self.subspace is not None:
            values = self.subspace.basis.coefficients(self._in_full("gradient", values, self.subspace))
        return self._packed("gradient", values, gradient.numel())

    def grad_decode(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Decodes a gradient, or its part within the subspace, to fp32[B, S, dim] on `device`.

        Raises:
            CodecError: other tensors than `grad_encode` makes.
            NonFiniteActivationError: a value is not finite.
        """
        values = self._unpacked("gradient", tensors)
        if self.subspace is None:
            return values
        _check_width(values, self.subspace.rank)
        return self.subspace.basis.add_span_(values, values.new_zeros((*values.shape[:2], self.subspace.dim)))

    def specs(self, num_rows: int, num_positions: int, dim: int, direction: Direction) -> tuple[TensorSpec, ...]:
        """Returns exactly the tensors that travel for [num_rows, num_positions, dim]; for the ids see `ids_spec`.

        Raises:
            TrainerUsageError: the codec is for another width.
        """
        width = dim
        if self.subspace is not None:
            width = self.subspace.rank
            if dim != self.subspace.dim:
                raise TrainerUsageError(f"expected activations of width {self.subspace.dim}, found {dim}")
        return self.packing.specs(direction, (num_rows, num_positions, width))

    def check(
        self, tensors: Mapping[str, Tensor], num_rows: int, num_positions: int, dim: int, direction: Direction
    ) -> None:
        """Refuses tensors that are not exactly `specs`, without looking at their values.

        Raises:
            CodecError: the message names the first difference.
        """
        check_specs(tensors, self.specs(num_rows, num_positions, dim, direction))

    def wire_bytes(self, num_rows: int, num_positions: int, dim: int, direction: Direction) -> int:
        """Returns the size of the tensors that travel, ids not included."""
        return sum(spec.size_bytes for spec in self.specs(num_rows, num_positions, dim, direction))

    def _in_full(self, direction: Direction, values: Tensor, subspace: _Subspace) -> Tensor:
        """Checks all values, also those that do not travel: NaN in any of them means a faulty stage."""
        _check_width(values, subspace.dim)
        values = values.to(self.device)
        check_finite(direction, values)
        return values

    def _packed(self, direction: Direction, values: Tensor, num_values: int) -> Encoded:
        tensors = self.packing.pack(direction, values)
        wire_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        return Encoded(tensors, 4 * num_values, wire_bytes)

    def _unpacked(self, direction: Direction, tensors: Mapping[str, Tensor]) -> Tensor:
        found = tensors.get(direction)
        if found is None or found.ndim != 3:
            what = "none" if found is None else f"{found.dtype} {list(found.shape)}"
            raise CodecError(f"expected a tensor {direction!r} of rows, positions and values, found {what}")
        num_rows, num_positions, width = found.shape
        check_specs(tensors, self.packing.specs(direction, (num_rows, num_positions, width)))
        return self.packing.unpack(direction, tensors, self.device)


def activation_codec(
    name: str,
    basis: Basis | None = None,
    fixed: Tensor | None = None,
    *,
    device: torch.device | str = "cpu",
) -> ActivationCodec:
    """Returns the codec of that name.

    Args:
        name: one of `ACTIVATION_CODECS`.
        basis: for a subspace codec.
        fixed: for a subspace codec: the fixed rows (`fixed_table_of`, or `SubspaceEmbedding.fixed`), shared, or copied
            if on another device. A grown vocabulary needs a new codec.
        device: where it computes and decodes to.

    Raises:
        TrainerUsageError: there is none of that name, or it lacks a basis and fixed rows of one width.
        BasisError: the basis is not orthonormal.
    """
    if name not in ACTIVATION_CODECS:
        raise TrainerUsageError(f"codec: expected one of {', '.join(ACTIVATION_CODECS)}, found {name!r}")
    where = torch.device(device)
    space, _, after = name.partition("+")
    packing = PACKINGS[cast(PackingName, after or "fp32" if space == _PREFIX else name)]
    if space != _PREFIX:
        return ActivationCodec(name, packing.rounding, where, packing, None)
    if basis is None or fixed is None or fixed.ndim != 2 or fixed.shape[1] != basis.dim:
        raise TrainerUsageError(f"codec {name}: expected a basis and fixed rows of its width; is subspace.rank set?")
    basis.check()
    table = fixed.detach().to(device=where, dtype=torch.float32)
    ready = projector(basis, where)
    subspace = _Subspace(basis.dim, basis.rank, ready, table, ready.coefficients(table))
    return ActivationCodec(name, packing.rounding, where, packing, subspace)


def _check_width(values: Tensor, width: int) -> None:
    if values.shape[-1] != width:
        raise CodecError(f"expected {width} values a position, found {values.shape[-1]}")


def _checked(values: Tensor) -> Tensor:
    if values.ndim != 3 or not values.is_floating_point():
        raise CodecError(f"expected values [rows, positions, dim], found {values.dtype} {list(values.shape)}")
    return values.detach().float()

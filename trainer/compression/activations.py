"""Codecs of activations and their gradients on the links between stages, and what a link costs and loses.

    codec = activation_codec("subspace+int8", basis, fixed_table_of(config))
    sent = codec.encode(hidden, ids)                       # tensors by name, on the CPU; the ids travel beside them
    codec.check(tensors, num_rows, num_positions, dim, "activation")      # by shape and type, before any work
    hidden = codec.decode(tensors, ids)
    gradient = codec.grad_decode(codec.grad_encode(gradient).tensors)

A subspace codec (`trainer.model.subspace`) sends ``c = (x − e[ids])·U`` of an activation and decodes ``e[ids] + c·Uᵀ``,
which is x itself, to 2e-8 of its norm, if a constrained model made it. Of a gradient it sends ``g·U``, the derivative
by ``c``, which decodes to the part that the stage before would keep. Values, or coordinates, are packed as

* ``fp32``: one tensor, lossless.
* ``fp16``: each row of the batch is multiplied by a power of two that brings its largest magnitude to 2^14 … 2^15, and
  that power travels beside it, so that small gradients keep their digits and nothing overflows.
* ``int8``: blocks of 1,024 values under one scale each (`trainer.compression.vectors.Int8Codec`).

Guarantees: non-finite values are refused at both ends; names, types and shapes follow from the values' shape alone, and
nothing else is taken. A codec keeps no state. The trade-off: both ends hold the fixed embedding. One core encodes 5 to
8 GB/s of fp32 activation (rank 64 of 1,024), and decodes 4 to 8; fp32, which only looks for NaN, 34.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final, Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional

from trainer.compression.vectors import BLOCK_VALUES, Int8Codec
from trainer.errors import CodecError, NonFiniteActivationError, TrainerUsageError
from trainer.model.subspace.basis import Basis, Projector, projector
from trainer.network.transfer.descriptor import TensorSpec, specs_of

ActivationCodecName = Literal["fp32", "fp16", "int8", "subspace", "subspace+fp16", "subspace+int8"]
ACTIVATION_CODECS: Final[tuple[str, ...]] = get_args(ActivationCodecName)

Direction = Literal["activation", "gradient"]
"""What travels; also the name of its tensor, and with ``.scales`` that of the tensor beside it."""

IDS: Final = "ids"
"""Name of the token ids' tensor beside a message: int32, since half precision would change an id and so its row."""

_PREFIX = "subspace"
_FP16_EXPONENT: Final = 15
_MAX_EXPONENT: Final = 126 - _FP16_EXPONENT  # Scales from 2^-111 to 2^111: their reciprocals are fp32 numbers too.
_MEASURED_EVERY = 16
_KEPT = 0.9  # Weight of the old value in the moving average.
_LOG_INTERVAL_S = 60.0

Shape = tuple[int, int, int]  # Rows, positions, values of a position.

logger = logging.getLogger(__name__)


# A packing writes finite values, fp32[B, S, K], as CPU tensors, and reads back tensors of the right specs.


class _Fp32:
    rounding = 0.0  # Largest relative error (Euclidean, of a whole tensor) that a packing itself causes.

    def specs(self, name: str, shape: Shape) -> tuple[TensorSpec, ...]:
        return (TensorSpec(name=name, dtype="float32", shape=shape),)

    def pack(self, name: str, values: Tensor) -> dict[str, Tensor]:
        return {name: values.to("cpu").contiguous()}

    def unpack(self, name: str, tensors: Mapping[str, Tensor], device: torch.device) -> Tensor:
        return tensors[name].to(device)


class _Fp16:
    rounding = 2.0**-11

    def specs(self, name: str, shape: Shape) -> tuple[TensorSpec, ...]:
        scales = TensorSpec(name=f"{name}.scales", dtype="float32", shape=(shape[0],))
        return TensorSpec(name=name, dtype="float16", shape=shape), scales

    def pack(self, name: str, values: Tensor) -> dict[str, Tensor]:
        flat = values.flatten(1)
        largest = flat.abs().amax(1) if flat.shape[1] else flat.new_zeros(len(flat))
        exponents = torch.frexp(largest).exponent.clamp(-_MAX_EXPONENT, _MAX_EXPONENT + 2 * _FP16_EXPONENT)
        scales = torch.exp2((exponents - _FP16_EXPONENT).float())
        halves = (flat / scales[:, None]).half().view_as(values)
        return {name: halves.to("cpu").contiguous(), f"{name}.scales": scales.to("cpu")}

    def unpack(self, name: str, tensors: Mapping[str, Tensor], device: torch.device) -> Tensor:
        scales = tensors[f"{name}.scales"]
        if not bool(((scales > 0) & torch.isfinite(scales)).all()):
            raise CodecError(f"{name}: expected scales above 0, found others; drop the message")
        return tensors[name].to(device).float() * scales.to(device)[:, None, None]


class _Int8:
    rounding = 2.0**-6  # Normal values have 0.0075; blocks with an outlier more.
    _codec = Int8Codec()

    def specs(self, name: str, shape: Shape) -> tuple[TensorSpec, ...]:
        levels = TensorSpec(name=name, dtype="int8", shape=shape)
        num_blocks = -(-levels.num_values // BLOCK_VALUES)
        return levels, TensorSpec(name=f"{name}.scales", dtype="float32", shape=(num_blocks,))

    def pack(self, name: str, values: Tensor) -> dict[str, Tensor]:
        flat = values.to("cpu").contiguous().view(-1)
        encoded = torch.frombuffer(bytearray(self._codec.encode(flat)), dtype=torch.int8)
        split = encoded.numel() - flat.numel()
        return {name: encoded[split:].view(values.shape), f"{name}.scales": encoded[:split].view(torch.float32)}

    def unpack(self, name: str, tensors: Mapping[str, Tensor], device: torch.device) -> Tensor:
        levels, scales = tensors[name].contiguous(), tensors[f"{name}.scales"].contiguous()
        encoded = torch.cat((scales.view(torch.int8), levels.view(-1)))
        return self._codec.decode(encoded.numpy().data, levels.numel()).view(levels.shape).to(device)


_Packing = _Fp32 | _Fp16 | _Int8
_PACKINGS: Final = MappingProxyType[str, _Packing]({"fp32": _Fp32(), "fp16": _Fp16(), "int8": _Int8()})


@dataclass(frozen=True, slots=True, eq=False)
class Encoded:
    """The tensors that are sent for one activation or gradient."""

    tensors: dict[str, Tensor]  # By name, contiguous, on the CPU. They may share memory with what was encoded.
    raw_bytes: int  # Size of the values in fp32.
    wire_bytes: int  # Size of the tensors, ids not included.


@dataclass(frozen=True, slots=True, eq=False)
class _Subspace:
    """The affine subspace that holds the residual stream of a constrained model."""

    dim: int
    rank: int
    basis: Projector
    fixed: Tensor  # fp32[vocabulary, dim].
    fixed_coefficients: Tensor
    """fp32[vocabulary, rank], so that encoding reads rank values of a fixed row instead of all."""

    def rows(self, table: Tensor, ids: Tensor | None, like: Tensor) -> Tensor:
        """Returns the rows of the ids in one of the two tables, fp32[B, S, …]."""
        if ids is None:
            raise CodecError("expected the token ids with a subspace's activations, found none")
        if ids.dtype not in (torch.int32, torch.int64) or ids.ndim != 2 or ids.numel() == 0:
            raise CodecError(f"ids: expected whole numbers [rows, positions], found {ids.dtype} {list(ids.shape)}")
        lowest, highest = (int(value) for value in torch.aminmax(ids))
        if lowest < 0 or highest >= len(table):
            raise CodecError(f"ids: expected 0 to {len(table) - 1}, found {lowest} to {highest}")
        if ids.shape != like.shape[:2]:
            raise CodecError(f"ids: expected one for each position of {list(like.shape)}, found {list(ids.shape)}")
        return functional.embedding(ids.to(table.device), table)


@dataclass(frozen=True, slots=True, eq=False)
class ActivationCodec:
    """Encodes and decodes activations and gradients of a link; made by `activation_codec`. Thread-safe."""

    name: str  # One of `ACTIVATION_CODECS`.
    device: torch.device  # Device of decoded tensors.
    _packing: _Packing
    _subspace: _Subspace | None = None

    @property
    def rounding(self) -> float:
        """Largest relative error of a tensor that the packing causes; 0: lossless."""
        return self._packing.rounding

    @property
    def needs_ids(self) -> bool:
        """Whether activations (not gradients) are sent relative to their tokens' fixed rows."""
        return self._subspace is not None

    def encode(self, activation: Tensor, ids: Tensor | None = None) -> Encoded:
        """Prepares an activation, fp32 or narrower, [B, S, dim], for the wire; with its ids, int[B, S], if `needs_ids`.

        Raises:
            CodecError: the shapes do not match, or an id has no fixed row.
            NonFiniteActivationError: a value is not finite.
        """
        values = self._checked("activation", activation)
        if self._subspace is not None:
            fixed = self._subspace.rows(self._subspace.fixed_coefficients, ids, values)
            values = self._subspace.basis.coefficients(values).sub_(fixed)
        return self._packed("activation", values, activation.numel())

    def decode(self, tensors: Mapping[str, Tensor], ids: Tensor | None = None) -> Tensor:
        """Decodes what `encode` made, or a stranger, to fp32[B, S, dim] on `device`; it may share their memory.

        Raises:
            CodecError: other tensors than `encode` makes, or ids that do not match them.
            NonFiniteActivationError: a value is not finite.
        """
        values = self._unpacked("activation", tensors)
        if self._subspace is None:
            return values
        return self._subspace.basis.add_span_(values, self._subspace.rows(self._subspace.fixed, ids, values))

    def grad_encode(self, gradient: Tensor) -> Encoded:
        """Prepares the gradient by an activation, fp32 or narrower, [B, S, dim], for the wire; errors as `encode`."""
        values = self._checked("gradient", gradient)
        if self._subspace is not None:
            values = self._subspace.basis.coefficients(values)
        return self._packed("gradient", values, gradient.numel())

    def grad_decode(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Decodes a gradient, or its part within the subspace, to fp32[B, S, dim] on `device`; errors as `decode`."""
        values = self._unpacked("gradient", tensors)
        if self._subspace is None:
            return values
        return self._subspace.basis.add_span_(values, values.new_zeros((*values.shape[:2], self._subspace.dim)))

    def specs(self, num_rows: int, num_positions: int, dim: int, direction: Direction) -> tuple[TensorSpec, ...]:
        """Returns exactly the tensors that travel for [num_rows, num_positions, dim]; for the ids see `ids_spec`.

        Raises:
            TrainerUsageError: the codec is for another width.
        """
        width = dim
        if self._subspace is not None:
            width = self._subspace.rank
            if dim != self._subspace.dim:
                raise TrainerUsageError(f"expected activations of width {self._subspace.dim}, found {dim}")
        return self._packing.specs(direction, (num_rows, num_positions, width))

    def check(
        self, tensors: Mapping[str, Tensor], num_rows: int, num_positions: int, dim: int, direction: Direction
    ) -> None:
        """Refuses tensors that are not exactly `specs`, without looking at their values.

        Raises:
            CodecError: the message names the first difference.
        """
        _check_specs(tensors, self.specs(num_rows, num_positions, dim, direction))

    def wire_bytes(self, num_rows: int, num_positions: int, dim: int, direction: Direction) -> int:
        """Returns the size of the tensors that travel, ids not included."""
        return sum(spec.size_bytes for spec in self.specs(num_rows, num_positions, dim, direction))

    def _checked(self, direction: Direction, values: Tensor) -> Tensor:
        """Checks all values, also those that do not travel: NaN in any of them means a faulty stage."""
        if values.ndim != 3 or not values.is_floating_point():
            raise CodecError(f"expected values [rows, positions, dim], found {values.dtype} {list(values.shape)}")
        values = values.detach().float()
        if self._subspace is not None:
            _check_width(values, self._subspace.dim)
            values = values.to(self.device)
            _check_finite(direction, values)
        return values

    def _packed(self, direction: Direction, values: Tensor, num_values: int) -> Encoded:
        _check_finite(direction, values)
        tensors = self._packing.pack(direction, values)
        wire_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        return Encoded(tensors, 4 * num_values, wire_bytes)

    def _unpacked(self, direction: Direction, tensors: Mapping[str, Tensor]) -> Tensor:
        found = tensors.get(direction)
        if found is None or found.ndim != 3:
            what = "none" if found is None else f"{found.dtype} {list(found.shape)}"
            raise CodecError(f"expected a tensor {direction!r} of rows, positions and values, found {what}")
        num_rows, num_positions, width = found.shape
        _check_specs(tensors, self._packing.specs(direction, (num_rows, num_positions, width)))
        values = self._packing.unpack(direction, tensors, self.device)
        _check_finite(direction, values)
        if self._subspace is not None:
            _check_width(values, self._subspace.rank)
        return values


def activation_codec(
    name: str, basis: Basis | None = None, fixed: Tensor | None = None, *, device: torch.device | str = "cpu"
) -> ActivationCodec:
    """Returns the codec of that name.

    A subspace codec needs a basis and the ``fixed`` rows (`fixed_table_of`, or `SubspaceEmbedding.fixed`), which are
    shared, or copied if on another device. A grown vocabulary needs a new codec.

    Raises:
        TrainerUsageError: there is none of that name, or it lacks a basis and fixed rows of one width.
        BasisError: the basis is not orthonormal.
    """
    if name not in ACTIVATION_CODECS:
        raise TrainerUsageError(f"codec: expected one of {', '.join(ACTIVATION_CODECS)}, found {name!r}")
    where = torch.device(device)
    space, _, after = name.partition("+")
    if space != _PREFIX:
        return ActivationCodec(name, where, _PACKINGS[name])
    if basis is None or fixed is None or fixed.ndim != 2 or fixed.shape[1] != basis.dim:
        raise TrainerUsageError(f"codec {name}: expected a basis and fixed rows of its width; is subspace.rank set?")
    basis.check()
    table = fixed.detach().to(device=where, dtype=torch.float32)
    ready = projector(basis, where)
    subspace = _Subspace(basis.dim, basis.rank, ready, table, ready.coefficients(table))
    return ActivationCodec(name, where, _PACKINGS[after or "fp32"], subspace)


def ids_spec(num_rows: int, num_positions: int) -> TensorSpec:
    """Returns the expected tensor of a micro-batch's ids."""
    return TensorSpec(name=IDS, dtype="int32", shape=(num_rows, num_positions))


def _check_specs(tensors: Mapping[str, Tensor], specs: tuple[TensorSpec, ...]) -> None:
    """Refuses tensors that are not exactly the expected ones, on the CPU."""
    found = {spec.name: spec for spec in specs_of(tensors)}
    expected = {spec.name: spec for spec in specs}
    for name in sorted(found.keys() | expected.keys()):
        if found.get(name) != expected.get(name) or tensors[name].device.type != "cpu":
            raise CodecError(
                f"tensor {name!r}: expected {_described(expected.get(name))}, found {_described(found.get(name))}; do "
                "both nodes use the same run file?"
            )


def _described(spec: TensorSpec | None) -> str:
    return "none" if spec is None else f"{spec.dtype} {list(spec.shape)}"


def _check_finite(name: str, values: Tensor) -> None:
    if values.numel() == 0:
        return
    lowest, highest = torch.aminmax(values)
    if not bool(torch.isfinite(lowest) & torch.isfinite(highest)):
        raise NonFiniteActivationError(f"{name}: expected finite values, found NaN or infinity; nothing of it counts")


def _check_width(values: Tensor, width: int) -> None:
    if values.shape[-1] != width:
        raise CodecError(f"expected {width} values a position, found {values.shape[-1]}")


@dataclass(frozen=True, slots=True)
class LinkFigures:
    """A link's totals so far."""

    raw_bytes: int = 0  # Size in fp32 of what was encoded.
    wire_bytes: int = 0  # Size of what was sent for it, ids not included.
    num_tensors: int = 0  # Number of activations and gradients.
    error: float = 0.0
    """Relative reconstruction error of activations, a moving average; 0 before the first measurement."""
    max_error: float = 0.0  # The largest measured.
    alarms: int = 0  # Measurements above the limit.

    @property
    def ratio(self) -> float:
        """Compression ratio, raw over sent; 1 before anything was sent."""
        return self.raw_bytes / self.wire_bytes if self.wire_bytes else 1.0


class LinkMeter:
    """Counts what one worker sends over one link, and raises an alarm when the error is too large. Thread-safe.

    The error is end to end: the activation against what the far end decodes, relative to its norm. Measuring it costs
    one decoding, so it is done for one activation in ``every``. Gradients count in bytes only: what a subspace leaves
    out of them is not an error. The limit is ``max_error`` plus the codec's rounding.
    """

    def __init__(
        self,
        link: str,
        codec: ActivationCodec,
        max_error: float,
        *,
        every: int = _MEASURED_EVERY,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if every < 1 or not max_error > 0:
            raise TrainerUsageError(f"expected every ≥ 1 and max_error > 0, found {every} and {max_error}")
        self._link = link
        self._codec = codec
        self._limit = max_error + codec.rounding
        self._every = every
        self._clock = clock
        self._lock = threading.Lock()
        self._figures = LinkFigures()
        self._num_activations = 0
        self._is_measured = False
        self._logged_at_s = -_LOG_INTERVAL_S

    def activation(self, activation: Tensor, ids: Tensor | None, encoded: Encoded) -> float | None:
        """Counts a sent activation, [B, S, dim] as it was encoded; returns its error, or None if not measured."""
        with self._lock:
            is_due = self._num_activations % self._every == 0
            self._num_activations += 1
        self.gradient(encoded)
        if not is_due:
            return None
        error = reconstruction_error(self._codec, activation, ids, encoded)
        self._note(error)
        return error

    def gradient(self, encoded: Encoded) -> None:
        """Counts a sent gradient."""
        with self._lock:
            seen = self._figures
            self._figures = replace(
                seen,
                raw_bytes=seen.raw_bytes + encoded.raw_bytes,
                wire_bytes=seen.wire_bytes + encoded.wire_bytes,
                num_tensors=seen.num_tensors + 1,
            )

    def figures(self) -> LinkFigures:
        """Returns the link's totals so far."""
        return self._figures

    def _note(self, error: float) -> None:
        with self._lock:
            seen = self._figures
            average = _KEPT * seen.error + (1 - _KEPT) * error if self._is_measured else error
            self._is_measured = True
            alarms = seen.alarms + (not error <= self._limit)
            self._figures = replace(seen, error=average, max_error=max(seen.max_error, error), alarms=alarms)
            now_s = self._clock()
            if alarms == seen.alarms or now_s - self._logged_at_s < _LOG_INTERVAL_S:
                return
            self._logged_at_s = now_s
        text = "link %s (%s): expected a reconstruction error of at most %.2g, found %.2g (%d times so far); "
        text += "has the model left its subspace?"
        logger.warning(text, self._link, self._codec.name, self._limit, error, alarms)


def reconstruction_error(codec: ActivationCodec, activation: Tensor, ids: Tensor | None, encoded: Encoded) -> float:
    """Returns ‖x − decoded‖ / ‖x‖ of one activation; 0 if both are 0."""
    wanted = activation.detach().to(codec.device).float()
    error = float((codec.decode(encoded.tensors, ids) - wanted).norm())
    norm = float(wanted.norm())
    return error / norm if norm else (0.0 if error == 0.0 else float("inf"))

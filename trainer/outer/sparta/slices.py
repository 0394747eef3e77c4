"""Which values a round averages, and what they become.

Value ``i`` of all values laid end to end belongs to slice ``i mod num_slices``, and round ``r`` averages slice
``r mod num_slices``; a slice of a tensor is a strided view of it. Where a constraint binds the values along an
axis of a matrix (subspace networks: each column of an output projection lies in span(U)), averaging some of them breaks
it: tensors with a kept axis are cut into whole columns or rows, whose averages satisfy the constraint.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.errors import RoundFailedError, TrainerUsageError
from trainer.outer.diloco.flat import FlatLayout, is_finite
from trainer.outer.engine.collective import RoundResult

_NOTHING_KEPT: Mapping[str, int] = {}


@dataclass(frozen=True, slots=True)
class SlicePiece:
    """A slice's part of one tensor: every ``stride``-th value from ``start``, or row, or column."""

    name: str
    start: int
    stride: int
    num_values: int
    kept_axis: int | None  # Values along it stay together (0: whole columns, 1: whole rows); None: single values.

    def view(self, tensor: Tensor) -> Tensor:
        """Returns the piece as a view of its tensor."""
        values = tensor.detach()
        if self.kept_axis is None:
            return values.view(-1)[self.start :: self.stride]
        if self.kept_axis == 1:
            return values[self.start :: self.stride]
        return values[:, self.start :: self.stride]


@dataclass(frozen=True, slots=True)
class ParameterSlice:
    """The values of one round, by tensor in the layout's order."""

    index: int  # Of the slice, 0 to num_slices − 1.
    pieces: tuple[SlicePiece, ...]

    @property
    def num_values(self) -> int:
        """Length of the vector."""
        return sum(piece.num_values for piece in self.pieces)

    def gather(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Copies the slice's values from the layout's tensors, contiguous ones, to [num_values] fp32 on the CPU."""
        vector = torch.empty(self.num_values)
        for piece, place in self._placed():
            view = piece.view(tensors[piece.name])
            vector[place].view(view.shape).copy_(view)
        return vector

    def scatter(self, vector: Tensor, tensors: Mapping[str, Tensor]) -> None:
        """Writes the slice's values, [num_values] fp32 on the CPU, in place and unseen by autograd."""
        for piece, place in self._placed():
            view = piece.view(tensors[piece.name])
            view.copy_(vector[place].view(view.shape))

    def _placed(self) -> Iterator[tuple[SlicePiece, slice]]:
        start = 0
        for piece in self.pieces:
            yield piece, slice(start, start + piece.num_values)
            start += piece.num_values


def slice_of(
    round_index: int, layout: FlatLayout, num_slices: int, kept_axes: Mapping[str, int] = _NOTHING_KEPT
) -> ParameterSlice:
    """Returns the values that a round averages."""
    index = round_index % num_slices
    pieces, num_before = [], 0
    for name, shape, _ in layout.slices():
        axis = kept_axes.get(name)
        num_units = math.prod(shape) if axis is None else shape[1 - axis]
        start = (index - num_before) % num_slices
        found = len(range(start, num_units, num_slices))
        if found:
            pieces.append(SlicePiece(name, start, num_slices, found * (1 if axis is None else shape[axis]), axis))
        num_before += num_units
    return ParameterSlice(index, tuple(pieces))


def check_slices(
    tensors: Mapping[str, Tensor], layout: FlatLayout, num_slices: int, kept_axes: Mapping[str, int]
) -> None:
    """Refuses tensors that cannot be cut so.

    Raises:
        TrainerUsageError: a kept axis is none of a matrix, a tensor is not contiguous, or a slice is empty.
    """
    shapes = dict(zip(layout.names, layout.shapes, strict=True))
    for name, axis in kept_axes.items():
        shape = shapes.get(name)
        if shape is None or len(shape) != 2 or axis not in (0, 1):
            raise TrainerUsageError(f"kept axis {axis} of {name!r}: expected axis 0 or 1 of a matrix, found {shape}")
    for name, tensor in tensors.items():
        if not tensor.is_contiguous():
            raise TrainerUsageError(f"async_sparta: expected contiguous parameters, found {name!r} otherwise")
    if not all(slice_of(index, layout, num_slices, kept_axes).pieces for index in range(num_slices)):
        raise TrainerUsageError(
            f"sparta.num_slices: expected at most as many as the model has values to cut between, "
            f"found {num_slices} with {layout.num_values} values"
        )


def schedule_digest(layout: FlatLayout, num_slices: int, kept_axes: Mapping[str, int] = _NOTHING_KEPT) -> str:
    """Returns the SHA-256, lower-case hex, of what decides the slices of all rounds: equal if vectors mean the same."""
    first_slice = 0
    schedule = ["sparta", 1, layout.digest(), num_slices, first_slice, sorted(kept_axes.items())]
    return hashlib.sha256(json.dumps(schedule, separators=(",", ":"), ensure_ascii=True).encode()).hexdigest()


def merged(now: Tensor, contributed: Tensor, result: RoundResult) -> Tensor:
    """Returns what a slice's values become: ``average + (now − sent)``, where ``sent`` is what the others decoded.

    That is the average with the node's own progress since. Unlike ``now + (average − sent)``, it gives a replica that
    has not stepped since the average bit for bit, so that replicas at rest become identical in one cycle. Where the
    average is what was sent, the parameter keeps its bits. The remainder of a lossy encoding stays at home, so that the
    mean over the replicas is unchanged and errors do not build up. ``contributed`` are the values when it began.

    Raises:
        RoundFailedError: the result does not fit or is not finite, or the sum is not.
    """
    average = result.vector
    if average.shape != contributed.shape or not is_finite(average):
        raise RoundFailedError(
            f"expected {contributed.numel()} finite values as the round's result, "
            f"found {list(average.shape)}, not all finite or not as many"
        )
    sent = contributed if result.residual is None else contributed - result.residual
    untouched = average == sent
    if result.report.completeness < 1:
        untouched |= average == 0  # The result of a part without a usable contribution.
    new = torch.where(untouched, now, average + (now - sent))
    if not is_finite(new):
        raise RoundFailedError("the round's result is so large that parameters overflow")
    return new

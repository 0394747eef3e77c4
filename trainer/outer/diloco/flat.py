"""Named tensors as one flat fp32 vector on the CPU, and back.

Everything that is synchronised is exchanged, summed and stored as one vector; only this file knows which of its values
belongs to which tensor. The layout is by name, in the given order: two nodes whose layouts have one digest mean the
same by position ``i``. fp32 tensors come back bit for bit; narrower ones (bf16) are widened exactly and rounded once on
the way back. The vector takes 4 bytes a parameter of host memory, on whatever device the tensors are.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.errors import IncompatiblePeerError, TrainerUsageError

__all__ = ["FlatLayout", "is_finite"]


@dataclass(frozen=True, slots=True)
class FlatLayout:
    """Positions of named tensors in the flat vector.

    Args:
        names: of the tensors, in order; each once.
        shapes: one for each name.
        offsets: start of each, in values; one more at the end, the number of all values.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    offsets: tuple[int, ...]

    @classmethod
    def of(cls, named_tensors: Iterable[tuple[str, Tensor]] | Mapping[str, Tensor]) -> FlatLayout:
        """Lays out tensors in the given order.

        Args:
            named_tensors: pairs such as ``module.named_parameters()`` gives, or a mapping.

        Raises:
            TrainerUsageError: no tensors, a duplicate name, or a tensor that is not of floating point.
        """
        pairs = named_tensors.items() if isinstance(named_tensors, Mapping) else named_tensors
        shapes: dict[str, tuple[int, ...]] = {}
        for name, tensor in pairs:
            if name in shapes:
                raise TrainerUsageError(f"a flat layout needs each name once, found {name!r} twice")
            if not tensor.is_floating_point():
                raise TrainerUsageError(
                    f"only floating point tensors are synchronised, found {name!r} of {tensor.dtype}"
                )
            shapes[name] = tuple(tensor.shape)
        return cls.from_shapes(shapes)

    @classmethod
    def from_shapes(cls, shapes: Mapping[str, tuple[int, ...]]) -> FlatLayout:
        """Lays out tensors by names and shapes, in the mapping's order.

        Raises:
            TrainerUsageError: the mapping is empty.
        """
        if not shapes:
            raise TrainerUsageError("a flat layout needs at least one tensor, found none: has the model parameters?")
        offsets = [0]
        for shape in shapes.values():
            offsets.append(offsets[-1] + math.prod(shape))
        return cls(tuple(shapes), tuple(shapes.values()), tuple(offsets))

    @property
    def num_values(self) -> int:
        """Length of the vector."""
        return self.offsets[-1]

    def slices(self) -> Iterator[tuple[str, tuple[int, ...], slice]]:
        """Yields each tensor's name, shape and place in the vector, in order."""
        for index, (name, shape) in enumerate(zip(self.names, self.shapes, strict=True)):
            yield name, shape, slice(self.offsets[index], self.offsets[index + 1])

    def select(self, names: Iterable[str]) -> FlatLayout:
        """Returns the layout of some of the tensors, in the given order.

        Raises:
            TrainerUsageError: a name is not in this layout.
        """
        shapes = dict(zip(self.names, self.shapes, strict=True))
        wanted = tuple(names)
        missing = [name for name in wanted if name not in shapes]
        if missing:
            raise TrainerUsageError(f"the layout has no tensor named {missing[0]!r}; it has {len(shapes)} others")
        return FlatLayout.from_shapes({name: shapes[name] for name in wanted})

    @torch.no_grad()
    def gather(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Copies the tensors into one vector.

        Args:
            tensors: at least those of the layout, on any device, of any floating point type.

        Returns:
            [num_values] fp32 on the CPU.

        Raises:
            TrainerUsageError: a tensor is missing or has another shape.
        """
        vector = torch.empty(self.num_values)
        for name, shape, place in self.slices():
            vector[place].view(shape).copy_(self._checked(tensors, name, shape))
        return vector

    @torch.no_grad()
    def scatter(self, vector: Tensor, tensors: Mapping[str, Tensor]) -> None:
        """Copies the vector's values into the tensors, in place and unseen by autograd; nothing unless everything fits.

        Args:
            vector: [num_values] fp32 on the CPU.
            tensors: at least those of the layout, on any device.

        Raises:
            TrainerUsageError: a tensor is missing or has another shape, or the vector is not [num_values] fp32 on the
            CPU.
        """
        if vector.shape != (self.num_values,) or vector.dtype != torch.float32 or vector.device.type != "cpu":
            found = f"{list(vector.shape)} {vector.dtype} on {vector.device}"
            raise TrainerUsageError(f"expected a vector of [{self.num_values}] torch.float32 on the CPU, found {found}")
        targets = [self._checked(tensors, name, shape) for name, shape, _ in self.slices()]
        for target, (_, shape, place) in zip(targets, self.slices(), strict=True):
            target.copy_(vector[place].view(shape))

    def digest(self) -> str:
        """Returns the SHA-256, in lower-case hex, of names, shapes and order: equal if vectors mean the same."""
        canonical = json.dumps([self.names, self.shapes], separators=(",", ":"), ensure_ascii=True)
        return hashlib.sha256(canonical.encode()).hexdigest()

    def require_same(self, digest: str, whose: str) -> None:
        """Refuses another layout.

        Args:
            digest: the other layout's :meth:`digest`.
            whose: its owner, for the message.

        Raises:
            IncompatiblePeerError: the digests differ.
        """
        if digest != self.digest():
            raise IncompatiblePeerError(
                f"expected the layout {self.digest()[:12]} ({len(self.names)} tensors, {self.num_values} values), "
                f"found {digest[:12]} in {whose}; use the same preset, vocabulary and number of fragments"
            )

    @staticmethod
    def _checked(tensors: Mapping[str, Tensor], name: str, shape: tuple[int, ...]) -> Tensor:
        tensor = tensors.get(name)
        if tensor is None:
            raise TrainerUsageError(f"expected a tensor named {name!r} of shape {list(shape)}, found none of that name")
        if tuple(tensor.shape) != shape:
            raise TrainerUsageError(f"expected {name!r} of shape {list(shape)}, found {list(tensor.shape)}")
        return tensor


def is_finite(vector: Tensor) -> bool:
    """Returns whether all values are finite, in one pass and without a mask of the vector's size."""
    if not vector.numel():
        return True
    smallest, largest = torch.aminmax(vector)
    return bool(torch.isfinite(smallest)) and bool(torch.isfinite(largest))

"""Named tensors as flat fp32 vectors on the CPU, and which of them are synchronised together.

Only this file knows which value of a vector belongs to which tensor. fp32 tensors come back bit for bit; narrower ones
(bf16) are rounded once. Layer ``i`` goes to fragment ``i mod n`` (Streaming DiLoCo, arXiv 2501.18512); what comes
before the layers (the embedding) and after them (last norm, output) counts as one layer each and goes to the smallest
fragments, whatever their sizes in bytes, so that a growing vocabulary moves nothing.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor, nn

from trainer.errors import IncompatiblePeerError, TrainerUsageError

_NAMED_LAYER = re.compile(r"^(?:.*?\.)?(?:layers|blocks|h)\.\d+(?=\.)")
_ANY_NUMBER = re.compile(r"^(?:[^\d.][^.]*\.)*\d+(?=\.)")


@dataclass(frozen=True, slots=True)
class FlatLayout:
    """Positions of named tensors in the flat vector."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    offsets: tuple[int, ...]  # Start of each, in values; one more at the end, the number of all values.

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> FlatLayout:
        """Lays out tensors in the given order; raises TrainerUsageError for none, or one that is not floating point."""
        for name, tensor in tensors.items():
            if not tensor.is_floating_point():
                raise TrainerUsageError(
                    f"only floating point tensors are synchronised, found {name!r} of {tensor.dtype}"
                )
        return cls.from_shapes({name: tuple(tensor.shape) for name, tensor in tensors.items()})

    @classmethod
    def from_shapes(cls, shapes: Mapping[str, tuple[int, ...]]) -> FlatLayout:
        """Lays out tensors by names and shapes, in the mapping's order; raises TrainerUsageError if there are none."""
        if not shapes:
            raise TrainerUsageError("a flat layout needs at least one tensor, found none: has the model parameters?")
        offsets = accumulate(map(math.prod, shapes.values()), initial=0)
        return cls(tuple(shapes), tuple(shapes.values()), tuple(offsets))

    @property
    def num_values(self) -> int:
        """Length of the vector."""
        return self.offsets[-1]

    def slices(self) -> Iterator[tuple[str, tuple[int, ...], slice]]:
        """Yields each tensor's name, shape and place in the vector, in order."""
        for name, shape, (start, stop) in zip(self.names, self.shapes, pairwise(self.offsets), strict=True):
            yield name, shape, slice(start, stop)

    def places(self, tensors: Mapping[str, Tensor]) -> list[tuple[slice, Tensor]]:
        """Returns each tensor's place in the vector and the tensor itself, unseen by autograd, in order.

        Raises:
            TrainerUsageError: a tensor is missing or has another shape.
        """
        return [(place, self._checked(tensors, name, shape).detach()) for name, shape, place in self.slices()]

    @torch.no_grad()
    def gather(self, tensors: Mapping[str, Tensor], out: Tensor | None = None) -> Tensor:
        """Copies tensors, on any device and of any floating point type, into one vector, [num_values] fp32 on the CPU.

        Args:
            tensors: by name.
            out: the vector to write to; None: a new one.

        Raises:
            TrainerUsageError: a tensor is missing or has another shape.
        """
        vector = torch.empty(self.num_values) if out is None else out
        for place, tensor in self.places(tensors):
            vector[place].view(tensor.shape).copy_(tensor)
        return vector

    @torch.no_grad()
    def scatter(self, vector: Tensor, tensors: Mapping[str, Tensor]) -> None:
        """Copies the vector's values into the tensors, in place and unseen by autograd; nothing unless everything fits.

        Raises:
            TrainerUsageError: a tensor is missing or of another shape, or the vector not [num_values] fp32 on the CPU.
        """
        self.check_vector(vector)
        for place, target in self.places(tensors):
            target.copy_(vector[place].view(target.shape))

    def check_vector(self, vector: Tensor) -> None:
        """Raises TrainerUsageError unless it is [num_values] fp32 on the CPU."""
        if vector.shape != (self.num_values,) or vector.dtype != torch.float32 or vector.device.type != "cpu":
            found = f"{list(vector.shape)} {vector.dtype} on {vector.device}"
            raise TrainerUsageError(f"expected a vector of [{self.num_values}] torch.float32 on the CPU, found {found}")

    def digest(self) -> str:
        """Returns the SHA-256, in lower-case hex, of names, shapes and order: equal if vectors mean the same."""
        canonical = json.dumps([self.names, self.shapes], separators=(",", ":"), ensure_ascii=True)
        return hashlib.sha256(canonical.encode()).hexdigest()

    def require_same(self, digest: str, whose: str) -> None:
        """Raises IncompatiblePeerError for the digest of another layout."""
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


def synchronised_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Returns the trainable parameters by name, whether or not the model, or part of it, is compiled."""
    named = model.named_parameters()
    return {name.replace("_orig_mod.", ""): parameter for name, parameter in named if parameter.requires_grad}


@dataclass(frozen=True, slots=True)
class FragmentPlan:
    """The model cut into fragments, a layout each; in the whole vector they lie one after another."""

    layouts: tuple[FlatLayout, ...]

    @classmethod
    def of(cls, named_tensors: Mapping[str, Tensor], num_fragments: int) -> FragmentPlan:
        """Assigns each tensor to a fragment; a single fragment keeps the model's order of layers.

        Raises:
            TrainerUsageError: more fragments than layers, or nothing to synchronise.
        """
        whole = FlatLayout.of(named_tensors)
        groups = _assign(whole.names, num_fragments)
        if not all(groups):
            filled = sum(1 for group in groups if group)
            raise TrainerUsageError(
                f"diloco.num_fragments: expected at most {filled} for this model, found {num_fragments}"
            )
        shapes = dict(zip(whole.names, whole.shapes, strict=True))
        return cls(tuple(FlatLayout.from_shapes({name: shapes[name] for name in group}) for group in groups))

    def slices(self) -> list[slice]:
        """Returns the place of each fragment in the whole vector."""
        ends = accumulate(layout.num_values for layout in self.layouts)
        return [slice(end - layout.num_values, end) for end, layout in zip(ends, self.layouts, strict=True)]

    def whole(self) -> FlatLayout:
        """Returns the layout of the whole vector."""
        return FlatLayout.from_shapes({name: shape for layout in self.layouts for name, shape, _ in layout.slices()})

    def digest(self) -> str:
        """Returns the digest of the whole vector's layout."""
        return self.whole().digest()


def _assign(names: Iterable[str], num_fragments: int) -> list[list[str]]:
    """Names by fragment, in the model's order within each."""
    units = _units(names)
    layers = [unit for unit, is_layer in units if is_layer]
    edges = [unit for unit, is_layer in units if not is_layer]
    fragments: list[list[list[str]]] = [[] for _ in range(num_fragments)]
    for index, unit in enumerate(layers):
        fragments[index % num_fragments].append(unit)
    with_edge: set[int] = set()
    for unit in edges:
        home = min(range(num_fragments), key=lambda index: (len(fragments[index]), index in with_edge, -index))
        fragments[home].append(unit)
        with_edge.add(home)
    position = {name: index for index, name in enumerate(name for unit, _ in units for name in unit)}
    return [sorted((name for unit in fragment for name in unit), key=position.__getitem__) for fragment in fragments]


def _units(names: Iterable[str]) -> list[tuple[list[str], bool]]:
    """Runs of neighbouring names that stay together, each with whether it is a numbered layer.

    A layer is what shares a prefix such as ``body.layers.3``, or else the first number in the dotted name
    (``nn.Sequential``); names without a number that are neighbours (last norm and output) are one unit.
    """
    units: list[tuple[list[str], bool]] = []
    by_prefix: dict[str, list[str]] = {}
    previous_is_edge = False
    for name in names:
        match = _NAMED_LAYER.match(name) or _ANY_NUMBER.match(name)
        if match is not None and match.group(0) in by_prefix:
            by_prefix[match.group(0)].append(name)
        elif match is not None:
            by_prefix[match.group(0)] = [name]
            units.append((by_prefix[match.group(0)], True))
        elif previous_is_edge:
            units[-1][0].append(name)
        else:
            units.append(([name], False))
        previous_is_edge = match is None
    return units

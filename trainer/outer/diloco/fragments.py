"""Which parameters are synchronised together: one fragment, or several that take turns (Streaming DiLoCo).

Layers go to fragments in strides (layer ``i`` to fragment ``i mod n``), which the paper (arXiv 2501.18512) prefers to
runs of neighbours. What comes before the layers (the embedding) and after them (last norm, output) counts as one layer
each and goes to the smallest fragments, two different ones if there are two. Sizes in bytes play no part, so that a
growing vocabulary moves nothing; in a small model with a large vocabulary the fragments are therefore uneven. Peak
bandwidth falls to about 1/n; the total stays the same.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from trainer.errors import TrainerUsageError
from trainer.outer.diloco.flat import FlatLayout

__all__ = ["FragmentPlan", "synchronised_parameters"]

_NAMED_LAYER = re.compile(r"^(?:.*?\.)?(?:layers|blocks|h)\.\d+(?=\.)")
_ANY_NUMBER = re.compile(r"^(?:[^\d.][^.]*\.)*\d+(?=\.)")


def synchronised_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Returns the trainable parameters by name, whether or not the model, or part of it, is compiled."""
    named = model.named_parameters()
    return {name.replace("_orig_mod.", ""): parameter for name, parameter in named if parameter.requires_grad}


@dataclass(frozen=True, slots=True)
class FragmentPlan:
    """The model cut into fragments; in the whole vector they lie one after another.

    Args:
        layouts: one a fragment.
    """

    layouts: tuple[FlatLayout, ...]

    @classmethod
    def of(cls, named_tensors: Mapping[str, Tensor], num_fragments: int) -> FragmentPlan:
        """Assigns each tensor to a fragment; a single fragment keeps the model's order.

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
        return cls(tuple(whole.select(group) for group in groups))

    @property
    def num_values(self) -> int:
        """Number of values in all fragments."""
        return sum(layout.num_values for layout in self.layouts)

    def slices(self) -> list[slice]:
        """Returns the place of each fragment in the whole vector."""
        places, start = [], 0
        for layout in self.layouts:
            places.append(slice(start, start + layout.num_values))
            start += layout.num_values
        return places

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

"""State for a model whose vocabulary grew: old rows bit for bit, new rows as the grown model has them, or zeros.

Rows are appended to some tensors' first dimension, so a grown tensor's values begin with the old tensor's. The model's
new rows must be the same at all members (they are seeded by their number), or the members' anchors part here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from trainer.errors import TrainerUsageError
from trainer.outer.diloco.flat import FlatLayout
from trainer.outer.diloco.fragments import FragmentPlan
from trainer.outer.diloco.state import FragmentState, ReplicaState

__all__ = ["grown_state", "grown_vector"]


def grown_state(
    state: ReplicaState,
    old_plan: FragmentPlan,
    new_plan: FragmentPlan,
    tensors: Mapping[str, Tensor],
    vocab_rows: int,
) -> ReplicaState:
    """The state for the grown model.

    Args:
        state: before.
        old_plan: what ``state`` is laid out by.
        new_plan: of the grown model.
        tensors: the grown model's parameters, for the anchor's new rows.
        vocab_rows: rows it has now.

    Raises:
        TrainerUsageError: the plans have other names, or a tensor did anything but get more rows.
    """
    fragments = []
    for old_layout, new_layout, fragment in zip(old_plan.layouts, new_plan.layouts, state.fragments, strict=True):
        _check_grown(old_layout, new_layout)
        fragments.append(
            FragmentState(
                anchor=grown_vector(fragment.anchor, old_layout, new_layout.gather(tensors), new_layout),
                momentum=grown_vector(fragment.momentum, old_layout, torch.zeros(new_layout.num_values), new_layout),
                reference=grown_vector(fragment.reference, old_layout, torch.zeros(new_layout.num_values), new_layout),
                residual=None
                if fragment.residual is None
                else grown_vector(fragment.residual, old_layout, torch.zeros(new_layout.num_values), new_layout),
            )
        )
    return replace(state, vocab_rows=vocab_rows, fragments=tuple(fragments))


def grown_vector(old: Tensor, old_layout: FlatLayout, new: Tensor, new_layout: FlatLayout) -> Tensor:
    """Old values put over the beginning of each of the new vector's tensors, by name and in place.

    Args:
        old: [P] values to keep.
        old_layout: of ``old``.
        new: [P'] values for the new rows; changed in place.
        new_layout: of ``new``, with the same names.

    Returns:
        ``new``.
    """
    starts = {name: place.start for name, _, place in new_layout.slices()}
    for name, _, place in old_layout.slices():
        start = starts[name]
        new[start : start + place.stop - place.start] = old[place]
    return new


def _check_grown(old: FlatLayout, new: FlatLayout) -> None:
    if old.names != new.names:
        changed = sorted(set(old.names) ^ set(new.names)) or ["their order"]
        raise TrainerUsageError(f"expected the same tensors in the grown model, found a difference in {changed[0]}")
    for name, before, after in zip(old.names, old.shapes, new.shapes, strict=True):
        same = before == after
        longer = len(before) == len(after) > 0 and before[1:] == after[1:] and before[0] <= after[0]
        if not same and not longer:
            raise TrainerUsageError(
                f"expected {name!r} of {list(before)} to have more rows in the grown model, found {list(after)}"
            )

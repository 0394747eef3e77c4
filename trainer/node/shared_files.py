"""A member's shared state as a snapshot others can fetch, and back; every member makes the same bytes of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from trainer.diloco import SharedState
from trainer.errors import StateTransferError

__all__ = ["from_snapshot", "snapshot_meta", "snapshot_tensors"]

_NUMBERS = ("outer_step", "fragment", "num_inner_steps", "vocab_rows")


def snapshot_meta(shared: SharedState) -> dict[str, int | str]:
    """What goes into the descriptor."""
    numbers: dict[str, int | str] = {name: int(getattr(shared, name)) for name in _NUMBERS}
    return numbers | {"version": 1, "layout_digest": shared.layout_digest}


def snapshot_tensors(shared: SharedState) -> dict[str, torch.Tensor]:
    """What goes into the data."""
    return {"anchor": shared.anchor, "momentum": shared.momentum, "reference": shared.reference}


def from_snapshot(meta: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> SharedState:
    """The state a snapshot holds.

    Raises:
        StateTransferError: it is no snapshot of a shared state.
    """
    numbers = {name: meta.get(name) for name in _NUMBERS}
    layout_digest = meta.get("layout_digest")
    if (
        meta.get("version") != 1
        or not isinstance(layout_digest, str)
        or set(tensors) != {"anchor", "momentum", "reference"}
    ):
        raise StateTransferError("expected a snapshot of anchor, momentum and reference, found something else")
    for name, value in numbers.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise StateTransferError(f"the snapshot's {name}: expected a number of 0 or more, found {value!r}")
    return SharedState(
        outer_step=int(meta["outer_step"]),
        fragment=int(meta["fragment"]),
        num_inner_steps=int(meta["num_inner_steps"]),
        vocab_rows=int(meta["vocab_rows"]),
        layout_digest=layout_digest,
        anchor=tensors["anchor"],
        momentum=tensors["momentum"],
        reference=tensors["reference"],
    )

"""The names under which tensors travel between drivers and workers, and checks of those no codec touches.

A codec's tensors keep their names from the worker that made them to the worker that reads them, so whoever routes hands
on what it gets. Ids and labels are int32: half of int64's bytes, and every vocabulary fits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

__all__ = ["ACTIVATION", "GRADIENT", "IDS", "LABELS", "as_wire_ids", "named", "parts_of"]

IDS, LABELS = "ids", "labels"
ACTIVATION, GRADIENT = "activation", "gradient"


def named(what: str, tensors: Sequence[Tensor]) -> dict[str, Tensor]:
    """A codec's tensors under their names: ``activation.0``, ``activation.1``, …"""
    return {f"{what}.{number}": tensor for number, tensor in enumerate(tensors)}


def parts_of(what: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Those of some tensors that are an activation, or a gradient, names kept: to be sent on as they are."""
    return {name: tensor for name, tensor in tensors.items() if name.startswith(what + ".")}


def as_wire_ids(ids: Tensor) -> Tensor:
    """Ids or labels as they travel."""
    return ids.to(device="cpu", dtype=torch.int32)

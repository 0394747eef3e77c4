"""The names (``activation``, ``activation.scales``, …) under which tensors travel; a driver passes on what it gets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor

ACTIVATION: Final = "activation"
GRADIENT: Final = "gradient"
LABELS: Final = "labels"


def part_of(what: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the tensors that make up an activation or a gradient, under their names, to be sent on unchanged."""
    return {name: tensor for name, tensor in tensors.items() if name == what or name.startswith(what + ".")}


def wire_ids(ids: Tensor) -> Tensor:
    """Returns ids or labels as they travel: int32, half of int64's bytes; labels that do not count keep their −100."""
    return ids.to(device="cpu", dtype=torch.int32).contiguous()

"""Tensors to make states of."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch


@pytest.fixture
def make_tensors() -> Callable[..., dict[str, torch.Tensor]]:
    """Two fp32 vectors of so many values, and an odd small one before them, so that chunks span tensors."""

    def make(num_values: int, seed: int = 0) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return {
            "anchor": torch.randn(num_values, generator=generator),
            "aaa": torch.arange(3, dtype=torch.uint8),
            "momentum": torch.randn(num_values, generator=generator),
        }

    return make

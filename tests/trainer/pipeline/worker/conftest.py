"""What the tests of workers have in common."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.support.model_configs import random_tokens, small_config
from trainer.pipeline.protocol.wire import wire_ids


@pytest.fixture
def head_input() -> dict[str, Tensor]:
    """Ids of two rows of eight."""
    return {"ids": wire_ids(random_tokens(64, 2, 8)[0])}


@pytest.fixture
def tail_input() -> dict[str, Tensor]:
    """Hidden states and labels of two rows of eight."""
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(2, 8, small_config().dim, generator=generator)
    return {"activation": hidden, "labels": wire_ids(random_tokens(64, 2, 8)[1])}

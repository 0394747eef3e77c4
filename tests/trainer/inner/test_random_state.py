"""Random generators go on where they were, through a file that holds no code."""

from __future__ import annotations

import io
import random

import numpy as np
import pytest
import torch

from trainer.errors import CheckpointMismatchError
from trainer.inner import rng_state, set_rng_state


def _draw() -> tuple[object, ...]:
    """Normal draws too: each generator keeps the second of a pair for the next call."""
    return (
        random.random(),
        random.gauss(0, 1),
        np.random.rand(),
        float(np.random.normal()),
        torch.rand(3).tolist(),
        torch.randn(3).tolist(),
    )


@pytest.fixture(autouse=True)
def as_before() -> object:
    state = rng_state()
    yield
    set_rng_state(state)


def test_all_generators_go_on_where_they_were() -> None:
    for seed in range(3):
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        _draw()
        file = io.BytesIO()
        torch.save(rng_state(), file)
        expected = [_draw() for _ in range(5)]
        random.seed(99)
        np.random.seed(99)
        torch.manual_seed(99)
        file.seek(0)
        set_rng_state(torch.load(file, weights_only=True))
        assert [_draw() for _ in range(5)] == expected


def test_taking_the_state_draws_nothing() -> None:
    state = rng_state()
    first = _draw()
    set_rng_state(state)
    rng_state()
    assert _draw() == first


@pytest.mark.parametrize(
    "damage",
    [
        {"version": 2},
        {"python": None},
        {"python": (3, torch.zeros(3, dtype=torch.int64), None)},
        {"numpy": (torch.zeros(3, dtype=torch.int64), 0, 0, 0.0)},
        {"torch_cpu": torch.zeros(3, dtype=torch.uint8)},
        {"torch_cpu": "no"},
    ],
)
def test_a_state_that_is_none_is_refused_before_any_generator_is_touched(damage: dict[str, object]) -> None:
    state = rng_state()
    expected = _draw()
    set_rng_state(state)
    with pytest.raises(CheckpointMismatchError, match="random"):
        set_rng_state({**state, **damage})
    assert _draw() == expected

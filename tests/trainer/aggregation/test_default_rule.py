"""The default options against each lie, on a small model over real text: `bench_trainer.py liars`, cut short."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from scripts.trainer_bench.liars import LIES, RULES, Setting, trained_loss

SETTING = Setting(num_rounds=3, inner_steps=6)
TOLERANCE = 1.05
MOST_AN_HONEST_RUN_LOSES = 1.01


@cache
def honest_loss(num_members: int) -> float:
    torch.set_num_threads(1)
    return trained_loss(RULES["mean"], num_members, SETTING)


@pytest.mark.slow
@pytest.mark.parametrize("lie", LIES)
def test_one_of_four_costs_little(lie: str) -> None:
    assert trained_loss(RULES["default"], 4, SETTING, lie, 1) < TOLERANCE * honest_loss(4)


@pytest.mark.slow
@pytest.mark.parametrize("lie", LIES)
def test_two_of_seven_cost_little(lie: str) -> None:
    assert trained_loss(RULES["default"], 7, SETTING, lie, 2) < TOLERANCE * honest_loss(7)


@pytest.mark.parametrize("num_members", [3, 4, pytest.param(8, marks=pytest.mark.slow)])
def test_the_honest_lose_nothing_to_speak_of(num_members: int) -> None:
    honest = honest_loss(num_members)
    assert trained_loss(RULES["default"], num_members, SETTING) < MOST_AN_HONEST_RUN_LOSES * honest


@pytest.mark.slow
def test_the_mean_is_what_it_protects_from() -> None:
    assert trained_loss(RULES["mean"], 4, SETTING, "x -10", 1) > 1.2 * honest_loss(4)

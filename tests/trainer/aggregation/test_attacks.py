"""Attackers among honest members: the stated bound of every rule, whatever they send and claim."""

from __future__ import annotations

import math
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from scripts.trainer_bench import liars
from tests.support.aggregation import aggregate
from trainer.aggregation import RuleConfig, cap_weights

NUM_VALUES = 400
GROUPS = ((5, 1), (7, 2))
RULES = ("trimmed_mean", "median", "krum", "multi_krum", "centered_clip")
LARGEST = torch.finfo(torch.float32).max


def honest_members(count: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    common = torch.randn(NUM_VALUES, generator=generator)
    return common + 0.5 * torch.randn(count, NUM_VALUES, generator=generator)


ATTACKS = {
    "sign flip x10": lambda honest, count: -10 * honest[:count],
    "NaN": lambda honest, count: torch.full((count, NUM_VALUES), torch.nan),
    "one NaN": lambda honest, count: honest[:count].index_fill(1, torch.tensor([7]), torch.nan),
    "infinity": lambda honest, count: torch.full((count, NUM_VALUES), -torch.inf),
    "large noise": lambda honest, count: 1e6 * honest_members(count, seed=5),
    "largest": lambda honest, count: torch.full((count, NUM_VALUES), LARGEST),
    "zero": lambda honest, count: torch.zeros(count, NUM_VALUES),
    # One and a half deviations off in every coordinate, all at the same point ("a little is enough").
    "colluding inliers": lambda honest, count: (honest.mean(0) - 1.5 * honest.std(0)).repeat(count, 1),
    "opposite": lambda honest, count: -honest[:count],
}


def check(rule: str, honest: torch.Tensor, attackers: torch.Tensor, result: torch.Tensor) -> None:
    assert torch.isfinite(result).all()
    if rule in ("trimmed_mean", "median"):
        slack = 1e-5 * honest.abs().max(0).values
        assert (result >= honest.min(0).values - slack).all()
        assert (result <= honest.max(0).values + slack).all()
        return
    centre = honest.double().mean(0)
    spread = float((honest.double() - centre).norm(dim=1).max())
    away = float((result.double() - centre).norm())
    # A vector with a Krum score as good as an honest one's is that near to an honest one (Blanchard et al., 2017).
    bound = 1 + 2 * math.sqrt(len(honest) - 2)
    if rule == "centered_clip":
        bound = (len(honest) + len(attackers)) / (len(honest) - len(attackers))
    assert away <= spread * bound * (1 + 1e-4) + 1e-5


def shuffled(honest: torch.Tensor, attackers: torch.Tensor, seed: int) -> torch.Tensor:
    rows = torch.cat([honest, attackers])
    return rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))]


@pytest.mark.parametrize("with_reference", [False, True])
@pytest.mark.parametrize(("num_members", "num_byzantine"), GROUPS)
@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("rule", RULES)
def test_the_honest_mean_is_recovered_within_the_bound(rule, attack, num_members, num_byzantine, with_reference):
    honest = honest_members(num_members - num_byzantine)
    attackers = ATTACKS[attack](honest, num_byzantine)
    rows = shuffled(honest, attackers, seed=num_members)
    reference = honest_members(1, seed=0)[0] if with_reference else None
    config = RuleConfig(rule=rule, num_byzantine=num_byzantine)
    result, decision = aggregate(rows, config, reference=reference)
    check(rule, honest, attackers, result)
    cosine = torch.nn.functional.cosine_similarity(result, honest.mean(0), dim=0)
    assert cosine > 0.7, "the step would go elsewhere"
    if decision is not None and attack in ("NaN", "one NaN", "infinity"):
        assert len(decision.excluded) == num_byzantine


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
@settings(max_examples=60, deadline=None)
@given(
    group=st.sampled_from(GROUPS),
    seed=st.integers(0, 2**16),
    scale=st.floats(-1e9, 1e9),
    shift=st.floats(-100, 100),
    together=st.booleans(),
)
def test_whatever_they_send(rule, group, seed, scale, shift, together):
    num_members, num_byzantine = group
    honest = honest_members(num_members - num_byzantine, seed)
    attackers = scale * honest_members(num_byzantine, seed + 1) + shift
    if together:
        attackers = attackers[:1].repeat(num_byzantine, 1)
    rows = shuffled(honest, attackers, seed)
    result, _ = aggregate(rows, RuleConfig(rule=rule, num_byzantine=num_byzantine))
    check(rule, honest, attackers, result)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("num_members", "num_byzantine"), GROUPS)
def test_a_claimed_weight_does_not_buy_the_result(rule, num_members, num_byzantine):
    honest = honest_members(num_members - num_byzantine)
    attackers = -10 * honest[:num_byzantine]
    weights = cap_weights([10.0] * len(honest) + [1e12] * num_byzantine)
    config = RuleConfig(rule=rule, num_byzantine=num_byzantine)
    result, _ = aggregate(torch.cat([honest, attackers]), config, weights=weights)
    check(rule, honest, attackers, result)


SETTING = liars.Setting(num_rounds=3, inner_steps=6)
"""`bench_trainer.py liars`, cut short: the default options against each lie, on a small model over real text."""
TOLERANCE = 1.05
MOST_AN_HONEST_RUN_LOSES = 1.01


@cache
def honest_loss(num_members: int) -> float:
    torch.set_num_threads(1)
    return liars.trained_loss(liars.RULES["mean"], num_members, SETTING)


@pytest.mark.slow
@pytest.mark.parametrize(("num_members", "num_liars"), [(4, 1), (7, 2)])
@pytest.mark.parametrize("lie", liars.LIES)
def test_a_minority_of_liars_costs_a_training_run_little(lie: str, num_members: int, num_liars: int) -> None:
    loss = liars.trained_loss(liars.RULES["default"], num_members, SETTING, lie, num_liars)
    assert loss < TOLERANCE * honest_loss(num_members)


@pytest.mark.parametrize("num_members", [3, 4, pytest.param(8, marks=pytest.mark.slow)])
def test_the_honest_lose_nothing_to_speak_of(num_members: int) -> None:
    honest = honest_loss(num_members)
    assert liars.trained_loss(liars.RULES["default"], num_members, SETTING) < MOST_AN_HONEST_RUN_LOSES * honest


@pytest.mark.slow
def test_the_mean_is_what_it_protects_from() -> None:
    assert liars.trained_loss(liars.RULES["mean"], 4, SETTING, "x -10", 1) > 1.2 * honest_loss(4)

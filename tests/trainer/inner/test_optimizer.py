"""Which parameters decay, at which rate they learn, and under whose options a saved state goes on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tests.support.small_model import batches, small_model
from trainer.errors import CheckpointMismatchError, TrainerUsageError
from trainer.inner import InnerConfig, InnerLoop, lr_at, make_optimizer, parameter_groups

CPU = torch.device("cpu")


def test_norms_and_vectors_do_not_decay_and_everything_else_does() -> None:
    model = small_model()
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    decayed, plain = ([names[id(parameter)] for parameter in group] for group in parameter_groups(model))
    assert sorted(decayed + plain) == sorted(names.values())
    assert all("norm" in name for name in plain)
    assert plain
    assert not any("norm" in name for name in decayed)


def test_a_norm_of_two_dimensions_a_bias_and_a_frozen_matrix() -> None:
    model = nn.Sequential(nn.LayerNorm((2, 3)), nn.Linear(3, 3), nn.Linear(3, 3, bias=False).requires_grad_(False))
    decayed, plain = parameter_groups(model)
    assert [tuple(parameter.shape) for parameter in decayed] == [(3, 3)]
    assert [tuple(parameter.shape) for parameter in plain] == [(2, 3), (2, 3), (3,)]


def test_a_shared_parameter_is_there_once() -> None:
    one, other = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
    other.weight = one.weight
    assert len(parameter_groups(nn.Sequential(one, other))[0]) == 1


def test_the_groups_have_the_options() -> None:
    optimizer = make_optimizer(small_model(), InnerConfig(weight_decay=0.2, betas=(0.8, 0.9), eps=1e-6))
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.2, 0.0]
    assert all(group["betas"] == (0.8, 0.9) and group["eps"] == 1e-6 for group in optimizer.param_groups)


def test_nothing_to_train_is_refused() -> None:
    with pytest.raises(TrainerUsageError, match="trainable"):
        make_optimizer(nn.Linear(2, 2).requires_grad_(False), InnerConfig())


def _trained(config: InnerConfig, seed: int = 0) -> InnerLoop:
    model = small_model(seed)
    return InnerLoop(model, make_optimizer(model, config), config, batches(1), CPU)


def test_a_state_goes_on_under_the_new_options() -> None:
    first = _trained(InnerConfig())
    first.step()
    model, changed = small_model(), InnerConfig(weight_decay=0.5, betas=(0.7, 0.8))
    optimizer = make_optimizer(model, changed)
    InnerLoop(model, optimizer, changed, batches(1), CPU).load_state_dict(first.state_dict())
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.5, 0.0]
    assert optimizer.param_groups[0]["betas"] == (0.7, 0.8)
    moments = first.state_dict()["optimizer"]["state"]
    assert all(torch.equal(optimizer.state_dict()["state"][key]["exp_avg"], moments[key]["exp_avg"]) for key in moments)


def test_a_state_that_is_saved_again_before_a_step_is_the_same() -> None:
    first, second = _trained(InnerConfig(warmup_steps=2)), _trained(InnerConfig(warmup_steps=2))
    first.step(), first.step()
    second.load_state_dict(first.state_dict())
    rates = [[group["lr"] for group in loop.state_dict()["optimizer"]["param_groups"]] for loop in (first, second)]
    assert rates[0] == rates[1] == [5e-5, 5e-5]


def test_a_state_of_another_model_is_refused_and_changes_nothing() -> None:
    config = InnerConfig()
    wide = nn.Linear(4, 5)
    narrow = nn.Linear(4, 3)
    states = {}
    for module in (wide, narrow):
        optimizer = make_optimizer(module, config)
        module(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        states[module] = optimizer.state_dict()
    loop = InnerLoop(narrow, make_optimizer(narrow, config), config, iter(()), CPU)
    state = {**loop.state_dict(), "step_index": 9}
    with pytest.raises(CheckpointMismatchError, match=r"expected shape \(3, 4\), found \(5, 4\)"):
        loop.load_state_dict({**state, "optimizer": states[wide]})
    with pytest.raises(CheckpointMismatchError, match="parameters by group"):
        loop.load_state_dict({**state, "optimizer": _trained(config).state_dict()["optimizer"]})
    assert loop.step_index == 0


@pytest.mark.parametrize("state", [{}, {"version": 2}, {"version": 1}, {"version": 1, "step_index": "x"}])
def test_a_state_of_another_form_is_refused(state: dict[str, object]) -> None:
    with pytest.raises(CheckpointMismatchError, match="expected"):
        _trained(InnerConfig()).load_state_dict(state)


@pytest.mark.parametrize(
    ("step", "lr"), [(0, "0.00e+00"), (1000, "1.00e-04"), (25_000, "5.64e-05"), (50_000, "1.00e-05")]
)
def test_the_table_of_the_specification_holds_to_three_digits(step: int, lr: str) -> None:
    assert f"{lr_at(step, InnerConfig()):.2e}" == lr


@pytest.mark.parametrize(
    ("options", "rates"),
    [
        ({}, {500: 5e-5, 50_000: 1e-5, 50_001: 1e-5, 10**9: 1e-5}),
        ({"schedule": "linear"}, {25_500: 5.5e-5, 50_000: 1e-5, 50_001: 1e-5, 10**9: 1e-5}),
        ({"schedule": "constant", "warmup_steps": 10, "decay_end_step": 0}, {5: 5e-5, 10: 1e-4, 10**6: 1e-4}),
        ({"warmup_steps": 0}, {0: 1e-4}),
    ],
)
def test_rates_at_steps_of_note(options: dict[str, Any], rates: dict[int, float]) -> None:
    """Half-way through the warm-up and the fall, at its end and long after it; a constant rate needs no end."""
    config = InnerConfig(**options)
    assert {step: lr_at(step, config) for step in rates} == pytest.approx(rates, rel=1e-12)


@given(
    schedule=st.sampled_from(["cosine", "linear", "constant"]),
    warmup=st.integers(0, 2000),
    length=st.integers(1, 5000),
    ratio=st.floats(0, 1),
    step=st.integers(0, 8000),
)
def test_it_rises_through_the_warm_up_and_never_rises_again(
    schedule: str, warmup: int, length: int, ratio: float, step: int
) -> None:
    config = InnerConfig(
        schedule=schedule, warmup_steps=warmup, decay_end_step=warmup + length, min_lr_ratio=ratio, lr=1.0
    )
    now, later = lr_at(step, config), lr_at(step + 1, config)
    assert 0.0 <= now <= 1.0
    assert later > now if step < warmup else later <= now
    assert now >= ratio - 1e-12 or step < warmup


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"lr": 0.0}, "lr"),
        ({"lr": float("nan")}, "lr"),
        ({"betas": (0.9, 1.0)}, "betas"),
        ({"betas": (0.9,)}, "betas"),
        ({"eps": 0.0}, "eps"),
        ({"weight_decay": -0.1}, "weight_decay"),
        ({"max_grad_norm": 0.0}, "max_grad_norm"),
        ({"schedule": "step"}, "schedule"),
        ({"precision": "fp16"}, "precision"),
        ({"compile": "yes"}, "compile"),
        ({"warmup_steps": -1}, "warmup_steps"),
        ({"warmup_steps": 50_000}, "decay_end_step"),
        ({"min_lr_ratio": 1.5}, "min_lr_ratio"),
        ({"micro_batch_size": -1}, "micro_batch_size"),
        ({"accumulation_steps": 0}, "accumulation_steps"),
        ({"seq_len": 0}, "seq_len"),
        ({"max_skipped_in_a_row": 0}, "max_skipped_in_a_row"),
    ],
)
def test_an_option_out_of_range_is_refused_by_name(options: dict[str, object], field: str) -> None:
    with pytest.raises(TrainerUsageError, match=rf"^{field}: expected .*, found "):
        InnerConfig(**options)

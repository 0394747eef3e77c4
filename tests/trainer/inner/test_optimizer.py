"""Which parameters decay, and under whose options a saved state goes on."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.support.small_model import batches, small_model
from trainer.errors import CheckpointMismatchError, TrainerUsageError
from trainer.inner import InnerConfig, InnerLoop, make_optimizer, parameter_groups

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

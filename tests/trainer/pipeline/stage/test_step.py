"""What a step applies, clips, drops, and reports."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.support.stage_replicas import INNER, backward, bits_of, count, hidden, micro_batch, stage_replica
from trainer.errors import NonFiniteTrainingError, TrainerUsageError
from trainer.inner import InnerConfig, lr_at, make_optimizer
from trainer.pipeline.stage import Accumulated, StageConfig, StageReplica


def _clip_norm(kind: Any, num_stages: int, config: StageConfig) -> float:
    module = stage_replica(2 if kind == "tail" else 1, 3).module
    stage = StageReplica(module, make_optimizer(module, INNER), INNER, config, kind=kind, num_stages=num_stages)
    return stage.clip_norm


def _values(stage: StageReplica) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in stage.module.parameters()])


def _moments(stage: StageReplica) -> list[torch.Tensor]:
    return [each["exp_avg"].clone() for each in stage.optimizer.state_dict()["state"].values()]


@given(num_stages=st.integers(1, 500), factor=st.floats(0.01, 100.0), kind=st.sampled_from(["head", "body", "tail"]))
@settings(max_examples=30, deadline=None)
def test_each_stage_has_its_share_of_the_norm(num_stages: int, factor: float, kind: str) -> None:
    clip_norm = _clip_norm(kind, num_stages, StageConfig(clip_factor=factor, tail_clip_factor=3 * factor))
    assert num_stages * clip_norm**2 == pytest.approx((factor * (3 if kind == "tail" else 1)) ** 2)


def test_with_32_stages_the_norms_are_those_of_the_specification() -> None:
    assert [round(_clip_norm(kind, 32, StageConfig()), 4) for kind in ("body", "tail")] == [0.1768, 0.8839]


@pytest.mark.parametrize("index", [1, 2])
def test_a_gradient_beyond_the_norm_is_scaled_to_it_and_one_within_is_left_alone(index: int) -> None:
    free = stage_replica(index, 3, StageConfig(clip_factor=math.inf, tail_clip_factor=math.inf))
    count(free)
    norm = free.step(9).grad_norm
    for limit, expected in ((norm / 4, 0.25), (norm * 4, 1.0)):
        factor = limit * math.sqrt(3)
        stage = stage_replica(index, 3, StageConfig(clip_factor=factor, tail_clip_factor=factor))
        seen = []
        stage.optimizer.register_step_pre_hook(
            lambda optimizer, *_, seen=seen: seen.append(
                math.sqrt(sum(float(p.grad.square().sum()) for g in optimizer.param_groups for p in g["params"]))
            )
        )
        count(stage)
        info = stage.step(9)
        assert info.grad_norm == pytest.approx(norm, rel=1e-6)
        assert info.clip_coefficient == pytest.approx(expected, rel=1e-5)
        assert seen == [pytest.approx(norm * expected, rel=1e-5)]


def test_a_step_reports_what_it_was_and_leaves_nothing_behind() -> None:
    stage = stage_replica(2, 3)
    count(stage)
    count(stage)
    was = stage.accumulated
    assert (was.num_tokens, was.num_micro_batches) == (32, 2)
    info = stage.step(7)
    assert (info.version, info.num_tokens, info.num_micro_batches, info.applied) == (1, 32, 2, True)
    assert info.loss == pytest.approx(was.loss_sum / 32)
    assert info.seconds >= 0
    assert stage.accumulated == Accumulated()
    assert all(parameter.grad is None for parameter in stage.module.parameters())


def test_the_rate_is_that_of_the_schedule_not_of_the_version() -> None:
    stage = stage_replica(1, 3)
    for lr_step in (0, 3, 50, 50, 1000):
        count(stage)
        assert stage.step(lr_step).lr == lr_at(lr_step, INNER)


def test_without_a_token_only_the_version_advances() -> None:
    calls: list[nn.Module] = []
    stage = stage_replica(2, 3, after_update=calls.append)
    before = _values(stage)
    stage.tail("m", hidden(1), micro_batch(1, padded=8)[2])
    infos = [stage.step(9), stage.step(10)]
    found = [(info.version, info.applied, info.num_tokens, info.num_micro_batches, info.loss) for info in infos]
    assert found == [(1, False, 0, 1, None), (2, False, 0, 0, None)]
    assert torch.equal(_values(stage), before)
    assert not stage.optimizer.state_dict()["state"]
    assert not calls
    assert stage.skipped_steps == 0


def _overflow(stage: StageReplica) -> None:
    """A sum whose norm is not finite, as of a fault in memory: micro-batches that are accepted do not add up to one."""
    count(stage, scale=1e3)
    for total in stage.state_dict()["sums"].values():
        total.mul_(1e30)


def test_a_sum_that_is_not_finite_is_dropped_and_counted() -> None:
    stage = stage_replica(1, 3)
    count(stage)
    stage.step(9)
    weights, moments = _values(stage), _moments(stage)
    _overflow(stage)
    info = stage.step(10)
    assert (info.applied, info.version, stage.skipped_steps, stage.accumulated) == (False, 2, 1, Accumulated())
    assert torch.equal(_values(stage), weights)
    assert all(torch.equal(value, was) for value, was in zip(_moments(stage), moments, strict=True))
    count(stage)
    assert stage.step(11).applied


def test_so_many_in_a_row_end_the_run_with_the_last_one_counted() -> None:
    stage = stage_replica(1, 3, inner=replace(INNER, max_skipped_in_a_row=3))
    for lr_step in range(2):
        _overflow(stage)
        stage.step(lr_step)
    stage.step(2)  # Nothing accumulated: neither good nor bad.
    _overflow(stage)
    with pytest.raises(NonFiniteTrainingError, match="at step 3, the last of 3 such steps"):
        stage.step(3)
    assert (stage.version, stage.skipped_steps, stage.accumulated) == (4, 3, Accumulated())


def test_the_hook_sees_the_updated_module_and_what_it_does_lasts() -> None:
    def to_halves(module: nn.Module) -> None:
        for parameter in module.parameters():
            parameter.mul_(2).round_().div_(2)

    stage = stage_replica(1, 3, after_update=to_halves)
    count(stage)
    stage.step(9)
    assert torch.equal(_values(stage) * 2, (_values(stage) * 2).round())
    stage.module.load_state_dict(stage_replica(1, 3).module.state_dict())
    stage.weights_changed()
    assert torch.equal(_values(stage) * 2, (_values(stage) * 2).round())


def test_dropping_returns_what_there_was_and_the_next_step_is_without_it() -> None:
    stage, fresh = stage_replica(1, 3), stage_replica(1, 3)
    count(stage, scale=3.0)
    assert [stage.drop(), stage.drop()] == [Accumulated(16, 1, 0.0), Accumulated()]
    for each in (stage, fresh):
        count(each)
        each.step(9)
    assert bits_of(stage) == bits_of(fresh)


def test_a_version_is_followed_without_an_update() -> None:
    stage = stage_replica(1, 3)
    count(stage)
    stage.set_version(7)
    assert (stage.version, stage.accumulated.num_tokens) == (7, 16)
    assert stage.step(9).version == 8
    with pytest.raises(TrainerUsageError, match="version: expected 0 or more, found -1"):
        stage.set_version(-1)


def test_bf16_products_leave_sums_weights_and_what_is_passed_on_in_fp32() -> None:
    inner = InnerConfig(precision="bf16", warmup_steps=0)
    stage, exact = stage_replica(1, 3, inner=inner), stage_replica(1, 3)
    y, expected = (each.forward("m", hidden(1)) for each in (stage, exact))
    assert y.dtype == torch.float32
    assert not torch.equal(y, expected)
    torch.testing.assert_close(y, expected, rtol=0.05, atol=0.05)
    assert backward(stage, None, hidden(2)).grad_x.dtype == torch.float32
    assert {total.dtype for total in stage.state_dict()["sums"].values()} == {torch.float32}


def test_gradients_left_by_someone_else_do_not_leak_in() -> None:
    dirty, clean = stage_replica(1, 3), stage_replica(1, 3)
    dirty.module(hidden(8)).square().sum().backward()
    for each in (dirty, clean):
        count(each)
        each.step(9)
    assert bits_of(dirty) == bits_of(clean)

"""What a step applies, clips, drops, and tells."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.support.stage_replicas import CUT, INNER, bits_of, micro_batch, stage_replica
from trainer.errors import NonFiniteTrainingError, TrainerUsageError
from trainer.inner import InnerConfig, lr_at, make_optimizer
from trainer.pipeline.stage import Accumulated, StageConfig, StageReplica


def _hidden(seed: int, scale: float = 1.0) -> torch.Tensor:
    return scale * torch.randn(2, 8, CUT.dim, generator=torch.Generator().manual_seed(seed))


def _count_one(stage: StageReplica, scale: float = 1.0) -> None:
    if stage.kind == "tail":
        stage.tail("m", _hidden(1), micro_batch(1)[2])
    else:
        stage.backward("m", _hidden(1), _hidden(2, scale), 16, stage.version)


def _wrapped(kind: str, num_stages: int, config: StageConfig) -> StageReplica:
    donor = stage_replica(2 if kind == "tail" else 1, 3)
    optimizer = make_optimizer(donor.module, INNER)
    return StageReplica(donor.module, optimizer, INNER, config, kind=kind, num_stages=num_stages)


@given(num_stages=st.integers(1, 500), factor=st.floats(0.01, 100.0), kind=st.sampled_from(["head", "body", "tail"]))
@settings(max_examples=30, deadline=None)
def test_each_stage_has_its_share_of_the_norm(num_stages: int, factor: float, kind: str) -> None:
    stage = _wrapped(kind, num_stages, StageConfig(clip_factor=factor, tail_clip_factor=3 * factor))
    share = factor * (3 if kind == "tail" else 1)
    assert num_stages * stage.clip_norm**2 == pytest.approx(share**2)


def test_with_32_stages_the_norms_are_those_of_the_specification() -> None:
    assert round(_wrapped("body", 32, StageConfig()).clip_norm, 4) == 0.1768
    assert round(_wrapped("tail", 32, StageConfig()).clip_norm, 4) == 0.8839


@pytest.mark.parametrize("index", [1, 2])
def test_a_gradient_beyond_the_norm_is_scaled_to_it_and_one_within_is_left_alone(index: int) -> None:
    free = stage_replica(index, 3, StageConfig(clip_factor=math.inf, tail_clip_factor=math.inf))
    _count_one(free)
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
        _count_one(stage)
        info = stage.step(9)
        assert info.grad_norm == pytest.approx(norm, rel=1e-6)
        assert info.clip_coefficient == pytest.approx(expected, rel=1e-5)
        assert seen == [pytest.approx(norm * expected, rel=1e-5)]


def test_a_step_tells_what_it_was_and_leaves_nothing_behind() -> None:
    stage = stage_replica(2, 3)
    _count_one(stage)
    _count_one(stage)
    was = stage.accumulated
    assert (was.num_tokens, was.num_micro_batches) == (32, 2)
    info = stage.step(7)
    assert (info.version, info.num_tokens, info.num_micro_batches, info.applied) == (1, 32, 2, True)
    assert info.loss == pytest.approx(was.loss_sum / 32)
    assert info.lr == lr_at(7, INNER)
    assert info.seconds >= 0
    assert stage.accumulated == Accumulated()
    assert all(parameter.grad is None for parameter in stage.module.parameters())


def test_the_rate_is_that_of_the_schedule_not_of_the_version() -> None:
    stage = stage_replica(1, 3)
    for lr_step in (0, 3, 50, 50, 1000):
        _count_one(stage)
        assert stage.step(lr_step).lr == lr_at(lr_step, INNER)


def test_without_a_token_the_version_goes_on_and_nothing_else_does() -> None:
    calls: list[nn.Module] = []
    stage = stage_replica(2, 3, after_update=calls.append)
    before = [value.clone() for value in stage.module.state_dict().values()]
    stage.tail("m", _hidden(1), micro_batch(1, padded=8)[2])
    infos = [stage.step(9), stage.step(10)]
    assert [(info.version, info.applied, info.num_tokens, info.loss) for info in infos] == [
        (1, False, 0, None),
        (2, False, 0, None),
    ]
    assert [info.num_micro_batches for info in infos] == [1, 0]
    assert all(torch.equal(value, was) for value, was in zip(stage.module.state_dict().values(), before, strict=True))
    assert not stage.optimizer.state_dict()["state"]
    assert not calls
    assert stage.skipped_steps == 0


def _overflow(stage: StageReplica) -> None:
    """A sum whose norm is not finite, as of a fault in memory: micro-batches that are accepted do not add up to one."""
    _count_one(stage, 1e3)
    for total in stage.state_dict()["sums"].values():
        total.mul_(1e30)


def test_a_sum_that_is_not_finite_is_dropped_and_counted() -> None:
    stage = stage_replica(1, 3)
    _count_one(stage)
    stage.step(9)
    weights = [value.clone() for value in stage.module.state_dict().values()]
    moments = [each["exp_avg"].clone() for each in stage.optimizer.state_dict()["state"].values()]
    _overflow(stage)
    info = stage.step(10)
    assert (info.applied, info.version, stage.skipped_steps, stage.accumulated) == (False, 2, 1, Accumulated())
    assert all(torch.equal(value, was) for value, was in zip(stage.module.state_dict().values(), weights, strict=True))
    after = [each["exp_avg"] for each in stage.optimizer.state_dict()["state"].values()]
    assert all(torch.equal(value, was) for value, was in zip(after, moments, strict=True))
    _count_one(stage)
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
    assert (stage.version, stage.skipped_steps) == (4, 3)
    assert stage.accumulated == Accumulated()


def test_the_hook_sees_the_updated_module_and_what_it_does_lasts() -> None:
    def to_halves(module: nn.Module) -> None:
        for parameter in module.parameters():
            parameter.mul_(2).round_().div_(2)

    stage = stage_replica(1, 3, after_update=to_halves)
    _count_one(stage)
    stage.step(9)
    values = torch.cat([parameter.detach().flatten() for parameter in stage.module.parameters()])
    assert torch.equal(values * 2, (values * 2).round())
    stage.module.load_state_dict(stage_replica(1, 3).module.state_dict())
    stage.weights_changed()
    values = torch.cat([parameter.detach().flatten() for parameter in stage.module.parameters()])
    assert torch.equal(values * 2, (values * 2).round())


def test_a_graph_from_before_the_hook_is_not_used() -> None:
    stage = stage_replica(1, 3, after_update=lambda module: None)
    _count_one(stage)
    stage.forward("n", _hidden(3))
    stage.step(9)
    assert stage.backward("n", None, _hidden(4), 16, 0).recomputed


def test_dropping_returns_what_there_was_and_the_next_step_is_without_it() -> None:
    stage, fresh = stage_replica(1, 3), stage_replica(1, 3)
    _count_one(stage, 3.0)
    assert stage.drop() == Accumulated(16, 1, 0.0)
    assert stage.drop() == Accumulated()
    for each in (stage, fresh):
        _count_one(each)
        each.step(9)
    assert bits_of(stage) == bits_of(fresh)


def test_a_version_is_followed_without_an_update() -> None:
    stage = stage_replica(1, 3)
    _count_one(stage)
    stage.set_version(7)
    assert stage.version == 7
    assert stage.accumulated.num_tokens == 16
    assert stage.step(9).version == 8
    with pytest.raises(TrainerUsageError, match="version: expected 0 or more, found -1"):
        stage.set_version(-1)


def test_bf16_products_leave_sums_weights_and_what_is_handed_on_in_fp32() -> None:
    inner = InnerConfig(precision="bf16", warmup_steps=0)
    stage, exact = stage_replica(1, 3, inner=inner), stage_replica(1, 3)
    y, expected = (each.forward("m", _hidden(1)) for each in (stage, exact))
    assert y.dtype == torch.float32
    assert not torch.equal(y, expected)
    torch.testing.assert_close(y, expected, rtol=0.05, atol=0.05)
    result = stage.backward("m", None, _hidden(2), 16, 0)
    assert result.grad_x.dtype == torch.float32
    assert {total.dtype for total in stage.state_dict()["sums"].values()} == {torch.float32}


def test_gradients_left_by_someone_else_do_not_leak_in() -> None:
    dirty, clean = stage_replica(1, 3), stage_replica(1, 3)
    dirty.module(_hidden(8)).square().sum().backward()
    for each in (dirty, clean):
        _count_one(each)
        each.step(9)
    assert bits_of(dirty) == bits_of(clean)

"""What a step applies, clips, drops, and reports; and that stages composed by hand are the whole model.

Tolerance: 1e-5 of each gradient's own size, fp32. (One micro-batch gives the same bits; several are added up in another
order by the whole model's autograd than here.)
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import islice
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import get_total_norm

from tests.support.model_configs import batches
from tests.support.stage_replicas import (
    CUT,
    CUT_REORDERED,
    INNER,
    UNCLIPPED,
    MicroBatch,
    bits_of,
    carry,
    count,
    hidden,
    micro_batch,
    stage_replica,
    stage_replicas,
    sums_of,
)
from trainer.errors import NonFiniteTrainingError
from trainer.inner import InnerConfig, InnerLoop, lr_at, make_optimizer
from trainer.model import ModelConfig, build_model
from trainer.pipeline.stage import Accumulated, StageConfig, StageReplica


def _values(stage: StageReplica) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in stage.module.parameters()])


def bits_of_weights(stage: StageReplica) -> bytes:
    """Weights and moments."""
    moments = [each["exp_avg"].flatten() for each in stage.optimizer.state_dict()["state"].values()]
    return torch.cat([_values(stage), *moments]).numpy().tobytes()


@given(num_stages=st.integers(1, 500), factor=st.floats(0.01, 100.0), kind=st.sampled_from(["head", "body", "tail"]))
@example(32, 1.0, "tail")
@settings(max_examples=30, deadline=None)
def test_each_stage_has_its_share_of_the_norm(num_stages: int, factor: float, kind: Any) -> None:
    config, module = StageConfig(clip_factor=factor), stage_replica(2 if kind == "tail" else 1, 3).module
    stage = StageReplica(module, make_optimizer(module, INNER), INNER, config, kind=kind, num_stages=num_stages)
    assert num_stages * stage.clip_norm**2 == pytest.approx((5.0 if kind == "tail" else factor) ** 2)


@pytest.mark.parametrize("index", [1, 2])
def test_a_gradient_beyond_the_norm_is_scaled_to_it_and_one_within_is_left_alone(index: int) -> None:
    free = stage_replica(index, 3, StageConfig(clip_factor=math.inf, tail_clip_factor=math.inf))
    count(free)
    norm = free.step(9).grad_norm
    for limit, expected in ((norm / 4, 0.25), (norm * 4, 1.0)):
        factor = limit * math.sqrt(3)
        stage = stage_replica(index, 3, StageConfig(clip_factor=factor, tail_clip_factor=factor))
        count(stage)
        info = stage.step(9)
        assert info.grad_norm == pytest.approx(norm, rel=1e-6)
        assert info.clip_coefficient == pytest.approx(expected, rel=1e-5)
        # Of a first step AdamW's mean is a tenth of the gradient it was given.
        moments = [each["exp_avg"] for each in stage.optimizer.state_dict()["state"].values()]
        assert 10 * float(get_total_norm(moments)) == pytest.approx(norm * expected, rel=1e-4)


def test_the_rate_is_that_of_the_schedule_and_a_version_is_followed_without_an_update() -> None:
    stage = stage_replica(1, 3)
    count(stage)
    stage.set_version(7)
    assert (stage.version, stage.accumulated.num_tokens) == (7, 16)
    info = stage.step(50)
    assert (info.version, info.lr) == (8, lr_at(50, INNER))


def test_without_a_token_only_the_version_advances() -> None:
    calls: list[nn.Module] = []
    stage = stage_replica(2, 3, after_update=calls.append)
    before = _values(stage)
    stage.tail("m", hidden(1), micro_batch(1, padded=8)[2])
    infos = [stage.step(9), stage.step(10)]
    found = [(info.version, info.applied, info.num_tokens, info.num_micro_batches, info.loss) for info in infos]
    assert found == [(1, False, 0, 1, None), (2, False, 0, 0, None)]
    assert torch.equal(_values(stage), before)
    assert (stage.optimizer.state_dict()["state"], calls, stage.skipped_steps) == ({}, [], 0)


def _overflow(stage: StageReplica) -> None:
    """A sum whose norm is not finite, as of a fault in memory: micro-batches that are accepted do not add up to one."""
    count(stage, scale=1e3)
    for total in stage.state_dict()["sums"].values():
        total.mul_(1e30)


def test_a_sum_that_is_not_finite_is_dropped_and_counted_and_so_many_in_a_row_end_the_run() -> None:
    stage = stage_replica(1, 3, inner=replace(INNER, max_skipped_in_a_row=3))
    count(stage)
    stage.step(9)
    before = bits_of_weights(stage)
    _overflow(stage)
    info = stage.step(10)
    assert (info.applied, info.version, stage.skipped_steps, stage.accumulated) == (False, 2, 1, Accumulated())
    assert bits_of_weights(stage) == before
    count(stage)
    assert stage.step(11).applied
    for lr_step in (12, 13):
        _overflow(stage)
        stage.step(lr_step)
    stage.step(14)  # Nothing accumulated: neither good nor bad.
    _overflow(stage)
    with pytest.raises(NonFiniteTrainingError, match="at step 15, the last of 3 such steps"):
        stage.step(15)
    assert (stage.version, stage.skipped_steps, stage.accumulated) == (7, 4, Accumulated())


def test_what_was_dropped_or_left_by_someone_else_does_not_leak_into_a_step() -> None:
    dropped, dirty, fresh = (stage_replica(1, 3) for _ in range(3))
    count(dropped, scale=3.0)
    assert [dropped.drop(), dropped.drop()] == [Accumulated(16, 1, 0.0), Accumulated()]
    dirty.module(hidden(8)).square().sum().backward()
    for each in (dropped, dirty, fresh):
        count(each)
        each.step(9)
    assert bits_of(dropped) == bits_of(dirty) == bits_of(fresh)


TOLERANCE = 1e-5


def _of_the_whole(model: ModelConfig, parts: list[MicroBatch]) -> tuple[float, dict[str, torch.Tensor]]:
    """Sum of the losses and its gradients."""
    whole, loss_sum = build_model(model, 0), 0.0
    for _, ids, labels in parts:
        total, _ = whole.loss_sum(ids, labels)
        total.backward()
        loss_sum += float(total.detach())
    return loss_sum, {name: p.grad for name, p in whole.named_parameters() if p.grad is not None}


def _close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return float((found - expected).norm()) <= TOLERANCE * float(expected.norm())


@pytest.mark.parametrize("num_stages", [2, 3, 4])
@pytest.mark.parametrize("model", [CUT, CUT_REORDERED], ids=["pre-norm", "reordered"])
@pytest.mark.parametrize("mode", ["cached", "recompute"])
def test_one_micro_batch_gives_the_bits_of_the_whole_model(num_stages: int, model: ModelConfig, mode: str) -> None:
    batch = micro_batch(1, rows=3, padded=2)
    stages = stage_replicas(num_stages, replace(UNCLIPPED, backward=mode), model=model)
    loss_sum, gradients = _of_the_whole(model, [batch])
    assert carry(stages, batch) == loss_sum
    found = sums_of(stages)
    assert found.keys() == gradients.keys()
    assert all(torch.equal(found[name], gradients[name]) for name in gradients)


@pytest.mark.slow
@settings(max_examples=12, deadline=None)
@example(2, [(1, 1, 0), (1, 8, 0), (1, 8, 0), (1, 8, 0)])
@given(
    num_stages=st.integers(2, 4),
    shapes=st.lists(
        st.tuples(st.integers(1, 3), st.integers(1, 12), st.integers(0, 12)).map(
            lambda shape: (*shape[:2], min(shape[2], shape[1]))
        ),
        min_size=1,
        max_size=4,
    ),
)
def test_micro_batches_of_any_length_and_padding_weigh_by_their_tokens(num_stages, shapes):
    parts = [micro_batch(seed, *shape) for seed, shape in enumerate(shapes)]
    stages = stage_replicas(num_stages)
    found_loss = sum(carry(stages, part) for part in parts)
    loss_sum, gradients = _of_the_whole(CUT, [part for part in parts if (part[2] != -100).any()])
    assert found_loss == pytest.approx(loss_sum, rel=TOLERANCE)
    found = sums_of(stages)
    assert found.keys() == gradients.keys()
    assert all(_close(found[name], gradients[name]) for name in gradients)
    num_tokens = sum(rows * (positions - padded) for rows, positions, padded in shapes)
    assert {(it.accumulated.num_tokens, it.accumulated.num_micro_batches) for it in stages} == {
        (num_tokens, len(shapes))
    }
    if num_tokens:  # A step is of the mean over tokens, not of the mean of means.
        tail_names = stages[-1].state_dict()["sums"].keys()
        expected = torch.stack([gradients[name].norm() for name in tail_names]).norm() / num_tokens
        assert stages[-1].step(10).grad_norm == pytest.approx(float(expected), rel=TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_steps_are_those_of_the_inner_loop_on_the_whole_model(num_stages: int) -> None:
    """Eight steps of three micro-batches with their moments, decay and schedule; clipping is off."""
    inner = InnerConfig(lr=1e-2, warmup_steps=4, decay_end_step=10, max_grad_norm=1e9, accumulation_steps=3)
    whole = build_model(CUT, 0)
    loop = InnerLoop(whole, make_optimizer(whole, inner), inner, batches(5), torch.device("cpu"))
    stages, data = stage_replicas(num_stages, inner=inner), batches(5)
    for step in range(8):
        for number, batch in enumerate(islice(data, 3)):
            carry(stages, (f"e0.s{step}.r{number}", batch["input_ids"], batch["labels"]))
        infos = [stage.step(step) for stage in stages]
        expected = loop.step()
        assert infos[-1].loss == pytest.approx(expected.loss, rel=TOLERANCE)
        assert sum(info.grad_norm**2 for info in infos) ** 0.5 == pytest.approx(expected.grad_norm, rel=1e-4)
        assert {(info.lr, info.num_tokens, info.applied) for info in infos} == {(expected.lr, 96, True)}
    weights = {name: value for stage in stages for name, value in stage.state_dict()["module"].items()}
    assert weights.keys() == whole.state_dict().keys()
    for name, value in whole.state_dict().items():
        # AdamW divides by a root of squares: where a gradient is next to nothing its last bits make steps of their own.
        torch.testing.assert_close(weights[name], value, rtol=1e-4, atol=1e-5)

"""Stages composed by hand are the whole model: its losses, its gradients, its steps.

Tolerance: 1e-5 of each gradient's own size, fp32. (One micro-batch gives the same bits; several are added up in another
order by the whole model's autograd than here.)
"""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.small_model import batches
from tests.support.stage_replicas import (
    CUT,
    CUT_REORDERED,
    INNER,
    UNCLIPPED,
    MicroBatch,
    carry,
    micro_batch,
    stage_replicas,
    sums_of,
)
from trainer.inner import InnerConfig, InnerLoop, make_optimizer
from trainer.model import ModelConfig, build_model
from trainer.pipeline.stage import StageConfig

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
def test_micro_batches_of_any_length_and_padding_weigh_by_their_tokens(
    num_stages: int, shapes: list[tuple[int, int, int]]
) -> None:
    parts = [micro_batch(seed, *shape) for seed, shape in enumerate(shapes)]
    stages = stage_replicas(num_stages)
    found_loss = sum(carry(stages, part) for part in parts)
    loss_sum, gradients = _of_the_whole(CUT, [part for part in parts if (part[2] != -100).any()])
    assert found_loss == pytest.approx(loss_sum, rel=TOLERANCE)
    found = sums_of(stages)
    assert found.keys() == gradients.keys()
    assert all(_close(found[name], gradients[name]) for name in gradients)
    num_tokens = sum(rows * (positions - padded) for rows, positions, padded in shapes)
    assert {stage.accumulated.num_tokens for stage in stages} == {num_tokens}
    assert {stage.accumulated.num_micro_batches for stage in stages} == {len(shapes)}


def test_a_step_is_of_the_mean_over_tokens_not_of_the_mean_of_means() -> None:
    parts = [micro_batch(seed, rows=1, positions=positions) for seed, positions in enumerate((1, 8, 8, 8))]
    stages = stage_replicas(2)
    for part in parts:
        carry(stages, part)
    _, gradients = _of_the_whole(CUT, parts)
    tail_names = stages[1].state_dict()["sums"].keys()
    expected = torch.stack([gradients[name].norm() for name in tail_names]).norm() / 25
    assert stages[1].step(10).grad_norm == pytest.approx(float(expected), rel=TOLERANCE)


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


@pytest.mark.slow
def test_training_in_stages_lowers_the_loss() -> None:
    stages, losses = stage_replicas(3, StageConfig(), inner=replace(INNER, schedule="constant")), []
    for step, batch in enumerate(islice(batches(1), 40)):
        losses.append(carry(stages, (f"e0.s0.r{step}", batch["input_ids"], batch["labels"])) / 32)
        for stage in stages:
            stage.step(step)
    assert losses[-1] < 0.7 * losses[0]


def test_held_out_data_have_the_loss_of_the_whole_model_and_leave_no_trace() -> None:
    stages, (_, ids, labels) = stage_replicas(3), micro_batch(3, padded=1)
    found, _ = stages[2].evaluate_loss(stages[1].evaluate(stages[0].evaluate(ids)), labels)
    total, num_tokens = build_model(CUT, 0).loss_sum(ids, labels)
    assert (found.loss_sum, found.num_tokens) == (float(total.detach()), int(num_tokens))
    assert not sums_of(stages)
    assert {stage.cached_bytes for stage in stages} == {0}

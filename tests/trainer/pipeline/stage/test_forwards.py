"""Graphs kept or made again: the same bits at the same weights, and never a graph of other weights or another input."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.support.stage_replicas import CUT, UNCLIPPED, carry, micro_batch, stage_replica, stage_replicas, sums_of
from trainer.errors import NonFiniteActivationError, PipelineError, StaleGradientError
from trainer.pipeline.stage import StageConfig, StageReplica
from trainer.pipeline.stage.graph_cache import ENTRY_BYTES

RECOMPUTE = replace(UNCLIPPED, backward="recompute")


def _hidden(seed: int, rows: int = 2, positions: int = 8) -> Tensor:
    return torch.randn(rows, positions, CUT.dim, generator=torch.Generator().manual_seed(seed))


def _body(config: StageConfig = UNCLIPPED) -> StageReplica:
    return stage_replica(1, 3, config)


def _same(first: StageReplica, second: StageReplica) -> bool:
    mine, others = sums_of([first]), sums_of([second])
    return mine.keys() == others.keys() and all(torch.equal(mine[name], others[name]) for name in mine)


def test_recomputed_and_cached_are_the_same_bits_at_the_same_version() -> None:
    cached, recomputing = _body(), _body(RECOMPUTE)
    for seed in range(3):
        x, gradient = _hidden(seed), _hidden(seed + 10)
        assert torch.equal(cached.forward("m", x), recomputing.forward("m", x))
        kept = cached.backward("m", x, gradient, 16, cached.version)
        again = recomputing.backward("m", x, gradient, 16, recomputing.version)
        assert (kept.recomputed, again.recomputed) == (False, True)
        assert torch.equal(kept.grad_x, again.grad_x)
        assert _same(cached, recomputing)
        assert cached.step(9).grad_norm == recomputing.step(9).grad_norm


def test_a_gradient_whose_forward_pass_was_elsewhere_is_the_same() -> None:
    here, there = _body(), _body()
    x, gradient = _hidden(1), _hidden(2)
    there.forward("m", x)
    assert here.backward("m", x, gradient, 16, there.version).recomputed
    there.backward("m", x, gradient, 16, there.version)
    assert _same(here, there)


def test_behind_a_step_the_gradient_is_that_of_the_new_weights() -> None:
    stage, fresh = _body(), _body()
    x, gradient = _hidden(1), _hidden(2)
    for each in (stage, fresh):
        each.forward("first", x)
        each.backward("first", x, gradient, 16, 0)
    stage.forward("m", x)
    for each in (stage, fresh):
        each.step(9)
    result = stage.backward("m", None, gradient, 16, 0)
    fresh.backward("m", x, gradient, 16, 1)
    assert (result.recomputed, result.version) == (True, 1)
    assert _same(stage, fresh)


@pytest.mark.parametrize("told", [True, False])
def test_weights_changed_by_an_average_make_graphs_useless_told_or_not(told: bool) -> None:
    stage, fresh = _body(), _body()
    x, gradient = _hidden(1), _hidden(2)
    stage.forward("m", x)
    for each in (stage, fresh):
        with torch.no_grad():
            for parameter in each.module.parameters():
                parameter.mul_(1.5)
        if told:
            each.weights_changed()
    assert stage.backward("m", x, gradient, 16, 0).recomputed
    fresh.backward("m", x, gradient, 16, 0)
    assert _same(stage, fresh)


def test_a_graph_of_another_input_is_not_used() -> None:
    stage, fresh = _body(), _body()
    stage.forward("m", _hidden(1))
    assert stage.backward("m", _hidden(3), _hidden(2), 16, 0).recomputed
    fresh.backward("m", _hidden(3), _hidden(2), 16, 0)
    assert _same(stage, fresh)


def test_a_forward_pass_repeated_counts_as_the_latest() -> None:
    stage, fresh = _body(), _body()
    stage.forward("m", _hidden(1))
    one = stage.cached_bytes
    stage.forward("m", _hidden(3))
    assert stage.cached_bytes == one
    assert not stage.backward("m", None, _hidden(2), 16, 0).recomputed
    fresh.backward("m", _hidden(3), _hidden(2), 16, 0)
    assert _same(stage, fresh)


def test_a_graph_serves_one_backward_pass() -> None:
    stage = _body()
    stage.forward("m", _hidden(1))
    stage.backward("m", None, _hidden(2), 16, 0)
    assert stage.cached_bytes == 0
    with pytest.raises(PipelineError, match="the input of m, found neither"):
        stage.backward("m", None, _hidden(2), 16, 0)
    assert stage.accumulated.num_micro_batches == 1


def test_forgotten_passes_are_gone() -> None:
    stage = _body()
    stage.forward("m", _hidden(1))
    stage.forget("m")
    stage.forget("never there")
    assert stage.cached_bytes == 0


def test_memory_is_bounded_and_of_what_had_to_go_the_input_comes_again() -> None:
    probe = _body()
    probe.forward("m", _hidden(0))
    one = probe.cached_bytes
    assert one > 10 * _hidden(0).nbytes
    stage = _body(replace(UNCLIPPED, max_cached_bytes=2 * one + one // 2))
    for seed in range(3):
        stage.forward(f"m{seed}", _hidden(seed))
        assert stage.cached_bytes <= 2.5 * one
    found = [stage.backward(f"m{seed}", _hidden(seed), _hidden(9), 16, 0).recomputed for seed in range(3)]
    assert found == [True, False, False]
    assert stage.cached_bytes == 0


def test_with_no_memory_at_all_the_input_has_to_come_again() -> None:
    stage = _body(replace(UNCLIPPED, max_cached_bytes=0))
    stage.forward("m", _hidden(1))
    assert stage.cached_bytes == 0
    with pytest.raises(PipelineError, match="send it again"):
        stage.backward("m", None, _hidden(2), 16, 0)
    assert stage.backward("m", _hidden(1), _hidden(2), 16, 0).recomputed


def test_what_a_graph_keeps_is_measured_alike_at_the_first_and_at_later_passes() -> None:
    stage = _body()
    sizes = []
    for rows in (2, 2, 4, 4):
        before = stage.cached_bytes
        stage.forward(f"m{len(sizes)}", _hidden(len(sizes), rows=rows))
        sizes.append(stage.cached_bytes - before - ENTRY_BYTES)
    assert sizes[0] == sizes[1]
    assert sizes[2] == sizes[3]
    assert sizes[2] == pytest.approx(2 * sizes[0], rel=0.02)


@pytest.mark.parametrize("sign", [1, -1])
def test_a_gradient_too_many_steps_off_is_refused(sign: int) -> None:
    stage = _body(replace(UNCLIPPED, max_staleness=3))
    stage.set_version(10)
    stage.backward("m", _hidden(1), _hidden(2), 16, 10 + 3 * sign)
    before = sums_of([stage])
    with pytest.raises(StaleGradientError, match="at most 3 steps from version 10"):
        stage.backward("n", _hidden(1), _hidden(2), 16, 10 + 4 * sign)
    assert all(torch.equal(before[name], total) for name, total in sums_of([stage]).items())
    assert stage.accumulated.num_micro_batches == 1


def test_forward_passes_from_before_a_roll_back_are_forgotten() -> None:
    stage = _body(replace(UNCLIPPED, max_staleness=3))
    stage.set_version(100)
    stage.forward("m", _hidden(1))
    stage.set_version(97)
    assert stage.cached_bytes > 0
    stage.set_version(5)
    assert stage.cached_bytes == 0


def test_forward_passes_too_old_to_be_counted_are_forgotten() -> None:
    stage = _body(replace(UNCLIPPED, max_staleness=1))
    stage.forward("m", _hidden(1))
    stage.step(0)
    assert stage.cached_bytes > 0
    stage.step(1)
    assert stage.cached_bytes == 0


@pytest.mark.parametrize("config", [UNCLIPPED, RECOMPUTE], ids=["cached", "recompute"])
def test_many_at_once_are_as_one_by_one(config: StageConfig) -> None:
    shapes = [(2, 8), (1, 5), (3, 8), (1, 8), (2, 5)]
    together, apart = _body(config), _body(config)
    requests = [(f"m{number}", _hidden(number, *shape)) for number, shape in enumerate(shapes)]
    answers = together.forward_many(requests)
    for (key, x), found in zip(requests, answers, strict=True):
        assert isinstance(found, Tensor)
        torch.testing.assert_close(found, apart.forward(key, x), rtol=1e-5, atol=1e-6)
    for key, x in reversed(requests):
        gradient = _hidden(7, *x.shape[:2])
        mine, others = (each.backward(key, None, gradient, 4, 0).grad_x for each in (together, apart))
        assert torch.equal(mine, others)
    assert _same(together, apart)
    assert together.forward_many([]) == []


@pytest.mark.parametrize("config", [UNCLIPPED, RECOMPUTE], ids=["cached", "recompute"])
def test_a_bad_one_among_many_is_named_and_spoils_nobody(config: StageConfig) -> None:
    bad = _hidden(1)
    bad[1, 2, 3] = float("nan")
    stage = _body(config)
    requests = [("good", _hidden(0)), ("bad", bad), ("also good", _hidden(2))]
    first, second, third = stage.forward_many(requests)
    assert isinstance(second, NonFiniteActivationError)
    assert "bad" in str(second)
    assert torch.equal(first, stage.forward("x", _hidden(0)))
    assert torch.equal(third, stage.forward("x", _hidden(2)))
    with pytest.raises(PipelineError, match="the input of bad"):
        stage.backward("bad", None, _hidden(1), 16, 0)


def test_ids_of_32_bits_are_as_good_and_the_callers_tensors_stay_as_they_are() -> None:
    key, ids, labels = micro_batch(1)
    narrow, wide = stage_replicas(2), stage_replicas(2)
    assert carry(narrow, (key, ids.int(), labels.int())) == carry(wide, (key, ids, labels))
    x = _hidden(1)
    before = x.clone()
    body = _body()
    body.forward("m", x)
    body.backward("m", x, _hidden(2), 16, 0)
    assert torch.equal(x, before)
    assert not x.requires_grad

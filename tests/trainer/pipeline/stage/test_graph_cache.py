"""Forward passes kept or run again, and the cache's bound.

Gradients have the same bits at the same weights, and never come from a graph of other weights or another input.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.support.stage_replicas import (
    UNCLIPPED,
    backward,
    bits_of,
    hidden,
    stage_replica,
    sums_of,
)
from trainer.errors import NonFiniteActivationError, PipelineError, StaleGradientError
from trainer.pipeline.stage import StageConfig, StageReplica
from trainer.pipeline.stage.passes import ENTRY_BYTES, CachedForward, GraphCache

RECOMPUTE = replace(UNCLIPPED, backward="recompute")
MODES = pytest.mark.parametrize("config", [UNCLIPPED, RECOMPUTE], ids=["cached", "recompute"])


def _body(config: StageConfig = UNCLIPPED) -> StageReplica:
    return stage_replica(1, 3, config)


def _same(first: StageReplica, second: StageReplica) -> bool:
    mine, others = sums_of([first]), sums_of([second])
    return mine.keys() == others.keys() and all(torch.equal(mine[name], others[name]) for name in mine)


def _step(stage: StageReplica) -> None:
    backward(stage, hidden(1), hidden(2), "first")
    stage.step(9)


def _average(stage: StageReplica) -> None:
    with torch.no_grad():
        for parameter in stage.module.parameters():
            parameter.mul_(1.5)


@pytest.mark.parametrize("change", [_step, _average, StageReplica.weights_changed])
def test_when_the_weights_have_changed_the_gradient_is_that_of_the_new_ones(change):
    stage, fresh = _body(), _body()
    stage.forward("m", hidden(1))
    for each in (stage, fresh):
        change(each)
    result = backward(stage, None, hidden(2), forward_version=0)
    backward(fresh, hidden(1), hidden(2))
    assert (result.recomputed, result.version) == (True, fresh.version)
    assert _same(stage, fresh)


def test_a_graph_serves_its_input_alone_once_and_the_latest_forward_pass_counts_unless_it_is_forgotten() -> None:
    stage, fresh = _body(), _body()
    stage.forward("m", hidden(1))
    assert backward(stage, hidden(3), hidden(2)).recomputed
    stage.forward("m", hidden(1))
    one = stage.cached_bytes
    stage.forward("m", hidden(3))
    assert stage.cached_bytes == one
    assert not backward(stage, None, hidden(2)).recomputed
    for _ in range(2):
        backward(fresh, hidden(3), hidden(2))
    assert _same(stage, fresh)
    stage.forward("n", hidden(1))
    stage.forget("n")
    stage.forget("never there")
    assert stage.cached_bytes == 0
    with pytest.raises(PipelineError, match="the input of m, found neither"):
        backward(stage, None, hidden(2))
    assert stage.accumulated.num_micro_batches == 2


def test_memory_is_bounded_and_the_input_of_what_was_dropped_has_to_come_again() -> None:
    probe = _body()
    probe.forward("m", hidden(0))
    one = probe.cached_bytes
    assert one > 10 * hidden(0).nbytes
    stage = _body(replace(UNCLIPPED, max_cached_bytes=2 * one + one // 2))
    for seed in range(3):
        stage.forward(f"m{seed}", hidden(seed))
        assert stage.cached_bytes <= 2.5 * one
    found = [backward(stage, hidden(seed), hidden(9), f"m{seed}").recomputed for seed in range(3)]
    assert (found, stage.cached_bytes) == ([True, False, False], 0)
    forgetful = _body(replace(UNCLIPPED, max_cached_bytes=0))
    forgetful.forward("m", hidden(1))
    assert forgetful.cached_bytes == 0
    with pytest.raises(PipelineError, match="send it again"):
        backward(forgetful, None, hidden(2))
    assert backward(forgetful, hidden(1), hidden(2)).recomputed


def test_a_gradient_too_many_steps_away_is_refused_and_forward_passes_that_cannot_be_counted_are_dropped() -> None:
    stage = _body(replace(UNCLIPPED, max_staleness=3))
    stage.set_version(100)
    for sign in (1, -1):
        backward(stage, hidden(1), hidden(2), forward_version=100 + 3 * sign)
        before = bits_of(stage)
        with pytest.raises(StaleGradientError, match="at most 3 steps from version 100"):
            backward(stage, hidden(1), hidden(2), "n", forward_version=100 + 4 * sign)
        assert bits_of(stage) == before
    stage.forward("m", hidden(1))
    for version, is_kept in ((97, True), (5, False)):
        stage.set_version(version)
        assert (stage.cached_bytes > 0) == is_kept
    stage.forward("m", hidden(1))
    for is_kept in (True, True, True, False):
        stage.step(0)
        assert (stage.cached_bytes > 0) == is_kept


@MODES
def test_many_at_once_are_as_one_by_one_with_their_graphs_kept(config: StageConfig) -> None:
    together, apart = _body(config), _body()
    requests = [(f"m{rows}", hidden(rows, rows)) for rows in (2, 3, 1)]
    for (key, x), found in zip(requests, together.forward_many(requests), strict=True):
        assert isinstance(found, Tensor)
        torch.testing.assert_close(found, apart.forward(key, x), rtol=1e-5, atol=1e-6)
    for key, x in reversed(requests):
        found, kept = (backward(each, None, hidden(7, len(x)), key, num_tokens=4) for each in (together, apart))
        assert torch.equal(found.grad_x, kept.grad_x)
        assert (found.recomputed, kept.recomputed) == (config is RECOMPUTE, False)
    assert _same(together, apart)
    assert together.step(9).grad_norm == apart.step(9).grad_norm
    assert together.forward_many([]) == []


@MODES
def test_a_bad_one_among_many_is_named_and_spoils_nobody(config: StageConfig) -> None:
    bad, stage = hidden(1), _body(config)
    bad[1, 2, 3] = float("nan")
    first, second, third = stage.forward_many([("good", hidden(0)), ("bad", bad), ("also good", hidden(2))])
    assert isinstance(second, NonFiniteActivationError)
    assert "bad" in str(second)
    assert torch.equal(first, stage.forward("x", hidden(0)))
    assert torch.equal(third, stage.forward("x", hidden(2)))
    with pytest.raises(PipelineError, match="the input of bad"):
        backward(stage, None, hidden(1), "bad")


_PUT = st.tuples(st.just("put"), st.integers(0, 5), st.integers(0, 20), st.integers(0, 60))
_OTHER = st.tuples(st.sampled_from(["take", "drop_graphs", "keep_versions", "get"]), st.integers(0, 5))


def _forward(num_values: int, graph_bytes: int, version: int = 0) -> CachedForward:
    x = torch.zeros(num_values, requires_grad=True)
    return CachedForward(x, x + 1, 0, version, graph_bytes)


@pytest.mark.slow
@given(max_bytes=st.integers(0, 6 * ENTRY_BYTES), actions=st.lists(_PUT | _OTHER, max_size=30))
def test_the_bound_holds_and_the_count_is_that_of_what_is_there(max_bytes: int, actions: list[tuple]) -> None:
    cache = GraphCache(max_bytes)
    for number, (action, key, *sizes) in enumerate(actions):
        if action == "put":
            cache.put(str(key), _forward(*sizes, version=number))
        elif action == "keep_versions":
            cache.keep_versions(number - key, number - 1)
        elif action == "drop_graphs":
            cache.drop_graphs()
        else:
            getattr(cache, action)(str(key))
        there = [entry for entry in (cache.get(str(key)) for key in range(6)) if entry is not None]
        assert cache.size_bytes == sum(entry.size_bytes for entry in there) <= max_bytes
        if action == "drop_graphs":
            assert all(entry.y is None and not entry.x.requires_grad for entry in there)
        if action == "keep_versions":
            assert all(number - key <= entry.version < number for entry in there)


def test_the_oldest_go_whole_or_those_of_who_floods_and_what_is_too_large_costs_no_other() -> None:
    cache = GraphCache(2 * ENTRY_BYTES + 100)
    for key in "abac":
        cache.put(key, _forward(5, 20))
    assert [cache.get(key) is None for key in "abc"] == [False, True, False]
    cache.put("d", _forward(15, 0))
    assert [cache.get(key) is None for key in "acd"] == [True, False, False]
    assert cache.size_bytes == 2 * ENTRY_BYTES + 100
    cache = GraphCache(3 * ENTRY_BYTES + 100)
    cache.put("0 meek", _forward(5, 20))
    for number in range(10):
        cache.put(f"{number} flooding", _forward(5, 5))
    assert cache.get("0 meek") is not None
    assert [number for number in range(10) if cache.get(f"{number} flooding") is not None] == [8, 9]
    cache = GraphCache(ENTRY_BYTES + 100)
    cache.put("a", _forward(5, 20))
    cache.put("b", _forward(26, 0))
    assert cache.get("a").y is not None
    assert cache.size_bytes == ENTRY_BYTES + 40
    cache.put("a", _forward(5, 1000))
    assert cache.get("a").y is None
    assert cache.size_bytes == ENTRY_BYTES + 20

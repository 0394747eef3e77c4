"""What is kept for backward passes never exceeds its bound, whatever comes in which order."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainer.pipeline.stage.graph_cache import ENTRY_BYTES, CachedForward, GraphCache

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
        assert len(cache) == len(there)
        if action == "drop_graphs":
            assert all(entry.y is None and not entry.x.requires_grad for entry in there)
        if action == "keep_versions":
            assert all(number - key <= entry.version < number for entry in there)


def test_the_oldest_go_whole_and_a_repetition_makes_new() -> None:
    cache = GraphCache(2 * ENTRY_BYTES + 100)
    for key in "abac":
        cache.put(key, _forward(5, 20))
    assert [cache.get(key) is None for key in "abc"] == [False, True, False]
    cache.put("d", _forward(15, 0))
    assert [cache.get(key) is None for key in "acd"] == [True, False, False]
    assert (len(cache), cache.size_bytes) == (2, 2 * ENTRY_BYTES + 100)


def test_who_floods_drives_out_its_own() -> None:
    cache = GraphCache(3 * ENTRY_BYTES + 100)
    cache.put("0 meek", _forward(5, 20))
    for number in range(10):
        cache.put(f"{number} flooding", _forward(5, 5))
    assert cache.get("0 meek") is not None
    assert [number for number in range(10) if cache.get(f"{number} flooding") is not None] == [8, 9]


def test_one_that_is_larger_than_all_there_may_be_is_not_kept_and_costs_no_other() -> None:
    cache = GraphCache(ENTRY_BYTES + 100)
    cache.put("a", _forward(5, 20))
    cache.put("b", _forward(26, 0))
    assert cache.get("a").y is not None
    assert (len(cache), cache.size_bytes) == (1, ENTRY_BYTES + 40)


def test_of_one_whose_graph_alone_is_too_large_the_input_stays() -> None:
    cache = GraphCache(ENTRY_BYTES + 100)
    cache.put("a", _forward(5, 1000))
    assert cache.get("a").y is None
    assert cache.size_bytes == ENTRY_BYTES + 20
    cache.clear()
    assert (len(cache), cache.size_bytes) == (0, 0)


def test_forward_passes_of_next_to_nothing_are_bounded_too() -> None:
    cache = GraphCache(10 * ENTRY_BYTES)
    for number in range(1000):
        cache.put(f"{number} tiny", _forward(1, 0))
    assert len(cache) < 10

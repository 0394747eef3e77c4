"""Which shards a node is given: 001's rule to the letter, and rendezvous hashing that moves only what must move."""

from __future__ import annotations

import hashlib
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loader import LoaderUsageError, get_assigned_shards, rendezvous_shards, verify_assignment
from loader.stream.assignment import assign, coverage

GOLDEN_MODULO = [552765, 552766, 552767, 552768, 552769, 552770, 552771, 552772, 552773, 552774]
GOLDEN_RENDEZVOUS = [255034, 432085, 274944, 372090, 585444, 167993, 408197, 320738, 141232, 534733]
GOLDEN_OMEGA = [3, 12, 9, 1, 10]

NODES = st.text(min_size=0, max_size=30).filter(lambda text: text.isprintable())
TOTALS = st.integers(1, 3_000)


@pytest.mark.slow
@given(NODES, TOTALS, st.integers(10, 700_000), st.integers(1, 40))
def test_modulo_is_the_specification_and_each_shard_comes_once(
    node_id: str, total: int, num_shards: int, count: int
) -> None:
    primary = int(hashlib.sha256(node_id.encode()).hexdigest(), 16) % num_shards
    assert get_assigned_shards(node_id, num_shards) == [(primary + i) % num_shards for i in range(10)]
    for rule in ("modulo", "rendezvous"):
        shards = assign(node_id, range(total), count, rule)  # type: ignore[arg-type]
        assert len(shards) == len(set(shards)) == min(count, total)
        assert all(type(shard) is int and 0 <= shard < total for shard in shards)


def test_golden_ids() -> None:
    assert get_assigned_shards("gpu-7", 600_000) == GOLDEN_MODULO
    assert get_assigned_shards("gpu-7", 3) == [0, 1, 2]
    assert rendezvous_shards("gpu-7", 600_000) == GOLDEN_RENDEZVOUS
    assert rendezvous_shards("Knoten-Ω", 14, 5) == GOLDEN_OMEGA


@pytest.mark.slow
@given(NODES, st.integers(1, 400), st.integers(1, 100), st.integers(1, 12))
def test_rendezvous_moves_only_what_new_shards_outrank(node_id: str, total: int, more: int, count: int) -> None:
    before, after = rendezvous_shards(node_id, total, count), rendezvous_shards(node_id, total + more, count)
    stayed = [shard for shard in after if shard < total]
    # What stays keeps its rank order, and what leaves was ranked lowest of all.
    assert stayed == before[: len(stayed)]
    # What leaves is behind every newcomer in the ranking of all shards.
    ranking = rendezvous_shards(node_id, total + more, total + more)
    assert after == ranking[: len(after)]
    left = set(before) - set(after)
    assert not left or len(after) - len(stayed) >= len(left)
    assert all(ranking.index(gone) > ranking.index(new) for gone in left for new in after)


def test_rendezvous_exchanges_count_over_n_shards_on_average() -> None:
    moved = sum(
        len(set(rendezvous_shards(f"node-{n}", 500)) - set(rendezvous_shards(f"node-{n}", 505))) for n in range(400)
    )
    # Expected: 400 nodes × 10 × 5/505 = 39.6; modulo would move nearly all 4,000.
    assert 20 <= moved <= 65


@pytest.mark.parametrize("rule", ["modulo", "rendezvous"])
def test_nodes_spread_evenly(rule: str) -> None:
    given_to = Counter(shard for n in range(2_000) for shard in assign(f"node-{n}", range(50), 5, rule))  # type: ignore[arg-type]
    assert len(given_to) == 50
    # 200 expected on each, standard deviation 13 (modulo moves in blocks of five: up to 30).
    assert min(given_to.values()) > 100 and max(given_to.values()) < 300


@pytest.mark.slow
@given(st.lists(st.integers(0, 10_000), min_size=1, max_size=50, unique=True).map(sorted), NODES)
def test_a_pool_with_gaps(pool: list[int], node_id: str) -> None:
    modulo = assign(node_id, pool, 5, "modulo")
    assert list(modulo) == [pool[position] for position in get_assigned_shards(node_id, len(pool), 5)]
    assert set(assign(node_id, pool, 5, "rendezvous")) <= set(pool)
    # What a node is given does not depend on shards that were never in its pool.
    assert [s for s in rendezvous_shards(node_id, 10_001, 10_001) if s in set(pool)][:5] == list(
        assign(node_id, pool, 5, "rendezvous")
    )


def test_a_claim_is_checked() -> None:
    claimed = get_assigned_shards("gpu-7", 100)
    assert verify_assignment("gpu-7", claimed, 100)
    assert verify_assignment("gpu-7", iter(claimed), range(100))
    assert not verify_assignment("gpu-8", claimed, 100)
    assert not verify_assignment("gpu-7", claimed, 101)
    assert not verify_assignment("gpu-7", claimed[:-1], 100)
    assert not verify_assignment("gpu-7", [*claimed[1:], claimed[0]], 100)
    assert not verify_assignment("gpu-7", claimed, 100, count=9)
    assert verify_assignment("gpu-7", rendezvous_shards("gpu-7", 100, 3), 100, count=3, assignment="rendezvous")


def test_what_cannot_be_assigned() -> None:
    for rule in (get_assigned_shards, rendezvous_shards):
        with pytest.raises(LoaderUsageError, match="expected a store with shards"):
            rule("gpu-7", 0)
        with pytest.raises(LoaderUsageError, match="count of 0"):
            rule("gpu-7", 5, 0)
    with pytest.raises(LoaderUsageError, match="'nearest'"):
        assign("gpu-7", range(5), 2, "nearest")  # type: ignore[arg-type]


def test_coverage() -> None:
    found = coverage({"a": [0, 1, 2], "b": [2, 3], "c": [2]}, 6)
    assert (found.num_nodes, found.num_shards, found.covered, found.shared, found.most_nodes) == (3, 6, 4, 1, 3)
    assert found.mean_nodes == pytest.approx(1.5)
    assert coverage({}, 4).covered == 0

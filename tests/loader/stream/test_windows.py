"""Windows, orders, assignments and the plateau rules, against loops that anyone can read."""

from __future__ import annotations

import hashlib
import math
from collections import Counter

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from loader import LoaderUsageError, PlateauRule, get_assigned_shards, rendezvous_shards, verify_assignment
from loader.stream.assignment import assign, coverage
from loader.stream.plateau import LossHistory
from loader.stream.windows import (
    EOS,
    WindowView,
    cumulative_lengths,
    document_ids,
    num_windows,
    positions,
    random_words,
    start_positions,
    window_order,
)
from manifests import sha256_hex

BATCHES = hnp.arrays(np.int64, st.tuples(st.integers(1, 5), st.integers(1, 30)), elements=st.sampled_from([EOS, 7, 8]))


@given(st.integers(2, 400), st.integers(1, 60))
def test_windows_do_not_overlap_and_labels_are_one_further(num_tokens: int, seq_len: int) -> None:
    ids = np.arange(1_000, 1_000 + num_tokens)
    windows = num_windows(num_tokens, seq_len)
    assert windows == len([start for start in range(0, num_tokens, seq_len) if start + seq_len + 1 <= num_tokens])
    if not windows:
        return
    view = WindowView.of(ids, seq_len)
    assert view.inputs.shape == view.labels.shape == (windows, seq_len)
    chosen = np.arange(windows)[::-1]
    inputs, labels = view.gather(chosen)
    for row, window in enumerate(chosen):
        start = window * seq_len
        assert np.array_equal(inputs[row], ids[start : start + seq_len])
        assert np.array_equal(labels[row], ids[start + 1 : start + seq_len + 1])
    inputs[:] = labels[:] = -1
    assert np.array_equal(ids, np.arange(1_000, 1_000 + num_tokens)), "a batch is a copy"


def naive(row: npt.NDArray[np.int64]) -> tuple[list[int], list[int]]:
    """Positions and documents of one row."""
    found: tuple[list[int], list[int]] = ([], [])
    position = document = 0
    for token in row:
        found[0].append(position)
        found[1].append(document)
        position += 1
        if token == EOS:
            position, document = 0, document + 1
    return found


@given(BATCHES)
def test_extras_equal_a_loop(input_ids: npt.NDArray[np.int64]) -> None:
    expected = [naive(row) for row in input_ids]
    assert positions(input_ids).tolist() == [row[0] for row in expected]
    assert document_ids(input_ids).tolist() == [row[1] for row in expected]
    assert positions(input_ids).dtype == document_ids(input_ids).dtype == np.int64
    lengths = cumulative_lengths(input_ids)
    width, flat = input_ids.shape[1], input_ids.ravel()
    begins = [i for i in range(len(flat)) if i % width == 0 or flat[i - 1] == EOS]
    assert lengths.tolist() == [*begins, len(flat)]
    assert lengths.dtype == np.int32


GOLDEN_ORDER = "e38dbfdf12f430cc7212949cf2394951085ec40e59a72836404d8d928518edcc"
GOLDEN_SMALL_ORDER = [2, 1, 7, 6, 3, 4, 5, 0]
GOLDEN_STARTS = "024d0d48a373cb7c51f94c14fb10a862f00878efa1887e2322721583525f8462"
GOLDEN_WORDS = ["0x1a872f6991aaba01", "0xf01aa76f1351d86e", "0xf3492fb67a0a5659"]
PARTS = st.lists(st.integers(-(2**70), 2**70) | st.text(max_size=12), max_size=5)


@given(st.integers(1, 3_000), PARTS, st.integers(1, 500))
def test_an_order_is_a_permutation_and_starts_lie_in_range(num_windows, parts, count):
    order = window_order(num_windows, *parts)
    assert order.dtype == np.int64
    assert np.array_equal(np.sort(order), np.arange(num_windows))
    assert np.array_equal(order, window_order(num_windows, *parts))
    starts = start_positions(count, num_windows, *parts)
    assert starts.dtype == np.int64 and starts.shape == (count,)
    assert starts.min() >= 0 and starts.max() < num_windows


def test_golden_digests_and_ids_in_which_every_part_matters() -> None:
    assert sha256_hex(window_order(2_441, 0, "gpu-7", 3, 41).astype("<i8").tobytes()) == GOLDEN_ORDER
    assert window_order(8, 0, "gpu-7", 0, 0).tolist() == GOLDEN_SMALL_ORDER
    assert sha256_hex(start_positions(1_000, 2_498_976, 0, "gpu-7", 41, 17).astype("<i8").tobytes()) == GOLDEN_STARTS
    assert [hex(word) for word in random_words(3, "a", 1)] == GOLDEN_WORDS
    assert get_assigned_shards("gpu-7", 600_000) == GOLDEN_MODULO
    assert get_assigned_shards("gpu-7", 3) == [0, 1, 2]
    assert rendezvous_shards("gpu-7", 600_000) == GOLDEN_RENDEZVOUS
    assert rendezvous_shards("Knoten-Ω", 14, 5) == GOLDEN_OMEGA
    base = (0, "node", 1, 2)
    variants = [base, (1, "node", 1, 2), (0, "nodf", 1, 2), (0, "node", 2, 2), (0, "node", 1, 3), (0, "node", 12)]
    orders = {window_order(200, *parts).tobytes() for parts in variants}
    assert len(orders) == len(variants)
    assert random_words(4, "a", 1).tolist() != random_words(4, "a1").tolist()
    assert random_words(4, "1").tolist() != random_words(4, 1).tolist()


GOLDEN_MODULO = [552765, 552766, 552767, 552768, 552769, 552770, 552771, 552772, 552773, 552774]
GOLDEN_RENDEZVOUS = [255034, 432085, 274944, 372090, 585444, 167993, 408197, 320738, 141232, 534733]
GOLDEN_OMEGA = [3, 12, 9, 1, 10]


@pytest.mark.parametrize("found", [1.5, None, "3", True, 2**70 * 1.0])
def test_what_is_no_number_of_shards_is_said_in_a_line(found: object) -> None:
    for ask in (get_assigned_shards, rendezvous_shards):
        with pytest.raises(LoaderUsageError, match="number of shards in the store, a whole number, found"):
            ask("gpu-7", found)  # type: ignore[operator]
        with pytest.raises(LoaderUsageError, match="a whole number, found a count of"):
            ask("gpu-7", 5, found)  # type: ignore[operator]
    if not isinstance(found, str):
        with pytest.raises(LoaderUsageError, match="number of shards in the store"):
            verify_assignment("gpu-7", [0], found)  # type: ignore[arg-type]
    with pytest.raises(LoaderUsageError, match="the id of a node, a text"):
        get_assigned_shards(found if not isinstance(found, str) else 3, 5)  # type: ignore[arg-type]
    assert get_assigned_shards("gpu-7", np.int64(3), np.int64(2)) == get_assigned_shards("gpu-7", 3, 2)  # type: ignore[arg-type]


NODES = st.text(min_size=0, max_size=30).filter(lambda text: text.isprintable())
TOTALS = st.integers(1, 3_000)


@pytest.mark.slow
@given(NODES, TOTALS, st.integers(10, 700_000), st.integers(1, 40))
def test_modulo_is_the_specification_and_each_shard_comes_once(node_id, total, num_shards, count):
    primary = int(hashlib.sha256(node_id.encode()).hexdigest(), 16) % num_shards
    assert get_assigned_shards(node_id, num_shards) == [(primary + i) % num_shards for i in range(10)]
    for rule in ("modulo", "rendezvous"):
        shards = assign(node_id, range(total), count, rule)  # type: ignore[arg-type]
        assert len(shards) == len(set(shards)) == min(count, total)
        assert all(type(shard) is int and 0 <= shard < total for shard in shards)


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


def test_claims_coverage_and_what_cannot_be_assigned() -> None:
    claimed = get_assigned_shards("gpu-7", 100)
    assert verify_assignment("gpu-7", claimed, 100)
    assert verify_assignment("gpu-7", iter(claimed), range(100))
    assert not verify_assignment("gpu-8", claimed, 100)
    assert not verify_assignment("gpu-7", claimed, 101)
    assert not verify_assignment("gpu-7", claimed[:-1], 100)
    assert not verify_assignment("gpu-7", [*claimed[1:], claimed[0]], 100)
    assert not verify_assignment("gpu-7", claimed, 100, count=9)
    assert verify_assignment("gpu-7", rendezvous_shards("gpu-7", 100, 3), 100, count=3, assignment="rendezvous")
    for rule in (get_assigned_shards, rendezvous_shards):
        with pytest.raises(LoaderUsageError, match="expected a store with shards"):
            rule("gpu-7", 0)
        with pytest.raises(LoaderUsageError, match="count of 0"):
            rule("gpu-7", 5, 0)
    with pytest.raises(LoaderUsageError, match="'nearest'"):
        assign("gpu-7", range(5), 2, "nearest")  # type: ignore[arg-type]
    found = coverage({"a": [0, 1, 2], "b": [2, 3], "c": [2]}, 6)
    assert (found.num_nodes, found.num_shards, found.covered, found.shared, found.most_nodes) == (3, 6, 4, 1, 3)
    assert found.mean_nodes == pytest.approx(1.5)
    assert coverage({}, 4).covered == 0


LOSSES = st.lists(st.floats(0.0, 0.3) | st.floats(0.0, 12.0), max_size=50)


def specification_says(losses: list[float]) -> bool:
    """001, "Adaptive Shard Rotation"."""
    if len(losses) < 20:
        return False
    recent = losses[-20:]
    average = sum(recent) / len(recent)
    variance = sum((loss - average) ** 2 for loss in recent) / len(recent)
    return variance < 0.02 and average < 0.05


@given(LOSSES)
def test_absolute_is_the_specification_and_off_never_fires(losses: list[float]) -> None:
    assert (PlateauRule().plateau(losses) is not None) == specification_says(losses)
    assert PlateauRule("off").plateau(losses) is None


def test_plateaus() -> None:
    plateau = PlateauRule().plateau([9.0] * 30 + [0.01, 0.03] * 10)
    assert plateau is not None
    assert (plateau.mean, plateau.variance) == (pytest.approx(0.02), pytest.approx(0.0001))
    at_the_mean = [0.05] * 50
    assert PlateauRule("absolute").plateau(at_the_mean) is None
    assert PlateauRule("absolute").plateau([math.nextafter(0.05, 0)] * 50) is not None
    half = math.sqrt(0.02)
    wide = [1 + half * 1.0001, 1 - half * 1.0001] * 25
    assert PlateauRule("absolute", max_mean=5.0).plateau(wide) is None
    # However wide losses scatter from batch to batch, one that no longer falls has plateaued.
    assert PlateauRule("relative").plateau(wide) is not None
    rule = PlateauRule("relative")
    falling = [3.0 - 0.01 * n for n in range(50)]
    assert rule.plateau(falling) is None
    assert rule.plateau([3.0] * 50) is not None
    assert rule.plateau([3.0] * 30 + [2.99] * 20) is not None  # 0.33 % is less than 0.5 %.
    assert rule.plateau([3.0] * 30 + [2.98] * 20) is None  # 0.67 % is not.
    assert rule.plateau([3.0] * 30 + [3.05] * 20) is not None  # Rising is no improvement.
    assert rule.plateau([3.0] * 49) is None  # The history is not full.
    # The square of 1e200 is no float; a rule that looks at it must say no, not fail.
    assert PlateauRule("absolute").plateau([1e200, -1e200] * 25) is None
    assert PlateauRule("relative").plateau([1e200, -1e200] * 25) is None


def test_the_history_is_bounded_can_be_cleared_and_leaves_out_losses_that_are_not_finite() -> None:
    history = LossHistory(50, [0.01] * 19)
    for loss in (math.nan, math.inf, -math.inf):
        history.add(loss)
    assert history.losses() == [0.01] * 19
    history.add(0.01)
    assert PlateauRule().plateau(history.losses()) is not None
    for loss in range(130):
        history.add(loss)
    assert history.losses() == [float(loss) for loss in range(80, 130)]
    history.clear()
    assert history.losses() == []

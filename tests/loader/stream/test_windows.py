"""Windows and what the document boundaries say, against loops that anyone can read."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from loader.stream.permutation import random_words, start_positions, window_order
from loader.stream.windows import EOS, WindowView, cumulative_lengths, document_ids, num_windows, positions
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


@given(st.integers(1, 3_000), PARTS)
def test_an_order_is_a_permutation(num_windows: int, parts: list[int | str]) -> None:
    order = window_order(num_windows, *parts)
    assert order.dtype == np.int64
    assert np.array_equal(np.sort(order), np.arange(num_windows))
    assert np.array_equal(order, window_order(num_windows, *parts))


@given(st.integers(1, 500), st.integers(1, 10_000), PARTS)
def test_starts_lie_in_range(count: int, num_positions: int, parts: list[int | str]) -> None:
    starts = start_positions(count, num_positions, *parts)
    assert starts.dtype == np.int64 and starts.shape == (count,)
    assert starts.min() >= 0 and starts.max() < num_positions


def test_golden_digests() -> None:
    assert sha256_hex(window_order(2_441, 0, "gpu-7", 3, 41).astype("<i8").tobytes()) == GOLDEN_ORDER
    assert window_order(8, 0, "gpu-7", 0, 0).tolist() == GOLDEN_SMALL_ORDER
    assert sha256_hex(start_positions(1_000, 2_498_976, 0, "gpu-7", 41, 17).astype("<i8").tobytes()) == GOLDEN_STARTS
    assert [hex(word) for word in random_words(3, "a", 1)] == GOLDEN_WORDS


def test_every_part_matters() -> None:
    base = (0, "node", 1, 2)
    variants = [base, (1, "node", 1, 2), (0, "nodf", 1, 2), (0, "node", 2, 2), (0, "node", 1, 3), (0, "node", 12)]
    orders = {window_order(200, *parts).tobytes() for parts in variants}
    assert len(orders) == len(variants)
    assert random_words(4, "a", 1).tolist() != random_words(4, "a1").tolist()
    assert random_words(4, "1").tolist() != random_words(4, 1).tolist()


def test_all_positions_are_drawn_alike() -> None:
    # 100,000 draws of 10: 10,000 each, standard deviation 95.
    counts = np.bincount(start_positions(100_000, 10, "uniform"), minlength=10)
    assert counts.min() > 9_500 and counts.max() < 10_500
    # The window that comes first is any of them, too.
    first = np.bincount([window_order(5, seed)[0] for seed in range(5_000)], minlength=5)
    assert first.min() > 850 and first.max() < 1_150

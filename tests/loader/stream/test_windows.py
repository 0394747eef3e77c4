"""Windows and what the document boundaries say, against loops that anyone can read."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from loader.stream.windows import EOS, WindowView, cumulative_lengths, document_ids, num_windows, positions

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


def test_a_batch_is_a_copy() -> None:
    ids = np.arange(100)
    inputs, labels = WindowView.of(ids, 9).gather(np.asarray([3, 0]))
    inputs[:] = labels[:] = -1
    assert np.array_equal(ids, np.arange(100))


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


@given(BATCHES)
def test_cumulative_lengths_cut_where_a_row_or_a_document_begins(input_ids: npt.NDArray[np.int64]) -> None:
    lengths = cumulative_lengths(input_ids)
    width = input_ids.shape[1]
    flat = input_ids.ravel()
    begins = [i for i in range(len(flat)) if i % width == 0 or flat[i - 1] == EOS]
    assert lengths.tolist() == [*begins, len(flat)]
    assert lengths.dtype == np.int32
    assert (np.diff(lengths) > 0).all()

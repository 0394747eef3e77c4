"""From ids to batches: windows gathered from a mapped shard, their order, and the document boundaries in them.

Windows do not overlap: window w is ids ``w·T … w·T + T``, its labels the same one further. Two views of the map, one id
apart, hold every window as a row, so a batch is two gathers: 7 µs for 8 × 1,024 ids where a loop of slices takes 17.
The ids are copied once, out of the page cache into the batch; nothing of a batch points into the map.

A document ends with the store's EOS, and text never yields that id, so the boundaries found here are exact.

Orders are the same on every machine and in every release of numpy, which promises the raw words of its bit generators
for ever, but not the results of `Generator.permutation` or `integers`; torch promises neither. So an order is Philox
words (Salmon et al. 2011) under a key that is the sha256 of the order's parts, sorted. Sorting 2,441 words (a shard at
1,024 ids a window) takes 0.15 ms, once a shard.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from manifests import EOS_ID

EOS: Final = EOS_ID
"""Of a store whose vocabulary is our own; one made elsewhere has another."""

Ids = npt.NDArray[np.int64]


def num_windows(num_tokens: int, seq_len: int) -> int:
    """Windows of ``seq_len`` ids, each with a label for its last id, in a shard of ``num_tokens``."""
    return (num_tokens - 1) // seq_len


@dataclass(frozen=True, slots=True)
class WindowView:
    """A shard as rows of windows; both are views of the map, read-only by convention.

    Attributes:
        inputs: int64[W, T].
        labels: int64[W, T], each id the one after its input.
    """

    inputs: Ids
    labels: Ids

    @classmethod
    def of(cls, ids: Ids, seq_len: int) -> WindowView:
        """The windows of a shard's ids, int64[N], N > seq_len."""
        used = num_windows(len(ids), seq_len) * seq_len
        return cls(ids[:used].reshape(-1, seq_len), ids[1 : used + 1].reshape(-1, seq_len))

    def gather(self, windows: Ids) -> tuple[Ids, Ids]:
        """Inputs and labels of some windows, each int64[len(windows), T], copied."""
        return self.inputs.take(windows, 0), self.labels.take(windows, 0)


def document_ids(input_ids: Ids, eos_id: int = EOS) -> Ids:
    """Which document of its row an id belongs to, int64[B, T] as the ids; an EOS belongs to the document it ends."""
    return np.cumsum(_starts(input_ids, eos_id), axis=1) - 1


def positions(input_ids: Ids, eos_id: int = EOS) -> Ids:
    """How many ids of the same document come before an id in its row; int64[B, T], as the ids."""
    columns = np.arange(input_ids.shape[1])
    begins = np.where(_starts(input_ids, eos_id), columns, 0)
    return columns - np.maximum.accumulate(begins, axis=1)


def cumulative_lengths(input_ids: Ids, eos_id: int = EOS) -> npt.NDArray[np.int32]:
    """The starts of documents in the batch as one row, and its length, for variable-length attention.

    Returns:
        int32[D + 1], from 0 to B·T, for D runs of one document within one row of int64[B, T].
    """
    begins = np.flatnonzero(_starts(input_ids, eos_id))
    return np.append(begins, input_ids.size).astype(np.int32)


def _starts(input_ids: Ids, eos_id: int) -> npt.NDArray[np.bool_]:
    """bool[B, T]: the first id of every row, and every id after an EOS."""
    starts = np.ones(input_ids.shape, dtype=np.bool_)
    np.equal(input_ids[:, :-1], eos_id, out=starts[:, 1:])
    return starts


def random_words(count: int, *parts: int | str) -> npt.NDArray[np.uint64]:
    """uint64[count], a function of ``parts`` alone; ``("a", 1)`` and ``("a1",)`` differ."""
    digest = hashlib.sha256(json.dumps(parts).encode()).digest()
    words: npt.NDArray[np.uint64] = np.random.Philox(key=np.frombuffer(digest[:16], dtype="<u8")).random_raw(count)
    return words


def window_order(num_windows: int, *parts: int | str) -> Ids:
    """A permutation of a shard's windows, int64[num_windows]; ``parts`` are run seed, node, epoch, shard."""
    return np.argsort(random_words(num_windows, "windows", *parts), kind="stable").astype(np.int64)


def start_positions(count: int, num_positions: int, *parts: int | str) -> Ids:
    """Independent start positions in ``0 … num_positions − 1``, int64[count].

    Uniform up to ``num_positions / 2**64``, 10**-13 for a shard; ``parts`` are run seed, node, shard, step.
    """
    words: npt.NDArray[np.uint64] = random_words(count, "starts", *parts) % np.uint64(num_positions)
    return words.astype(np.int64)

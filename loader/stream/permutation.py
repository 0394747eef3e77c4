"""Seeded orders that are the same on every machine and in every release of numpy.

numpy promises the raw words of its bit generators for ever, but not the results of `Generator.permutation` or
`integers`, and torch promises neither. So an order is defined here: Philox words (Salmon et al. 2011) under a key that
is the sha256 of the order's parts, sorted. Sorting 2,441 words (a shard at 1,024 ids a window) takes 0.15 ms, once a
shard.
"""

from __future__ import annotations

import hashlib
import json

import numpy as np
import numpy.typing as npt


def random_words(count: int, *parts: int | str) -> npt.NDArray[np.uint64]:
    """Random 64-bit words, a function of ``parts`` alone.

    Args:
        count: how many.
        *parts: ``("a", 1)`` and ``("a1",)`` differ.

    Returns:
        uint64[count].
    """
    digest = hashlib.sha256(json.dumps(parts).encode()).digest()
    words: npt.NDArray[np.uint64] = np.random.Philox(key=np.frombuffer(digest[:16], dtype="<u8")).random_raw(count)
    return words


def window_order(num_windows: int, *parts: int | str) -> npt.NDArray[np.int64]:
    """A permutation of a shard's windows, a function of ``parts`` alone.

    Args:
        num_windows: how many there are.
        *parts: run seed, node, epoch, shard.

    Returns:
        int64[num_windows], each of ``0 … num_windows − 1`` once.
    """
    return np.argsort(random_words(num_windows, "windows", *parts), kind="stable").astype(np.int64)


def start_positions(count: int, num_positions: int, *parts: int | str) -> npt.NDArray[np.int64]:
    """Independent start positions in ``0 … num_positions − 1``, a function of ``parts`` alone.

    Uniform up to ``num_positions / 2**64``, 10**-13 for a shard.

    Args:
        count: how many.
        num_positions: how many positions there are, 1 or more.
        *parts: run seed, node, shard, step.

    Returns:
        int64[count].
    """
    words = random_words(count, "starts", *parts) % np.uint64(num_positions)
    positions: npt.NDArray[np.int64] = words.astype(np.int64)
    return positions

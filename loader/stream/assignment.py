"""Which shards a node trains on: a function of its id and the number of shards.

`modulo` (spec L-2): the sha256 of the id names the first shard, the others follow it. One more shard in the store gives
nearly every node other shards, which is why a run pins the number it began with. `rendezvous` ranks every shard by a
hash of (node, shard) and takes the highest: when shards are added, a node exchanges only those that a new shard
outranks, count/N of them on average. The trade-off: it ranks all N shards (600,000: 30 ms), and
neighbours on disk are no longer neighbours in the assignment.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass
from numbers import Integral
from typing import Final, Literal, get_args

import numpy as np
import numpy.typing as npt

from loader.errors import LoaderUsageError

Assignment = Literal["modulo", "rendezvous"]

DEFAULT_COUNT: Final = 10
"""Shards a node is given (spec L-3)."""
_RANKED_AT_ONCE: Final = 1 << 20


def get_assigned_shards(node_id: str, num_shards: int, count: int = DEFAULT_COUNT) -> list[int]:
    """The shards of a node (spec L-2, L-3), first the primary one.

    Args:
        node_id: any text; its sha256 decides.
        num_shards: shards in the store.
        count: how many to give; never more than there are, so none comes twice.

    Returns:
        ``min(count, num_shards)`` shard ids.

    Raises:
        LoaderUsageError: there is no shard, or ``count`` is below 1.
    """
    return list(assign(node_id, _shards_of(num_shards), count, "modulo"))


def rendezvous_shards(node_id: str, num_shards: int, count: int = DEFAULT_COUNT) -> list[int]:
    """The ``count`` shards that rank highest for a node, highest first.

    Args:
        node_id: any text.
        num_shards: shards in the store.
        count: how many to give; never more than there are.

    Raises:
        LoaderUsageError: there is no shard, or ``count`` is below 1.
    """
    return list(assign(node_id, _shards_of(num_shards), count, "rendezvous"))


def assign(node_id: str, pool: Sequence[int], count: int, assignment: Assignment) -> tuple[int, ...]:
    """A node's share of a pool of shards.

    Args:
        node_id: any text.
        pool: the ids to choose from, ascending; `modulo` counts positions in it.
        count: how many to give.
        assignment: the rule.

    Raises:
        LoaderUsageError: the pool is empty, ``count`` is below 1, or there is no such rule.
    """
    if assignment not in get_args(Assignment):
        raise LoaderUsageError(f"expected an assignment of {', '.join(get_args(Assignment))}, found {assignment!r}")
    if not len(pool):
        raise LoaderUsageError("expected a store with shards to assign, found none; populate it, or hold out fewer")
    if not is_whole(count) or count < 1:
        raise LoaderUsageError(f"expected to assign 1 shard or more, a whole number, found a count of {count!r}")
    if assignment == "rendezvous":
        return tuple(int(shard) for shard in _ranked(node_id, pool, count))
    primary = int(hashlib.sha256(check_node_id(node_id)).hexdigest(), 16) % len(pool)
    return tuple(pool[(primary + i) % len(pool)] for i in range(min(count, len(pool))))


def verify_assignment(
    node_id: str,
    claimed: Iterable[int],
    pool: int | Sequence[int],
    *,
    count: int = DEFAULT_COUNT,
    assignment: Assignment = "modulo",
) -> bool:
    """Whether a node's claimed shards are its assignment, in that order.

    Args:
        node_id: the node.
        claimed: shard ids, as it states them.
        pool: how many shards the store had when its run began, or the ids it may have been given.
        count: how many shards a node of this run is given.
        assignment: the run's rule.
    """
    shards = pool if isinstance(pool, Sized) else _shards_of(pool)
    return tuple(claimed) == assign(node_id, shards, count, assignment)


@dataclass(frozen=True, slots=True)
class Coverage:
    """How a set of nodes covers a pool of shards."""

    num_nodes: int
    num_shards: int
    covered: int
    """Shards that at least one node has."""
    shared: int
    """Shards that more than one node has."""
    most_nodes: int
    """Nodes on the shard that most nodes have."""
    mean_nodes: float
    """Nodes on a covered shard, on average."""


def coverage(assigned: Mapping[str, Sequence[int]], num_shards: int) -> Coverage:
    """How many of a store's shards some nodes cover together, and how far they overlap."""
    nodes = np.zeros(num_shards, dtype=np.int64)
    for shards in assigned.values():
        np.add.at(nodes, np.asarray(shards, dtype=np.int64), 1)
    covered = int(np.count_nonzero(nodes))
    return Coverage(
        num_nodes=len(assigned),
        num_shards=num_shards,
        covered=covered,
        shared=int(np.count_nonzero(nodes > 1)),
        most_nodes=int(nodes.max(initial=0)),
        mean_nodes=float(nodes.sum() / covered) if covered else 0.0,
    )


def check_node_id(node_id: str) -> bytes:
    """The UTF-8 form of a node's id.

    Raises:
        LoaderUsageError: it has none.
    """
    if not isinstance(node_id, str):
        raise LoaderUsageError(f"expected the id of a node, a text, found {node_id!r}")
    try:
        return node_id.encode()
    except UnicodeEncodeError:
        raise LoaderUsageError(f"expected a node id that is valid Unicode, found {node_id!a}") from None


def is_whole(number: object) -> bool:
    """Whether a value is a whole number, of Python or numpy, and no truth value."""
    return isinstance(number, Integral) and not isinstance(number, bool)


def _shards_of(num_shards: int) -> range:
    """The shards of a store of so many."""
    if not is_whole(num_shards):
        raise LoaderUsageError(f"expected the number of shards in the store, a whole number, found {num_shards!r}")
    return range(num_shards)


def _ranked(node_id: str, pool: Sequence[int], count: int) -> npt.NDArray[np.uint64]:
    """The highest of a pool, highest first; a million at a time, so that memory does not grow with the store."""
    highest = np.empty(0, dtype=np.uint64)
    for first in range(0, len(pool), _RANKED_AT_ONCE):
        part = pool[first : first + _RANKED_AT_ONCE]
        highest = _highest(node_id, np.concatenate([highest, _as_words(part)]), count)
    return highest


def _as_words(ids: Sequence[int]) -> npt.NDArray[np.uint64]:
    if isinstance(ids, range):  # Thirty times as fast as one by one.
        return np.arange(ids.start, ids.stop, ids.step, dtype=np.uint64)
    return np.asarray(ids, dtype=np.uint64)


def _highest(node_id: str, shards: npt.NDArray[np.uint64], count: int) -> npt.NDArray[np.uint64]:
    scores = _scores(node_id, shards)
    count = min(count, len(shards))
    highest = np.argpartition(scores, len(scores) - count)[len(scores) - count :]
    # Ties, all but impossible with 64 bits, go to the lower id, so that the order is defined.
    ordered = np.lexsort((shards[highest], ~scores[highest]))
    return shards[highest][ordered]


def _scores(node_id: str, shards: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """A 64-bit hash of (node, shard): the sha256 of the id, then SplitMix64's finaliser over both (Steele 2014)."""
    node = np.frombuffer(hashlib.sha256(check_node_id(node_id)).digest()[:8], dtype="<u8")[0]
    x = (shards + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15) ^ node
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    scores: npt.NDArray[np.uint64] = x ^ (x >> np.uint64(31))
    return scores

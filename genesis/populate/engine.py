"""What a run's work is done by: the processes of this machine, or a cluster.

The pipeline drives either through one small protocol: it asks for encoded blocks in the input's order, cuts them into
shards by their counts, and hands full shards to the engine's storage, which answers with what to commit. Boundaries,
order, ledger and lease are the pipeline's, so that both engines give the same bytes.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Protocol, Self

from genesis.errors import UsageError
from genesis.extras import with_extra
from genesis.populate.commit_log import CommitLog
from genesis.populate.committer import ShardStorage, ShardWriter
from genesis.populate.options import PopulateOptions
from genesis.populate.pool import EncodedBlock, WorkerPool
from genesis.sources import tasks
from genesis.sources.base import InputPlan
from genesis.store import FolderStore, Store
from genesis.tokenizer import EncoderSpec
from manifests import Cursor


class PopulateEngine(Protocol):
    """Encodes a plan, and stores shards; a context manager that gives back what it took."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def check(self, plan: InputPlan) -> None:
        """Makes sure that whoever does the work can.

        Raises:
            GenesisError: who cannot, and why.
        """

    def load(self, encoder: EncoderSpec) -> None:
        """Takes the vocabulary."""

    def blocks(self, plan: InputPlan, cursor: Cursor | None, stop: threading.Event) -> Iterator[EncodedBlock]:
        """The plan's documents from the cursor on, encoded, in order.

        Raises:
            LostWorkError: what was under way is lost; it can be begun again from the last commit.
            GenesisError: reading or encoding failed, after everything before it.
        """

    def storage(self, commit_log: CommitLog, source: str, next_merge_id: int, *, packed: bool) -> ShardStorage[Any]:
        """What stores the shards made of those blocks."""

    def store_threads(self, store: Store) -> int:
        """How many shards are stored at once."""

    @property
    def commit_interval_s(self) -> float:
        """Pause behind a commit, in which shards gather for the next; 0 for none."""


class LocalEngine:
    """Worker processes of this machine, and threads of this process."""

    def __init__(self, num_workers: int) -> None:
        self._num_workers = num_workers
        self._pool = WorkerPool(num_workers)
        self._exits = ExitStack()

    def __enter__(self) -> Self:
        """Starts the workers."""
        self._exits.enter_context(self._pool)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Ends them."""
        self._exits.__exit__(kind, error, trace)

    def check(self, plan: InputPlan) -> None:
        """Nothing to check: this process has read the plan."""

    def load(self, encoder: EncoderSpec) -> None:
        """Gives the workers their vocabulary."""
        self._pool.load(encoder)

    def blocks(self, plan: InputPlan, cursor: Cursor | None, stop: threading.Event) -> Iterator[EncodedBlock]:
        """As the workers give them; once in the life of an engine."""
        return self._pool.blocks(tasks(plan, cursor), stop)

    def storage(self, commit_log: CommitLog, source: str, next_merge_id: int, *, packed: bool) -> ShardWriter:
        """Writes from this process's memory."""
        return ShardWriter(commit_log, source, next_merge_id, packed)

    @property
    def commit_interval_s(self) -> float:
        """None: a commit's 1.3 ms are nothing beside the work on a shard."""
        return 0.0

    def store_threads(self, store: Store) -> int:
        """A disk is kept busy by 2 threads, an uplink, each of whose requests waits, by 8.

        A thread takes some 50 ms of processor time a shard, a worker 150: with many workers a disk needs more of them.
        """
        return store_threads(store, self._num_workers)


def store_threads(store: Store, num_workers: int) -> int:
    """How many shards a machine with that many workers stores at once."""
    return min(max(2, num_workers // 2), 8) if isinstance(store, FolderStore) else 8


def make_engine(options: PopulateOptions) -> PopulateEngine:
    """The engine the options ask for; it starts when it is entered.

    Raises:
        UsageError: it is not installed.
    """
    if options.engine == "local":
        return LocalEngine(options.num_workers)
    try:
        from genesis.populate.ray_engine import RayEngine
    except ModuleNotFoundError as error:
        raise UsageError(f"--engine ray: {with_extra(error)}") from None
    return RayEngine(options)

"""`GenesisDataset`: a node's stream of batches in the shape torch expects, in one process or in DataLoader workers.

Guarantees: the batches are a function of the options, the store's shards and the steps at which shards were left early;
a state resumes to the exact next batch; the sequence is the same for 0, 1 and 4 workers. A batch is whole when it comes
out, so `DataLoader` is given ``batch_size=None``. Use no workers unless something else in the pipeline needs them: a
batch takes 7 to 15 µs here, and 1.4 ms to get out of a worker.

The constructor finds the manifest and pins the node's shards, against the rule of this house that constructors do no
work: whatever is forked off afterwards has to share that pin.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import IterableDataset, get_worker_info

from loader.board import WorkerBoard
from loader.cache import settings as cache_settings
from loader.errors import LoaderError, LoaderUsageError
from loader.feed import Feed, FeedStats
from loader.node_stream import NodeStream
from loader.options import Extra, Split, StoreOptions, StreamOptions
from loader.session import Session
from loader.state import StreamState, WorkerState
from loader.stream.assignment import DEFAULT_COUNT, Assignment
from loader.stream.plateau import PlateauKind, PlateauRule

if TYPE_CHECKING:
    from manifests import Manifest

__all__ = ["Batch", "GenesisDataset"]

Batch = dict[str, torch.Tensor]

logger = logging.getLogger(__name__)


class GenesisDataset(IterableDataset[Batch]):
    """Batches of a node's shards, endless unless ``epochs`` says otherwise.

    Iterating again goes on where iterating stopped. With DataLoader workers that is known of whole passes only: one
    that was broken off begins again, unless ``load_state_dict(state_dict(step=N))`` says how far training has come.
    """

    def __init__(
        self,
        store: str | os.PathLike[str],
        node_id: str,
        *,
        seq_len: int = 1024,
        batch_size: int = 8,
        seed: int = 0,
        mirrors: Sequence[str] = (),
        public_key: str | os.PathLike[str] | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
        cache_bytes: int | str | None = None,
        max_bytes_per_s: float | None = None,
        timeout_s: float = 600.0,
        count: int = DEFAULT_COUNT,
        assignment: Assignment = "modulo",
        sources: Mapping[str, float] | None = None,
        holdout: int = 0,
        split: Split = "train",
        epochs: int | None = None,
        plateau: PlateauKind | PlateauRule = "absolute",
        extras: Sequence[Extra] = (),
    ) -> None:
        """Finds the store and pins the node's shards.

        Args:
            store: a folder, ``s3://bucket/prefix`` or ``http(s)://host/prefix``.
            node_id: decides which shards, and in which order.
            seq_len: T, ids a row.
            batch_size: B, rows a batch.
            seed: of the run.
            mirrors: further addresses of the same store.
            public_key: PEM file of the key that must have signed the manifest.
            cache_dir: where shards are kept; by default ``GENESIS_CACHE_DIR`` or ``~/.neuroshard/data_cache``.
            cache_bytes: how much is kept, as a number or ``"20GB"``; by default ``GENESIS_CACHE_BYTES`` or 20 GB.
            max_bytes_per_s: cap on downloads.
            timeout_s: how long to try for a shard before `DataUnavailableError`.
            count: shards the node is given, of each source.
            assignment: ``modulo`` (001) or ``rendezvous``.
            sources: weights by source; by default all shards alike.
            holdout: the first so many shards of every source are not trained on.
            split: ``holdout`` to read exactly those, all of them.
            epochs: end an iteration after this many passes over the shards.
            plateau: when to leave a shard early.
            extras: any of ``positions``, ``document_ids`` (int64[B, T]) and ``cu_seqlens`` (int32[D + 1]).

        Raises:
            LoaderUsageError: options that make no sense.
            DataUnavailableError: the store cannot be reached.
            UntrustedManifestError: its manifest may not be believed.
        """
        super().__init__()
        store_options = StoreOptions(
            mirrors=(str(store), *mirrors),
            public_key=Path(public_key) if public_key is not None else None,
            cache_dir=cache_settings.cache_dir(cache_dir),
            cache_bytes=cache_settings.cache_bytes(cache_bytes),
            max_bytes_per_s=max_bytes_per_s,
            timeout_s=timeout_s,
        )
        self._options = StreamOptions(
            node_id=node_id,
            seq_len=seq_len,
            batch_size=batch_size,
            seed=seed,
            count=count,
            assignment=assignment,
            sources=tuple((sources or {}).items()),
            holdout=holdout,
            split=split,
            epochs=epochs,
            plateau=plateau if isinstance(plateau, PlateauRule) else PlateauRule(plateau),
            extras=tuple(extras),
        )
        self._session = Session.open(store_options)
        self._stream = NodeStream.begin(self._options, self._session.catalog)
        self._origin = self._stream.state()
        self._board = WorkerBoard.create()
        self._generation = 0
        self._worker: WorkerState | None = None
        self._worker_is_used = False
        self._feed: Feed | None = None
        self._feed_pid = -1
        self._iterates_here = False

    @property
    def manifest(self) -> Manifest:
        """The manifest that the stream's shards were found in."""
        return self._session.catalog.document()

    @property
    def options(self) -> StreamOptions:
        """What decides the stream."""
        return self._options

    @property
    def shards(self) -> tuple[int, ...]:
        """The shards that are read in this epoch, in order; of several sources, one source after the other."""
        return tuple(shard for plan in self._stream.plans for shard in plan.lane.shards)

    @property
    def rotations(self) -> tuple[int, ...]:
        """The steps before which a shard was left early: with them `replay` finds any batch."""
        return tuple(sorted({*self._stream.rotations, *self._board.look().rotations}))

    @property
    def stats(self) -> FeedStats:
        """What was opened in this process, and how long batches waited for it."""
        return self._own_feed().stats

    @property
    def received_bytes(self) -> int:
        """Bytes that came over the network in this process."""
        return self._session.mirrors.received_bytes

    def __iter__(self) -> Iterator[Batch]:
        info = get_worker_info()
        if info is not None:
            try:
                self._worker = self._begin_worker_pass(info.id, info.num_workers, info.seed - info.id)
            except LoaderError as error:
                return _failing(error)
            self._stream.begin_pass()
            return self._worker_batches(self._worker)
        self._stream.begin_pass()
        return self._batches()

    def report_loss(self, loss: float) -> None:
        """Feeds the plateau rule with the loss of the latest batch; where it fires, the shard is left.

        Call it in the process that trains, once a batch. With DataLoader workers, which are some batches ahead, the
        rotation takes place behind the furthest batch that any has begun.
        """
        follows = self._follow_workers()
        if self._stream.report_loss(float(loss)) is not None:
            self._stream.add_rotation(self._board.rotate() if follows else self._stream.step)

    def refresh(self) -> int:
        """Takes the store's newest manifest: from its next epoch on, a lane reads what the node is assigned in it.

        Returns:
            How many shards the store has now.

        Raises:
            LoaderUsageError: DataLoader workers are within a pass.
            LoaderError: the store cannot be asked, or has another history; the stream goes on as it was.
        """
        if self._workers_make_batches():
            self._settle_between_passes()
        catalog = self._session.newest_catalog()
        total = self._stream.adopt(catalog)
        self._session = replace(self._session, catalog=catalog)
        if self._feed is not None:
            self._feed.adopt(catalog)
        self._origin = self._stream.state()
        return total

    def state_dict(self, *, step: int | None = None) -> dict[str, Any]:
        """Where the stream stands: behind the last batch that came out.

        Args:
            step: where it stood behind so many batches: needed with plain DataLoader workers, whose progress this
                object cannot see. It must not lie before the state that was loaded last.

        Returns:
            Plain JSON values, some 600 bytes.

        Raises:
            LoaderUsageError: DataLoader workers make the batches, and ``step`` is not given.
        """
        if step is not None:
            return self._state_at(step).to_dict()
        if get_worker_info() is None and self._workers_make_batches():
            raise LoaderUsageError(
                "expected state_dict(step=N), N the batches that were taken, since DataLoader workers make them, found "
                "no step; or use torchdata's StatefulDataLoader"
            )
        if self._worker is not None and get_worker_info() is not None:
            return replace(self._stream.state(in_worker=True), worker=self._worker).to_dict()
        return self._stream.state().to_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Goes to where a state says; the next batch is the one that followed it.

        Raises:
            StateMismatchError: the state is of another stream, store or release.
            LoaderError: the store's index cannot be had.
        """
        state = StreamState.from_dict(state_dict)
        stream = self._resumed(state)
        self._stream, self._worker = stream, state.worker
        self._origin = stream.state()
        self._iterates_here = False
        if get_worker_info() is None:
            self._generation = self._board.reset(state.step, state.rotations)
        else:
            self._board.merge(state.rotations)

    def replay(
        self, node_id: str, step: int, *, rotations: Sequence[int] = (), total_shards: int | None = None
    ) -> Batch:
        """The batch a node with the same options must have trained on at a step.

        Args:
            node_id: the node.
            step: counts its batches from 0.
            rotations: the steps before which it left a shard early (its `rotations`).
            total_shards: what its run was pinned to; by default what this one began with.

        Raises:
            LoaderUsageError: steps are never negative.
            LoaderError: a shard cannot be had.
        """
        from loader.replay import replay_batch

        total = total_shards if total_shards is not None else self._origin.lanes[0].total_shards
        return replay_batch(self._session, replace(self._options, node_id=node_id), step, rotations, total)

    def close(self) -> None:
        """Lets go of shards and connections; iterating again opens them anew."""
        self._feed = None
        self._session.mirrors.close()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_feed": None, "_feed_pid": -1}

    def _batches(self) -> Iterator[Batch]:
        stream = self._stream
        self._generation = self._board.reset(stream.step, stream.rotations)
        while True:
            self._iterates_here = True
            if self._stream is not stream:  # A state was loaded since.
                stream = self._stream
                stream.begin_pass()
            batch = _next_batch(stream, self._own_feed())
            if batch is None:
                return
            yield batch

    def _worker_batches(self, worker: WorkerState) -> Iterator[Batch]:
        """Every ``worker.count``-th batch of the stream, this worker's."""
        stream, feed = self._stream, self._own_feed()
        step = worker.origin + worker.id
        step += -(-max(0, stream.step - step) // worker.count) * worker.count
        while True:
            for rotation in self._board.announce(step):
                stream.add_rotation(rotation)
            stream.seek(step)
            batch = _next_batch(stream, feed)
            if batch is None:
                self._board.end_pass(stream.step)
                return
            yield batch
            step += worker.count

    def _begin_worker_pass(self, worker_id: int, num_workers: int, seed: int) -> WorkerState:
        """Takes this worker to where all of them begin."""
        reused, self._worker_is_used = self._worker_is_used, True
        known = self._worker
        if not reused and known is not None and (known.id, known.count) == (worker_id, num_workers):
            self._board.join_pass(worker_id, seed, self._generation, known.origin, resumed=True, reused=False)
            if self._stream.schedule.is_over:
                # DataLoader may not ask this worker again before it begins the next pass with other processes.
                self._board.end_pass(self._stream.step)
            return known
        first = self._stream.step if self._iterates_here else self._origin.step
        origin = self._board.join_pass(worker_id, seed, self._generation, first, resumed=False, reused=reused)
        self._move(origin)
        return WorkerState(id=worker_id, count=num_workers, origin=origin)

    def _settle_between_passes(self) -> None:
        """Goes to where the workers' next pass begins.

        Raises:
            LoaderUsageError: they are within one, and only the training loop knows how far it has come.
        """
        end = self._board.look().pass_end
        if end is None:
            raise LoaderUsageError(
                "expected refresh() between two passes of DataLoader workers, found them within one; call "
                "load_state_dict(state_dict(step=N)), N the batches that were taken, refresh(), and make a new "
                "DataLoader"
            )
        self._move(end)
        self._origin = self._stream.state()
        self._generation = self._board.reset(end, self._stream.rotations)

    def _workers_make_batches(self) -> bool:
        """Whether it is DataLoader workers that have gone on from where this process stood."""
        furthest = self._board.look().furthest
        if self._iterates_here and furthest >= self._stream.step:
            self._iterates_here = False
        return not self._iterates_here and furthest >= self._origin.step

    def _follow_workers(self) -> bool:
        """Goes on to behind the furthest batch that workers have begun, if any have; whether they have."""
        if not self._workers_make_batches():
            return False
        self._move(self._board.look().furthest + 1)
        return True

    def _move(self, step: int) -> None:
        """Moves the stream to a step, leaving shards early wherever any process knows of it."""
        rotations = self.rotations
        if step < self._stream.step or rotations != self._stream.rotations:
            self._stream = self._resumed(replace(self._origin, rotations=rotations))
        self._stream.seek_through(step)

    def _own_feed(self) -> Feed:
        """The feed of this process: threads and open shards do not outlive a fork."""
        if self._feed is None or self._feed_pid != os.getpid():
            session = self._session
            self._feed = Feed(self._options, session.catalog, session.opener, session.options.timeout_s)
            self._feed_pid = os.getpid()
        return self._feed

    def _state_at(self, step: int) -> StreamState:
        if step < self._origin.step:
            raise LoaderUsageError(f"expected a step of {self._origin.step} or later, found {step}")
        stream = self._resumed(replace(self._origin, rotations=self.rotations))
        stream.seek_through(step)
        return replace(stream.state(), losses=self._stream.state().losses)

    def _resumed(self, state: StreamState) -> NodeStream:
        """A stream at a state; a store that has grown since this manifest was read is looked at again."""
        most = max((lane.next_total_shards or lane.total_shards for lane in state.lanes), default=0)
        if most > self._session.catalog.manifest.total_shards:
            self._session = replace(self._session, catalog=self._session.newest_catalog())
            self._feed = None
        return NodeStream.resume(self._options, self._session.catalog, state)


def _failing(error: LoaderError) -> Iterator[Batch]:
    """Raises when a batch is asked for: a persistent worker that fails before that dies without a word."""

    def fail() -> Batch:
        raise error

    return iter(fail, None)


def _next_batch(stream: NodeStream, feed: Feed) -> Batch | None:
    """The next batch; None at the end. Where it cannot be made, the stream stays where it is."""
    mark = stream.mark()
    rows = stream.next_rows()
    if not rows:
        return None
    try:
        arrays = feed.batch(rows, stream.schedule)
    except BaseException:  # Ctrl-C too: whoever catches it may save a state.
        stream.rewind(mark)
        raise
    return {name: torch.from_numpy(array) for name, array in arrays.items()}

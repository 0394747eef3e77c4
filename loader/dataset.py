"""`GenesisDataset`: a node's stream of batches in the shape torch expects, in one process or in DataLoader workers.

Guarantees: the batches are a function of the options, the store's shards and the steps at which shards were left early;
a state resumes to the exact next batch; the sequence is the same for 0, 1 and 4 workers. A batch comes out whole, so
`DataLoader` is given ``batch_size=None``. Use no workers unless something else in the pipeline needs them: a batch
takes some 15 µs here, and 1.4 ms to get out of a worker.

The constructor finds the manifest and pins the node's shards, so that processes forked afterwards share the pin.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from multiprocessing.context import get_spawning_popen
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.utils.data import IterableDataset, get_worker_info

from loader.errors import LoaderError, LoaderUsageError
from loader.feed import Feed, FeedStats
from loader.options import Extra, Labels, Split, StoreOptions, StreamOptions
from loader.plan import Pin, parse_pins
from loader.ranks import check_not_dispatched, resolve_ranks
from loader.session import Session
from loader.shared_stream import SharedStream
from loader.shares import shares_of_file
from loader.state import StreamState
from loader.stream.assignment import DEFAULT_COUNT, Assignment
from loader.stream.mixture import Mixture
from loader.stream.plateau import PlateauKind, PlateauRule
from loader.stream.schedule import Schedule, rows_of_rank

if TYPE_CHECKING:
    from manifests import Manifest

Batch = dict[str, torch.Tensor]


class GenesisDataset(IterableDataset[Batch]):
    """Batches of a node's shards, endless unless ``epochs`` says otherwise.

    Iterating again continues where iterating stopped. With DataLoader workers that holds for whole passes only: a pass
    that was broken off begins again, with a warning, unless ``load_state_dict(state_dict(step=N))`` tells how far
    training has come. A copy, by pickle or by a fork other than of DataLoader workers, has a stream of its own.

    Args:
        store: a folder, ``s3://bucket/prefix`` or ``http(s)://host/prefix``.
        node_id: decides which shards, and in which order; the same for all ranks that share them.
        seq_len: T, ids a row.
        batch_size: B, rows a batch, of this rank.
        seed: of the run.
        mirrors: further addresses of the same store.
        public_key: PEM file of the key that must have signed the manifest.
        cache_dir: where shards are kept; by default ``GENESIS_CACHE_DIR`` or ``~/.neuroshard/data_cache``.
        cache_bytes: how much is kept, as a number or ``"20GB"``; by default ``GENESIS_CACHE_BYTES`` or 20 GB.
        max_bytes_per_s: cap on downloads.
        timeout_s: how long to try for a shard before `DataUnavailableError`.
        count: shards the node is given, of each source; None for all of the store.
        total_shards: begin as if the store had only its first so many shards, on which ranks agree while it grows; by
            default all that are there now.
        assignment: ``modulo`` (spec L-2) or ``rendezvous``.
        sources: token shares by source, as weights of any sum, or the path of a sources.json that has them; by default
            all shards alike.
        mixture: ``weyl`` for the order of sources that runs had before ``exact``; a state decides for itself.
        holdout: the first so many shards of every source are not trained on.
        split: ``holdout`` to read exactly those, all of them.
        epochs: end an iteration after this many passes over the shards.
        plateau: when to leave a shard early; by default ``absolute``, of several ranks ``off``, which is all they may.
        extras: any of ``positions``, ``document_ids`` (int64[B, T]) and ``cu_seqlens`` (int32[D + 1]).
        labels: ``shifted``: each the id after its input. ``input_ids``: the inputs themselves, for models that shift
            labels in their forward pass, as those of transformers do.
        rank: this process among the ``world_size`` that deal the node's windows out, each window to one of them;
            ``auto`` takes both from torch.distributed or torchrun.
        world_size: how many there are.

    Raises:
        LoaderUsageError: invalid options.
        DataUnavailableError: the store cannot be reached.
        UntrustedManifestError: its manifest cannot be trusted.
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
        count: int | None = DEFAULT_COUNT,
        total_shards: int | None = None,
        assignment: Assignment = "modulo",
        sources: Mapping[str, float] | str | os.PathLike[str] | None = None,
        mixture: Mixture = "exact",
        holdout: int = 0,
        split: Split = "train",
        epochs: int | None = None,
        plateau: PlateauKind | PlateauRule | None = None,
        extras: Sequence[Extra] = (),
        labels: Labels = "shifted",
        rank: int | Literal["auto"] | None = None,
        world_size: int | None = None,
    ) -> None:
        super().__init__()
        rank, world_size = resolve_ranks(rank, world_size)
        if plateau is None:
            plateau = "absolute" if world_size == 1 else "off"
        store_options = StoreOptions.of(
            store,
            mirrors=mirrors,
            public_key=public_key,
            cache_dir=cache_dir,
            cache_bytes=cache_bytes,
            max_bytes_per_s=max_bytes_per_s,
            timeout_s=timeout_s,
        )
        if not node_id:
            raise LoaderUsageError("node_id: expected a name, found an empty one")
        self._options = StreamOptions(
            node_id=node_id,
            seq_len=seq_len,
            batch_size=batch_size,
            seed=seed,
            count=count,
            total_shards=total_shards,
            assignment=assignment,
            sources=_weights(sources),
            mixture=mixture,
            holdout=holdout,
            split=split,
            epochs=epochs,
            plateau=plateau if isinstance(plateau, PlateauRule) else PlateauRule(plateau),
            extras=tuple(extras),
            labels=labels,
            rank=rank,
            world_size=world_size,
        )
        self._shared = SharedStream(self._options, Session.open(store_options))
        self._feed: Feed | None = None
        self._feed_pid = -1

    @property
    def manifest(self) -> Manifest:
        """The manifest in use."""
        return self._shared.session.catalog.document()

    @property
    def eos_id(self) -> int:
        """The id that ends every document: 2, or that of a vocabulary made elsewhere."""
        return self._shared.session.catalog.manifest.eos_id

    @property
    def options(self) -> StreamOptions:
        """The options that decide the stream."""
        return self._options

    @property
    def shards(self) -> tuple[int, ...]:
        """The shards that are read in this epoch, in order; of several sources, one source after the other."""
        return tuple(shard for plan in self._shared.stream.plans for shard in plan.lane.shards)

    @property
    def rotations(self) -> tuple[int, ...]:
        """The steps before which a shard was left early: with them and `pins`, `replay` finds any batch."""
        return self._shared.rotations

    @property
    def pins(self) -> tuple[tuple[Pin, ...], ...]:
        """For each lane (one per source, or one for all) from which epoch on it knew how many shards of the store.

        The first pin has epoch 0; each `refresh` that finds more shards adds one.
        """
        return self._shared.stream.pins

    @property
    def stats(self) -> FeedStats:
        """The shards opened in this process, and how long batches waited for them."""
        return self._own_feed().stats

    @property
    def received_bytes(self) -> int:
        """Bytes that came over the network in this process."""
        return self._shared.session.mirrors.received_bytes

    def __iter__(self) -> Iterator[Batch]:
        info = get_worker_info()
        if info is None:
            check_not_dispatched(self._options.world_size)
            stream = self._shared.stream
            stream.schedule.begin_pass()
            return self._batches(self._shared.turns_here(stream))
        try:
            check_not_dispatched(self._options.world_size)
            worker = self._shared.begin_in_worker(info.id, info.num_workers, info.seed - info.id)
        except LoaderError as error:
            return _failing(error)
        return self._batches(self._shared.turns_in_worker(worker))

    def report_loss(self, loss: float | torch.Tensor) -> None:
        """Feeds the plateau rule with the loss of the latest batch; if it fires, the shard is left.

        Call it in the process that trains, once a batch. With DataLoader workers, which are some batches ahead, the
        rotation takes place behind the furthest batch that any has begun, to whose shard the loss counts.
        """
        self._shared.report_loss(loss.item() if isinstance(loss, torch.Tensor) else float(loss))

    def refresh(self) -> int:
        """Takes the store's newest manifest: from its next epoch on, a lane reads what the node is assigned in it.

        Returns:
            How many shards the store has now.

        Raises:
            LoaderUsageError: DataLoader workers are within a pass, or this is not the first of several ranks.
            LoaderError: the store cannot be asked, or has another history; the stream goes on as it was.
        """
        if self._options.rank:
            raise LoaderUsageError(
                f"expected refresh() on rank 0, found rank {self._options.rank}, which may see another number of "
                "shards; load the state_dict() of rank 0 after its refresh()"
            )
        return self._shared.refresh()

    def state_dict(self, *, step: int | None = None) -> dict[str, Any]:
        """The state behind the last batch.

        With workers and a plateau rule save ``state_dict(step=N)`` of this object. StatefulDataLoader keeps what its
        workers knew when they made the latest batch; a rotation that was set since is missing from its state.

        Args:
            step: the state behind so many batches, no fewer than at the last load: needed with plain DataLoader
                workers, whose progress this object cannot see.

        Returns:
            Plain JSON values, some 600 bytes.

        Raises:
            LoaderUsageError: DataLoader workers make the batches, and ``step`` is not given.
        """
        shared = self._shared
        if step is not None:
            return shared.state(step).to_dict()
        if get_worker_info() is not None and shared.worker is not None:
            return replace(shared.stream.state(in_worker=True), worker=shared.worker).to_dict()
        if get_worker_info() is None and shared.workers_make_batches():
            raise LoaderUsageError(
                "expected state_dict(step=N), N the batches that were taken, since DataLoader workers make them, found "
                "no step; or use torchdata's StatefulDataLoader"
            )
        return shared.stream.state().to_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restores a state; the next batch is the one that followed it.

        Raises:
            StateMismatchError: the state belongs to another stream, store or release.
            LoaderError: the store's index is unavailable.
        """
        self._shared.load(StreamState.from_dict(state_dict), in_worker=get_worker_info() is not None)

    def replay(
        self,
        node_id: str,
        step: int,
        *,
        rotations: Sequence[int] = (),
        pins: Sequence[Sequence[Sequence[int]]] | None = None,
        total_shards: int | None = None,
        rank: int | None = None,
    ) -> Batch:
        """Recomputes the batch on which a node with the same options must have trained.

        Args:
            node_id: the node.
            step: counts its batches from 0.
            rotations: the steps before which it left a shard early (its `rotations`).
            pins: for each lane, from which epoch on it knew how many shards (its `pins`); by default as here.
            total_shards: in place of ``pins``, of a run that never called `refresh`.
            rank: which of its ranks, in a run that had the same number of them all the time; by default as here.

        Raises:
            LoaderUsageError: a step is negative or absurd, the store has fewer shards, or both pins and total_shards
                are given.
            LoaderError: a shard is unavailable.
        """
        from loader.replay import replay_batch

        if pins is not None and total_shards is not None:
            raise LoaderUsageError("expected pins or total_shards, found both; total_shards=n is pins=[[(0, n)]]")
        if total_shards is not None:
            pins = [[(0, total_shards)]] * self._options.num_lanes
        pinned = parse_pins(pins, self._options.num_lanes) if pins is not None else self.pins
        session = self._shared.session
        if max(lane[-1].total_shards for lane in pinned) > session.catalog.manifest.total_shards:
            session = replace(session, catalog=session.newest_catalog())
        options = replace(
            self._options,
            node_id=node_id,
            mixture=self._shared.stream.schedule.mixture,
            rank=self._options.rank if rank is None else rank,
        )
        return replay_batch(session, options, step, rotations, pinned)

    def close(self) -> None:
        """Releases shards and connections; iterating again opens them anew."""
        self._feed = None
        self._shared.session.mirrors.close()

    def __getstate__(self) -> dict[str, Any]:
        if get_spawning_popen() is not None:  # In a worker that is spawned nothing is left of who wanted it.
            check_not_dispatched(self._options.world_size)
        return {**self.__dict__, "_feed": None, "_feed_pid": -1}

    def _batches(self, turns: Iterator[Schedule]) -> Iterator[Batch]:
        for schedule in turns:
            mark = schedule.mark()
            rows = rows_of_rank(schedule.next_rows(), self._options.rank, self._options.world_size)
            if not rows:
                continue  # The pass is over, and so are its turns, or its last batch had fewer rows than ranks.
            try:
                arrays = self._own_feed().batch(rows, schedule)
            except BaseException:  # Ctrl-C too: its handler may save a state, which must name this batch.
                schedule.rewind(mark)
                raise
            yield {name: torch.from_numpy(array) for name, array in arrays.items()}

    def _own_feed(self) -> Feed:
        """The feed of this process: threads and open shards do not outlive a fork."""
        session = self._shared.session
        if self._feed is None or self._feed_pid != os.getpid():
            self._feed = Feed(self._options, session)
            self._feed_pid = os.getpid()
        self._feed.adopt(session)
        return self._feed


def _weights(sources: Mapping[str, float] | str | os.PathLike[str] | None) -> tuple[tuple[str, float], ...]:
    if isinstance(sources, str | os.PathLike):
        return shares_of_file(Path(sources))
    if sources is not None and not isinstance(sources, Mapping):
        raise LoaderUsageError(
            f"sources: expected shares by source, such as {{'c4': 1.0}}, or the path of a sources.json, found "
            f"{sources!r}"
        )
    return tuple((sources or {}).items())


def _failing(error: LoaderError) -> Iterator[Batch]:
    """Raises when a batch is asked for: a persistent worker that fails before that dies without a word."""

    def fail() -> Batch:
        raise error

    return iter(fail, None)

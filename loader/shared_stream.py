"""Where a node's stream stands, for the process that trains and for every DataLoader worker it starts.

The batches come from one of two places, and the one may take over from the other between two batches:

- **this process** (`begin_here`, `go_on_here`): `stream` stands behind the latest batch;
- **DataLoader workers** (`begin_in_worker`, `turns`), each with a copy of this object: `stream` stays behind in the
  process that trains, whose copy learns from the `WorkerBoard` how far they are, and how that ended.

What holds either way: the stream at a step is a function of `origin` (where it last stood for certain) and of the
rotations that any process knows of. So this object goes to any step by starting from there, and needs no news of what
happened on the way.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Self

from loader.board import WorkerBoard
from loader.errors import LoaderUsageError
from loader.node_stream import NodeStream
from loader.options import StreamOptions
from loader.session import Session
from loader.state import StreamState, WorkerState

__all__ = ["SharedStream"]


class SharedStream:
    """A `NodeStream` that several processes go through together. Use `begin`.

    Args:
        options: the stream's.
        session: the store.
        stream: at its beginning.
    """

    def __init__(self, options: StreamOptions, session: Session, stream: NodeStream) -> None:
        self._options = options
        self._origin = stream.state()
        self._board = WorkerBoard()
        self._worker: WorkerState | None = None
        self._iterates_here = False
        self.session = session
        self.stream = stream

    @classmethod
    def begin(cls, options: StreamOptions, session: Session) -> Self:
        """A stream at its beginning, pinned to the shards there are.

        Raises:
            LoaderError: the node has no shards, or the index cannot be had.
        """
        shared = cls(options, session, NodeStream.begin(options, session.catalog))
        shared._board.open()
        return shared

    @property
    def rotations(self) -> tuple[int, ...]:
        """The steps before which a shard was, or will be, left early, whichever process knows of it."""
        return tuple(sorted({*self.stream.rotations, *self._board.rotations()}))

    @property
    def worker(self) -> WorkerState | None:
        """Which of several workers this process is, or a state of which was loaded."""
        return self._worker

    # In this process.

    def begin_here(self) -> None:
        """Begins a pass whose batches this process makes."""
        self._board.reset(self.stream.step, self.stream.rotations)

    def go_on_here(self, stream: NodeStream) -> NodeStream:
        """The stream that the next batch comes from: the one before, unless a state was loaded since."""
        self._iterates_here = True
        if self.stream is not stream:
            self.stream.begin_pass()
        return self.stream

    # In a worker.

    def begin_in_worker(self, worker_id: int, num_workers: int, seed: int) -> WorkerState:
        """Takes this worker to where all of them begin, or goes on where its state was taken.

        Raises:
            LoaderUsageError: nobody can know where that is.
            LoaderError: the store's index cannot be had.
        """
        known = self._worker
        if not self._board.has_joined and known is not None and (known.id, known.count) == (worker_id, num_workers):
            self._board.join_pass(worker_id, seed, known.origin, resumed=True)
            if self.stream.schedule.is_over:
                # DataLoader may not ask this worker again before it begins the next pass with other processes.
                self.end_in_worker()
        else:
            first = self.stream.step if self._iterates_here else self._origin.step
            origin = self._board.join_pass(worker_id, seed, first, resumed=False)
            self._move(origin)
            known = WorkerState(id=worker_id, count=num_workers, origin=origin)
        self._worker = known
        self.stream.begin_pass()
        return known

    def turns(self, worker: WorkerState) -> Iterator[NodeStream]:
        """The stream, at one after the other of the batches that are this worker's: every ``worker.count``-th."""
        stream, known = self.stream, 0
        step = worker.origin + worker.id
        step += -(-max(0, stream.step - step) // worker.count) * worker.count
        while True:
            for rotation in self._board.announce(step, known):
                stream.add_rotation(rotation)
                known += 1
            stream.seek(step)
            yield stream
            step += worker.count

    def end_in_worker(self) -> None:
        """Says that the pass ends where this worker stands."""
        self._board.end_pass(self.stream.step)

    # Whoever makes the batches.

    def workers_make_batches(self) -> bool:
        """Whether it is DataLoader workers that have gone on from where this process stood."""
        furthest = self._board.look().furthest
        if self._iterates_here and furthest >= self.stream.step:
            self._iterates_here = False
        return not self._iterates_here and furthest >= self._origin.step

    def report_loss(self, loss: float) -> None:
        """Feeds the plateau rule with the loss of the latest batch, or of one that workers have made lately."""
        follows = self.workers_make_batches()
        if follows:
            self._move(self._board.look().furthest + 1)
        if self.stream.report_loss(loss) is not None:
            self.stream.add_rotation(self._board.rotate() if follows else self.stream.step)

    def refresh(self) -> int:
        """Takes the store's newest manifest; returns how many shards it has.

        Raises:
            LoaderUsageError: workers are within a pass.
            LoaderError: the store cannot be asked, or has another history; the stream goes on as it was.
        """
        if self.workers_make_batches():
            self._settle_between_passes()
        catalog = self.session.newest_catalog()
        total = self.stream.adopt(catalog)
        self.session = replace(self.session, catalog=catalog)
        self._origin = self.stream.state()
        return total

    def state(self, step: int) -> StreamState:
        """Where the stream stood, or will stand, behind so many batches.

        Raises:
            LoaderUsageError: that is before the origin.
        """
        if step < self._origin.step:
            raise LoaderUsageError(f"expected a step of {self._origin.step} or later, found {step}")
        stream = self._resumed(replace(self._origin, rotations=self.rotations))
        stream.seek_through(step)
        return replace(stream.state(), losses=self.stream.state().losses)

    def load(self, state: StreamState, *, in_worker: bool) -> None:
        """Goes to where a state says.

        Raises:
            StateMismatchError: it is of another stream or store.
            LoaderError: the store's index cannot be had.
        """
        stream = self._resumed(state)
        self.stream, self._worker = stream, state.worker
        self._origin = stream.state()
        self._iterates_here = False
        if in_worker:
            self._board.merge(state.rotations)
        else:
            self._board.reset(state.step, state.rotations)

    def _settle_between_passes(self) -> None:
        """Goes to where the workers' next pass begins."""
        end = self._board.look().pass_end
        if end is None:
            raise LoaderUsageError(
                "expected refresh() between two passes of DataLoader workers, found them within one; call "
                "load_state_dict(state_dict(step=N)), N the batches that were taken, refresh(), and make a new "
                "DataLoader"
            )
        self._move(end)
        self._origin = self.stream.state()
        self._board.reset(end, self.stream.rotations)

    def _move(self, step: int) -> None:
        """Moves the stream to a step, leaving shards early wherever any process knows of it."""
        rotations = self.rotations
        if step < self.stream.step or rotations != self.stream.rotations:
            self.stream = self._resumed(replace(self._origin, rotations=rotations))
        self.stream.seek_through(step)

    def _resumed(self, state: StreamState) -> NodeStream:
        """A stream at a state; a store that has grown since this manifest was read is looked at again."""
        most = max((lane.next_total_shards or lane.total_shards for lane in state.lanes), default=0)
        if most > self.session.catalog.manifest.total_shards:
            self.session = replace(self.session, catalog=self.session.newest_catalog())
        return NodeStream.resume(self._options, self.session.catalog, state)

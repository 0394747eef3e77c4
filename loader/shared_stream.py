"""One node's stream in the process that trains and in the DataLoader workers it starts.

Either makes the batches, and may take over between two: the stream at a step is a function of `_origin`, where it last
stood for certain, and of the rotations that any process knows of. A worker announces a batch before it makes it, and a
rotation is set behind the furthest batch announced, under one lock: so each worker knows every rotation that concerns
its batch. The first worker that joins a pass settles where it begins: where the last pass ended, or, if that was broken
off, where that began.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import struct
import tempfile
import time
import uuid
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from multiprocessing.context import get_spawning_popen
from pathlib import Path
from typing import Any, Final, NamedTuple

from torch.utils.data import get_worker_info

from genesis.file_lock import try_lock, unlock
from loader.errors import LoaderError, LoaderUsageError
from loader.node_stream import NodeStream
from loader.options import StreamOptions
from loader.session import Session
from loader.state import StreamState, WorkerState
from loader.stream.schedule import Schedule

logger = logging.getLogger(__name__)

MAX_WORKERS: Final = 256
NEVER: Final = -1

_COUNTERS: Final = struct.Struct("<qqqqqq32s")
_ROTATION_BYTES: Final = 8
_LOCK_TIMEOUT_S: Final = 10.0
"""The lock is held for microseconds, unless its holder was stopped."""


class _Counters(NamedTuple):
    """The head of a board's file, written by one call; the rotations follow."""

    furthest: int = -1  # The furthest batch that was announced; one before the first if none was.
    num_rotations: int = 0
    generation: int = 0  # How often the training process moved the stream, which workers from before do not know.
    seed: int = 0  # Of the DataLoader iterator whose pass this is.
    origin: int = NEVER  # The step the pass began with.
    end: int = NEVER  # The step behind the last batch of the pass, once a worker has come there.
    joined: bytes = bytes(MAX_WORKERS // 8)  # A bit for each worker that has begun the pass.


class WorkerBoard:
    """Rotations and passes of one stream, shared by a process and its DataLoader workers in a locked file.

    A spawned worker finds the file by its name, and a killed one leaves no lock behind. The dataset in any other
    process, by a fork or a pickle, has a board of its own that begins as a copy. The file is opened for each call, so
    threads exclude each other. Every method raises `LoaderError` if the board stays locked for 10 seconds.
    """

    def __init__(self) -> None:
        self._stem = str(Path(tempfile.gettempdir()) / f"genesis-workers-{uuid.uuid4().hex}")
        self._home_pid = os.getpid()
        self._content = b""
        self._generation = 0
        self._is_removed_at_exit = False
        self.has_joined = False
        """Whether this process, a worker, has taken part in a pass."""

    def __getstate__(self) -> dict[str, Any]:
        if get_spawning_popen() is not None:  # multiprocessing starts a process with it.
            return {"_stem": self._stem, "_home_pid": self._home_pid, "_generation": self._generation}
        with self._locked() as (descriptor, _):
            return {"_content": _content_of(descriptor)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__()  # type: ignore[misc]
        self.__dict__.update(state)

    def look(self) -> _Counters:
        """How far the workers are; makes the file if there is none, which is removed when this process ends."""
        with self._locked() as (_, counters):
            return counters

    def rotations(self) -> tuple[int, ...]:
        """All rotations, in the order in which they became known."""
        with self._locked() as (descriptor, counters):
            return _read_rotations(descriptor, counters)

    def reset(self, step: int, rotations: tuple[int, ...]) -> None:
        """Begins a new generation behind ``step`` batches and some rotations."""
        with self._locked() as (descriptor, counters):
            self._generation = max(self._generation, counters.generation) + 1
            _append(descriptor, _Counters(furthest=step - 1, generation=self._generation), rotations)

    def announce(self, step: int, num_known: int) -> tuple[int, ...]:
        """Announces batch ``step``; returns the rotations behind the first ``num_known`` that can ever concern it."""
        with self._locked() as (descriptor, counters):
            if step > counters.furthest:
                _write(descriptor, counters._replace(furthest=step))
            # A worker started before the stream was moved cannot tell which rotations are new.
            is_current = counters.generation in (0, self._generation)
            return _read_rotations(descriptor, counters, num_known if is_current else 0)

    def rotate(self) -> int:
        """Sets a rotation; returns the batch before which it takes place."""
        with self._locked() as (descriptor, counters):
            _append(descriptor, counters, (counters.furthest + 1,))
            return counters.furthest + 1

    def merge(self, rotations: tuple[int, ...]) -> None:
        """Adds the rotations of a worker's state: another worker's state may have been taken before it knew them."""
        with self._locked() as (descriptor, counters):
            known = set(_read_rotations(descriptor, counters))
            _append(descriptor, counters, tuple(step for step in rotations if step not in known))

    def join_pass(self, worker_id: int, seed: int, origin: int, *, resumed: bool) -> int:
        """Takes part in a pass; the first to do so begins it. Returns the step with which it begins.

        Args:
            worker_id: counts from 0.
            seed: of the DataLoader iterator; where a script seeds each alike, a worker that joins again begins another.
            origin: where the first pass begins.
            resumed: the worker continues, from a loaded state, a pass that began at ``origin``.

        Raises:
            LoaderUsageError: a persistent worker cannot know where this pass begins.
        """
        if worker_id >= MAX_WORKERS:
            raise LoaderUsageError(f"expected at most {MAX_WORKERS} DataLoader workers, found worker {worker_id}")
        reused, self.has_joined = self.has_joined, True
        with self._locked() as (descriptor, counters):
            if counters.generation not in (0, self._generation):
                raise LoaderUsageError(
                    "expected DataLoader workers that were started after the dataset was moved (load_state_dict, or "
                    "iterating it directly), found persistent ones from before; make a new DataLoader"
                )
            joined = int.from_bytes(counters.joined, "little")
            if counters.seed != seed or joined >> worker_id & 1 or counters.origin == NEVER:
                if reused and counters.end == NEVER:
                    raise LoaderUsageError(
                        "expected persistent DataLoader workers to reach the end of a pass before the next one, found "
                        "a pass that was broken off; make a new DataLoader, after load_state_dict(state_dict(step=N))"
                    )
                origin = origin if resumed else _next_origin(counters, origin)
                counters = counters._replace(seed=seed, origin=origin, end=NEVER, furthest=origin - 1)
                joined = 0
            joined |= 1 << worker_id
            _write(descriptor, counters._replace(joined=joined.to_bytes(MAX_WORKERS // 8, "little")))
            return counters.origin

    def end_pass(self, step: int) -> None:
        """Ends the pass behind ``step`` batches; the next one begins there."""
        with self._locked() as (descriptor, counters):
            _write(descriptor, counters._replace(end=step, furthest=min(counters.furthest, step - 1)))

    @property
    def _path(self) -> Path:
        return Path(f"{self._stem}-{self._home_pid}")

    @contextmanager
    def _locked(self) -> Iterator[tuple[int, _Counters]]:
        """The file of this process, or for its DataLoader worker of the process that started it."""
        parent = multiprocessing.parent_process() if get_worker_info() is not None else None
        home_pid = parent.pid if parent is not None and parent.pid is not None else os.getpid()
        if home_pid != self._home_pid:  # The dataset came by a fork, or with a process that was started with it.
            with suppress(OSError), self._path.open("rb") as file:
                self._content = _content_of(file.fileno())
            self._home_pid, self._is_removed_at_exit = home_pid, False
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            if parent is None and not self._is_removed_at_exit:
                weakref.finalize(self, _remove, self._path, os.getpid())
                self._is_removed_at_exit = True
            _lock(descriptor, self._path)
            try:
                if self._content and not os.fstat(descriptor).st_size:
                    os.pwrite(descriptor, self._content, 0)
                yield descriptor, _read(descriptor)
            finally:
                unlock(descriptor)
        finally:
            os.close(descriptor)


def _next_origin(counters: _Counters, origin: int) -> int:
    if counters.end != NEVER:
        return counters.end
    if counters.origin == NEVER:
        return origin
    if counters.furthest >= counters.origin:
        logger.warning(
            "a pass of DataLoader workers was broken off and begins again: batches from step %d come again; to go "
            "on call load_state_dict(state_dict(step=N)), N the step behind the last batch that was taken",
            counters.origin,
        )
    return counters.origin


def _lock(descriptor: int, path: Path) -> None:
    deadline, pause_s = time.monotonic() + _LOCK_TIMEOUT_S, 0.00005
    while not try_lock(descriptor):
        if time.monotonic() > deadline:
            raise LoaderError(
                f"expected {path}, which coordinates DataLoader workers, to be free within {_LOCK_TIMEOUT_S:.0f} s, "
                f"found it locked by {_lock_holder(descriptor)}; if that was stopped (SIGSTOP, a debugger), let it go "
                "on or end it"
            )
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.01)


def _lock_holder(descriptor: int) -> str:
    """The process that holds the lock, according to Linux."""
    inode = f":{os.fstat(descriptor).st_ino}"
    with suppress(OSError):
        for line in Path("/proc/locks").read_text(encoding="ascii").splitlines():
            fields = line.split()
            if len(fields) > 5 and fields[1] == "FLOCK" and fields[5].endswith(inode):
                return f"process {fields[4]}"
    return "another process"


def _read(descriptor: int) -> _Counters:
    data = os.pread(descriptor, _COUNTERS.size, 0)
    return _Counters._make(_COUNTERS.unpack(data)) if len(data) == _COUNTERS.size else _Counters()


def _write(descriptor: int, counters: _Counters) -> None:
    os.pwrite(descriptor, _COUNTERS.pack(*counters), 0)


def _read_rotations(descriptor: int, counters: _Counters, num_known: int = 0) -> tuple[int, ...]:
    count = counters.num_rotations - num_known
    if count <= 0:
        return ()
    data = os.pread(descriptor, count * _ROTATION_BYTES, _COUNTERS.size + num_known * _ROTATION_BYTES)
    return struct.unpack(f"<{len(data) // _ROTATION_BYTES}q", data)


def _append(descriptor: int, counters: _Counters, rotations: tuple[int, ...]) -> None:
    data = struct.pack(f"<{len(rotations)}q", *rotations)
    os.pwrite(descriptor, data, _COUNTERS.size + counters.num_rotations * _ROTATION_BYTES)
    _write(descriptor, counters._replace(num_rotations=counters.num_rotations + len(rotations)))


def _content_of(descriptor: int) -> bytes:
    """What a copy of the board begins with; it has no workers from before."""
    counters = _read(descriptor)._replace(generation=0)
    rotations = os.pread(descriptor, counters.num_rotations * _ROTATION_BYTES, _COUNTERS.size)
    return _COUNTERS.pack(*counters) + rotations


def _remove(path: Path, pid: int) -> None:
    if pid == os.getpid():
        path.unlink(missing_ok=True)


class SharedStream:
    """A `NodeStream` that several processes go through together, pinned to the shards there are.

    Raises:
        LoaderError: the node has no shards, or the index is unavailable.
    """

    def __init__(self, options: StreamOptions, session: Session) -> None:
        self._options = options
        self._board = WorkerBoard()
        self._iterates_here = False
        if (options.total_shards or 0) > session.catalog.manifest.total_shards:
            session = replace(session, catalog=session.newest_catalog())
        self.session = session
        self.stream = NodeStream.begin(options, session.catalog)
        self.worker: WorkerState | None = None
        """Which of several workers this process is, or was when the loaded state was taken."""
        self._origin = self.stream.state()
        self._board.look()

    @property
    def rotations(self) -> tuple[int, ...]:
        """The steps before which a shard was, or will be, left early, whichever process knows of it."""
        return tuple(sorted({*self.stream.schedule.rotations, *self._board.rotations()}))

    def turns_here(self, stream: NodeStream) -> Iterator[Schedule]:
        """Gives the schedule for each batch of a pass in this process; a stream from a loaded state begins its own."""
        self._board.reset(self.stream.schedule.step, self.stream.schedule.rotations)
        while True:
            self._iterates_here = True
            if self.stream is not stream:
                stream = self.stream
                stream.schedule.begin_pass()
            yield stream.schedule
            if stream.schedule.pass_is_over:
                return

    def begin_in_worker(self, worker_id: int, num_workers: int, seed: int) -> WorkerState:
        """Moves this worker to where all of them begin, or continues where its state was taken.

        Raises:
            LoaderError: the beginning of the pass is unknown, or the store's index unavailable.
        """
        worker, schedule = self.worker, self.stream.schedule
        if not self._board.has_joined and worker is not None and (worker.id, worker.count) == (worker_id, num_workers):
            self._board.join_pass(worker_id, seed, worker.origin, resumed=True)
            if schedule.is_exhausted:
                # DataLoader may not ask this worker again before it begins the next pass with other processes.
                self._board.end_pass(schedule.step)
        else:
            first = schedule.step if self._iterates_here else self._origin.step
            origin = self._board.join_pass(worker_id, seed, first, resumed=False)
            self._move(origin)
            worker = WorkerState(id=worker_id, count=num_workers, origin=origin)
        self.worker = worker
        self.stream.schedule.begin_pass()
        return worker

    def turns_in_worker(self, worker: WorkerState) -> Iterator[Schedule]:
        """Gives the schedule at each batch of this worker, every ``worker.count``-th, until the pass is over."""
        schedule, num_known = self.stream.schedule, 0
        step = worker.origin + worker.id
        step += -(-max(0, schedule.step - step) // worker.count) * worker.count
        while True:
            for rotation in self._board.announce(step, num_known):
                schedule.add_rotation(rotation)
                num_known += 1
            schedule.seek(step)
            yield schedule
            if schedule.pass_is_over:
                self._board.end_pass(schedule.step)
                return
            step += worker.count

    def workers_make_batches(self) -> bool:
        """Whether DataLoader workers have gone on from where this process stood."""
        furthest = self._board.look().furthest
        if self._iterates_here and furthest >= self.stream.schedule.step:
            self._iterates_here = False
        return not self._iterates_here and furthest >= self._origin.step

    def report_loss(self, loss: float) -> None:
        """Feeds the plateau rule with the loss of the latest batch, or of one that workers have made lately."""
        follows = self.workers_make_batches()
        if follows:
            self._move(self._board.look().furthest + 1)
        if self.stream.report_loss(loss) is not None:
            schedule = self.stream.schedule
            schedule.add_rotation(self._board.rotate() if follows else schedule.step)

    def refresh(self) -> int:
        """Takes the store's newest manifest; returns how many shards it has.

        Raises:
            LoaderUsageError: workers are within a pass.
            LoaderError: the store is unavailable, or has another history; the stream goes on as it was.
        """
        if self.workers_make_batches():
            end = self._board.look().end
            if end == NEVER:
                raise LoaderUsageError(
                    "expected refresh() between two passes of DataLoader workers, found them within one; call "
                    "load_state_dict(state_dict(step=N)), N the batches that were taken, refresh(), and make a new "
                    "DataLoader"
                )
            self._move(end)
            self._origin = self.stream.state()
            self._board.reset(end, self.stream.schedule.rotations)
        catalog = self.session.newest_catalog()
        total_shards = self.stream.adopt(catalog)
        self.session = replace(self.session, catalog=catalog)
        self._origin = self.stream.state()
        return total_shards

    def state(self, step: int) -> StreamState:
        """The state behind so many batches; `LoaderUsageError` for fewer than the origin's."""
        if step < self._origin.step:
            raise LoaderUsageError(f"expected a step of {self._origin.step} or later, found {step}")
        stream = self._resumed(replace(self._origin, rotations=self.rotations))
        stream.schedule.seek_through(step)
        return replace(stream.state(), losses=self.stream.state().losses)

    def load(self, state: StreamState, *, in_worker: bool) -> None:
        """Moves the stream to a state; `StateMismatchError` for one of another stream or store."""
        stream = self._resumed(state)
        self.stream, self.worker = stream, state.worker
        self._origin = stream.state()
        self._iterates_here = False
        if in_worker:
            self._board.merge(state.rotations)
        else:
            self._board.reset(state.step, state.rotations)

    def _move(self, step: int) -> None:
        """Moves the stream to a step, leaving shards early wherever any process knows of it."""
        rotations = self.rotations
        if step < self.stream.schedule.step or rotations != self.stream.schedule.rotations:
            self.stream = self._resumed(replace(self._origin, rotations=rotations))
        self.stream.schedule.seek_through(step)

    def _resumed(self, state: StreamState) -> NodeStream:
        """A stream at a state, which may know more shards than the manifest in hand."""
        if state.total_shards > self.session.catalog.manifest.total_shards:
            self.session = replace(self.session, catalog=self.session.newest_catalog())
        return NodeStream.resume(self._options, self.session.catalog, state)

"""What the process that sees the losses and DataLoader's workers must know of each other.

**Rotations.** Workers are ahead of the training loop by whatever they prefetch, and none may be told what another was
not. So each announces a batch before it makes it, and a rotation is set for the batch behind the furthest one
announced; both under one lock. Every worker has then heard of every rotation that concerns the batch it is about to
make, and the step that was settled on, not the moment, decides what the batches are: with it any of them can be made
again.

**Passes.** All workers of a pass must begin it at the same step, and DataLoader starts them anew from the dataset of
the parent, which has not moved. So the first that joins a pass settles where it begins: where the last one ended, or,
if that was broken off, where that began.

A file of a few counters and a list to which only ever is appended (until the parent moves the stream), locked with
flock: a spawned worker finds it by its name, and a killed worker leaves no lock behind. It belongs to one process and
the DataLoader workers of that process; the same dataset anywhere else, be it by a fork or a pickle, has a stream of its
own and a board of its own. Announcing takes 13 µs of every batch a worker makes, however many rotations there were.
"""

from __future__ import annotations

import fcntl
import logging
import multiprocessing
import os
import struct
import tempfile
import threading
import time
import uuid
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing.context import get_spawning_popen
from pathlib import Path
from typing import Final

from torch.utils.data import get_worker_info

from loader.errors import LoaderError, LoaderUsageError

__all__ = ["BoardView", "WorkerBoard"]

logger = logging.getLogger(__name__)

_HEAD: Final = struct.Struct("<qqqqqq32s")
_ENTRY_BYTES: Final = 8
_MOST_WORKERS: Final = 256
_NEVER: Final = -1
_PATIENCE_S: Final = 10.0
"""For a lock that is held for microseconds, unless its holder was stopped."""
_PAUSES_S: Final = (0.00005, 0.01)
"""Between two tries for it: the first pause, and the longest."""


@dataclass(frozen=True, slots=True)
class _Head:
    """The counters, as they lie in the file."""

    furthest: int = -1
    """The furthest batch that was announced; one before the first if none was."""
    rotations: int = 0
    generation: int = 0
    """How often the stream was moved by the parent: workers that were started before do not know of it."""
    seed: int = 0
    """Of the pass's DataLoader iterator."""
    origin: int = _NEVER
    """The step the pass began with."""
    end: int = _NEVER
    """The step behind its last batch, once that is known."""
    joined: bytes = bytes(_MOST_WORKERS // 8)
    """A bit for each worker that has begun the pass."""

    def pack(self) -> bytes:
        return _HEAD.pack(self.furthest, self.rotations, self.generation, self.seed, self.origin, self.end, self.joined)


@dataclass(frozen=True, slots=True)
class BoardView:
    """What a board says."""

    furthest: int
    """The furthest batch that was announced; one before the first if none was."""
    pass_end: int | None
    """The step behind the last batch of the pass, once a worker has come there."""


@dataclass(frozen=True, slots=True)
class _Pickled:
    """A board on its way to another process."""

    token: str
    home_pid: int
    generation: int
    content: bytes | None
    """For a copy that is to have a board of its own: what this one says."""


class WorkerBoard:
    """The rotations and passes of one stream, as a process and its DataLoader workers see them.

    Every method raises `LoaderError` if the board stays locked for 10 seconds. Threads may share a board.
    """

    def __init__(self) -> None:
        """Of a name of its own; the file is made when it is needed, or by `open`."""
        self._token = uuid.uuid4().hex
        self._home_pid = os.getpid()
        self._content = b""
        self._generation = 0
        self._has_joined = False
        self._descriptor = -1
        self._threads = threading.Lock()
        _boards.add(self)

    def __getstate__(self) -> _Pickled:
        if get_spawning_popen() is not None:  # multiprocessing starts a process with it.
            return _Pickled(self._token, self._home_pid, self._generation, None)
        with self._locked() as descriptor:
            return _Pickled("", 0, 0, _content(descriptor))

    def __setstate__(self, pickled: _Pickled) -> None:
        self.__init__()  # type: ignore[misc]
        if pickled.content is not None:
            self._content = pickled.content
        else:
            self._token, self._home_pid, self._generation = pickled.token, pickled.home_pid, pickled.generation

    def open(self) -> None:
        """Makes the file, which goes when this process does."""
        with self._locked():
            pass

    @property
    def has_joined(self) -> bool:
        """Whether this process, a worker, has taken part in a pass."""
        return self._has_joined

    def reset(self, step: int, rotations: tuple[int, ...]) -> None:
        """Begins anew behind ``step`` batches and some rotations, as a new generation."""
        with self._locked() as descriptor:
            self._generation = max(self._generation, _read(descriptor).generation) + 1
            _write_rotations(descriptor, 0, rotations)
            _write(descriptor, _Head(step - 1, len(rotations), self._generation))

    def announce(self, step: int, known: int) -> tuple[int, ...]:
        """Says that batch ``step`` is about to be made.

        Args:
            step: the batch.
            known: how many rotations this worker was told of in this pass.

        Returns:
            The rotations beyond those; with them it knows all that can ever concern the batch.
        """
        with self._locked() as descriptor:
            head = _read(descriptor)
            if step > head.furthest:
                _write(descriptor, replace(head, furthest=step))
            # A worker of before the parent moved the stream cannot tell what is new.
            return _rotations(descriptor, head, known if head.generation in (0, self._generation) else 0)

    def look(self) -> BoardView:
        """How far the workers are."""
        with self._locked() as descriptor:
            head = _read(descriptor)
            return BoardView(head.furthest, None if head.end == _NEVER else head.end)

    def rotations(self) -> tuple[int, ...]:
        """All rotations, in the order in which they became known."""
        with self._locked() as descriptor:
            return _rotations(descriptor, _read(descriptor), 0)

    def rotate(self) -> int:
        """Sets a rotation; returns the batch before which it takes place."""
        with self._locked() as descriptor:
            head = _read(descriptor)
            step = head.furthest + 1
            _append(descriptor, head, (step,))
            return step

    def merge(self, rotations: tuple[int, ...]) -> None:
        """Adds what a worker knows from a state: another's state may have been taken before it heard of them."""
        with self._locked() as descriptor:
            head = _read(descriptor)
            known = set(_rotations(descriptor, head, 0))
            _append(descriptor, head, tuple(step for step in rotations if step not in known))

    def join_pass(self, worker_id: int, seed: int, origin: int, *, resumed: bool) -> int:
        """Takes part in a pass; the first to do so begins it.

        Args:
            worker_id: counts from 0.
            seed: tells one DataLoader iterator from another; where a script seeds each alike, the worker that comes
                again does.
            origin: where a pass begins that no other came before.
            resumed: the worker goes on within a pass that began at ``origin``, by a state that was loaded.

        Returns:
            The step that the pass begins with.

        Raises:
            LoaderUsageError: a worker that took part in another pass (``persistent_workers``) cannot know where this
                one begins.
        """
        if worker_id >= _MOST_WORKERS:
            raise LoaderUsageError(f"expected at most {_MOST_WORKERS} DataLoader workers, found worker {worker_id}")
        reused, self._has_joined = self._has_joined, True
        with self._locked() as descriptor:
            head = _read(descriptor)
            if head.generation not in (0, self._generation):  # 0: made anew.
                raise LoaderUsageError(
                    "expected DataLoader workers that were started after the dataset was moved (load_state_dict, or "
                    "iterating it directly), found persistent ones from before; make a new DataLoader"
                )
            joined = int.from_bytes(head.joined, "little")
            if head.seed != seed or joined >> worker_id & 1 or head.origin == _NEVER:
                if reused and head.end == _NEVER:
                    raise LoaderUsageError(
                        "expected persistent DataLoader workers to reach the end of a pass before the next one, found "
                        "a pass that was broken off; make a new DataLoader, after load_state_dict(state_dict(step=N))"
                    )
                head, joined = _next_pass(head, seed, origin, resumed), 0
            _write(descriptor, replace(head, joined=(joined | 1 << worker_id).to_bytes(_MOST_WORKERS // 8, "little")))
            return head.origin

    def end_pass(self, step: int) -> None:
        """Says that the pass ends behind ``step`` batches; the next one begins there."""
        with self._locked() as descriptor:
            head = _read(descriptor)
            _write(descriptor, replace(head, end=step, furthest=min(head.furthest, step - 1)))

    @contextmanager
    def _locked(self) -> Iterator[int]:
        deadline = time.monotonic() + _PATIENCE_S
        if not self._threads.acquire(timeout=_PATIENCE_S):
            raise _still_locked(self._path, "another thread of this process")
        try:
            if self._descriptor < 0:
                self._descriptor = self._open()
            _flock(self._descriptor, deadline, self._path)
            try:
                yield self._descriptor
            finally:
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        finally:
            self._threads.release()

    @property
    def _path(self) -> Path:
        return Path(tempfile.gettempdir()) / f"genesis-workers-{self._token}-{self._home_pid}"

    def _open(self) -> int:
        """Opens this process's board, or as its DataLoader worker that of the process which started it."""
        parent = multiprocessing.parent_process() if get_worker_info() is not None else None
        home_pid = parent.pid if parent is not None and parent.pid is not None else os.getpid()
        if home_pid != self._home_pid:
            # The dataset came by a fork, or with a process that was started with it: from here on it is another one.
            with suppress(OSError), self._path.open("rb") as file:
                self._content = _content(file.fileno())
            self._home_pid = home_pid
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        descriptor = os.open(self._path, flags, 0o600)
        weakref.finalize(self, _close, descriptor, os.getpid())
        if parent is None:
            weakref.finalize(self, _remove, self._path, os.getpid())
        if self._content:
            _flock(descriptor, time.monotonic() + _PATIENCE_S, self._path)
            if not os.fstat(descriptor).st_size:
                os.pwrite(descriptor, self._content, 0)
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        return descriptor

    def _renew(self) -> None:
        """Makes a forked child's own what it has from its parent: a lock of threads it has not, a shared descriptor."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1
        self._threads = threading.Lock()


_boards: Final[weakref.WeakSet[WorkerBoard]] = weakref.WeakSet()


def _renew_all() -> None:
    for board in tuple(_boards):
        board._renew()


os.register_at_fork(after_in_child=_renew_all)


def _next_pass(head: _Head, seed: int, origin: int, resumed: bool) -> _Head:
    if not resumed and head.end != _NEVER:
        origin = head.end
    elif not resumed and head.origin != _NEVER:
        origin = head.origin
        if head.furthest >= origin:
            logger.warning(
                "a pass of DataLoader workers was broken off and begins again: batches from step %d come again; to go "
                "on call load_state_dict(state_dict(step=N)), N the step behind the last batch that was taken",
                origin,
            )
    return replace(head, seed=seed, origin=origin, end=_NEVER, furthest=origin - 1)


def _flock(descriptor: int, deadline: float, path: Path) -> None:
    pause_s, longest_s = _PAUSES_S
    while True:
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise _still_locked(path, _holder(descriptor)) from None
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, longest_s)


def _holder(descriptor: int) -> str:
    """Who has a file locked, as Linux tells it."""
    inode = f":{os.fstat(descriptor).st_ino}"
    with suppress(OSError):
        for line in Path("/proc/locks").read_text(encoding="ascii").splitlines():
            fields = line.split()
            if len(fields) > 5 and fields[1] == "FLOCK" and fields[5].endswith(inode):
                return f"process {fields[4]}"
    return "another process"


def _still_locked(path: Path, holder: str) -> LoaderError:
    return LoaderError(
        f"expected {path}, by which DataLoader workers go together, to be free within {_PATIENCE_S:.0f} s, found it "
        f"locked by {holder}; if that was stopped (SIGSTOP, a debugger), let it go on or end it"
    )


def _read(descriptor: int) -> _Head:
    data = os.pread(descriptor, _HEAD.size, 0)
    return _Head(*_HEAD.unpack(data)) if len(data) == _HEAD.size else _Head()


def _write(descriptor: int, head: _Head) -> None:
    os.pwrite(descriptor, head.pack(), 0)


def _content(descriptor: int) -> bytes:
    """What a copy of the board begins with: all of it, and none of its workers are from before."""
    head = replace(_read(descriptor), generation=0)
    return head.pack() + os.pread(descriptor, head.rotations * _ENTRY_BYTES, _HEAD.size)


def _rotations(descriptor: int, head: _Head, known: int) -> tuple[int, ...]:
    count = head.rotations - known
    if count <= 0:
        return ()
    data = os.pread(descriptor, count * _ENTRY_BYTES, _HEAD.size + known * _ENTRY_BYTES)
    return struct.unpack(f"<{len(data) // _ENTRY_BYTES}q", data)


def _append(descriptor: int, head: _Head, rotations: tuple[int, ...]) -> None:
    if rotations:
        _write_rotations(descriptor, head.rotations, rotations)
        _write(descriptor, replace(head, rotations=head.rotations + len(rotations)))


def _write_rotations(descriptor: int, first: int, rotations: tuple[int, ...]) -> None:
    os.pwrite(descriptor, struct.pack(f"<{len(rotations)}q", *rotations), _HEAD.size + first * _ENTRY_BYTES)


def _remove(path: Path, pid: int) -> None:
    if pid == os.getpid():
        path.unlink(missing_ok=True)


def _close(descriptor: int, pid: int) -> None:
    if pid == os.getpid():
        with suppress(OSError):
            os.close(descriptor)

"""What the process that sees the losses and DataLoader's workers must know of each other.

**Rotations.** Workers are ahead of the training loop by whatever they prefetch, and none may be told what another was
not. So each announces a batch before it makes it, and a rotation is set for the batch behind the furthest one
announced; both under one lock. Every worker has then heard of every rotation that concerns the batch it is about to
make, and the step that was settled on, not the moment, decides what the batches are: with it any of them can be made
again.

**Passes.** All workers of a pass must begin it at the same step, and DataLoader starts them anew from the dataset of
the parent, which has not moved. So the first that joins a pass settles where it begins: where the last one ended, or,
if that was broken off, where that began.

A file of a few counters and a list, locked with flock: a dataset that is pickled into a spawned worker takes its path
along, and a killed worker leaves no lock behind. Announcing costs 4 µs, once a batch and only in workers.
"""

from __future__ import annotations

import fcntl
import os
import struct
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from loader.errors import LoaderUsageError

__all__ = ["BoardView", "WorkerBoard"]

_HEAD: Final = struct.Struct("<qqqqqq32s")
_ENTRY: Final = struct.Struct("<q")
_MOST_WORKERS: Final = 256
_NEVER: Final = -1


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
    rotations: tuple[int, ...]


class WorkerBoard:
    """The rotations and passes of one stream, as all its processes see them. Use `create`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor = -1
        self._owner_pid = -1

    @classmethod
    def create(cls) -> WorkerBoard:
        """A board of its own file, which goes when the board does."""
        descriptor, name = tempfile.mkstemp(prefix="genesis-workers-")
        os.close(descriptor)
        board = cls(Path(name))
        weakref.finalize(board, _remove, board._path, os.getpid())
        return board

    def __getstate__(self) -> Path:
        return self._path

    def __setstate__(self, path: Path) -> None:
        self.__init__(path)  # type: ignore[misc]

    def reset(self, step: int, rotations: tuple[int, ...]) -> int:
        """Begins anew behind ``step`` batches and some rotations; returns the new generation."""
        with self._locked() as descriptor:
            generation = _read(descriptor).generation + 1
            _write_rotations(descriptor, rotations)
            _write(descriptor, _Head(step - 1, len(rotations), generation))
            return generation

    def announce(self, step: int) -> tuple[int, ...]:
        """Says that batch ``step`` is about to be made; returns the rotations, all that can ever concern it."""
        with self._locked() as descriptor:
            head = _read(descriptor)
            if step > head.furthest:
                _write(descriptor, replace(head, furthest=step))
            return _rotations(descriptor, head.rotations)

    def look(self) -> BoardView:
        """What is on the board."""
        with self._locked() as descriptor:
            head = _read(descriptor)
            end = None if head.end == _NEVER else head.end
            return BoardView(head.furthest, end, _rotations(descriptor, head.rotations))

    def rotate(self) -> int:
        """Sets a rotation; returns the batch before which it takes place."""
        with self._locked() as descriptor:
            head = _read(descriptor)
            step = head.furthest + 1
            _write_rotations(descriptor, (*_rotations(descriptor, head.rotations), step))
            _write(descriptor, replace(head, rotations=head.rotations + 1))
            return step

    def merge(self, rotations: tuple[int, ...]) -> None:
        """Adds what a worker knows from a state: another's state may have been taken before it heard of them."""
        with self._locked() as descriptor:
            head = _read(descriptor)
            known = set(_rotations(descriptor, head.rotations))
            if known.issuperset(rotations):
                return
            merged = tuple(sorted(known.union(rotations)))
            _write_rotations(descriptor, merged)
            _write(descriptor, replace(head, rotations=len(merged)))

    def join_pass(self, worker_id: int, seed: int, generation: int, origin: int, *, resumed: bool, reused: bool) -> int:
        """Takes part in a pass; the first to do so begins it.

        Args:
            worker_id: counts from 0.
            seed: tells one DataLoader iterator from another; where a script seeds each alike, the worker that comes
                again does.
            generation: what the worker knows of the parent's moves.
            origin: where a pass begins that no other came before.
            resumed: the worker goes on within a pass that began at ``origin``, by a state that was loaded.
            reused: the process has made a pass before (``persistent_workers``).

        Returns:
            The step that the pass begins with.

        Raises:
            LoaderUsageError: a reused worker cannot know where this pass begins.
        """
        if worker_id >= _MOST_WORKERS:
            raise LoaderUsageError(f"expected at most {_MOST_WORKERS} DataLoader workers, found worker {worker_id}")
        with self._locked() as descriptor:
            head = _read(descriptor)
            if head.generation not in (0, generation):  # 0: made anew, see below.
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
        if self._owner_pid != os.getpid():
            # A descriptor that came by fork shares its lock with the parent's: everyone opens their own. The file is
            # made anew where a pickled dataset has outlived it, or came to another machine.
            self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            self._owner_pid = os.getpid()
            weakref.finalize(self, _close, self._descriptor, self._owner_pid)
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        try:
            yield self._descriptor
        finally:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)


def _next_pass(head: _Head, seed: int, origin: int, resumed: bool) -> _Head:
    if not resumed and head.end != _NEVER:
        origin = head.end
    elif not resumed and head.origin != _NEVER:
        origin = head.origin
    return replace(head, seed=seed, origin=origin, end=_NEVER, furthest=origin - 1)


def _read(descriptor: int) -> _Head:
    data = os.pread(descriptor, _HEAD.size, 0)
    return _Head(*_HEAD.unpack(data)) if len(data) == _HEAD.size else _Head()


def _write(descriptor: int, head: _Head) -> None:
    os.pwrite(descriptor, head.pack(), 0)


def _rotations(descriptor: int, count: int) -> tuple[int, ...]:
    data = os.pread(descriptor, count * _ENTRY.size, _HEAD.size) if count else b""
    return tuple(step for (step,) in _ENTRY.iter_unpack(data))


def _write_rotations(descriptor: int, rotations: tuple[int, ...]) -> None:
    os.pwrite(descriptor, b"".join(map(_ENTRY.pack, rotations)), _HEAD.size)


def _remove(path: Path, pid: int) -> None:
    if pid == os.getpid():
        path.unlink(missing_ok=True)


def _close(descriptor: int, pid: int) -> None:
    if pid == os.getpid():
        with suppress(OSError):
            os.close(descriptor)

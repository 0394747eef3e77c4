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

import logging
import multiprocessing
import os
import tempfile
import threading
import uuid
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing.context import get_spawning_popen
from pathlib import Path
from typing import Final

from torch.utils.data import get_worker_info

from loader.board_file import (
    MOST_WORKERS,
    NEVER,
    Head,
    append_rotations,
    content_of,
    lock,
    read_head,
    read_rotations,
    still_locked,
    unlock,
    write_content,
    write_head,
)
from loader.errors import LoaderUsageError

__all__ = ["BoardView", "WorkerBoard"]

logger = logging.getLogger(__name__)

_PATIENCE_S: Final = 10.0
"""For a lock that is held for microseconds, unless its holder was stopped."""


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

    stem: str
    home_pid: int
    generation: int
    content: bytes | None
    """For a copy that is to have a board of its own: what this one says."""


class WorkerBoard:
    """The rotations and passes of one stream, as a process and its DataLoader workers see them.

    Every method raises `LoaderError` if others keep the board locked for 10 seconds. Threads may share it.
    """

    def __init__(self) -> None:
        """Of a name of its own; the file is made when it is needed, or by `open`."""
        self._stem = str(Path(tempfile.gettempdir()) / f"genesis-workers-{uuid.uuid4().hex}")
        self._home_pid = os.getpid()
        self._content = b""
        self._generation = 0
        self._has_joined = False
        self._descriptor = -1
        self._threads = threading.Lock()
        _boards.add(self)

    def __getstate__(self) -> _Pickled:
        if get_spawning_popen() is not None:  # multiprocessing starts a process with it.
            return _Pickled(self._stem, self._home_pid, self._generation, None)
        with self._locked() as descriptor:
            return _Pickled("", 0, 0, content_of(descriptor))

    def __setstate__(self, pickled: _Pickled) -> None:
        self.__init__()  # type: ignore[misc]
        if pickled.content is not None:
            self._content = pickled.content
        else:
            self._stem, self._home_pid, self._generation = pickled.stem, pickled.home_pid, pickled.generation

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
            self._generation = max(self._generation, read_head(descriptor).generation) + 1
            append_rotations(descriptor, Head(furthest=step - 1, generation=self._generation), rotations)

    def announce(self, step: int, known: int) -> tuple[int, ...]:
        """Says that batch ``step`` is about to be made.

        Args:
            step: the batch.
            known: how many rotations this worker was told of in this pass.

        Returns:
            The rotations beyond those; with them it knows all that can ever concern the batch.
        """
        with self._locked() as descriptor:
            head = read_head(descriptor)
            if step > head.furthest:
                write_head(descriptor, replace(head, furthest=step))
            # A worker of before the parent moved the stream cannot tell what is new.
            return read_rotations(descriptor, head, known if head.generation in (0, self._generation) else 0)

    def look(self) -> BoardView:
        """How far the workers are."""
        with self._locked() as descriptor:
            head = read_head(descriptor)
            return BoardView(head.furthest, None if head.end == NEVER else head.end)

    def rotations(self) -> tuple[int, ...]:
        """All rotations, in the order in which they became known."""
        with self._locked() as descriptor:
            return read_rotations(descriptor, read_head(descriptor))

    def rotate(self) -> int:
        """Sets a rotation; returns the batch before which it takes place."""
        with self._locked() as descriptor:
            head = read_head(descriptor)
            step = head.furthest + 1
            append_rotations(descriptor, head, (step,))
            return step

    def merge(self, rotations: tuple[int, ...]) -> None:
        """Adds what a worker knows from a state: another's state may have been taken before it heard of them."""
        with self._locked() as descriptor:
            head = read_head(descriptor)
            known = set(read_rotations(descriptor, head))
            append_rotations(descriptor, head, tuple(step for step in rotations if step not in known))

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
        if worker_id >= MOST_WORKERS:
            raise LoaderUsageError(f"expected at most {MOST_WORKERS} DataLoader workers, found worker {worker_id}")
        reused, self._has_joined = self._has_joined, True
        with self._locked() as descriptor:
            head = read_head(descriptor)
            if head.generation not in (0, self._generation):  # 0: made anew.
                raise LoaderUsageError(
                    "expected DataLoader workers that were started after the dataset was moved (load_state_dict, or "
                    "iterating it directly), found persistent ones from before; make a new DataLoader"
                )
            joined = int.from_bytes(head.joined, "little")
            if head.seed != seed or joined >> worker_id & 1 or head.origin == NEVER:
                if reused and head.end == NEVER:
                    raise LoaderUsageError(
                        "expected persistent DataLoader workers to reach the end of a pass before the next one, found "
                        "a pass that was broken off; make a new DataLoader, after load_state_dict(state_dict(step=N))"
                    )
                head, joined = _next_pass(head, seed, origin, resumed), 0
            write_head(
                descriptor, replace(head, joined=(joined | 1 << worker_id).to_bytes(MOST_WORKERS // 8, "little"))
            )
            return head.origin

    def end_pass(self, step: int) -> None:
        """Says that the pass ends behind ``step`` batches; the next one begins there."""
        with self._locked() as descriptor:
            head = read_head(descriptor)
            write_head(descriptor, replace(head, end=step, furthest=min(head.furthest, step - 1)))

    @contextmanager
    def _locked(self) -> Iterator[int]:
        if not self._threads.acquire(timeout=_PATIENCE_S):
            raise still_locked(self._path, "another thread of this process", _PATIENCE_S)
        try:
            if self._descriptor < 0:
                self._descriptor = self._open()
            lock(self._descriptor, self._path, _PATIENCE_S)
            try:
                yield self._descriptor
            finally:
                unlock(self._descriptor)
        finally:
            self._threads.release()

    @property
    def _path(self) -> Path:
        return Path(f"{self._stem}-{self._home_pid}")

    def _open(self) -> int:
        """Opens this process's board, or as its DataLoader worker that of the process which started it."""
        parent = multiprocessing.parent_process() if get_worker_info() is not None else None
        home_pid = parent.pid if parent is not None and parent.pid is not None else os.getpid()
        if home_pid != self._home_pid:
            # The dataset came by a fork, or with a process that was started with it: from here on it is another one.
            with suppress(OSError), self._path.open("rb") as file:
                self._content = content_of(file.fileno())
            self._home_pid = home_pid
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        descriptor = os.open(self._path, flags, 0o600)
        weakref.finalize(self, _close, descriptor, os.getpid())
        if parent is None:
            weakref.finalize(self, _remove, self._path, os.getpid())
        if self._content:
            lock(descriptor, self._path, _PATIENCE_S)
            write_content(descriptor, self._content)
            unlock(descriptor)
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


def _next_pass(head: Head, seed: int, origin: int, resumed: bool) -> Head:
    if not resumed and head.end != NEVER:
        origin = head.end
    elif not resumed and head.origin != NEVER:
        origin = head.origin
        if head.furthest >= origin:
            logger.warning(
                "a pass of DataLoader workers was broken off and begins again: batches from step %d come again; to go "
                "on call load_state_dict(state_dict(step=N)), N the step behind the last batch that was taken",
                origin,
            )
    return replace(head, seed=seed, origin=origin, end=NEVER, furthest=origin - 1)


def _remove(path: Path, pid: int) -> None:
    if pid == os.getpid():
        path.unlink(missing_ok=True)


def _close(descriptor: int, pid: int) -> None:
    if pid == os.getpid():
        with suppress(OSError):
            os.close(descriptor)

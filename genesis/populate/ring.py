"""What the populating process and a worker of its share: memory for token ids, and messages over a private socket.

Token ids travel without passing a pipe. The worker appends blocks of uint32 ids, the parent reads each where it lies
and gives the space back in the same order. The memory has no name: it is a file descriptor both processes hold, so
nothing is left behind when either is killed. A pipe costs a copy in, a copy out and two context switches per 64 KiB
(0.5 GB/s measured on two cores); here a block costs the one copy that puts it there.

The trade-off: each worker's ring is a fixed 32 MiB, which is also what bounds how far a worker runs ahead.

Of the messages: both ends run the same program on the same machine, the socket has no name, and the worker is the
parent's own child: the messages are pickled by `multiprocessing.connection`. Nothing that crosses a machine's border
goes this way.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import threading
from collections import deque
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from genesis.sources.base import Task

RING_IDS = 8 << 20
"""Capacity in ids: 32 MiB, some eight batches of English text."""


def anonymous_file(size_bytes: int) -> int:
    """A file descriptor of ``size_bytes`` of memory (where the system has that) or of an unlinked file."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("genesis-ring", os.MFD_CLOEXEC)
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, size_bytes)
    return descriptor


def _map_ids(descriptor: int, num_ids: int, access: int) -> npt.NDArray[np.uint32]:
    return np.frombuffer(mmap.mmap(descriptor, num_ids * 4, access=access), dtype=np.uint32)


@dataclass(slots=True)
class _Held:
    """A block that has come and, until ``done``, is still needed."""

    position: int
    end: int
    done: bool = False


@dataclass(slots=True)
class RingReader:
    """The parent's side. Blocks may be done with in any order; space is given back in the order they were written."""

    ids: npt.NDArray[np.uint32]
    released: int = 0
    """Ids given back so far, the ones skipped at the ring's end included."""
    _held: deque[_Held] = field(default_factory=deque)

    @classmethod
    def over(cls, descriptor: int, num_ids: int = RING_IDS) -> RingReader:
        """Maps the memory behind ``descriptor``; the descriptor may be closed afterwards."""
        return cls(_map_ids(descriptor, num_ids, mmap.ACCESS_READ))

    def receive(self, position: int, count: int) -> None:
        """Notes a block, in the order in which the worker wrote them; it is kept until released."""
        self._held.append(_Held(position, position + count))

    def view(self, position: int, count: int) -> npt.NDArray[np.uint32]:
        """The block of ``count`` ids at ``position``; valid until released."""
        start = position % len(self.ids)
        return self.ids[start : start + count]

    def release(self, position: int) -> int:
        """Is done with the block at ``position``; returns the figure to tell the worker.

        Space behind a block that is still needed is only given back with it.
        """
        for held in self._held:
            if held.position == position:
                held.done = True
                break
        while self._held and self._held[0].done:
            self.released = self._held.popleft().end
        return self.released


@dataclass(slots=True)
class RingWriter:
    """The worker's side. Positions only ever grow; a block never wraps around the end."""

    ids: npt.NDArray[np.uint32]
    _position: int = 0
    _released: int = 0
    _closed: bool = False
    _changed: threading.Condition = field(default_factory=threading.Condition)

    @classmethod
    def over(cls, descriptor: int, num_ids: int = RING_IDS) -> RingWriter:
        """Maps the memory behind ``descriptor``."""
        return cls(_map_ids(descriptor, num_ids, mmap.ACCESS_WRITE))

    def fits(self, count: int) -> bool:
        """Whether a block of ``count`` ids can ever be reserved: at most half the ring, so that two overlap."""
        return count <= len(self.ids) // 2

    def reserve(self, count: int) -> tuple[int, npt.NDArray[np.uint32]]:
        """Waits for room and returns the block's position and where to write its ids.

        Raises:
            EOFError: the parent is gone.
        """
        size = len(self.ids)
        position = self._position
        if position % size + count > size:
            position += size - position % size
        with self._changed:
            self._changed.wait_for(lambda: self._closed or position + count - self._released <= size)
            if self._closed:
                raise EOFError("the populating process is gone")
        self._position = position + count
        start = position % size
        return position, self.ids[start : start + count]

    def released_up_to(self, released: int) -> None:
        """Notes what the parent gave back."""
        with self._changed:
            self._released = max(self._released, released)
            self._changed.notify()

    def close(self) -> None:
        """Wakes a waiting `reserve` with an error."""
        with self._changed:
            self._closed = True
            self._changed.notify()


@dataclass(frozen=True, slots=True)
class Assignment:
    """Parent to worker: encode this task."""

    number: int
    task: Task


@dataclass(frozen=True, slots=True)
class Released:
    """Parent to worker: the ring is free up to here."""

    position: int


@dataclass(frozen=True, slots=True)
class EncodedDocuments:
    """Worker to parent: some documents of a task, each followed by EOS."""

    number: int
    """The assignment's."""
    position: int
    """Where in the ring the ids are; −1 if they are in ``ids``, being more than fit there."""
    num_ids: int
    ids: npt.NDArray[np.uint32] | None
    ends: npt.NDArray[np.int64]
    """int64[D], where each document ends among the ids, its EOS included."""
    rows: npt.NDArray[np.int64]
    """int64[D], the row of each document."""
    text_bytes: npt.NDArray[np.int64]
    """int64[D], UTF-8 bytes of this batch's documents up to and including each."""
    first_row: int
    end_row: int


@dataclass(frozen=True, slots=True)
class Finished:
    """Worker to parent: the task is read to its end."""

    number: int


@dataclass(frozen=True, slots=True)
class Failed:
    """Worker to parent: the task cannot be done; doing it again would fail the same way."""

    number: int
    error: str
    """Name of the class in `genesis.errors`, or of another exception."""
    message: str

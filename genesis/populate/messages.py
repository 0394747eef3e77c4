"""What the populating process and its workers say to each other over their private socket.

Both ends run the same program on the same machine, the socket has no name, and the worker is the parent's own child:
the messages are pickled by `multiprocessing.connection`. Nothing that crosses a machine's border goes this way.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from genesis.sources.base import Task


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

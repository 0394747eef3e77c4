"""The file behind a `WorkerBoard`: a few counters, a list of rotations, and the lock that guards both.

Fixed places and no parsing, so that a look at the counters is one read of 80 bytes. Nothing here waits without end:
the lock is tried for until a deadline, and whoever has it then is named.
"""

from __future__ import annotations

import fcntl
import os
import struct
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from loader.errors import LoaderError

__all__ = [
    "MOST_WORKERS",
    "NEVER",
    "Head",
    "append_rotations",
    "content_of",
    "lock",
    "read_head",
    "read_rotations",
    "still_locked",
    "unlock",
    "write_content",
    "write_head",
]

MOST_WORKERS: Final = 256
NEVER: Final = -1

_HEAD: Final = struct.Struct("<qqqqqq32s")
_ENTRY_BYTES: Final = 8
_PAUSES_S: Final = (0.00005, 0.01)
"""Between two tries for the lock: the first pause, and the longest."""


@dataclass(frozen=True, slots=True)
class Head:
    """The counters, as they lie in the file."""

    furthest: int = -1
    """The furthest batch that was announced; one before the first if none was."""
    rotations: int = 0
    generation: int = 0
    """How often the stream was moved by the parent: workers that were started before do not know of it."""
    seed: int = 0
    """Of the pass's DataLoader iterator."""
    origin: int = NEVER
    """The step the pass began with."""
    end: int = NEVER
    """The step behind its last batch, once that is known."""
    joined: bytes = bytes(MOST_WORKERS // 8)
    """A bit for each worker that has begun the pass."""

    def pack(self) -> bytes:
        """The bytes of the file."""
        return _HEAD.pack(self.furthest, self.rotations, self.generation, self.seed, self.origin, self.end, self.joined)


def lock(descriptor: int, path: Path, patience_s: float) -> None:
    """Locks the file against all other descriptors of it.

    Raises:
        LoaderError: somebody else has it for longer than that.
    """
    deadline = time.monotonic() + patience_s
    pause_s, longest_s = _PAUSES_S
    while True:
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise still_locked(path, _holder(descriptor), patience_s) from None
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, longest_s)


def unlock(descriptor: int) -> None:
    """Gives the lock back."""
    fcntl.flock(descriptor, fcntl.LOCK_UN)


def still_locked(path: Path, holder: str, patience_s: float) -> LoaderError:
    """What to say where waiting was in vain."""
    return LoaderError(
        f"expected {path}, by which DataLoader workers go together, to be free within {patience_s:.0f} s, found it "
        f"locked by {holder}; if that was stopped (SIGSTOP, a debugger), let it go on or end it"
    )


def _holder(descriptor: int) -> str:
    """Who has a file locked, as Linux tells it."""
    inode = f":{os.fstat(descriptor).st_ino}"
    with suppress(OSError):
        for line in Path("/proc/locks").read_text(encoding="ascii").splitlines():
            fields = line.split()
            if len(fields) > 5 and fields[1] == "FLOCK" and fields[5].endswith(inode):
                return f"process {fields[4]}"
    return "another process"


def read_head(descriptor: int) -> Head:
    """The counters; of a new file, as they begin."""
    data = os.pread(descriptor, _HEAD.size, 0)
    return Head(*_HEAD.unpack(data)) if len(data) == _HEAD.size else Head()


def write_head(descriptor: int, head: Head) -> None:
    """Puts the counters in place."""
    os.pwrite(descriptor, head.pack(), 0)


def read_rotations(descriptor: int, head: Head, known: int = 0) -> tuple[int, ...]:
    """The rotations behind the first ``known``."""
    count = head.rotations - known
    if count <= 0:
        return ()
    data = os.pread(descriptor, count * _ENTRY_BYTES, _HEAD.size + known * _ENTRY_BYTES)
    return struct.unpack(f"<{len(data) // _ENTRY_BYTES}q", data)


def append_rotations(descriptor: int, head: Head, rotations: tuple[int, ...]) -> None:
    """Adds rotations behind those that ``head`` counts, and writes it with the new count."""
    data = struct.pack(f"<{len(rotations)}q", *rotations)
    os.pwrite(descriptor, data, _HEAD.size + head.rotations * _ENTRY_BYTES)
    write_head(descriptor, replace(head, rotations=head.rotations + len(rotations)))


def content_of(descriptor: int) -> bytes:
    """What a copy of the board begins with: all of it, and none of its workers are from before."""
    head = replace(read_head(descriptor), generation=0)
    return head.pack() + os.pread(descriptor, head.rotations * _ENTRY_BYTES, _HEAD.size)


def write_content(descriptor: int, content: bytes) -> None:
    """Lets a file that is empty begin with what `content_of` gave."""
    if not os.fstat(descriptor).st_size:
        os.pwrite(descriptor, content, 0)

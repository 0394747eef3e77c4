"""The log of a node: steps, rounds and other events, written by a thread of its own (`trainer.monitor.events`).

Guarantees: logging an event queues it (4 µs) and never waits for the disk. A line is whole or absent, except for the
last one after a kill, which `start` cuts off and readers skip. A full disk costs events, which are counted and reported
once there is room again, and never the run. The trade-off: the thread writes some 10 ms behind, and the oldest file is
deleted when there are more than ``max_files``: 8 of 64 MiB hold about 2.5 million steps.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Self

from loader.cache.locks import open_exclusive, release
from trainer.errors import TrainerUsageError
from trainer.monitor.events import (
    RESERVED_FIELDS,
    active_path,
    event_line,
    next_rotated_path,
    rotated_paths,
    round_fields,
    step_fields,
)
from trainer.monitor.facts import RoundFacts, StepFacts

__all__ = ["EventLog"]

logger = logging.getLogger(__name__)

_COALESCE_S = 0.01
"""Events within this time are written together: at most 100 writes a second however short the steps are."""
_MAX_WAITING = 100_000
"""Events that may wait for a slow disk, some 50 MB; more are lost, and counted."""
_MAX_AT_ONCE = 1_000
_CLOSE_WITHIN_S = 5.0

_Fields = Callable[[], Mapping[str, object]]
_Item = tuple[float, str, _Fields] | threading.Event | None
"""An event, a request to report that those before it are written, or the end."""


class EventLog:
    """One node's events. Any thread may log; `start` before and `close` after, or use it in a ``with``."""

    def __init__(self, directory: Path, node_id: str, *, max_file_bytes: int = 64 << 20, max_files: int = 8) -> None:
        self._directory = directory.expanduser()
        self._node_id = node_id
        self._max_file_bytes = max_file_bytes
        self._max_files = max_files
        self._waiting: queue.SimpleQueue[_Item] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock: int | None = None
        self._file = -1
        self._size_bytes = 0
        self._is_failing = False
        self._counting = threading.Lock()
        self._refused = 0  # Counted by the threads that log.
        self._unwritten = 0  # Counted by the thread that writes, as the next.
        self._reported = 0

    @property
    def path(self) -> Path:
        """The file being written."""
        return active_path(self._directory, self._node_id)

    @property
    def lost_events(self) -> int:
        """Events that could not be written."""
        return self._refused + self._unwritten

    def start(self) -> Self:
        """Opens the file and begins to write.

        Raises:
            TrainerUsageError: the file cannot be opened, or another process writes it.
        """
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            self._lock = open_exclusive(self.path.with_suffix(".lock"), create=True)
            if self._lock is not None:
                self._open()
        except OSError as error:
            self._unlock()
            raise TrainerUsageError(
                f"cannot write events to {self.path}: {error.strerror}; check --log-dir and its permissions"
            ) from None
        if self._lock is None:
            raise TrainerUsageError(
                f"expected nobody to write {self.path}, found another process doing so; give this one another "
                "--node-id or --log-dir"
            )
        self._thread = threading.Thread(target=self._write_all, name="event-log", daemon=True)
        self._thread.start()
        return self

    def step(self, step: StepFacts, *, loader_wait_s: float = 0.0) -> None:
        """Logs an inner step."""
        self._put("step", lambda: step_fields(step, loader_wait_s))

    def round(self, report: RoundFacts, *, outer_step: int, state_digest: str) -> None:
        """Logs a round that ended with a result; step and digest are the state's after it."""
        self._put("round", lambda: round_fields(report, outer_step, state_digest))

    def event(self, kind: str, **fields: object) -> None:
        """Logs any other event; the values must not change any more.

        Raises:
            ValueError: a field has the name of what every event has.
        """
        if taken := RESERVED_FIELDS.intersection(fields):
            raise ValueError(f"expected fields of other names than {sorted(RESERVED_FIELDS)}, found {sorted(taken)}")
        self._put(kind, lambda: fields)

    def flush(self, timeout_s: float = _CLOSE_WITHIN_S) -> bool:
        """Waits until all events logged before are written (not fsynced); False if that took too long."""
        if self._thread is None:
            return True
        done = threading.Event()
        self._waiting.put(done)
        return done.wait(timeout_s)

    def close(self) -> None:
        """Writes the queued events and closes the file; gives up after 5 s on a disk that does not answer."""
        if self._thread is None:
            return
        self._waiting.put(None)
        self._thread.join(_CLOSE_WITHIN_S)
        if self._thread.is_alive():
            logger.warning("%s: the disk does not answer; %d events are not written", self.path, self._waiting.qsize())
        self._thread = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _put(self, kind: str, fields: _Fields) -> None:
        if self._thread is None or self._waiting.qsize() >= _MAX_WAITING:
            with self._counting:
                self._refused += 1
        else:
            self._waiting.put((time.time(), kind, fields))

    # From here on only the thread that writes.

    def _write_all(self) -> None:
        is_closing = False
        try:
            while not is_closing:
                lines: list[bytes] = []
                flushed: list[threading.Event] = []
                for item in self._batch():
                    if item is None:
                        is_closing = True
                    elif isinstance(item, threading.Event):
                        flushed.append(item)
                    else:
                        lines += self._line(*item)
                self._write(lines)
                for done in flushed:
                    done.set()
        finally:
            os.close(self._file)
            self._unlock()

    def _batch(self) -> Iterator[_Item]:
        """Yields the queued items; waits for the first."""
        first = self._waiting.get()
        if isinstance(first, tuple):
            time.sleep(_COALESCE_S)
        yield first
        for _ in range(min(self._waiting.qsize(), _MAX_AT_ONCE)):
            yield self._waiting.get()

    def _line(self, time_s: float, kind: str, fields: _Fields) -> list[bytes]:
        try:
            return [event_line(time_s, self._node_id, kind, fields())]
        except (TypeError, ValueError, AttributeError, RuntimeError) as error:
            logger.warning("an event %r cannot be written as JSON and is not logged: %s", kind, error)
            self._unwritten += 1
            return []

    def _write(self, lines: list[bytes]) -> None:
        if not lines:
            return
        lost = self.lost_events
        if missing := lost - self._reported:
            lines = [event_line(time.time(), self._node_id, "lost", {"events": missing}), *lines]
        try:
            if self._size_bytes >= self._max_file_bytes:
                self._rotate()
            self._append(b"".join(lines))
        except OSError as error:
            self._unwritten += len(lines) - bool(missing)
            if not self._is_failing:
                logger.warning(
                    "cannot write events to %s: %s; training goes on, and events are lost until it can be written "
                    "again",
                    self.path,
                    error.strerror,
                )
            self._is_failing = True
        else:
            self._reported = lost
            self._is_failing = False

    def _append(self, data: bytes) -> None:
        if self._is_failing:  # Part of the data before may be there.
            os.ftruncate(self._file, self._size_bytes)
        written = 0
        while written < len(data):
            written += os.write(self._file, data[written:])
        self._size_bytes += written

    def _rotate(self) -> None:
        # The last attempt ended between these two calls, or the file was removed.
        with contextlib.suppress(FileNotFoundError):
            self.path.rename(next_rotated_path(self._directory, self._node_id))
        full = self._file
        self._open()
        os.close(full)
        for path in rotated_paths(self._directory, self._node_id)[: -max(1, self._max_files - 1)]:
            path.unlink(missing_ok=True)

    def _open(self) -> None:
        """Opens the file to append to; cuts off a last line that a kill left incomplete."""
        self._file = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._size_bytes = _end_of_last_line(self._file)
        os.ftruncate(self._file, self._size_bytes)

    def _unlock(self) -> None:
        if self._lock is not None:
            release(self._lock)
            self._lock = None


def _end_of_last_line(file: int) -> int:
    """Returns the number of bytes up to and with the last newline."""
    end = os.fstat(file).st_size
    while end > 0:
        begin = max(0, end - (64 << 10))
        found = os.pread(file, end - begin, begin).rfind(b"\n")
        if found >= 0:
            return begin + found + 1
        end = begin
    return 0

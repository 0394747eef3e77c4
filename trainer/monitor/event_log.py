"""The log of a node: one canonical JSON line an event, written by a thread of its own, and read back.

``events-{node}.jsonl`` is being written; ``events-{node}.000001.jsonl``, ``.000002`` ... are the full ones before it,
of which the oldest are deleted: 8 files of 64 MiB hold about 2.5 million steps. Characters of a node's name that do not
belong into a file name are percent-encoded. Numbers that are not finite are the strings ``"NaN"``, ``"Infinity"`` and
``"-Infinity"``, as in protobuf's JSON form; Python's ``float`` reads them.

Guarantees: logging an event queues it (4 µs) and never waits for the disk, which is some 10 ms behind. A line is whole
or absent, except for the last one after a kill, which `EventLog.start` cuts off and readers skip. A full disk costs
events, which are counted and reported once there is room again, and never the run.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import queue
import re
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from datetime import UTC, datetime
from numbers import Integral, Real
from pathlib import Path
from typing import BinaryIO, Self
from urllib.parse import quote, unquote

from loader.cache.locks import open_exclusive, release
from manifests import canonical_json
from trainer.errors import TrainerUsageError
from trainer.monitor.facts import RoundFacts, StepFacts

logger = logging.getLogger(__name__)

_RESERVED_FIELDS = frozenset({"time", "node", "kind"})  # Fields that every line has.
_REPORT_FIELDS = (
    *("round_index", "members", "dropped", "completeness", "sent_bytes", "received_bytes", "rule"),
    *("num_passes", "weights", "validation", "note"),
)
_PHASE_FIELDS = ("agree_s", "reduce_s", "vote_s")
_ACTIVE = re.compile(r"events-((?:[\w~-]|%[0-9A-F]{2})+)\.jsonl")
_MAX_NAME_BYTES = 200
_MAX_TEXT = 4_096
_MAX_DEPTH = 8
_MAX_LINE_BYTES = 4 << 20  # Of a line that is read; those written here are far shorter.
_COALESCE_S = 0.01
"""Events within this time are written together: at most 100 writes a second however short the steps are."""
_MAX_WAITING = 100_000  # Events that may wait for a slow disk, some 50 MB; more are lost, and counted.
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
        """Begins to write. Raises `TrainerUsageError`: the file cannot be opened, or another process writes it."""
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

        def fields_of() -> dict[str, object]:
            found = {name: getattr(step, name) for name in ("step", "num_tokens", "skipped")}
            # 7 significant digits, as many as a float32 has.
            found |= {name: float(f"{getattr(step, name):.7g}") for name in ("loss", "grad_norm", "lr")}
            return found | {"seconds": round(step.seconds, 6), "loader_wait_s": round(loader_wait_s, 6)}

        self._put("step", fields_of)

    def round(self, report: RoundFacts, *, outer_step: int, state_digest: str, stage: str = "") -> None:
        """Logs a round that ended with a result; step and digest are the state's after it.

        ``stage`` is that of the round, at a node that has several.
        """

        def fields_of() -> dict[str, object]:
            found = {name: getattr(report, name) for name in _REPORT_FIELDS}
            phases = zip(_PHASE_FIELDS, report.phases, strict=True)
            found |= {name: round(seconds, 6) for name, seconds in phases}
            found |= {"outer_step": outer_step, "state_digest": state_digest, "seconds": round(report.seconds, 6)}
            return found | ({"stage": stage} if stage else {})

        self._put("round", fields_of)

    def event(self, kind: str, **fields: object) -> None:
        """Logs any other event, whose values must not change. Raises `ValueError`: a field that every event has."""
        if taken := _RESERVED_FIELDS.intersection(fields):
            raise ValueError(f"expected fields of other names than {sorted(_RESERVED_FIELDS)}, found {sorted(taken)}")
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
            if self._is_failing:  # Part of the data before may be there.
                os.ftruncate(self._file, self._size_bytes)
            data = b"".join(lines)
            written = 0
            while written < len(data):
                written += os.write(self._file, data[written:])
            self._size_bytes += written
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

    def _rotate(self) -> None:
        rotated = _rotated_paths(self._directory, self._node_id)
        last = int(rotated[-1].name.rsplit(".", 2)[1]) if rotated else 0
        # The last attempt ended between these two calls, or the file was removed.
        with contextlib.suppress(FileNotFoundError):
            self.path.rename(self._directory / f"events-{_encoded(self._node_id)}.{last + 1:06d}.jsonl")
        full = self._file
        self._open()
        os.close(full)
        for path in _rotated_paths(self._directory, self._node_id)[: -max(1, self._max_files - 1)]:
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


def active_path(directory: Path, node_id: str) -> Path:
    """Returns the file that is being written. Raises `TrainerUsageError`: the node's name makes no file name."""
    encoded = _encoded(node_id)
    if not 0 < len(encoded) <= _MAX_NAME_BYTES:
        raise TrainerUsageError(
            f"--node-id: expected a name of 1 to {_MAX_NAME_BYTES} bytes for its log, found {len(encoded)} bytes when "
            "percent-encoded"
        )
    return directory / f"events-{encoded}.jsonl"


def _rotated_paths(directory: Path, node_id: str) -> list[Path]:
    """Returns the full files, oldest first."""
    rotated = re.compile(re.escape(f"events-{_encoded(node_id)}.") + r"(\d{6,})\.jsonl")
    numbered = [(int(found[1]), path) for path in directory.iterdir() if (found := rotated.fullmatch(path.name))]
    return [path for _, path in sorted(numbered)]


def _encoded(node_id: str) -> str:
    return quote(node_id, safe="", errors="backslashreplace").replace(".", "%2E")


def event_line(time_s: float, node_id: str, kind: str, fields_: Mapping[str, object]) -> bytes:
    """Returns one event as a line of canonical JSON with its newline; ``fields_`` has none of `_RESERVED_FIELDS`."""
    event = {name: _plain(value, _MAX_DEPTH) for name, value in fields_.items()}
    moment = datetime.fromtimestamp(time_s, UTC).isoformat(timespec="milliseconds").removesuffix("+00:00")
    event |= {"time": f"{moment}Z", "node": node_id, "kind": kind}
    return canonical_json(event) + b"\n"


def _plain(value: object, depth: int) -> object:
    """Returns ``value`` as JSON can have it; what has no such form, as its text."""
    if value is None or type(value) in (bool, int):
        return value
    if type(value) is float:  # Checked first, since the abstract classes below take 1 µs each.
        return _number(value)
    if isinstance(value, Integral):  # NumPy's too, as in the next check.
        return int(value)
    if isinstance(value, Real):
        return _number(float(value))
    if isinstance(value, str):
        return _text(value)
    if depth == 0:
        return _text(repr(value))
    if isinstance(value, Mapping):
        return {_text(str(name)): _plain(item, depth - 1) for name, item in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name), depth - 1) for field in fields(value)}
    if isinstance(value, Collection) and not isinstance(value, bytes | bytearray | memoryview):
        items = sorted(value, key=repr) if isinstance(value, set | frozenset) else value
        return [_plain(item, depth - 1) for item in items]
    return _text(str(value))


def _number(value: float) -> float | str:
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _text(value: str) -> str:
    shown = value if len(value) <= _MAX_TEXT else f"{value[:_MAX_TEXT]}…"
    return shown.encode("utf-8", "backslashreplace").decode()  # Half a surrogate pair cannot be written.


@dataclass(frozen=True, slots=True)
class Event:
    """One line of a log."""

    time: datetime
    node: str
    kind: str
    fields: Mapping[str, object]

    def number(self, name: str) -> float:
        """Returns a field as a number; NaN if it is missing or no number."""
        value = self.fields.get(name)
        try:
            return float(value) if isinstance(value, int | float | str) else float("nan")
        except (ValueError, OverflowError):
            return float("nan")


def read_events(path: Path) -> Iterator[Event]:
    """Yields the events of a file, or of a directory node by node, in their order. Raises `TrainerUsageError`: none."""
    path = path.expanduser()
    if not path.exists():
        raise TrainerUsageError(
            f"expected a log's directory or file at {path}, found nothing; give what --log-dir said"
        )
    if not path.is_dir():
        with path.open("rb") as file:
            yield from _events(file, path)
        return
    for node_id in logged_nodes(path):
        yield from read_node_events(path, node_id)


def logged_nodes(directory: Path) -> list[str]:
    """Returns the names of the nodes whose logs are in a directory, in order."""
    active = (_ACTIVE.fullmatch(file.name) for file in directory.iterdir())
    return sorted(unquote(match[1]) for match in active if match)


def read_node_events(directory: Path, node_id: str) -> Iterator[Event]:
    """Yields the events of a node of `logged_nodes`, from its oldest file on."""
    path = active_path(directory, node_id)
    with path.open("rb") as active:  # Opened first: if it is rotated meanwhile, it is still read once, and last.
        for older in _rotated_paths(directory, node_id):
            try:
                with older.open("rb") as file:
                    if not os.path.sameopenfile(file.fileno(), active.fileno()):
                        yield from _events(file, older)
            except FileNotFoundError:
                logger.info("%s was removed while the log was read", older)
        yield from _events(active, path)


def _events(file: BinaryIO, path: Path) -> Iterator[Event]:
    num_strange = 0
    for line in _lines(file):
        event = _event(line) if line else None
        if event is None:
            num_strange += 1
        else:
            yield event
    if num_strange:
        logger.warning("%s: expected one event a line, found %d lines that are none; left them out", path, num_strange)


def _lines(file: BinaryIO) -> Iterator[bytes]:
    """Yields the whole lines; an empty one in place of each that is too long to be an event, and was not held."""
    while line := file.readline(_MAX_LINE_BYTES):
        if line.endswith(b"\n"):
            yield line
            continue
        while (rest := file.readline(_MAX_LINE_BYTES)) and not rest.endswith(b"\n"):
            pass
        if not rest:  # Cut off in the middle of a line.
            return
        yield b""


def _event(line: bytes) -> Event | None:
    try:
        value = json.loads(line)
        moment = datetime.fromisoformat(value["time"])
        node, kind = value["node"], value["kind"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    if not isinstance(node, str) or not isinstance(kind, str) or moment.tzinfo is None:
        return None
    return Event(moment, node, kind, {name: item for name, item in value.items() if name not in _RESERVED_FIELDS})

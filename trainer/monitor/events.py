"""The format of a node's log: one canonical JSON line an event, in files that are rotated; written and read back.

``events-{node}.jsonl`` is being written; ``events-{node}.000001.jsonl``, ``.000002`` ... are the full ones before it,
oldest first. Characters of a node's name that do not belong into a file name are percent-encoded (``pod-1%2F0``).

JSON has no NaN: numbers that are not finite are the strings ``"NaN"``, ``"Infinity"`` and ``"-Infinity"``, as in
protobuf's JSON form; Python's ``float`` reads all three. Text is cut at 4,096 characters, so that one field cannot make
a line of megabytes.

A log can be read while it is written, after a kill, and when old files are gone. A last line without its newline is
skipped silently, since its writer was killed or has not finished it. One warning a file reports other lines that are no
events.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from datetime import UTC, datetime
from numbers import Integral, Real
from pathlib import Path
from typing import BinaryIO
from urllib.parse import quote, unquote

from manifests import canonical_json
from trainer.errors import TrainerUsageError
from trainer.monitor.facts import RoundFacts, StepFacts

__all__ = [
    "RESERVED_FIELDS",
    "Event",
    "active_path",
    "event_line",
    "next_rotated_path",
    "read_events",
    "rotated_paths",
    "round_fields",
    "step_fields",
]

logger = logging.getLogger(__name__)

RESERVED_FIELDS = frozenset({"time", "node", "kind"})
"""Fields that every line has."""
_REPORT_FIELDS = (
    *("round_index", "members", "dropped", "completeness", "sent_bytes", "received_bytes", "rule"),
    *("num_passes", "weights", "validation", "note"),
)
_MAX_TEXT = 4_096
_MAX_DEPTH = 8


_ACTIVE = re.compile(r"events-((?:[\w~-]|%[0-9A-F]{2})+)\.jsonl")
_MAX_NAME_BYTES = 200


def active_path(directory: Path, node_id: str) -> Path:
    """Returns the file that is being written.

    Raises:
        TrainerUsageError: the node's name makes no file name.
    """
    encoded = _encoded(node_id)
    if not 0 < len(encoded) <= _MAX_NAME_BYTES:
        raise TrainerUsageError(
            f"--node-id: expected a name of 1 to {_MAX_NAME_BYTES} bytes for its log, found {len(encoded)} bytes when "
            "percent-encoded"
        )
    return directory / f"events-{encoded}.jsonl"


def rotated_paths(directory: Path, node_id: str) -> list[Path]:
    """Returns the full files, oldest first."""
    rotated = re.compile(re.escape(f"events-{_encoded(node_id)}.") + r"(\d{6,})\.jsonl")
    numbered = [(int(found[1]), path) for path in directory.iterdir() if (found := rotated.fullmatch(path.name))]
    return [path for _, path in sorted(numbered)]


def next_rotated_path(directory: Path, node_id: str) -> Path:
    """Returns the name for the file that is full now."""
    rotated = rotated_paths(directory, node_id)
    last = int(rotated[-1].name.rsplit(".", 2)[1]) if rotated else 0
    return directory / f"events-{_encoded(node_id)}.{last + 1:06d}.jsonl"


def _encoded(node_id: str) -> str:
    return quote(node_id, safe="", errors="backslashreplace").replace(".", "%2E")


def event_line(time_s: float, node_id: str, kind: str, fields_: Mapping[str, object]) -> bytes:
    """Returns one event as a line of canonical JSON with its newline; ``fields_`` has none of `RESERVED_FIELDS`."""
    event = {name: _plain(value, _MAX_DEPTH) for name, value in fields_.items()}
    moment = datetime.fromtimestamp(time_s, UTC).isoformat(timespec="milliseconds").removesuffix("+00:00")
    event |= {"time": f"{moment}Z", "node": node_id, "kind": kind}
    return canonical_json(event) + b"\n"


def step_fields(step: StepFacts, loader_wait_s: float) -> dict[str, object]:
    """Returns the fields of a step's event."""
    fields = {name: getattr(step, name) for name in ("step", "num_tokens", "skipped")}
    fields |= {name: _rounded(getattr(step, name)) for name in ("loss", "grad_norm", "lr")}
    return fields | {"seconds": round(step.seconds, 6), "loader_wait_s": round(loader_wait_s, 6)}


def round_fields(report: RoundFacts, outer_step: int, state_digest: str) -> dict[str, object]:
    """Returns the fields of a round's event."""
    fields = {name: getattr(report, name) for name in _REPORT_FIELDS}
    return fields | {"outer_step": outer_step, "state_digest": state_digest, "seconds": round(report.seconds, 6)}


def _rounded(value: float) -> float:
    """Rounds to 7 significant digits, as many as a float32 has."""
    return float(f"{value:.7g}")


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
    """With its time zone, which is UTC."""
    node: str
    kind: str
    fields: Mapping[str, object]
    """All other fields of the line."""

    def number(self, name: str) -> float:
        """Returns a field as a number; NaN if it is missing or no number."""
        value = self.fields.get(name)
        try:
            return float(value) if isinstance(value, int | float | str) else float("nan")
        except (ValueError, OverflowError):
            return float("nan")


def read_events(path: Path) -> Iterator[Event]:
    """Yields the events of a log file, or of a log's directory node by node, in the order they were logged.

    Raises:
        TrainerUsageError: there is nothing at ``path``.
    """
    path = path.expanduser()
    if not path.exists():
        raise TrainerUsageError(
            f"expected a log's directory or file at {path}, found nothing; give what --log-dir said"
        )
    if not path.is_dir():
        with path.open("rb") as file:
            yield from _events(file, path)
        return
    active = (_ACTIVE.fullmatch(file.name) for file in path.iterdir())
    for node_id in sorted(unquote(match[1]) for match in active if match):
        yield from _node_events(path, node_id)


def _node_events(directory: Path, node_id: str) -> Iterator[Event]:
    path = active_path(directory, node_id)
    with path.open("rb") as active:  # Opened first: if it is rotated meanwhile, it is still read once, and last.
        for older in rotated_paths(directory, node_id):
            try:
                with older.open("rb") as file:
                    if not os.path.sameopenfile(file.fileno(), active.fileno()):
                        yield from _events(file, older)
            except FileNotFoundError:
                logger.info("%s was removed while the log was read", older)
        yield from _events(active, path)


def _events(file: BinaryIO, path: Path) -> Iterator[Event]:
    num_strange = 0
    for line in file:
        if not line.endswith(b"\n"):
            break
        event = _event(line)
        if event is None:
            num_strange += 1
        else:
            yield event
    if num_strange:
        logger.warning("%s: expected one event a line, found %d lines that are none; left them out", path, num_strange)


def _event(line: bytes) -> Event | None:
    try:
        value = json.loads(line)
        moment = datetime.fromisoformat(value["time"])
        node, kind = value["node"], value["kind"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    if not isinstance(node, str) or not isinstance(kind, str) or moment.tzinfo is None:
        return None
    return Event(moment, node, kind, {name: item for name, item in value.items() if name not in RESERVED_FIELDS})

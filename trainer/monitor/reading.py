"""Reading logs back: also while they are written, after a kill, and when old files are gone.

A last line without its newline is passed over in silence, since its writer is killed or not done with it. Any other
line that is no event is passed over, too, and told in one warning a file.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import BinaryIO

from trainer.errors import TrainerUsageError
from trainer.monitor.event_log import active_path, node_ids, rotated_paths
from trainer.monitor.spelling import RESERVED_FIELDS

__all__ = ["Event", "read_events"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Event:
    """One line of a log."""

    time: datetime
    """With its time zone, which is UTC."""
    node: str
    kind: str
    fields: Mapping[str, object]
    """All else that the line says."""

    def number(self, name: str) -> float:
        """A field as a number; NaN if there is none of that name, or no number in it."""
        value = self.fields.get(name)
        try:
            return float(value) if isinstance(value, int | float | str) else float("nan")
        except (ValueError, OverflowError):
            return float("nan")


def read_events(path: Path) -> Iterator[Event]:
    """The events of a log, in the order they were logged.

    Args:
        path: a log's directory, for all nodes in it one after the other, each from its oldest file on; or one file.

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
    for node_id in node_ids(path):
        yield from _node_events(path, node_id)


def _node_events(directory: Path, node_id: str) -> Iterator[Event]:
    """The newest file is opened first: should it be rotated meanwhile, it is still read once, and last."""
    path = active_path(directory, node_id)
    with path.open("rb") as active:
        for older in rotated_paths(directory, node_id):
            try:
                with older.open("rb") as file:
                    if not os.path.sameopenfile(file.fileno(), active.fileno()):
                        yield from _events(file, older)
            except FileNotFoundError:
                logger.info("%s went while the log was read", older)
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

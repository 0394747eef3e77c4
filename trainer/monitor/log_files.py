"""Where the events of a node lie.

``events-{node}.jsonl`` is being written; ``events-{node}.000001.jsonl``, ``.000002`` ... are the full ones before it,
oldest first. Characters of a node's name that a file's name should not have are spelt as in a URL (``pod-1%2F0``).
"""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import quote, unquote

from trainer.errors import TrainerUsageError

__all__ = ["active_path", "next_rotated_path", "node_ids", "rotated_paths"]

_ACTIVE = re.compile(r"events-((?:[\w~-]|%[0-9A-F]{2})+)\.jsonl")
_MAX_NAME_BYTES = 200


def active_path(directory: Path, node_id: str) -> Path:
    """The file that is being written.

    Raises:
        TrainerUsageError: the node's name makes no file name.
    """
    spelt = _spelt(node_id)
    if not 0 < len(spelt) <= _MAX_NAME_BYTES:
        raise TrainerUsageError(
            f"--node-id: expected a name of 1 to {_MAX_NAME_BYTES} bytes for its log, found {len(spelt)} bytes as spelt"
        )
    return directory / f"events-{spelt}.jsonl"


def rotated_paths(directory: Path, node_id: str) -> list[Path]:
    """The full files, oldest first."""
    rotated = re.compile(re.escape(f"events-{_spelt(node_id)}.") + r"(\d{6,})\.jsonl")
    numbered = [(int(found[1]), path) for path in directory.iterdir() if (found := rotated.fullmatch(path.name))]
    return [path for _, path in sorted(numbered)]


def next_rotated_path(directory: Path, node_id: str) -> Path:
    """What to call the file that is full now."""
    rotated = rotated_paths(directory, node_id)
    last = int(rotated[-1].name.rsplit(".", 2)[1]) if rotated else 0
    return directory / f"events-{_spelt(node_id)}.{last + 1:06d}.jsonl"


def node_ids(directory: Path) -> list[str]:
    """The nodes with events in a directory, by name."""
    found = (_ACTIVE.fullmatch(path.name) for path in directory.iterdir())
    return sorted(unquote(match[1]) for match in found if match)


def _spelt(node_id: str) -> str:
    return quote(node_id, safe="", errors="backslashreplace").replace(".", "%2E")

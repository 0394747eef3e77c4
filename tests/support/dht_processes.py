"""Which processes of the DHT are there."""

from __future__ import annotations

import os
import time
from pathlib import Path

__all__ = ["descendants", "wait_until_gone"]


def descendants(pid: int) -> set[int]:
    """All processes below ``pid``, by the kernel's list."""
    parents: dict[int, int] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            except (FileNotFoundError, ProcessLookupError):
                continue
    found: set[int] = set()
    while more := {child for child, parent in parents.items() if parent in {pid, *found}} - found:
        found |= more
    return found


def wait_until_gone(pids: set[int], timeout_s: float = 20.0) -> None:
    """Until none of them runs any more (a zombie does not)."""
    deadline = time.monotonic() + timeout_s
    while left := {pid for pid in pids if _runs(pid)}:
        if time.monotonic() > deadline:
            raise AssertionError(f"expected the processes {sorted(left)} to have ended")
        time.sleep(0.05)


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False

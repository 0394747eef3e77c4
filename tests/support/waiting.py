"""Waiting in tests for what comes about in another process or thread."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from pathlib import Path


def wait_until(holds: Callable[[], object], what: str = "", within_s: float = 180.0, every_s: float = 0.02) -> None:
    """Looks now and then whether it holds; an AssertionError if it does not in time."""
    end = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < end, what or f"did not come about within {within_s} s"
        time.sleep(every_s)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(50.0):
        while not condition():
            await asyncio.sleep(0.005)


def descendants(pid: int) -> set[int]:
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


def wait_until_gone(pids: set[int]) -> None:
    """Until none of them runs any more (a zombie does not)."""
    wait_until(lambda: not any(map(_runs, pids)), f"expected the processes {sorted(pids)} to have ended", 20.0)


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False

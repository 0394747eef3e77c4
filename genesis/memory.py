"""How much memory this process may still allocate: the least of what the machine, its limit and its groups leave.

Control groups of version 1 and 2 count, and every group above; a group's inactive page cache counts as free, since the
kernel gives it up before it kills. On macOS, without procfs, the machine's memory stands for what is free.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath


@dataclass(frozen=True, slots=True)
class FreeMemory:
    """What is left, and what leaves no more."""

    free_bytes: int
    source: str


def least_free_memory(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> FreeMemory | None:
    """Returns what this process may still allocate; None: procfs and control groups do not tell."""
    found = {"machine": _machine_bytes(proc), "own limit": _own_limit_bytes(proc)}
    found |= {f"control group {group}": left for group, left in _group_limits(proc, cgroups)}
    known = {source: left for source, left in found.items() if left is not None}
    if not known:
        return None
    source = min(known, key=known.__getitem__)
    return FreeMemory(max(0, known[source]), source)


def _machine_bytes(proc: Path) -> int | None:
    fields = _fields(proc / "meminfo")
    if "MemAvailable:" in fields:
        return fields["MemAvailable:"] * 1024
    if "SC_PHYS_PAGES" in os.sysconf_names and proc == Path("/proc"):  # no procfs: macOS
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None


def _own_limit_bytes(proc: Path) -> int | None:
    """Returns what ``ulimit -v`` leaves."""
    for line in _lines(proc / "self/limits"):
        if line.startswith("Max address space"):
            limit = line.removeprefix("Max address space").split()[0]
            used = _fields(proc / "self/status").get("VmSize:", 0) * 1024
            return int(limit) - used if limit.isdecimal() else None
    return None


def _group_limits(proc: Path, cgroups: Path) -> Iterator[tuple[str, int]]:
    """Yields the name of each limited control group around this process, and what it leaves."""
    for line in _lines(proc / "self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if not controllers:
            files = ("memory.max", "memory.current", "inactive_file")
            mounts = [cgroups, cgroups / "unified"]
        elif "memory" in controllers.split(","):
            files = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            mounts = [cgroups / "memory"]
        else:
            continue
        for mount in mounts:
            for group in (PurePosixPath(path), *PurePosixPath(path).parents):
                left = _group_bytes(mount / group.relative_to("/"), *files)
                if left is not None:
                    yield str(group), left


def _group_bytes(folder: Path, limit_file: str, usage_file: str, cache_field: str) -> int | None:
    limit, usage = (_lines(folder / name) for name in (limit_file, usage_file))
    if not (limit and usage and limit[0].isdecimal()):
        return None
    return int(limit[0]) - int(usage[0]) + _fields(folder / "memory.stat").get(cache_field, 0)


def _fields(path: Path) -> dict[str, int]:
    """Returns the lines of the form ``name number …``."""
    pairs = (line.split()[:2] for line in _lines(path))
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdecimal()}


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []

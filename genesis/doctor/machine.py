"""Checks of this machine that populating and training share: Python, packages, open files, memory, disks."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import resource
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from genesis.doctor.findings import Finding
from genesis.extras import EXTRA_OF
from genesis.memory import FreeMemory

_LEAST_PYTHON: Final = (3, 11)
_PROBE_BYTES: Final = 16 << 20
_PIECE_BYTES: Final = 1 << 20
_SLOW_DISK_BYTES_PER_S: Final = 20e6
_LONGEST_WRITE_S: Final = 10.0


def size_text(size_bytes: float) -> str:
    """``20.0 GB``, ``1.5 MB``: for people, in powers of 1,000."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if size_bytes >= 0.9995 * factor:
            return f"{size_bytes / factor:.1f} {unit}"
    return f"{size_bytes / 1e3:.1f} kB"


def python_finding() -> Finding:
    """Whether this Python runs the packages."""
    version = ".".join(map(str, sys.version_info[:3]))
    found = f"{version} at {sys.executable}, {platform.system()} {platform.machine()}"
    if sys.version_info < _LEAST_PYTHON:
        return Finding.failed(
            "machine", "python", f"expected 3.11 or newer, found {found}", "make the environment with python3.11"
        )
    if platform.system() != "Linux":
        return Finding.warning("machine", "python", f"expected Linux, found {found}", "untested: use Linux if it fails")
    return Finding.ok("machine", "python", found)


def packages_finding(modules: Mapping[str, str], version: str) -> Finding:
    """Whether modules are installed; ``modules`` maps each to the name of its distribution."""
    missing = [module for module in modules if importlib.util.find_spec(module) is None]
    if missing:
        extras = sorted({EXTRA_OF[module] for module in missing if module in EXTRA_OF})
        wanted = f"'genesis-training[{','.join(extras)}]'" if extras else "genesis-training"
        return Finding.failed(
            "machine",
            "packages",
            f"expected {', '.join(modules)}, found no {', '.join(missing)}",
            f"pip install {wanted} (in a checkout: pip install '.[{','.join(extras)}]')",
        )
    versions = ", ".join(f"{module} {_version_of(name)}" for module, name in modules.items())
    return Finding.ok("machine", "packages", f"genesis {version}, {versions}")


def _version_of(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "(version unknown)"


def open_files_finding(wanted: int, least: int) -> Finding:
    """Whether the process may open ``wanted`` files and sockets; with fewer than ``least`` it cannot work."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    granted = wanted if resource.RLIM_INFINITY in (soft, hard) else max(soft, min(hard, wanted))
    cure = f"raise it: ulimit -Hn {wanted}; ulimit -n {wanted} (systemd: LimitNOFILE={wanted}, docker: --ulimit nofile)"
    figures = {"granted_files": float(granted)}
    if granted < least:
        text = f"expected a limit of {wanted:,} open files, {least:,} at least, found {granted:,}"
        return Finding.failed("machine", "open-files", text, cure, **figures)
    if granted < wanted:
        text = f"expected a limit of {wanted:,} open files, found {granted:,}: fewer connections are accepted"
        return Finding.warning("machine", "open-files", text, cure, **figures)
    return Finding.ok("machine", "open-files", f"{granted:,} may be open", **figures)


def memory_per_core_finding(free: FreeMemory | None, num_cores: int, least_bytes: int) -> Finding:
    """Whether each core's worker process has ``least_bytes``."""
    if free is None:
        return Finding.skipped("machine", "memory", "neither procfs nor control groups say how much there is")
    each = free.free_bytes // max(1, num_cores)
    found = f"{size_text(free.free_bytes)} free ({free.source}), {size_text(each)} for each of {num_cores} cores"
    figures = {"free_bytes": float(free.free_bytes), "num_cores": float(num_cores)}
    fitting = free.free_bytes // least_bytes
    if not fitting:
        text = f"expected {size_text(least_bytes)} for a worker, found {found}"
        return Finding.failed("machine", "memory", text, "end other programs, or take a larger machine", **figures)
    if each < least_bytes:
        text = f"expected {size_text(least_bytes)} for each core's worker, found {found}"
        return Finding.warning("machine", "memory", text, f"give --workers {fitting}", **figures)
    return Finding.ok("machine", "memory", found, **figures)


def existing_folder(path: Path) -> Path:
    """The folder itself, or the nearest one above it that is there."""
    resolved = path.expanduser().absolute()
    return next(folder for folder in (resolved, *resolved.parents) if folder.is_dir())


def space_findings(needs: Sequence[tuple[str, Path, int, int]]) -> list[Finding]:
    """Whether there is room for what will be written.

    Args:
        needs: what it is, its folder, the bytes that it takes, and those without which it cannot begin. Folders of one
            file system share what that has.
    """
    by_device: dict[int, list[tuple[str, Path, int, int]]] = {}
    for each in needs:
        by_device.setdefault(existing_folder(each[1]).stat().st_dev, []).append(each)
    findings = []
    for shared in by_device.values():
        folder = existing_folder(shared[0][1])
        status = os.statvfs(folder)
        free_bytes = status.f_bavail * status.f_frsize
        wanted, least = sum(each[2] for each in shared), sum(each[3] for each in shared)
        what = ", ".join(f"{name} {size_text(size_bytes)} in {path}" for name, path, size_bytes, _ in shared)
        cure = f"make room there, or put {' or '.join(name for name, *_ in shared)} on another disk"
        figures = {"free_bytes": float(free_bytes), "needed_bytes": float(wanted)}
        if free_bytes < least:
            text = f"expected room for {what}, found {size_text(free_bytes)} free"
            findings.append(Finding.failed("machine", "disk-space", text, cure, **figures))
        elif free_bytes < wanted:
            text = f"expected room for {what}, found {size_text(free_bytes)} free: enough to begin with"
            findings.append(Finding.warning("machine", "disk-space", text, cure, **figures))
        else:
            findings.append(Finding.ok("machine", "disk-space", f"{size_text(free_bytes)} free, for {what}", **figures))
    return findings


def disk_speed_finding(folder: Path, what: str) -> Finding:
    """How fast a folder takes 16 MB, until they are on the disk; the file has no name and is gone at once."""
    there = existing_folder(folder)
    piece, written = os.urandom(_PIECE_BYTES), 0
    began_s = time.perf_counter()
    try:
        with tempfile.TemporaryFile(dir=there) as file:
            while written < _PROBE_BYTES and time.perf_counter() - began_s < _LONGEST_WRITE_S:
                written += os.write(file.fileno(), piece)
            os.fsync(file.fileno())
    except OSError as error:
        return Finding.failed(
            "machine",
            "disk-write",
            f"expected to write {size_text(_PROBE_BYTES)} to {there} ({what}), found: {error.strerror}",
            "make room, or have it writable for this user, or choose another folder",
        )
    rate = written / max(1e-6, time.perf_counter() - began_s)
    found = f"{size_text(rate)}/s to {there} ({what}), on the disk"
    if rate < _SLOW_DISK_BYTES_PER_S:
        cure = "put it on a local SSD: each checkpoint and shard waits for this disk"
        return Finding.warning(
            "machine", "disk-write", f"expected 20 MB/s or more, found {found}", cure, bytes_per_s=rate
        )
    return Finding.ok("machine", "disk-write", found, bytes_per_s=rate)

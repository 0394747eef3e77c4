"""Programs out of Debian packages, unpacked below a cache folder: nothing is installed, no service started, no root.

`unpacked` downloads what is named, and the libraries it needs that this machine lacks, with ``apt-get download`` and
unpacks it with ``dpkg -x``, once a machine: processes that come at the same time wait for the first. Package lists are
kept in the cache folder too, and fetched if the machine's own do not do. Some 3 MB and 5 s the first time.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from genesis.file_lock import FileLock

_LAYOUT = 1
"""Part of the folder's name; raised when what is in it changes its form."""
_LOCK_WITHIN_S = 300.0
_COMMAND_WITHIN_S = 240.0
_ALWAYS_THERE = {"libc6", "libgcc-s1", "libcrypt1"}


class PackagesError(RuntimeError):
    """The packages cannot be had; the message says what was tried."""


@dataclass(frozen=True, slots=True)
class Tree:
    """Where packages were unpacked."""

    root: Path

    def program(self, name: str) -> Path:
        """A program's path."""
        for folder in ("usr/sbin", "usr/bin"):
            if (path := self.root / folder / name).is_file():
                return path
        raise PackagesError(f"expected the program {name} below {self.root}, found none; remove that folder")

    def library_folders(self) -> list[Path]:
        """Folders that hold shared libraries."""
        return sorted({path.parent for path in self.root.glob("**/lib*.so*")})

    def environment(self) -> dict[str, str]:
        """What a program needs to find its libraries."""
        return {"LD_LIBRARY_PATH": ":".join(map(str, self.library_folders()))}


def unpacked(*packages: str) -> Tree:
    """The packages' files.

    Raises:
        PackagesError: there is no apt-get, or no package server within reach.
    """
    if shutil.which("apt-get") is None or shutil.which("dpkg") is None:
        raise PackagesError(
            f"expected apt-get and dpkg to get {', '.join(packages)} with; this test needs Debian or kin"
        )
    name = hashlib.sha256(" ".join(sorted(packages)).encode()).hexdigest()[:12]
    target = _cache_folder() / f"{_LAYOUT}-{name}"
    target.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(Path(f"{target}.lock"))
    lock.acquire(_LOCK_WITHIN_S)
    with lock:
        if not target.is_dir():
            work = Path(f"{target}.tmp")
            shutil.rmtree(work, ignore_errors=True)
            _fetch(packages, work)
            (work / "tree").rename(target)
            shutil.rmtree(work)
    return Tree(target)


def _cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "genesis-tests" / "debian"


def _fetch(packages: tuple[str, ...], work: Path) -> None:
    (work / "debs").mkdir(parents=True)
    (work / "tree").mkdir()
    failures = []
    for options in _ways(work):
        try:
            _run(["apt-get", *options, "download", *packages, *_libraries(packages, options)], work / "debs")
            break
        except PackagesError as error:
            failures.append(str(error))
    else:
        raise PackagesError(f"cannot get {', '.join(packages)}: {' | then, with new lists: '.join(failures)}")
    for archive in sorted((work / "debs").glob("*.deb")):
        _run(["dpkg", "-x", str(archive), str(work / "tree")], work)


def _ways(work: Path) -> Iterator[list[str]]:
    """apt's options: with the machine's own lists of packages, then with fresh ones of our own."""
    yield ["-q"]
    folders = {"Dir::State::lists": work / "lists", "Dir::Cache": work / "apt-cache"}
    for folder in folders.values():
        (folder / "partial").mkdir(parents=True)
        (folder / "archives" / "partial").mkdir(parents=True)
    # Without a sandbox user: that one cannot write below a home folder.
    settings = ["APT::Sandbox::User=", *(f"{key}={folder}" for key, folder in folders.items())]
    options = ["-q", *(part for setting in settings for part in ("-o", setting))]
    _run(["apt-get", *options, "update"], work)
    yield options


def _libraries(packages: tuple[str, ...], options: list[str]) -> list[str]:
    """The libraries that the packages depend on and this machine has not got."""
    listed = _run(["apt-cache", *options, "depends", "--important", *packages], Path("/"))
    names = {line.split()[-1] for line in listed.splitlines() if line.strip().startswith("Depends: lib")}
    wanted = {name for name in names if not name.endswith("-dev")} - _ALWAYS_THERE - set(packages)
    return sorted(name for name in wanted if not _is_installed(name))


def _is_installed(package: str) -> bool:
    query = ["dpkg-query", "-W", "-f", "${db:Status-Abbrev}", package]
    found = subprocess.run(query, capture_output=True, text=True, timeout=_COMMAND_WITHIN_S, check=False)
    return found.stdout.startswith("ii")


def _run(command: list[str], folder: Path) -> str:
    environment = {**os.environ, "LC_ALL": "C", "DEBIAN_FRONTEND": "noninteractive"}
    try:
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=_COMMAND_WITHIN_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise PackagesError(f"{command[0]} {command[-1]} took more than {_COMMAND_WITHIN_S:.0f} s") from None
    if done.returncode:
        raise PackagesError(f"'{' '.join(command)}' ended with {done.returncode}: {done.stderr.strip()[-500:]}")
    return done.stdout

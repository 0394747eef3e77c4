"""Folders that refuse: small disks, read-only ones; and a look at a cache folder that does not trust the cache."""

from __future__ import annotations

import fcntl
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.cache_actor import SIZE_BYTES, CacheActor


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "produced"


@pytest.fixture
def start_actor(folder: Path, log: Path) -> Iterator[Callable[..., CacheActor]]:
    """Starts processes that use `folder`; they end with the test."""
    with ExitStack() as stack:

        def start(*, max_files: int = 10, wait_timeout_s: float = 30.0) -> CacheActor:
            actor = CacheActor(folder, log, max_bytes=max_files * SIZE_BYTES, wait_timeout_s=wait_timeout_s)
            return stack.enter_context(actor)

        yield start


@pytest.fixture
def mount() -> Iterator[Callable[..., None]]:
    """Mounts with the arguments of mount(8), the last one the place; needs the superuser, as containers have."""
    places: list[str] = []

    def run(*arguments: str | Path) -> None:
        done = subprocess.run(["mount", *map(str, arguments)], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            pytest.skip(f"cannot mount here: {done.stderr.strip()}")
        if str(arguments[-1]) not in places:
            places.append(str(arguments[-1]))

    yield run
    for place in reversed(places):
        subprocess.run(["umount", "--lazy", place], check=True)


@pytest.fixture
def used_bytes(folder: Path) -> Callable[[], int]:
    """The bytes in `folder`, seen at one instant: under its lock, so no file is between two names."""

    def measure() -> int:
        with (folder / ".lock").open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            return sum(size_of(path) for path in folder.iterdir())

    def size_of(path: Path) -> int:
        try:
            return path.lstat().st_size
        except FileNotFoundError:  # A part of which nothing came; removing needs no lock.
            return 0

    return measure

"""Folders that refuse: small disks, read-only ones; and a look at a cache folder that does not trust the cache."""

from __future__ import annotations

import fcntl
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

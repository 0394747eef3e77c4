"""File systems that are small, full or read-only, mounted for the duration of a test."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def mounted(target: Path, *options: str | Path) -> Iterator[Path]:
    """Mounts with the options of mount(8) at ``target``; skips the test where that is not permitted."""
    target.mkdir(exist_ok=True)
    try:
        done = subprocess.run(["mount", *options, target], capture_output=True, text=True, timeout=10, check=False)
    except OSError as error:
        pytest.skip(f"cannot mount here: {error}")
    if done.returncode:
        pytest.skip(f"cannot mount here: {done.stderr.strip()}")
    try:
        yield target
    finally:
        subprocess.run(["umount", "--lazy", target], check=True, timeout=10)

"""Locks between processes: who is excluded, for how long, and what ends a lock."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from genesis.file_lock import FileLock, FileLockedError

HOLDER = """
import sys, time
from pathlib import Path
from genesis.file_lock import FileLock
with FileLock(Path(sys.argv[1]), shared=sys.argv[2] == "shared"):
    print("locked", flush=True)
    time.sleep(60)
"""


@contextmanager
def held_elsewhere(path: Path, kind: str = "alone") -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(path), kind], stdout=subprocess.PIPE) as holder:
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == b"locked\n"
            yield holder
        finally:
            holder.kill()


@pytest.mark.parametrize(
    ("theirs", "ours", "is_free"),
    [("alone", "alone", False), ("alone", "shared", False), ("shared", "alone", False), ("shared", "shared", True)],
)
def test_a_lock_of_another_process_excludes_unless_both_are_shared(tmp_path, theirs, ours, is_free):
    lock = FileLock(tmp_path / "lock", shared=ours == "shared")
    with held_elsewhere(tmp_path / "lock", theirs):
        if is_free:
            lock.acquire()
        else:
            with pytest.raises(FileLockedError, match="lock is locked"):
                lock.acquire(0.05, poll_s=0.01)
        assert lock.is_locked == is_free
    lock.release()


def test_a_process_that_is_killed_leaves_no_lock(tmp_path):
    lock = FileLock(tmp_path / "lock")
    with held_elsewhere(tmp_path / "lock") as holder:
        holder.send_signal(signal.SIGKILL)
        lock.acquire(30.0)
        assert lock.is_locked
        lock.release()


def test_two_locks_of_one_process_exclude_each_other_unless_the_file_was_removed(tmp_path):
    first, second = FileLock(tmp_path / "lock"), FileLock(tmp_path / "lock")
    with first:
        first.acquire()  # Held already: without effect.
        with pytest.raises(FileLockedError):
            second.acquire()
    with second:
        assert not first.is_locked
    path = tmp_path / "lock"
    with FileLock(path):
        path.unlink()
        with FileLock(path) as second:
            assert second.is_locked
            assert path.exists()


def test_a_forked_child_keeps_no_lock_that_its_parent_gives_back(tmp_path):
    lock = FileLock(tmp_path / "lock")
    lock.acquire()
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(writing)
        os.read(reading, 1)  # Until the parent closes its end.
        os._exit(0)
    os.close(reading)
    try:
        lock.release()
        with FileLock(tmp_path / "lock") as again:
            assert again.is_locked
    finally:
        os.close(writing)
        os.waitpid(child, 0)


@pytest.mark.parametrize("required", [True, False])
def test_a_file_system_without_locks_excludes_nobody_where_that_will_do(tmp_path, monkeypatch, required):
    def none_here(descriptor: int, kind: int) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("fcntl.flock", none_here)
    lock = FileLock(tmp_path / "lock", required=required)
    if required:
        with pytest.raises(OSError, match="not supported"):
            lock.acquire()
    else:
        with lock:
            assert lock.is_locked
    assert not lock.is_locked

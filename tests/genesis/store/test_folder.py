"""What only a folder has: files, leftovers, links, a full or read-only disk, locks; and from an address to a store."""

from __future__ import annotations

import fcntl
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from genesis.errors import ObjectNotFoundError, StoreAccessError, StoreFullError, StoreUnavailableError, UsageError
from genesis.file_lock import FileLock, FileLockedError
from genesis.store import CachePolicy, FolderStore, open_readable, open_store
from genesis.store.http import HttpStore
from genesis.store.s3 import S3Store

NONE = CachePolicy.NONE
OLD = time.time() - 3600


def leftovers(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob(".tmp-*"))


def test_objects_are_files_with_etags_of_their_own(tmp_path):
    FolderStore(tmp_path / "s").put("index/a.json", b"one", cache=NONE)
    assert (tmp_path / "s/index/a.json").read_bytes() == b"one"
    assert leftovers(tmp_path) == []
    store = FolderStore(tmp_path)
    etags = [store.put("k", b"same", cache=NONE) for _ in range(50)]
    assert len(set(etags)) == 50
    etag = FolderStore(tmp_path).put("k", b"1", cache=NONE)
    code = f"from genesis.store import FolderStore; print(FolderStore({str(tmp_path)!r}).get('k').etag)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == etag
    (tmp_path / "disk").mkdir()
    (tmp_path / "store").symlink_to(tmp_path / "disk")
    FolderStore(tmp_path / "store").put("k", b"1", cache=NONE)
    assert (tmp_path / "disk/k").read_bytes() == b"1"


def test_a_folder_that_is_not_there_or_cannot_be(tmp_path):
    reader = FolderStore(tmp_path / "typo", must_exist=True)
    for use in (lambda: reader.get("k"), lambda: reader.head("k"), lambda: list(reader.list())):
        with pytest.raises(StoreAccessError, match=r"typo.*no such folder"):
            use()
    writer = FolderStore(tmp_path / "new/store")
    assert writer.head("k") is None
    assert list(writer.list()) == []
    assert not (tmp_path / "new").exists(), "reading creates nothing"
    writer.put("k", b"", cache=NONE)
    assert FolderStore(tmp_path / "new/store", must_exist=True).get("k").body == b""
    (tmp_path / "file").write_text("")
    for root, key in ((tmp_path / "file" / "store", "k"), (tmp_path, "file/k")):
        with pytest.raises(StoreAccessError, match=r"file|directory"):
            FolderStore(root).put(key, b"", cache=NONE)


def test_what_a_killed_process_left_is_swept(tmp_path):
    names = [".tmp-1-dead", ".tmp-2-locked", ".tmp-3-young"]
    for name in names:
        (tmp_path / name).write_bytes(b"part")
        os.utime(tmp_path / name, (OLD, OLD))
    os.utime(tmp_path / ".tmp-3-young")
    with (tmp_path / ".tmp-2-locked").open("ab") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        store = FolderStore(tmp_path)
        assert list(store.list()) == []
        store.put("k", b"", cache=NONE)
        assert leftovers(tmp_path) == [".tmp-2-locked", ".tmp-3-young"]


def test_what_is_no_object_of_the_store(tmp_path):
    store = FolderStore(tmp_path)
    store.put("k", b"", cache=NONE)
    (tmp_path / "a note.txt").write_text("hello")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_text("hello")
    (tmp_path / "empty").mkdir()
    assert [info.key for info in store.list()] == ["k"]
    assert store.head("empty") is None
    with pytest.raises(ObjectNotFoundError):
        store.get("empty")
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_text("secret")
    root = tmp_path / "store"
    root.mkdir()
    (root / "file").symlink_to(outside / "secret")
    (root / "folder").symlink_to(outside)
    store = FolderStore(root)
    for key in ("file", "folder/secret"):
        with pytest.raises(StoreAccessError, match="symbolic link"):
            store.get(key)
    with pytest.raises(StoreAccessError, match="symbolic link"):
        store.put("folder/new", b"", cache=NONE)
    assert list(store.list()) == []
    assert sorted(path.name for path in outside.iterdir()) == ["secret"]


def test_a_full_disk(tiny_disk):
    store = FolderStore(tiny_disk / "store")
    etag = store.put("k", bytes(1000), cache=NONE)
    with pytest.raises(StoreFullError, match=r"shard_0.pt.* 2,097,152 bytes, .*bytes free"):
        store.put("shard_0.pt", bytes(2 << 20), cache=NONE)
    with pytest.raises(StoreFullError):
        store.put("k", bytes(2 << 20), cache=NONE, if_match=etag)
    assert store.get("k").body == bytes(1000)
    assert leftovers(tiny_disk) == []
    store.put("shard_0.pt", bytes(100_000), cache=NONE)


def test_a_read_only_disk(read_only_disk):
    with pytest.raises(StoreAccessError, match="Read-only"):
        FolderStore(read_only_disk).put("k", b"", cache=NONE)


def test_another_process_holding_the_lock(tmp_path):
    store = FolderStore(tmp_path, lock_timeout_s=0.05)
    store.put("k", b"1", cache=NONE)
    with FileLock(tmp_path / ".genesis.lock"), pytest.raises(StoreUnavailableError, match=r"genesis\.lock"):
        store.put("k", b"2", cache=NONE)
    store.put("k", b"3", cache=NONE)
    assert store.get("k").body == b"3"
    assert leftovers(tmp_path) == []


def test_a_local_store_loads_no_client_library():
    code = (
        "import sys; from genesis.store import open_store; open_store('x'); "
        "print(sorted({'boto3', 'botocore', 'httpx', 'tenacity'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("url", "kind", "shown"),
    [
        ("/data/store", FolderStore, "/data/store"),
        ("file:///data/a%20b", FolderStore, "/data/a b"),
        ("s3://bucket/", S3Store, "s3://bucket"),
        ("S3://bucket/pre/fix/", S3Store, "s3://bucket/pre/fix"),
        ("~/store", FolderStore, "/home/someone/store"),
        ("store", FolderStore, str(Path("store").absolute())),
    ],
)
def test_open_store(url, kind, shown, monkeypatch):
    monkeypatch.setenv("HOME", "/home/someone")
    store = open_store(url)
    assert isinstance(store, kind)
    assert store.url == shown


@pytest.mark.parametrize("url", ["https://host/prefix", "http://user:secret@host:8080/prefix/", "s3://bucket", "/data"])
def test_open_readable(url):
    with closing(open_readable(url)) as store:
        assert isinstance(store, HttpStore) == url.startswith("http")
        assert "secret" not in store.url + repr(store)
        again = pickle.loads(pickle.dumps(store))
        assert (type(again), again.url, again.received_bytes) == (type(store), store.url, 0)


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("gs://bucket/x", "s3://bucket/prefix"),
        ("https://host/x", "can only be read"),
        ("file://otherhost/x", "names no other host"),
        ("s3:/bucket/x", "expected s3:// and the rest"),
        ("s3://", "s3://bucket/prefix"),
        ("s3://bucket/../x", "s3://bucket/prefix"),
        ("s3://bucket/a?b=c", "s3://bucket/prefix"),
        ("", "empty"),
    ],
)
def test_what_cannot_be_written_or_read(url, says):
    with pytest.raises(UsageError, match=says):
        open_store(url)
    for unreadable in ("gs://bucket/x", "https://", "https://host/x?token=1", "https://u:secret@host/?x"):
        with pytest.raises(UsageError) as caught:
            open_readable(unreadable)
        assert "secret" not in str(caught.value)


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
    with first:
        (tmp_path / "lock").unlink()
        with second:
            assert second.is_locked
            assert (tmp_path / "lock").exists()


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

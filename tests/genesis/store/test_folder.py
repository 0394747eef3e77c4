"""What only a folder has: files, leftovers, links, a disk that is full or read-only, another process's lock."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from genesis.errors import ObjectNotFoundError, StoreAccessError, StoreFullError, StoreUnavailableError
from genesis.file_lock import FileLock
from genesis.store import CachePolicy, FolderStore

NONE = CachePolicy.NONE
OLD = time.time() - 3600


def leftovers(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob(".tmp-*"))


def test_an_object_is_a_file_of_its_name(tmp_path):
    FolderStore(tmp_path / "s").put("index/a.json", b"one", cache=NONE)
    assert (tmp_path / "s/index/a.json").read_bytes() == b"one"
    assert leftovers(tmp_path) == []


def test_equal_bodies_put_at_once_have_distinct_etags(tmp_path):
    store = FolderStore(tmp_path)
    etags = [store.put("k", b"same", cache=NONE) for _ in range(50)]
    assert len(set(etags)) == 50


def test_etags_hold_across_processes(tmp_path):
    etag = FolderStore(tmp_path).put("k", b"1", cache=NONE)
    code = f"from genesis.store import FolderStore; print(FolderStore({str(tmp_path)!r}).get('k').etag)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == etag


def test_a_folder_that_is_not_there(tmp_path):
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


def test_foreign_files_are_no_objects(tmp_path):
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


def test_links_do_not_lead_out_of_the_store(tmp_path):
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


def test_the_store_itself_may_be_a_link(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "store").symlink_to(tmp_path / "disk")
    FolderStore(tmp_path / "store").put("k", b"1", cache=NONE)
    assert (tmp_path / "disk/k").read_bytes() == b"1"


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


def test_a_file_size_limit(tmp_path):
    code = f"""
import resource
from genesis.errors import StoreFullError
from genesis.store import CachePolicy, FolderStore
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
try:
    FolderStore({str(tmp_path)!r}).put("shard_0.pt", bytes(2 << 20), cache=CachePolicy.NONE)
except StoreFullError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert "2,097,152 bytes" in done.stdout
    assert leftovers(tmp_path) == []
    assert list(FolderStore(tmp_path).list()) == []


def test_a_read_only_disk(read_only_disk):
    with pytest.raises(StoreAccessError, match="Read-only"):
        FolderStore(read_only_disk).put("k", b"", cache=NONE)


def test_a_file_in_the_way(tmp_path):
    (tmp_path / "file").write_text("")
    for root, key in ((tmp_path / "file" / "store", "k"), (tmp_path, "file/k")):
        with pytest.raises(StoreAccessError, match=r"file|directory"):
            FolderStore(root).put(key, b"", cache=NONE)


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

"""Folders that cannot be used: data comes without the cache, with one warning a cause, and it is tried again."""

import errno
import fcntl
import os
import resource
import stat

import pytest

from loader.cache import ShardCache
from loader.errors import CacheError
from tests.support.cache_actor import SIZE_BYTES, check, content, name_of


def open_file(cache, number, size_bytes=SIZE_BYTES):
    name = name_of(number)
    found = cache.open(name, size_bytes, lambda: content(name, size_bytes), check(name))
    assert found.buffer == content(name, size_bytes)
    assert not found.buffer.readonly
    return found


def test_a_full_disk(folder, mount, caplog, tmp_path):
    (tmp_path / "nameless").mkdir()
    mount("-t", "tmpfs", "-o", "nr_inodes=2", "tmpfs", tmp_path / "nameless")
    cache = ShardCache(tmp_path / "nameless", 10_000_000)
    assert not any(open_file(cache, number).cached for number in (1, 2))
    assert len(caplog.records) == 1
    caplog.clear()
    folder.mkdir()
    mount("-t", "tmpfs", "-o", "size=1M", "tmpfs", folder)
    cache = ShardCache(folder, 10_000_000)
    held = [open_file(cache, number, 450_000) for number in (1, 2)]
    assert all(file.cached for file in held)
    assert not any(open_file(cache, number, 450_000).cached for number in (3, 4, 3))
    assert len(caplog.records) == 1
    assert "No space left" in caplog.text
    assert {path.name for path in folder.iterdir()} == {name_of(1), name_of(2), ".lock"}
    # What is not open gives way to what is needed, as under the bound.
    held.pop(0)
    assert open_file(cache, 3, 450_000).cached
    assert [entry.name for entry in cache.entries()] == [name_of(2), name_of(3)]
    assert len(caplog.records) == 1


def test_a_limit_on_the_size_of_files(folder, caplog):
    cache = ShardCache(folder, 10_000_000)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (SIZE_BYTES - 1, limits[1]))
    try:
        assert not open_file(cache, 1).cached
        assert not open_file(cache, 1).cached
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert len(caplog.records) == 1
    assert open_file(cache, 1).cached
    assert {path.name for path in folder.iterdir()} == {name_of(1), ".lock"}


def test_a_folder_that_can_only_be_read(folder, mount, caplog):
    cache = ShardCache(folder, 10_000_000)
    open_file(cache, 1)
    (folder / name_of(2)).write_bytes(b"damaged")
    mount("--bind", folder, folder)
    mount("-o", "remount,bind,ro", folder)
    hit = open_file(cache, 1)
    assert hit.from_cache and hit.cached
    assert not open_file(cache, 3).cached
    assert not open_file(cache, 4).cached
    assert len(caplog.records) == 1
    assert "Read-only file system" in caplog.text
    assert not open_file(cache, 2).cached
    assert "damaged" in caplog.text
    cache.discard(name_of(1))
    assert {entry.name: entry.in_use for entry in cache.entries()} == {name_of(1): True, name_of(2): False}
    with pytest.raises(CacheError, match="Read-only file system"):
        cache.clear()


def test_a_file_where_the_folder_should_be(folder, caplog):
    folder.write_text("mine")
    for cache in (ShardCache(folder, 10_000_000), ShardCache(folder / "deeper", 10_000_000)):
        caplog.clear()
        assert not open_file(cache, 1).cached
        assert not open_file(cache, 2).cached
        assert len(caplog.records) == 1
        assert "a folder, not a file" in caplog.text
        assert not cache.contains(name_of(1))
        cache.discard(name_of(1))
    assert folder.read_text() == "mine"
    with pytest.raises(CacheError, match="Not a directory"):
        ShardCache(folder, 1).entries()


@pytest.mark.parametrize("number", [errno.EOPNOTSUPP, errno.ENOSYS, errno.ENOLCK])
@pytest.mark.parametrize("call", ["fcntl.flock", "os.posix_fallocate"])
def test_a_file_system_without_locks_or_reservations(folder, monkeypatch, caplog, call, number):
    def refuse(*arguments):
        raise OSError(number, os.strerror(number))

    cache = ShardCache(folder, 10_000_000)
    with monkeypatch.context() as patch:
        patch.setattr(call, refuse)
        assert not open_file(cache, 1).cached
        assert not open_file(cache, 2).cached
    assert len(caplog.records) == 1
    assert "local disk" in caplog.text
    assert open_file(cache, 1).cached


def test_a_folder_removed_while_a_file_is_made(folder, caplog):
    cache = ShardCache(folder, 10_000_000)

    def produce():
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()
        return content(name_of(1))

    found = cache.open(name_of(1), SIZE_BYTES, produce, check(name_of(1)))
    assert not found.cached and found.buffer == content(name_of(1))
    assert len(caplog.records) == 1
    assert open_file(cache, 1).cached


def test_a_folder_whose_lock_a_stopped_process_holds(folder, caplog):
    open_file(ShardCache(folder, 10_000_000), 1)
    cache = ShardCache(folder, 10_000_000, wait_timeout_s=0.05)
    with (folder / ".lock").open() as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert open_file(cache, 1).from_cache
        assert not open_file(cache, 2).cached
        assert not open_file(cache, 2).cached
        with pytest.raises(CacheError, match="its lock"):
            cache.entries()
    assert len(caplog.records) == 1
    assert open_file(ShardCache(folder, 10_000_000), 2).cached


def test_what_is_larger_than_the_bound(folder, caplog):
    cache = ShardCache(folder, 2 * SIZE_BYTES)
    open_file(cache, 1)
    assert not open_file(cache, 2, 2 * SIZE_BYTES + 1).cached
    assert "--cache-bytes" in caplog.text
    assert cache.contains(name_of(1))


def test_the_errors_of_the_producer_are_the_callers_even_those_of_a_disk(folder):
    def produce():
        raise OSError(errno.ENOSPC, "the producer's own disk")

    with pytest.raises(OSError, match="producer's own"):
        ShardCache(folder, 10_000_000).open(name_of(1), SIZE_BYTES, produce, check(name_of(1)))
    assert [path.name for path in folder.iterdir()] == [".lock"]


def test_others_may_read_but_not_write(folder):
    mask = os.umask(0)
    try:
        open_file(ShardCache(folder, 10_000_000), 1)
    finally:
        os.umask(mask)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o755
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o644}

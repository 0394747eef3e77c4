"""Whatever was done to a cached file or its folder, what is opened is right, and the damage is told once."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import subprocess
from pathlib import Path

import pytest

from loader.cache import ShardCache
from loader.errors import CacheError, LoaderUsageError
from tests.support.cache_actor import SIZE_BYTES, check, content, name_of
from tests.support.mounts import mounted

NAME = name_of(1)


def flip(path):
    data = bytearray(path.read_bytes())
    data[12_345] ^= 4
    path.write_bytes(data)


DAMAGES = {
    "a bit": flip,
    "shorter": lambda path: os.truncate(path, SIZE_BYTES - 1),
    "longer": lambda path: os.truncate(path, SIZE_BYTES + 1),
    "empty": lambda path: os.truncate(path, 0),
    "linked elsewhere": lambda path: path.symlink_to(path.rename(path.parent.parent / "elsewhere")),
    "a dangling link": lambda path: (path.unlink(), path.symlink_to(path.parent.parent / "nowhere")),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
    "a pipe": lambda path: (path.unlink(), os.mkfifo(path)),
}


@pytest.fixture
def filled(folder):
    cache = ShardCache(folder, 10 * SIZE_BYTES, wait_timeout_s=10)
    cache.open(NAME, SIZE_BYTES, lambda: content(NAME), check(NAME))
    return cache


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_named_removed_and_made_anew(filled, folder, caplog, damage):
    DAMAGES[damage](folder / NAME)
    found = filled.open(NAME, SIZE_BYTES, lambda: content(NAME), check(NAME))
    assert (found.from_cache, found.cached, bytes(found.buffer)) == (False, True, content(NAME))
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert NAME in caplog.text
    assert (folder / NAME).is_file() and not (folder / NAME).is_symlink()
    assert filled.open(NAME, SIZE_BYTES, lambda: b"", check(NAME)).from_cache
    if damage == "linked elsewhere":
        assert (folder.parent / "elsewhere").read_bytes() == content(NAME)


def test_a_folder_with_something_in_it_is_left_alone(filled, folder, caplog):
    DAMAGES["a folder"](folder / NAME)
    (folder / NAME / "mine").write_text("mine")
    found = filled.open(NAME, SIZE_BYTES, lambda: content(NAME), check(NAME))
    assert (found.cached, bytes(found.buffer)) == (False, content(NAME))
    assert (folder / NAME / "mine").read_text() == "mine"
    assert "Directory not empty" in caplog.text


def test_a_link_where_a_file_would_be_made_is_not_written_through(folder, tmp_path, caplog):
    precious = tmp_path / "precious"
    precious.write_text("precious")
    folder.mkdir()
    (folder / f".{NAME}.part").symlink_to(precious)
    found = ShardCache(folder, SIZE_BYTES).open(NAME, SIZE_BYTES, lambda: content(NAME), check(NAME))
    assert (found.cached, bytes(found.buffer)) == (False, content(NAME))
    assert precious.read_text() == "precious"
    assert "symbolic links" in caplog.text


@pytest.mark.parametrize("name", ["", "..", "../x-0123456789abcdef.pt", ".x-0123456789abcdef.pt", f"{NAME}\n"])
def test_a_name_that_is_not_one_is_refused(filled, name):
    for use in (filled.contains, filled.discard, lambda name: filled.open(name, 1, bytes, lambda view: None)):
        with pytest.raises(LoaderUsageError, match="expected a cache name"):
            use(name)
    with pytest.raises(LoaderUsageError, match="at least 1 byte"):
        filled.open(NAME, 0, bytes, lambda view: None)


def test_a_file_is_checked_again_only_when_it_was_touched(tmp_path):
    name = name_of(1)
    checked = []

    def open_it(cache):
        file = cache.open(
            name, SIZE_BYTES, lambda: content(name), lambda view: (checked.append(len(view)), check(name)(view))[1]
        )
        assert bytes(file.buffer) == content(name)
        return file.from_cache

    first = ShardCache(tmp_path / "cache", 10 * SIZE_BYTES)
    assert not open_it(first)
    assert open_it(first) and len(checked) == 1  # What was written is read back once.
    assert open_it(first) and len(checked) == 1
    assert open_it(ShardCache(tmp_path / "cache", 10 * SIZE_BYTES)) and len(checked) == 2  # Another reader's own check.
    assert open_it(first) and len(checked) == 3  # Which changed the inode, as restoring the time of writing does.
    assert open_it(first) and len(checked) == 3
    damaged = bytearray(content(name))
    damaged[SIZE_BYTES // 2] ^= 1
    (tmp_path / "cache" / name).write_bytes(damaged)
    assert not open_it(first) and len(checked) == 4  # Written to in place: noticed, made anew.
    replacement = tmp_path / "cache" / "x"
    replacement.write_bytes(damaged)
    os.utime(replacement, ns=(0, (tmp_path / "cache" / name).stat().st_mtime_ns))
    replacement.replace(tmp_path / "cache" / name)
    assert not open_it(first)  # Another file of the same age and size.


def test_a_mapped_file_written_in_place_with_its_times_restored_is_made_anew(tmp_path):
    name, cache = name_of(1), ShardCache(tmp_path / "cache", 10 * SIZE_BYTES)
    path = tmp_path / "cache" / name
    opened = [cache.open(name, SIZE_BYTES, lambda: content(name), check(name)) for _ in range(2)]
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(SIZE_BYTES // 2)
        file.write(b"?")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_mtime_ns == before.st_mtime_ns
    again = cache.open(name, SIZE_BYTES, lambda: content(name), check(name))
    assert not again.from_cache
    assert bytes(again.buffer) == content(name)
    assert len(opened) == 2  # Mapped until here.


@pytest.fixture
def before_locking(monkeypatch):
    """Does something once, when a file is open but not yet locked."""
    lock = fcntl.flock

    def plan(path, act):
        def flock(descriptor, kind):
            if not done and path.exists() and os.path.samestat(os.fstat(descriptor), path.lstat()):
                done.append(path)
                act(path)
            lock(descriptor, kind)

        done = []
        monkeypatch.setattr(fcntl, "flock", flock)
        return done

    return plan


def replaced(path):
    (path.parent / "new").write_bytes(path.read_bytes())
    (path.parent / "new").rename(path)


def finished(path):
    path.write_bytes(content(NAME))
    path.rename(path.parent / NAME)


@pytest.mark.parametrize(
    ("name", "act", "from_cache"),
    [
        *((NAME, Path.unlink, False), (NAME, replaced, True)),
        *((f".{NAME}.part", Path.unlink, False), (f".{NAME}.part", finished, True)),
    ],
    ids=["evicted", "replaced", "a part swept", "a part finished by another"],
)
def test_a_file_changed_between_opening_and_locking(folder, before_locking, caplog, name, act, from_cache):
    cache = ShardCache(folder, SIZE_BYTES)
    if name == NAME:
        open_file(cache, 1)
    done = before_locking(folder / name, act)
    found = open_file(cache, 1)
    assert done and (found.from_cache, found.cached) == (from_cache, True) and found.buffer == content(NAME)
    # It is the file of that name that is held, not the one that was.
    assert cache.clear().kept == (NAME,)
    assert not caplog.records


def test_what_a_dead_maker_left_is_taken_over_or_makes_room(folder, caplog):
    folder.mkdir()
    leftover = folder / f".{name_of(2)}.part"
    leftover.write_bytes(bytes(SIZE_BYTES))
    (folder / f".{NAME}.part").write_bytes(b"x" * (3 * SIZE_BYTES))
    assert open_file(ShardCache(folder, SIZE_BYTES), 1).cached
    assert (folder / NAME).read_bytes() == content(NAME)
    assert not leftover.exists() and not caplog.records


def open_file(cache, number, size_bytes=SIZE_BYTES):
    name = name_of(number)
    found = cache.open(name, size_bytes, lambda: content(name, size_bytes), check(name))
    assert found.buffer == content(name, size_bytes)
    assert not found.buffer.readonly
    return found


@pytest.fixture
def small_disk(folder):
    with mounted(folder, "-t", "tmpfs", "-o", "size=1M", "tmpfs"):
        yield


@pytest.mark.usefixtures("small_disk")
def test_a_full_disk(folder, caplog):
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


def test_a_folder_that_can_only_be_read(folder, caplog):
    cache = ShardCache(folder, 10_000_000)
    open_file(cache, 1)
    (folder / name_of(2)).write_bytes(b"damaged")
    with mounted(folder, "--bind", folder):
        subprocess.run(["mount", "-o", "remount,bind,ro", folder], check=True)
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


def test_others_may_read_but_not_write(folder):
    mask = os.umask(0)
    try:
        open_file(ShardCache(folder, 10_000_000), 1)
    finally:
        os.umask(mask)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o755
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o644}

"""Whatever was done to a cached file, what is opened is right, and the damage is told."""

from __future__ import annotations

import fcntl
import os
import socket
from pathlib import Path

import pytest

from loader.cache import ShardCache
from loader.errors import LoaderUsageError
from tests.support.cache_actor import SIZE_BYTES, check, content, name_of

NAME = name_of(1)


def flip(path):
    data = bytearray(path.read_bytes())
    data[12_345] ^= 4
    path.write_bytes(data)


def truncate(path):
    os.truncate(path, SIZE_BYTES - 1)


def lengthen(path):
    os.truncate(path, SIZE_BYTES + 1)


def empty(path):
    os.truncate(path, 0)


def link_elsewhere(path):
    path.rename(path.parent.parent / "elsewhere")
    path.symlink_to(path.parent.parent / "elsewhere")


def dangling_link(path):
    path.unlink()
    path.symlink_to(path.parent.parent / "nowhere")


def folder_instead(path):
    path.unlink()
    path.mkdir()


def pipe_instead(path):
    path.unlink()
    os.mkfifo(path)


def socket_instead(path):
    path.unlink()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.fspath(path))


DAMAGES = [
    flip, truncate, lengthen, empty, link_elsewhere, dangling_link, folder_instead, pipe_instead, socket_instead,
]  # fmt: skip


@pytest.fixture
def filled(folder):
    cache = ShardCache(folder, 10 * SIZE_BYTES, wait_timeout_s=10)
    cache.open(NAME, SIZE_BYTES, lambda: content(NAME), check(NAME))
    return cache


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_a_damaged_file_is_named_removed_and_made_anew(filled, folder, caplog, damage):
    damage(folder / NAME)
    found = filled.open(NAME, SIZE_BYTES, lambda: content(NAME), check(NAME))
    assert (found.from_cache, found.cached, bytes(found.buffer)) == (False, True, content(NAME))
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert NAME in caplog.text
    assert (folder / NAME).is_file() and not (folder / NAME).is_symlink()
    assert filled.open(NAME, SIZE_BYTES, lambda: b"", check(NAME)).from_cache
    if damage is link_elsewhere:
        assert (folder.parent / "elsewhere").read_bytes() == content(NAME)


def test_a_folder_with_something_in_it_is_left_alone(filled, folder, caplog):
    folder_instead(folder / NAME)
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


def test_the_leftover_of_another_size_is_taken_over(folder):
    folder.mkdir()
    (folder / f".{NAME}.part").write_bytes(b"x" * (3 * SIZE_BYTES))
    found = ShardCache(folder, SIZE_BYTES).open(NAME, SIZE_BYTES, lambda: content(NAME), check(NAME))
    assert found.cached and found.buffer == content(NAME)
    assert (folder / NAME).read_bytes() == content(NAME)


def test_another_error_of_the_check_is_the_callers(filled):
    def check_fails(view):
        raise KeyError("a bug")

    with pytest.raises(KeyError):
        filled.open(NAME, SIZE_BYTES, lambda: b"", check_fails)
    assert filled.contains(NAME)


def test_a_damaged_file_that_is_open_elsewhere_stays_readable_there(filled, folder, caplog):
    other = name_of(2)
    reader = filled.open(other, SIZE_BYTES, lambda: content(other), check(other))
    found = filled.open(other, SIZE_BYTES + 1, lambda: content(other, SIZE_BYTES + 1), check(other))
    assert found.cached and not found.from_cache
    assert reader.buffer == content(other)
    assert other in caplog.text


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "../x-0123456789abcdef.pt", "/x-0123456789abcdef.pt", "x.pt", ".x-0123456789abcdef.pt",
     "x-0123456789ABCDEF.pt", "x-0123456789abcdef.pt\n", "x-0123456789abcdef.pt.part",
     "x" * 300 + "-0123456789abcdef.pt"],
)  # fmt: skip
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
    assert open_it(first) and len(checked) == 2  # Which is no change of the file.
    damaged = bytearray(content(name))
    damaged[SIZE_BYTES // 2] ^= 1
    (tmp_path / "cache" / name).write_bytes(damaged)
    assert not open_it(first) and len(checked) == 3  # Written to in place: noticed, made anew.
    replacement = tmp_path / "cache" / "x"
    replacement.write_bytes(damaged)
    os.utime(replacement, ns=(0, (tmp_path / "cache" / name).stat().st_mtime_ns))
    replacement.replace(tmp_path / "cache" / name)
    assert not open_it(first)  # Another file of the same age and size.


def open_file(cache):
    return cache.open(NAME, SIZE_BYTES, lambda: content(NAME), check(NAME))


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
        open_file(cache)
    done = before_locking(folder / name, act)
    found = open_file(cache)
    assert done and (found.from_cache, found.cached) == (from_cache, True) and found.buffer == content(NAME)
    # It is the file of that name that is held, not the one that was.
    assert cache.clear().kept == (NAME,)
    assert not caplog.records


def test_what_a_dead_maker_of_another_file_left_makes_room(folder, caplog):
    folder.mkdir()
    leftover = folder / f".{name_of(2)}.part"
    leftover.write_bytes(bytes(SIZE_BYTES))
    assert open_file(ShardCache(folder, SIZE_BYTES)).cached
    assert not leftover.exists() and not caplog.records


def test_a_file_whose_lock_another_takes_while_it_is_published_leaves_no_descriptor_behind(folder, before_locking):
    cache = ShardCache(folder, SIZE_BYTES)

    def refuse(path):
        raise BlockingIOError(path)

    done = before_locking(folder / NAME, refuse)
    found = open_file(cache)
    assert done and not found.cached and found.buffer == content(NAME)
    file = (folder / NAME).stat()
    assert not [
        path for path in Path("/proc/self/fd").iterdir() if path.exists() and os.path.samestat(path.stat(), file)
    ]

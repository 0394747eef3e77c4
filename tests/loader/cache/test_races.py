"""What others may do between two steps of one process, done at just that moment."""

import fcntl
import os
from pathlib import Path

import pytest

from loader.cache import ShardCache
from tests.support.cache_actor import SIZE_BYTES, check, content, name_of

NAME = name_of(1)


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


def test_a_file_evicted_between_opening_and_locking_is_made_again(folder, before_locking):
    cache = ShardCache(folder, SIZE_BYTES)
    open_file(cache)
    done = before_locking(folder / NAME, lambda path: path.unlink())
    found = open_file(cache)
    assert done
    assert (found.from_cache, found.cached) == (False, True)
    assert cache.contains(NAME)


def test_a_file_replaced_between_opening_and_locking_is_opened_anew(folder, before_locking):
    cache = ShardCache(folder, SIZE_BYTES)
    open_file(cache)

    def replace(path):
        (folder / "new").write_bytes(path.read_bytes())
        (folder / "new").rename(path)

    done = before_locking(folder / NAME, replace)
    found = open_file(cache)
    assert done and found.from_cache
    # It is the file of that name that is held, not the one that was.
    assert cache.clear().kept == (NAME,)


def test_a_part_swept_between_opening_and_locking_is_begun_anew(folder, before_locking, caplog):
    cache = ShardCache(folder, SIZE_BYTES)
    done = before_locking(folder / f".{NAME}.part", lambda path: path.unlink())
    assert open_file(cache).cached
    assert done and cache.contains(NAME) and not caplog.records


def test_a_part_finished_by_another_between_opening_and_locking_is_not_made_twice(folder, before_locking):
    cache = ShardCache(folder, SIZE_BYTES)

    def finish(path):
        path.write_bytes(content(NAME))
        path.rename(folder / NAME)

    done = before_locking(folder / f".{NAME}.part", finish)
    found = open_file(cache)
    assert done and found.from_cache and found.buffer == content(NAME)


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

"""Many processes and threads, one folder: each file is made once, and nobody waits for ever."""

import os
import signal
import threading

import pytest

from loader.cache import ShardCache
from loader.errors import CorruptObjectError
from tests.support.cache_actor import SIZE_BYTES, check, content, name_of, produced_by

NAME = name_of(1)


def test_many_processes_that_want_one_file_make_it_once(start_actor, log):
    first = start_actor()
    first.tell(f"open {NAME} hold")
    assert first.hears() == "producing"
    others = [start_actor() for _ in range(5)]
    for actor in others:
        actor.tell(f"open {NAME}")
    first.tell("go")
    assert not first.opened().from_cache
    for actor in others:
        found = actor.opened()
        assert found.from_cache and found.cached and found.intact
    assert produced_by(log) == [NAME]


def test_many_threads_that_want_one_file_make_it_once(folder):
    cache = ShardCache(folder, 10 * SIZE_BYTES)
    made, found = [], []
    barrier = threading.Barrier(8)

    def produce():
        made.append(1)
        return content(NAME)

    def work():
        barrier.wait(30)
        found.append(cache.open(NAME, SIZE_BYTES, produce, check(NAME)))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(made) == 1
    assert sorted(file.from_cache for file in found) == [False] + [True] * 7
    assert all(file.cached and file.buffer == content(NAME) for file in found)


def test_when_making_fails_the_error_is_the_makers_and_another_tries(start_actor, folder, log):
    first, second = start_actor(), start_actor()
    first.tell(f"open {NAME} hold")
    assert first.hears() == "producing"
    second.tell(f"open {NAME}")
    first.tell("fail")
    assert first.hears() == "failed"
    found = second.opened()
    assert (found.from_cache, found.cached, found.intact) == (False, True, True)
    assert produced_by(log) == [NAME, NAME]
    assert [path.name for path in folder.iterdir() if path.name != ".lock"] == [NAME]


def test_a_stopped_maker_is_not_waited_for_for_ever(start_actor, folder, caplog):
    maker = start_actor()
    maker.tell(f"open {NAME} hold")
    assert maker.hears() == "producing"
    os.kill(maker.process.pid, signal.SIGSTOP)
    impatient = ShardCache(folder, 10 * SIZE_BYTES, wait_timeout_s=0.1)
    for _ in range(2):
        found = impatient.open(NAME, SIZE_BYTES, lambda: content(NAME), check(NAME))
        assert (found.from_cache, found.cached, bytes(found.buffer)) == (False, False, content(NAME))
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert NAME in caplog.text
    # What it holds counts, and is not taken from it.
    assert not ShardCache(folder, 2 * SIZE_BYTES - 1).open(name_of(2), SIZE_BYTES, bytearray_of(2), check(NAME)).cached
    os.kill(maker.process.pid, signal.SIGCONT)
    maker.tell("go")
    assert maker.opened().intact
    assert impatient.open(NAME, SIZE_BYTES, never, check(NAME)).from_cache


def test_an_open_file_of_another_process_stays(start_actor, folder, caplog):
    reader = start_actor()
    reader.tell(f"open {NAME}")
    assert reader.opened().intact
    cache = ShardCache(folder, SIZE_BYTES)
    assert not cache.open(name_of(2), SIZE_BYTES, bytearray_of(2), check(name_of(2))).cached
    assert cache.clear().kept == (NAME,)
    assert [entry.in_use for entry in cache.entries()] == [True]
    reader.tell("drop")
    assert reader.hears() == "dropped"
    assert cache.open(name_of(2), SIZE_BYTES, bytearray_of(2), check(name_of(2))).cached
    assert not cache.contains(NAME)
    assert len(caplog.records) == 1


def test_a_view_of_the_buffer_is_enough_to_keep_the_file(folder):
    cache = ShardCache(folder, SIZE_BYTES)
    tail = cache.open(NAME, SIZE_BYTES, lambda: content(NAME), check(NAME)).buffer[-10:]
    assert cache.clear().kept == (NAME,)
    assert tail == content(NAME)[-10:]
    del tail
    assert cache.clear().removed == (NAME,)


@pytest.mark.parametrize("was_there", [False, True])
def test_writing_to_the_buffer_changes_nobody_elses(folder, was_there):
    cache = ShardCache(folder, SIZE_BYTES)
    if was_there:
        cache.open(NAME, SIZE_BYTES, lambda: content(NAME), check(NAME))
    mine = cache.open(NAME, SIZE_BYTES, lambda: content(NAME), check(NAME))
    mine.buffer[:4] = b"mine"
    theirs = cache.open(NAME, SIZE_BYTES, never, check(NAME))
    assert theirs.from_cache and theirs.buffer == content(NAME)
    assert bytes(mine.buffer[:4]) == b"mine"


def test_a_producer_that_gives_the_wrong_number_of_bytes_is_found_out(folder):
    cache = ShardCache(folder, 10 * SIZE_BYTES)
    with pytest.raises(CorruptObjectError, match=f"expected {SIZE_BYTES} bytes, found 3"):
        cache.open(NAME, SIZE_BYTES, lambda: b"abc", check(NAME))
    assert [path.name for path in folder.iterdir()] == [".lock"]


def bytearray_of(number):
    return lambda: bytearray(content(name_of(number)))


def never():
    raise AssertionError("the file is there")

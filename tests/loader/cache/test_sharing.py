"""Many processes and threads on one folder: each file is made once, what is open stays, and it is never too much."""

import os
import random
import shutil
import signal
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from loader.cache import CachedFile, ShardCache
from tests.support.cache_actor import SIZE_BYTES, check, content, name_of, produced_by

NAME = name_of(1)


def test_many_processes_that_want_one_file_make_it_once(start_actor, log):
    first = start_actor()
    first.tell(f"open {NAME} hold", answer="producing")
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
    made = []
    barrier = threading.Barrier(8)

    def work(_):
        barrier.wait(30)
        return cache.open(NAME, SIZE_BYTES, lambda: made.append(1) or content(NAME), check(NAME))

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(work, range(8), timeout=60))
    assert len(made) == 1
    assert sorted(file.from_cache for file in found) == [False] + [True] * 7
    assert all(file.cached and file.buffer == content(NAME) for file in found)


def test_when_making_fails_the_error_is_the_makers_and_another_tries(start_actor, folder, log):
    first, second = start_actor(), start_actor()
    first.tell(f"open {NAME} hold", answer="producing")
    second.tell(f"open {NAME}")
    first.tell("fail", answer="failed")
    found = second.opened()
    assert (found.from_cache, found.cached, found.intact) == (False, True, True)
    assert produced_by(log) == [NAME, NAME]
    assert [path.name for path in folder.iterdir() if path.name != ".lock"] == [NAME]


def test_a_stopped_maker_is_not_waited_for_for_ever(start_actor, folder, caplog):
    maker = start_actor()
    maker.tell(f"open {NAME} hold", answer="producing")
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
    reader.tell("drop", answer="dropped")
    assert cache.open(name_of(2), SIZE_BYTES, bytearray_of(2), check(name_of(2))).cached
    assert not cache.contains(NAME)
    assert len(caplog.records) == 1


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


def test_a_view_keeps_the_file(folder):
    cache = ShardCache(folder, SIZE_BYTES)
    tail = cache.open(NAME, SIZE_BYTES, lambda: content(NAME), check(NAME)).buffer[-10:]
    assert cache.clear().kept == (NAME,)
    assert tail == content(NAME)[-10:]
    del tail
    assert cache.clear().removed == (NAME,)


def bytearray_of(number):
    return lambda: bytearray(content(name_of(number)))


def never():
    raise AssertionError("the file is there")


@pytest.fixture
def child_of():
    """Tells an actor that is producing to fork; the child ends with the test."""
    children = []

    def fork(actor):
        actor.tell("fork")
        children.append(int(actor.hears()))
        return children[-1]

    yield fork
    for child in children:
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)


def test_the_death_of_a_maker_frees_its_file_though_a_child_lives(start_actor, folder, child_of):
    maker = start_actor()
    maker.tell(f"open {NAME} hold", answer="producing")
    child_of(maker)
    maker.process.kill()
    maker.killed()
    found = ShardCache(folder, SIZE_BYTES, wait_timeout_s=30).open(NAME, SIZE_BYTES, lambda: content(NAME), check(NAME))
    assert (found.from_cache, found.cached) == (False, True)


def test_a_child_keeps_the_files_that_were_open_when_it_was_forked(start_actor, folder, child_of):
    parent = start_actor()
    parent.tell(f"open {NAME}")
    assert parent.opened().cached
    parent.tell(f"open {name_of(2)} hold", answer="producing")
    child = child_of(parent)
    parent.process.kill()
    parent.killed()
    cache = ShardCache(folder, 10 * SIZE_BYTES)
    assert cache.clear().kept == (NAME,)
    os.kill(child, signal.SIGKILL)
    deadline = time.monotonic() + 30
    while cache.clear().kept:  # The system takes a moment to end it.
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert not cache.contains(NAME)


ROUNDS = 100


def leftovers(folder):
    return [path.name for path in folder.iterdir() if path.name.endswith(".part")]


@pytest.mark.slow
def test_killed_before_each_thing_it_asks_of_the_system(start_actor, folder):
    """The folder is full of old files, so that the maker evicts too."""
    points = 0
    while True:
        cache = ShardCache(folder, 2 * SIZE_BYTES)
        cache.discard(NAME)
        for number in (2, 3):
            assert cache.open(name_of(number), SIZE_BYTES, lambda n=number: content(name_of(n)), check(NAME)).cached
        actor = start_actor(max_files=2)
        actor.tell(f"open {NAME} die={points}")
        if actor.hears():
            break
        actor.killed()
        assert used(folder) <= 2 * SIZE_BYTES
        found = cache.open(NAME, SIZE_BYTES, lambda: content(NAME), check(NAME))
        assert found.cached and found.buffer == content(NAME)
        # What has no maker goes when room is made, at the latest.
        del found
        cache.open(name_of(4), SIZE_BYTES, lambda: content(name_of(4)), check(NAME))
        assert not leftovers(folder)
        cache.clear()
        points += 1
    assert points >= 15


@pytest.mark.parametrize("moment", ["producing", "writing"])
def test_when_the_maker_is_killed_one_of_those_who_wait_takes_over(start_actor, folder, log, moment):
    maker = start_actor()
    maker.tell(f"open {NAME} hold die=write", answer="producing")
    waiting = [start_actor() for _ in range(3)]
    for actor in waiting:
        actor.tell(f"open {NAME}")
    if moment == "producing":
        maker.process.kill()
    else:
        maker.tell("go")
    maker.killed()
    found = [actor.opened() for actor in waiting]
    assert all(file.cached and file.intact for file in found)
    assert sorted(file.from_cache for file in found) == [False, True, True]
    assert produced_by(log) == [NAME, NAME]
    assert not leftovers(folder)


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "numbers"), [(1, 2), (2, 5), (3, 5)])
def test_four_processes_killed_and_restarted_twelve_times(start_actor, folder, log, used_bytes, seed, numbers):
    """On a cache of two files, whose bound is watched; while they fit, each is made once but for makers that died."""
    schedule, kills = random.Random(seed), 12
    largest, done = [0], threading.Event()
    folder.mkdir()

    def watch():
        while not done.wait(0.001):
            largest[0] = max(largest[0], used_bytes())

    def start(number):
        actor = start_actor(max_files=2)
        actor.tell(f"loop {seed}{number} {ROUNDS} {numbers}", answer="looping")
        return actor

    actors = [start(number) for number in range(4)]
    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        for kill in range(kills):
            victim = schedule.randrange(4)
            time.sleep(schedule.random() * 0.08)
            actors[victim].process.kill()
            assert actors[victim].hears() in ("", "done")
            actors[victim] = start(4 + kill)
        assert [actor.hears() for actor in actors] == ["done"] * 4
    finally:
        done.set()
        watcher.join(30)
    assert 0 < largest[0] <= 2 * SIZE_BYTES
    if numbers == 2:
        made = produced_by(log)
        assert {name_of(0), name_of(1)} == set(made)
        assert len(made) <= 2 + kills
        assert not leftovers(folder)
    ShardCache(folder, 2 * SIZE_BYTES).clear()
    assert not leftovers(folder)
    assert used(folder) == 0


def used(folder):
    return sum(path.lstat().st_size for path in folder.iterdir())


MAX_BYTES = 1000
NUMBERS = st.integers(0, 7)
SIZES = [1, 90, 200, 250, 333, 500, 1000, 1001]


class CacheModel(RuleBasedStateMachine):
    """`sizes` is the folder, least recently opened first; `held` what is open."""

    def __init__(self):
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.cache = ShardCache(self.folder, MAX_BYTES)
        self.sizes: dict[str, int] = {}
        self.held: dict[str, CachedFile] = {}

    def teardown(self):
        self.held.clear()
        shutil.rmtree(self.folder)

    @rule(number=NUMBERS, hold=st.booleans())
    def open(self, number, hold):
        name, size = name_of(number), SIZES[number]
        was_there = name in self.sizes
        fits = was_there or self.make_room(size)
        made = []
        found = self.cache.open(name, size, lambda: made.append(1) or content(name, size), check(name))
        assert found.buffer == content(name, size)
        assert (found.from_cache, found.cached, len(made)) == (was_there, fits, int(not was_there))
        if fits:
            self.sizes[name] = self.sizes.pop(name, size)
            if hold:
                self.held[name] = found

    def make_room(self, size):
        excess = sum(self.sizes.values()) + size - MAX_BYTES
        victims = []
        for name in self.sizes:
            if excess > 0 and name not in self.held:
                victims.append(name)
                excess -= self.sizes[name]
        if excess > 0 or size > MAX_BYTES:
            return False
        for name in victims:
            del self.sizes[name]
        return True

    @rule(number=NUMBERS)
    def let_go(self, number):
        self.held.pop(name_of(number), None)

    @rule(number=NUMBERS)
    def discard(self, number):
        self.cache.discard(name_of(number))
        self.sizes.pop(name_of(number), None)
        if held := self.held.pop(name_of(number), None):
            assert held.buffer == content(name_of(number), SIZES[number])

    @rule(number=NUMBERS, position=st.integers(0, 2000))
    def damage_what_is_closed(self, number, position):
        name = name_of(number)
        if name in self.sizes and name not in self.held:
            data = bytearray((self.folder / name).read_bytes())
            data[position % len(data)] ^= 1
            (self.folder / name).write_bytes(data)
            assert not self.cache.open(name, len(data), lambda: content(name, len(data)), check(name)).from_cache
            self.sizes[name] = self.sizes.pop(name)

    @rule()
    def clear(self):
        report = self.cache.clear()
        assert set(report.kept) == set(self.held)
        assert set(report.removed) == set(self.sizes) - set(self.held)
        assert report.freed_bytes == sum(self.sizes[name] for name in report.removed)
        self.sizes = {name: size for name, size in self.sizes.items() if name in self.held}

    @invariant()
    def the_folder_is_as_the_model(self):
        found = {entry.name: (entry.size_bytes, entry.in_use) for entry in self.cache.entries()}
        assert list(found.items()) == [(name, (size, name in self.held)) for name, size in self.sizes.items()]
        assert all(self.cache.contains(name_of(number)) == (name_of(number) in self.sizes) for number in range(8))
        assert sum(self.sizes.values()) <= MAX_BYTES
        assert {path.name for path in self.folder.iterdir()} - {".lock"} == set(self.sizes)


CacheModel.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestEviction = CacheModel.TestCase


def test_unknown_files_are_left_alone(tmp_path):
    foreign = {"notes.txt": b"n" * 500, "shard_1.pt": b"s" * 500, ".other.part": b"p" * 500}
    for name, body in foreign.items():
        (tmp_path / name).write_bytes(body)
    cache = ShardCache(tmp_path, 600)
    for number in (1, 2):
        assert cache.open(name_of(number), 600, lambda: bytes(600), lambda view: None).cached
    assert [entry.name for entry in cache.entries()] == [name_of(2)]
    assert cache.clear().removed == (name_of(2),)
    assert {name: (tmp_path / name).read_bytes() for name in foreign} == foreign

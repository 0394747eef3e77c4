"""Killed at any moment, a process leaves nothing that stops the others."""

import random
import threading
import time

import pytest

from loader.cache import ShardCache
from tests.support.cache_actor import SIZE_BYTES, check, content, name_of, produced_by

NAME = name_of(1)
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
    maker.tell(f"open {NAME} hold die=write")
    assert maker.hears() == "producing"
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
def test_four_processes_killed_and_restarted_make_each_file_once_while_it_fits(start_actor, folder, log, used_bytes):
    kills = run_under_fire(start_actor, folder, used_bytes, seed=1, numbers=2)
    made = produced_by(log)
    # A maker may die before its file is in place, so that it is made again: no more often than makers died.
    assert {name_of(0), name_of(1)} == set(made)
    assert len(made) <= 2 + kills
    assert not leftovers(folder)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [2, 3])
def test_four_processes_killed_and_restarted_on_a_cache_too_small(start_actor, folder, used_bytes, seed):
    run_under_fire(start_actor, folder, used_bytes, seed=seed, numbers=5)
    cache = ShardCache(folder, 2 * SIZE_BYTES)
    cache.clear()
    assert not leftovers(folder)
    assert used(folder) == 0


def run_under_fire(start_actor, folder, used_bytes, *, seed, numbers):
    """Four processes on a cache of two files, twelve times one of them killed and replaced; the bound is watched."""
    schedule = random.Random(seed)
    largest, done = [0], threading.Event()
    folder.mkdir()

    def watch():
        while not done.wait(0.001):
            largest[0] = max(largest[0], used_bytes())

    def start(number):
        actor = start_actor(max_files=2)
        actor.tell(f"loop {seed}{number} {ROUNDS} {numbers}")
        assert actor.hears() == "looping"
        return actor

    actors = [start(number) for number in range(4)]
    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        for kill in range(12):
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
    return 12


def used(folder):
    return sum(path.lstat().st_size for path in folder.iterdir())

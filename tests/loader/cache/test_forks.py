"""Children that a process forks share its files; its locks as a maker are not theirs."""

import os
import signal
import time
from contextlib import suppress

import pytest

from loader.cache import ShardCache
from tests.support.cache_actor import SIZE_BYTES, check, content, name_of

NAME = name_of(1)


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


def test_a_file_made_while_a_child_was_forked_is_everyones(start_actor, folder, child_of):
    maker = start_actor()
    maker.tell(f"open {NAME} hold")
    assert maker.hears() == "producing"
    child_of(maker)
    maker.tell("go on")
    assert maker.opened().cached
    cache = ShardCache(folder, SIZE_BYTES, wait_timeout_s=30)
    assert cache.open(NAME, SIZE_BYTES, lambda: content(NAME), check(NAME)).from_cache
    maker.tell("drop")
    assert maker.hears() == "dropped"
    # The child was forked before the file was mapped: it does not hold it.
    assert cache.clear().removed == (NAME,)


def test_the_death_of_a_maker_frees_its_file_though_a_child_lives(start_actor, folder, child_of):
    maker = start_actor()
    maker.tell(f"open {NAME} hold")
    assert maker.hears() == "producing"
    child_of(maker)
    maker.process.kill()
    maker.killed()
    found = ShardCache(folder, SIZE_BYTES, wait_timeout_s=30).open(NAME, SIZE_BYTES, lambda: content(NAME), check(NAME))
    assert (found.from_cache, found.cached) == (False, True)


def test_a_child_keeps_the_files_that_were_open_when_it_was_forked(start_actor, folder, child_of):
    parent = start_actor()
    parent.tell(f"open {NAME}")
    assert parent.opened().cached
    parent.tell(f"open {name_of(2)} hold")
    assert parent.hears() == "producing"
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

"""What stays and what goes, against a model: least recently opened first, never what is open, never too much."""

import shutil
import tempfile
from pathlib import Path

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from loader.cache import CachedFile, ShardCache
from tests.support.cache_actor import check, content, name_of

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


def test_unknown_files_are_neither_counted_nor_touched(tmp_path):
    foreign = {"notes.txt": b"n" * 500, "shard_1.pt": b"s" * 500, ".other.part": b"p" * 500}
    for name, body in foreign.items():
        (tmp_path / name).write_bytes(body)
    cache = ShardCache(tmp_path, 600)
    for number in (1, 2):
        assert cache.open(name_of(number), 600, lambda: bytes(600), lambda view: None).cached
    assert [entry.name for entry in cache.entries()] == [name_of(2)]
    assert cache.clear().removed == (name_of(2),)
    assert {name: (tmp_path / name).read_bytes() for name in foreign} == foreign


def test_making_room_for_what_cannot_fit_removes_nothing(tmp_path):
    cache = ShardCache(tmp_path, 1000)
    open_file = cache.open(name_of(1), 600, lambda: content(name_of(1), 600), check(name_of(1)))
    cache.open(name_of(2), 400, lambda: content(name_of(2), 400), check(name_of(2)))
    assert not cache.open(name_of(3), 500, lambda: bytes(500), check(name_of(3))).cached
    assert cache.contains(name_of(2))
    assert open_file.buffer == content(name_of(1), 600)

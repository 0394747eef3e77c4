"""What every store keeps, on every kind of store."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from genesis.errors import ObjectNotFoundError, PreconditionFailedError, StoreError, UsageError
from genesis.store import CachePolicy, FolderStore, Store
from manifests import InvalidDocumentError

ROOT = Path(__file__).parents[3]
NONE = CachePolicy.NONE


def actor(store: Store, action: str, key: str, number: int) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("actor.py")), store.url, action, key, str(number)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def together(processes: list[subprocess.Popen[str]]) -> list[str]:
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    outputs = [process.communicate(timeout=60)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes)
    return outputs


@pytest.mark.slow
def test_what_was_put_is_got(store: Store):
    etag = store.put("index/a.json", b"one", cache=CachePolicy.IMMUTABLE)
    found = store.get("index/a.json")
    assert (found.body, found.etag) == (b"one", etag)
    info = store.head("index/a.json")
    assert info is not None
    assert (info.key, info.size_bytes, info.etag) == ("index/a.json", 3, etag)
    assert info.modified_at is not None
    assert abs(info.modified_at.timestamp() - time.time()) < 3600


def test_an_etag_changes_with_the_object(store: Store):
    etags = [store.put("k", body, cache=NONE) for body in (b"one", b"two", b"six")]
    assert len(set(etags)) == 3


def test_nothing_there(store: Store):
    assert store.head("none") is None
    assert store.head("none/at-all") is None
    with pytest.raises(ObjectNotFoundError, match="none"):
        store.get("none")
    assert list(store.list()) == []
    store.delete("none")


def test_delete(store: Store):
    store.put("a/b", b"1", cache=NONE)
    store.delete("a/b")
    store.delete("a/b")
    assert store.head("a/b") is None
    assert list(store.list()) == []


@pytest.mark.parametrize("body", [bytearray(b"abc"), memoryview(b"xabcx")[1:4], np.array([97, 98, 99], np.uint8)])
def test_any_buffer(store: Store, body):
    store.put("k", body, cache=NONE)
    assert store.get("k").body == b"abc"


@pytest.mark.slow
def test_a_shard_sized_body(store: Store):
    body = random.Random(5).randbytes(20 << 20)
    store.put("shard_0.pt", memoryview(bytearray(body)), cache=CachePolicy.IMMUTABLE, if_absent=True)
    assert store.get("shard_0.pt").body == body


@pytest.mark.slow
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    body=st.binary(max_size=4096),
    key=st.from_regex(r"[A-Za-z0-9_]{1,8}(/[A-Za-z0-9_][A-Za-z0-9._\-]{0,6})?-k", fullmatch=True),
)
def test_every_body_comes_back(store: Store, body: bytes, key: str):
    etag = store.put(key, body, cache=NONE)
    assert store.get(key).body == body
    info = store.head(key)
    assert info is not None
    assert (info.size_bytes, info.etag) == (len(body), etag)


@pytest.mark.parametrize("key", ["../out", "/absolute", "a//b", ".hidden", "a/../b", "", "a b", "a/"])
def test_a_key_stays_in_the_store(store: Store, key: str):
    for use in (store.get, store.head, store.delete, lambda k: store.put(k, b"", cache=NONE)):
        with pytest.raises(InvalidDocumentError):
            use(key)


def test_an_object_larger_than_expected(store: Store):
    etag = store.put("k", b"12345", cache=NONE)
    assert store.get("k", max_bytes=5).body == b"12345"
    for read in (lambda: store.get("k", max_bytes=4), lambda: store.get_if_changed("k", '"0"', max_bytes=4)):
        with pytest.raises(StoreError, match="at most 4 bytes, found 5"):
            read()
    assert store.get_if_changed("k", etag, max_bytes=4) is None


def test_an_object_read_only_if_it_changed(store: Store):
    first = store.put("k", b"1", cache=NONE)
    assert store.get_if_changed("k", first) is None
    second = store.put("k", b"2", cache=NONE)
    found = store.get_if_changed("k", first)
    assert found is not None
    assert (found.body, found.etag) == (b"2", second)
    store.delete("k")
    with pytest.raises(ObjectNotFoundError):
        store.get_if_changed("k", second)


def test_what_is_received_is_counted(store: Store):
    store.put("k", bytes(1000), cache=NONE)
    before = store.received_bytes
    store.get("k")
    assert store.received_bytes - before == (0 if isinstance(store, FolderStore) else 1000)


@pytest.mark.slow
def test_list_is_in_key_order_and_by_prefix(store: Store):
    keys = ["a-b", "a.b", "a/b", "a/c/d", "a0", "aa", "B", "shard_1.pt", "shard_10.pt", "shard_2.pt"]
    for key in random.Random(1).sample(keys, len(keys)):
        store.put(key, key.encode(), cache=NONE)
    assert [info.key for info in store.list()] == sorted(keys)
    assert [info.key for info in store.list("a/")] == ["a/b", "a/c/d"]
    assert [info.key for info in store.list("a")] == [key for key in sorted(keys) if key.startswith("a")]
    assert [info.key for info in store.list("shard_1")] == ["shard_1.pt", "shard_10.pt"]
    assert list(store.list("nothing")) == []
    sizes = {info.key: (info.size_bytes, info.etag) for info in store.list()}
    assert sizes["a/c/d"] == (5, store.get("a/c/d").etag)


def test_if_absent(store: Store):
    etag = store.put("k", b"mine", cache=NONE, if_absent=True)
    assert store.put("k", b"mine", cache=NONE, if_absent=True) == etag, "an earlier attempt of one's own is success"
    with pytest.raises(PreconditionFailedError, match="expected no object"):
        store.put("k", b"other", cache=NONE, if_absent=True)
    assert store.get("k").body == b"mine"


def test_if_match(store: Store):
    first = store.put("k", b"1", cache=NONE)
    second = store.put("k", b"2", cache=NONE, if_match=first)
    assert store.put("k", b"2", cache=NONE, if_match=first) == second, "an earlier attempt of one's own is success"
    with pytest.raises(PreconditionFailedError, match="expected ETag"):
        store.put("k", b"3", cache=NONE, if_match=first)
    assert store.get("k").body == b"2"


@pytest.mark.slow
def test_if_match_of_an_object_that_is_gone(store: Store):
    etag = store.put("k", b"1", cache=NONE)
    store.delete("k")
    with pytest.raises(PreconditionFailedError, match="found no object"):
        store.put("k", b"2", cache=NONE, if_match=etag)
    assert store.head("k") is None


def test_one_condition_only(store: Store):
    with pytest.raises(UsageError):
        store.put("k", b"", cache=NONE, if_absent=True, if_match="x")


@pytest.mark.slow
def test_conditions_are_known_to_be_honoured(exact_store: Store):
    assert exact_store.conditional_writes
    assert list(exact_store.list()) == [], "the probe leaves nothing behind"


@pytest.mark.slow
def test_threads_racing_on_if_absent(exact_store: Store):
    barrier = threading.Barrier(4)

    def attempt(thread: int, key: str) -> bool:
        barrier.wait(30)
        try:
            exact_store.put(key, f"{thread}".encode(), cache=NONE, if_absent=True)
        except PreconditionFailedError:
            return False
        return True

    with ThreadPoolExecutor(4) as pool:
        for number in range(10):
            won = list(pool.map(attempt, range(4), [f"k{number}"] * 4))
            assert sum(won) == 1
            assert exact_store.get(f"k{number}").body == f"{won.index(True)}".encode()


@pytest.mark.slow
def test_threads_racing_on_if_match(exact_store: Store):
    etag = exact_store.put("k", b"start", cache=NONE)
    barrier = threading.Barrier(4)

    def attempt(thread: int, name: str, expected: str) -> str | None:
        barrier.wait(30)
        try:
            return exact_store.put("k", f"{name}/{thread}".encode(), cache=NONE, if_match=expected)
        except PreconditionFailedError:
            return None

    with ThreadPoolExecutor(4) as pool:
        for number in range(10):
            (etag,) = [tag for tag in pool.map(attempt, range(4), [f"{number}"] * 4, [etag] * 4) if tag is not None]
            assert exact_store.get("k").etag == etag


@pytest.mark.slow
def test_processes_racing(exact_store: Store):
    """Counting by compare-and-swap loses no step, and each key is created by one process only."""
    exact_store.put("n", b"0", cache=NONE)
    processes = [actor(exact_store, "race", "n", 15) for _ in range(2)]
    won = {process.pid: output.split() for process, output in zip(processes, together(processes), strict=True)}
    assert exact_store.get("n").body.split()[0] == b"30"
    assert sorted(key for keys in won.values() for key in keys) == sorted(f"n{number}" for number in range(15))
    for pid, keys in won.items():
        assert all(exact_store.get(key).body == f"{pid}".encode() for key in keys)


def test_a_writer_that_is_killed_leaves_old_or_new(store: Store):
    size = 2 << 20
    draw = random.Random(11)
    store.put("k", bytes(size), cache=NONE)
    for _ in range(3):
        process = actor(store, "write", "k", size)
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write("go\n")
        process.stdin.flush()
        for _ in range(draw.randrange(1, 4)):
            assert process.stdout.readline() == "writing\n"
        time.sleep(draw.uniform(0, 0.02))
        process.kill()
        process.communicate(timeout=30)
        body = store.get("k").body
        assert len(body) == size
        assert len(set(body)) == 1
        assert [(info.key, info.size_bytes) for info in store.list()] == [("k", size)]


@pytest.mark.slow
def test_readers_never_see_a_part(store: Store):
    sizes = [1 << 20, 3 << 18]
    store.put("k", bytes([0]) * sizes[0], cache=NONE)
    stop = threading.Event()

    def write() -> None:
        for value in range(1, 30):
            store.put("k", bytes([value]) * sizes[value % 2], cache=NONE)
        stop.set()

    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(write)
        while not stop.is_set() and not writing.done():
            body = store.get("k").body
            assert len(set(body)) == 1
            assert len(body) == sizes[body[0] % 2]
        writing.result(30)

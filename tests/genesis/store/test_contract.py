"""What every store keeps, on every kind of store, in threads, in processes, forked and pickled."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import random
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from genesis.errors import ObjectNotFoundError, PreconditionFailedError, StoreError, UsageError
from genesis.store import CachePolicy, FolderStore, Store, Throttle, open_readable
from manifests import InvalidDocumentError
from tests.genesis.store.conftest import QUICK
from tests.support.fault_proxy import FaultProxy, Request

ROOT = Path(__file__).parents[3]
NONE = CachePolicy.NONE
PYTHONPATH = {"PYTHONPATH": str(ROOT)}
ACTOR = [sys.executable, "-W", "ignore::DeprecationWarning", str(Path(__file__).with_name("actor.py"))]


def actor(store: Store, action: str, key: str, number: int) -> subprocess.Popen[str]:
    command = [*ACTOR, action, store.url, key, str(number)]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=os.environ | PYTHONPATH
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def go(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("go\n")
    process.stdin.flush()


def together(processes: list[subprocess.Popen[str]]) -> list[str]:
    for process in processes:
        go(process)
    outputs = [process.communicate(timeout=60)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes)
    return outputs


def test_objects_come_and_go(store):
    assert store.head("none") is None
    assert store.head("none/at-all") is None
    with pytest.raises(ObjectNotFoundError, match="none"):
        store.get("none")
    assert list(store.list()) == []
    store.delete("none")
    store.put("a/b", b"1", cache=NONE)
    store.delete("a/b")
    store.delete("a/b")
    assert store.head("a/b") is None
    assert list(store.list()) == []
    etags = [store.put("k", body, cache=NONE) for body in (b"one", b"two", b"six")]
    assert len(set(etags)) == 3
    for buffer in (bytearray(b"abc"), memoryview(b"xabcx")[1:4], np.array([97, 98, 99], np.uint8)):
        store.put("k", buffer, cache=NONE)
        assert store.get("k").body == b"abc"


@pytest.mark.slow
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    body=st.binary(max_size=4096),
    key=st.from_regex(r"[A-Za-z0-9_]{1,8}(/[A-Za-z0-9_][A-Za-z0-9._\-]{0,6})?-k", fullmatch=True),
)
def test_every_body_comes_back(store, body, key):
    etag = store.put(key, body, cache=NONE)
    assert store.get(key).body == body
    info = store.head(key)
    assert (info.size_bytes, info.etag) == (len(body), etag)


@pytest.mark.parametrize("key", ["../out", "/absolute", "a//b", ".hidden", "a/../b", "", "a b", "a/"])
def test_a_key_stays_in_the_store(store, key):
    for use in (store.get, store.head, store.delete, lambda k: store.put(k, b"", cache=NONE)):
        with pytest.raises(InvalidDocumentError):
            use(key)


def test_what_is_read_is_bounded_sent_if_changed_and_counted(store):
    first = store.put("k", b"12345", cache=NONE)
    assert store.get("k", max_bytes=5).body == b"12345"
    for read in (lambda: store.get("k", max_bytes=4), lambda: store.get_if_changed("k", '"0"', max_bytes=4)):
        with pytest.raises(StoreError, match="at most 4 bytes, found 5"):
            read()
    assert store.get_if_changed("k", first, max_bytes=4) is None
    second = store.put("k", b"2", cache=NONE)
    found = store.get_if_changed("k", first)
    assert found is not None
    assert (found.body, found.etag) == (b"2", second)
    store.delete("k")
    with pytest.raises(ObjectNotFoundError):
        store.get_if_changed("k", second)
    store.put("k", bytes(1000), cache=NONE)
    before = store.received_bytes
    store.get("k")
    assert store.received_bytes - before == (0 if isinstance(store, FolderStore) else 1000)


@pytest.mark.slow
def test_lists_and_heads(store):
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
    info = store.head("a/c/d")
    assert (info.key, info.size_bytes, info.etag) == ("a/c/d", *sizes["a/c/d"])
    assert abs(info.modified_at.timestamp() - time.time()) < 3600
    etag = store.put("k", b"1", cache=NONE)
    store.delete("k")
    with pytest.raises(PreconditionFailedError, match="found no object"):
        store.put("k", b"2", cache=NONE, if_match=etag)
    assert store.head("k") is None


def test_conditions(store):
    etag = store.put("k", b"mine", cache=NONE, if_absent=True)
    assert store.put("k", b"mine", cache=NONE, if_absent=True) == etag, "an earlier attempt of one's own is success"
    with pytest.raises(PreconditionFailedError, match="expected no object"):
        store.put("k", b"other", cache=NONE, if_absent=True)
    assert store.get("k").body == b"mine"
    first = store.put("k", b"1", cache=NONE)
    second = store.put("k", b"2", cache=NONE, if_match=first)
    assert store.put("k", b"2", cache=NONE, if_match=first) == second, "an earlier attempt of one's own is success"
    with pytest.raises(PreconditionFailedError, match="expected ETag"):
        store.put("k", b"3", cache=NONE, if_match=first)
    assert store.get("k").body == b"2"
    with pytest.raises(UsageError):
        store.put("k", b"", cache=NONE, if_absent=True, if_match="x")


@pytest.mark.slow
def test_processes_racing(exact_store):
    """Counting by compare-and-swap loses no step, and each key is created by one process only."""
    exact_store.put("n", b"0", cache=NONE)
    processes = [actor(exact_store, "race", "n", 15) for _ in range(2)]
    won = {process.pid: output.split() for process, output in zip(processes, together(processes), strict=True)}
    assert exact_store.get("n").body.split()[0] == b"30"
    assert sorted(key for keys in won.values() for key in keys) == sorted(f"n{number}" for number in range(15))
    for pid, keys in won.items():
        assert all(exact_store.get(key).body == f"{pid}".encode() for key in keys)


def test_a_writer_that_is_killed_leaves_old_or_new(store):
    size = 2 << 20
    draw = random.Random(11)
    store.put("k", bytes(size), cache=NONE)
    for _ in range(3):
        process = actor(store, "write", "k", size)
        go(process)
        assert process.stdout is not None
        for _ in range(draw.randrange(1, 4)):
            assert process.stdout.readline() == "writing\n"
        time.sleep(draw.uniform(0, 0.02))
        process.kill()
        process.communicate(timeout=30)
        body = store.get("k").body
        assert len(body) == size
        assert len(set(body)) == 1
        assert [(info.key, info.size_bytes) for info in store.list()] == [("k", size)]


BODY = random.Random(4).randbytes(100_000)
DIGEST = hashlib.sha256(BODY).hexdigest()


def acted(*arguments: str, stdin: bytes = b"") -> dict:
    done = subprocess.run(
        [*ACTOR, *arguments], input=stdin, capture_output=True, cwd=ROOT, env=os.environ | PYTHONPATH, timeout=100
    )
    assert done.returncode == 0, done.stderr.decode()
    assert done.stderr == b""
    return json.loads(done.stdout)


@pytest.mark.slow
def test_a_fork_shares_no_connection(origin):
    """Answers on a shared connection would be mixed up; a lock held by a thread of the parent would never be free."""
    key = origin.put(BODY)
    requests: list[Request] = []
    with FaultProxy(origin.server.port) as proxy:
        proxy.watch = requests.append
        store = origin.open(proxy.port)  # Points boto3 at the proxy, for the actor too.
        url = store.url
        found = acted("fork", url, key)
    assert found["before"] == found["after"] == [DIGEST] * 3
    expected = {"status": 0, "received": 0, "digests": [DIGEST] * 3, "received_after": 3 * len(BODY)}
    assert found["children"] == [expected] * 2
    if origin.kind != "moto":  # Which closes after every answer.
        # The parent's, and at least one of each child.
        assert len({request.client_port for request in requests}) > 2


def test_a_folder_forked_and_pickled(tmp_path):
    FolderStore(tmp_path).put("k", BODY, cache=CachePolicy.NONE)
    found = acted("fork", str(tmp_path), "k")
    assert [child["digests"] for child in found["children"]] == [[DIGEST] * 3] * 2
    assert acted("pickled", "k", stdin=pickle.dumps(open_readable(tmp_path)))["digests"] == [DIGEST] * 3


@pytest.mark.slow
def test_a_store_pickled_and_closed(origin):
    key = origin.put(BODY)
    store = origin.open(policy=replace(QUICK, deadline_s=77), throttle=Throttle(1e9))
    assert store.get(key).body == BODY
    found = acted("pickled", key, stdin=pickle.dumps(store))
    assert found == {"url": store.url, "received": 0, "digests": [DIGEST] * 3}
    assert store.get(key).body == BODY
    store.close()  # Opened again by its next call.
    assert store.get(key).body == BODY


def test_a_lock_held_at_the_fork_is_free_in_the_child():
    """A thread is making its value while another forks: the child makes its own."""
    code = """
import os, signal, threading
from genesis.store.base import PerProcess
entered, go, parent = threading.Event(), threading.Event(), os.getpid()
def make():
    if os.getpid() == parent:
        entered.set(); go.wait(30)
    return os.getpid()
value = PerProcess(make)
thread = threading.Thread(target=value.get); thread.start(); entered.wait(30)
pid = os.fork()
if pid == 0:
    signal.alarm(20)
    os._exit(0 if value.get() == os.getpid() else 1)
_, status = os.waitpid(pid, 0)
go.set(); thread.join()
assert value.get() == parent
raise SystemExit(1 if status else 0)
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, cwd=ROOT, timeout=60)

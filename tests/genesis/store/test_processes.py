"""Stores across processes: forked with connections open and threads at work, and pickled to a spawned one."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import random
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from genesis.store import CachePolicy, FolderStore, Throttle, open_readable
from genesis.store.per_process import PerProcess
from tests.genesis.store.conftest import QUICK
from tests.support.fault_proxy import FaultProxy, Request

ROOT = Path(__file__).parents[3]
BODY = random.Random(4).randbytes(100_000)
DIGEST = hashlib.sha256(BODY).hexdigest()


def acted(*arguments: str, stdin: bytes = b"") -> dict:
    done = subprocess.run(
        [
            sys.executable,
            "-W",
            "ignore::DeprecationWarning",
            str(Path(__file__).with_name("forking_actor.py")),
            *arguments,
        ],
        input=stdin,
        capture_output=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=100,
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
        found = acted(url, key)
    assert found["before"] == found["after"] == [DIGEST] * 3
    expected = {"status": 0, "received": 0, "digests": [DIGEST] * 3, "received_after": 3 * len(BODY)}
    assert found["children"] == [expected] * 2
    if origin.kind != "moto":  # Which closes after every answer.
        # The parent's, and at least one of each child.
        assert len({request.client_port for request in requests}) > 2


def test_a_folder_across_a_fork(tmp_path):
    FolderStore(tmp_path).put("k", BODY, cache=CachePolicy.NONE)
    found = acted(str(tmp_path), "k")
    assert [child["digests"] for child in found["children"]] == [[DIGEST] * 3] * 2


@pytest.mark.slow
def test_a_pickled_store_reads_in_another_process(origin):
    key = origin.put(BODY)
    store = origin.open(policy=replace(QUICK, deadline_s=77), throttle=Throttle(1e9))
    assert store.get(key).body == BODY
    found = acted("--pickled", key, stdin=pickle.dumps(store))
    assert found == {"url": store.url, "received": 0, "digests": [DIGEST] * 3}
    assert store.get(key).body == BODY


def test_a_pickled_folder(tmp_path):
    FolderStore(tmp_path).put("k", BODY, cache=CachePolicy.NONE)
    store = open_readable(tmp_path)
    assert acted("--pickled", "k", stdin=pickle.dumps(store))["digests"] == [DIGEST] * 3


@pytest.mark.parametrize("url", ["/data/store", "s3://bucket/prefix", "https://user:secret@host/prefix"])
def test_a_pickle_of_a_store_never_used(url):
    store = open_readable(url)
    again = pickle.loads(pickle.dumps(store))
    assert (type(again), again.url, again.received_bytes) == (type(store), store.url, 0)


@pytest.mark.slow
def test_a_store_closed_is_opened_again_by_its_next_call(origin):
    key = origin.put(BODY)
    store = origin.open()
    assert store.get(key).body == BODY
    store.close()
    store.close()
    assert store.get(key).body == BODY


def test_a_value_is_made_once_a_process():
    made: list[int] = []
    barrier = threading.Barrier(8)

    def make() -> list[int]:
        made.append(os.getpid())
        return made

    value = PerProcess(make)
    assert value.peek() is None

    def ask(_: int) -> list[int]:
        barrier.wait(30)
        return value.get()

    with ThreadPoolExecutor(8) as pool:
        assert all(found is made for found in pool.map(ask, range(8)))
    assert made == [os.getpid()]
    assert value.peek() is made
    assert value.take() is made
    assert value.take() is None
    value.get()
    assert len(made) == 2


def test_a_lock_held_at_the_fork_is_free_in_the_child():
    """A thread is making its value while another forks: the child makes its own."""
    code = """
import os, signal, threading
from genesis.store.per_process import PerProcess
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

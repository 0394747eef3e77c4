"""A process that works on a store, for tests that race several, kill one or fork.

    python actor.py race URL KEY N      adds 1 to the number in KEY, N times, each by compare-and-swap; then
                                        creates KEY0 … KEY{N-1} if absent, and prints those it got
    python actor.py write URL KEY SIZE  replaces KEY by SIZE equal bytes, again and again, until killed
    python actor.py fork URL KEY        reads KEY, forks while threads are reading, reads in the child and the parent
    python actor.py pickled KEY         reads KEY from the store whose pickle comes on standard input

The first two say "ready" once they have imported everything and go when a line comes on their standard input. The
others print one JSON object. A fork is made here since the tests' process has threads, which it does not take along.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import pickle
import signal
import sys
import threading

from genesis.errors import PreconditionFailedError
from genesis.store import CachePolicy, ReadableStore, Store, open_readable, open_store

_READS = 3
_CHILD_WITHIN_S = 30


def digests(store: ReadableStore, key: str) -> list[str]:
    return [hashlib.sha256(store.get(key).body).hexdigest() for _ in range(_READS)]


def child(store: ReadableStore, key: str, pipe: int) -> None:
    """Never returns, and never hangs: the alarm's default action ends it."""
    signal.alarm(_CHILD_WITHIN_S)
    found = {"received": store.received_bytes, "digests": digests(store, key), "received_after": store.received_bytes}
    store.close()
    os.write(pipe, json.dumps(found).encode())
    os._exit(0)


def fork(url: str, key: str) -> None:
    store = open_readable(url)
    before = digests(store, key)
    stop = threading.Event()

    def keep_reading() -> None:
        while not stop.is_set():
            store.get(key)

    threads = [threading.Thread(target=keep_reading) for _ in range(2)]
    for thread in threads:
        thread.start()
    readers = []
    for _ in range(2):
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            child(store, key, writer)
        os.close(writer)
        readers.append((pid, reader))
    children = []
    for pid, reader in readers:
        with open(reader, "rb") as pipe:  # noqa: PTH123 - a descriptor
            text = pipe.read()
        _, status = os.waitpid(pid, 0)
        children.append({"status": status, **json.loads(text or b"{}")})
    stop.set()
    for thread in threads:
        thread.join()
    report({"before": before, "children": children, "after": digests(store, key)})


def pickled(key: str) -> None:
    store = pickle.load(sys.stdin.buffer)
    received = store.received_bytes
    report({"url": store.url, "received": received, "digests": digests(store, key)})


def report(found: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(found))


def connected(url: str, key: str) -> Store:
    store = open_store(url)
    store.head(key)  # Connected, and a first lock file made.
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sys.stdin.readline()
    return store


def race(url: str, key: str, number: str) -> None:
    store = connected(url, key)
    for _ in range(int(number)):
        while True:
            found = store.get(key)
            try:
                # The pid makes every body distinct: equal bytes would rightly pass for one's own lost success.
                body = f"{int(found.body.split()[0]) + 1} {os.getpid()}".encode()
                store.put(key, body, cache=CachePolicy.NONE, if_match=found.etag)
                break
            except PreconditionFailedError:
                continue
    for own in (f"{key}{index}" for index in range(int(number))):
        try:
            store.put(own, f"{os.getpid()}".encode(), cache=CachePolicy.NONE, if_absent=True)
        except PreconditionFailedError:
            continue
        sys.stdout.write(f"{own}\n")


def write(url: str, key: str, size: str) -> None:
    store = connected(url, key)
    for value in itertools.cycle(range(1, 256)):
        sys.stdout.write("writing\n")
        sys.stdout.flush()
        store.put(key, bytes([value]) * int(size), cache=CachePolicy.NONE)


if __name__ == "__main__":
    {"race": race, "write": write, "fork": fork, "pickled": pickled}[sys.argv[1]](*sys.argv[2:])

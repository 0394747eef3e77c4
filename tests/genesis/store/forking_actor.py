"""A process that uses a store before and after a fork; prints one JSON object.

    python forking_actor.py URL KEY       reads KEY, forks while threads are reading, reads in the child and the parent
    python forking_actor.py --pickled KEY  reads KEY from the store whose pickle comes on standard input

It is a process of its own since the tests' has threads, which a fork does not take along.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import sys
import threading

from genesis.store import ReadableStore, open_readable

_READS = 3
_CHILD_WITHIN_S = 30


def digests(store: ReadableStore, key: str) -> list[str]:
    return [hashlib.sha256(store.get(key).body).hexdigest() for _ in range(_READS)]


def child(store: ReadableStore, key: str, pipe: int) -> None:
    """Never returns, and never hangs: the alarm's default action ends it."""
    import signal

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
    print(json.dumps({"before": before, "children": children, "after": digests(store, key)}))  # noqa: T201


def main(argument: str, key: str) -> None:
    if argument == "--pickled":
        store = pickle.load(sys.stdin.buffer)
        received = store.received_bytes
        print(json.dumps({"url": store.url, "received": received, "digests": digests(store, key)}))  # noqa: T201
    else:
        fork(argument, key)


if __name__ == "__main__":
    main(*sys.argv[1:])

"""A process that works on a store, for tests that race several or kill one.

    python actor.py URL race KEY N         adds 1 to the number in KEY, N times, each by compare-and-swap; then
                                           creates KEY0 … KEY{N-1} if absent, and prints those it got
    python actor.py URL write KEY SIZE     replaces KEY by SIZE equal bytes, again and again, until killed

It says "ready" once it has imported everything and goes when a line comes on its standard input.
"""

from __future__ import annotations

import itertools
import os
import sys

from genesis.errors import PreconditionFailedError
from genesis.store import CachePolicy, Store, open_store


def count(store: Store, key: str, times: int) -> None:
    for _ in range(times):
        while True:
            found = store.get(key)
            try:
                # The pid makes every body distinct: equal bytes would rightly pass for one's own lost success.
                body = f"{int(found.body.split()[0]) + 1} {os.getpid()}".encode()
                store.put(key, body, cache=CachePolicy.NONE, if_match=found.etag)
                break
            except PreconditionFailedError:
                continue


def claim(store: Store, prefix: str, number: int) -> None:
    for key in (f"{prefix}{index}" for index in range(number)):
        try:
            store.put(key, f"{os.getpid()}".encode(), cache=CachePolicy.NONE, if_absent=True)
        except PreconditionFailedError:
            continue
        sys.stdout.write(f"{key}\n")


def race(store: Store, key: str, times: int) -> None:
    count(store, key, times)
    claim(store, key, times)


def write(store: Store, key: str, size: int) -> None:
    for value in itertools.cycle(range(1, 256)):
        sys.stdout.write("writing\n")
        sys.stdout.flush()
        store.put(key, bytes([value]) * size, cache=CachePolicy.NONE)


def main(url: str, action: str, key: str, number: str) -> None:
    store = open_store(url)
    store.head(key)  # Connected, and a first lock file made.
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sys.stdin.readline()
    {"race": race, "write": write}[action](store, key, int(number))


if __name__ == "__main__":
    main(*sys.argv[1:])

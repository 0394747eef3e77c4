from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from genesis.sources.opening import read_ahead


def test_pieces_come_in_order_and_one_is_fetched_ahead():
    second = threading.Event()

    def pieces() -> Iterator[int]:
        yield 0
        second.set()
        yield from range(1, 100)

    given = read_ahead(pieces())
    assert next(given) == 0
    assert second.wait(timeout=30)
    assert list(given) == list(range(1, 100))


def test_an_error_comes_after_the_pieces_before_it():
    def pieces() -> Iterator[int]:
        yield from range(3)
        raise OSError("gone")

    found: list[int] = []
    with pytest.raises(OSError, match="gone"):
        found.extend(read_ahead(pieces()))
    assert found == [0, 1, 2]


def test_giving_up_early_ends_the_thread():
    closed = threading.Event()

    def pieces() -> Iterator[int]:
        try:
            yield from range(1_000_000)
        finally:
            closed.set()

    given = read_ahead(pieces())
    assert next(given) == 0
    given.close()
    assert closed.wait(timeout=30)

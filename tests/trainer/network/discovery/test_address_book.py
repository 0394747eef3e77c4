"""Pauses double up to a bound, and are over at once when an address answers."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from trainer.network.discovery.address_book import AddressBook


def test_pauses_double_to_the_longest() -> None:
    book = AddressBook(first_pause_s=1, max_pause_s=5)
    now = 0.0
    for pause_s in (1, 2, 4, 5, 5):
        assert book.is_due("a:1", now)
        assert book.failed("a:1", now) == pause_s
        assert not book.is_due("a:1", now + pause_s - 0.01)
        now += pause_s
    assert book.has_failed("a:1")
    book.answered("a:1")
    assert book.is_due("a:1", now)
    assert not book.has_failed("a:1")
    assert book.failed("a:1", now) == 1


def test_how_long_an_address_is_silent_counts_from_the_first_failure_in_a_row() -> None:
    book = AddressBook(first_pause_s=1, max_pause_s=5)
    assert book.silent_s("a:1", 10.0) == 0
    for now in (10.0, 11.0, 13.0):
        book.failed("a:1", now)
    assert book.silent_s("a:1", 15.0) == 5
    book.answered("a:1")
    book.failed("a:1", 20.0)
    assert book.silent_s("a:1", 21.0) == 1


@given(st.lists(st.integers(0, 50), max_size=200))
def test_it_never_remembers_more_than_it_may(addresses: list[int]) -> None:
    book = AddressBook(first_pause_s=1, max_pause_s=5, max_addresses=7)
    for now, address in enumerate(addresses):
        book.failed(str(address), float(now))
    assert sum(book.has_failed(str(address)) for address in range(51)) <= 7

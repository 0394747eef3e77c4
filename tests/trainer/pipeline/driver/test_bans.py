"""30 s, doubled to an hour; an hour for nonsense; a success sets free."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.pipeline.driver import Bans


def bans() -> Bans:
    return Bans(ban_s=30.0, max_ban_s=3600.0, malformed_ban_s=3600.0)


def test_bans_double_up_to_an_hour() -> None:
    book, now, lengths = bans(), 0.0, []
    for _ in range(10):
        until_s = book.failed("a", asked_s=now, now=now + 1)
        lengths.append(until_s - now - 1)
        assert book.is_banned("a", until_s - 0.001)
        assert not book.is_banned("a", until_s)
        now = until_s
    assert lengths == [30, 60, 120, 240, 480, 960, 1920, 3600, 3600, 3600]


def test_a_success_resets() -> None:
    book = bans()
    book.failed("a", asked_s=0.0, now=0.0)
    book.failed("a", asked_s=31.0, now=32.0)
    book.succeeded("a")
    assert not book.is_banned("a", 33.0)
    assert book.failed("a", asked_s=40.0, now=41.0) == 71.0


def test_requests_that_fail_together_are_one_failure() -> None:
    book = bans()
    assert {book.failed("a", asked_s=0.0, now=5.0 + number) for number in range(8)} == {35.0}
    # One that was sent before the ban and fails after it says nothing new either.
    assert book.failed("a", asked_s=1.0, now=40.0) == 35.0
    assert book.failed("a", asked_s=41.0, now=42.0) == 102.0


def test_nonsense_costs_an_hour_and_neither_success_nor_restart_shortens_it() -> None:
    book = bans()
    assert book.malformed("a", now=10.0) == 3610.0
    book.succeeded("a")
    book.restarted("a")
    assert book.is_banned("a", 3609.0)
    assert book.is_caught("a", 3609.0)
    assert not book.is_banned("a", 3610.0)
    assert not book.is_caught("a", 3610.0)


def test_who_is_silent_is_not_caught_lying() -> None:
    book = bans()
    book.failed("a", asked_s=0.0, now=0.0)
    assert book.is_banned("a", 1.0)
    assert not book.is_caught("a", 1.0)


def test_a_restart_frees_of_bans_for_silence_once_until_something_is_counted() -> None:
    book = bans()
    book.failed("a", asked_s=0.0, now=0.0)
    book.restarted("a")
    assert not book.is_banned("a", 1.0)
    assert book.failed("a", asked_s=2.0, now=3.0) == 63.0
    book.restarted("a")
    assert book.is_banned("a", 62.0)
    book.counted("a")
    book.failed("a", asked_s=70.0, now=71.0)
    book.restarted("a")
    assert not book.is_banned("a", 72.0)


def test_who_only_refuses_to_count_is_banned_and_forward_passes_or_restarts_do_not_help() -> None:
    book, now = bans(), 0.0
    for _ in range(4):
        now += 1.0
        assert not book.doubted("a", asked_s=now, now=now) > now
        book.succeeded("a")
    lengths = []
    for _ in range(3):
        now += 1.0
        until_s = book.doubted("a", asked_s=now, now=now)
        lengths.append(until_s - now)
        book.succeeded("a")
        book.restarted("a")
        assert book.is_banned("a", now + 1.0)
        now = until_s
    assert lengths == [30, 60, 120]
    book.counted("a")
    assert not book.doubted("a", asked_s=now, now=now) > now


def test_one_banned_for_silence_may_be_asked_soon_and_is_free_once_it_answers() -> None:
    book, now, waits = bans(), 0.0, []
    for _ in range(6):
        until_s = book.failed("a", asked_s=now, now=now, is_silent=True)
        wait_s = next(wait_s for wait_s in range(100) if book.may_be_asked("a", now + wait_s))
        waits.append(wait_s)
        book.answers("a", now + wait_s - 0.01)
        assert book.is_banned("a", now + wait_s), "asked too soon"
        now = until_s
    assert waits == [1, 2, 4, 8, 15, 15]
    book.failed("a", asked_s=now, now=now, is_silent=True)
    book.answers("a", now + 15)
    assert not book.is_banned("a", now + 15)
    assert not book.may_be_asked("a", now + 15)


def test_answering_ends_no_ban_for_refusals_or_nonsense() -> None:
    book = bans()
    book.failed("a", asked_s=0.0, now=0.0)
    book.doubted("b", asked_s=0.0, now=0.0, doubts=5)
    book.failed("c", asked_s=0.0, now=0.0, is_silent=True)
    book.malformed("c", now=1.0)
    for worker in "abc":
        assert not book.may_be_asked(worker, 20.0)
        book.answers(worker, 20.0)
        assert book.is_banned(worker, 20.0)


def test_those_who_left_are_forgotten_when_their_ban_is_over() -> None:
    book = bans()
    book.failed("a", asked_s=0.0, now=0.0)
    book.tidy(10.0, keep=set())
    assert book.banned(10.0) == {"a": 20.0}
    book.tidy(31.0, keep=set())
    assert book.failed("a", asked_s=31.0, now=31.0) == 61.0


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from("fms"), st.floats(0, 500)), max_size=60))
def test_no_ban_is_longer_than_it_may_be(events: list[tuple[str, str, float]]) -> None:
    book, now = bans(), 0.0
    for worker, kind, pause_s in events:
        now += pause_s
        if kind == "f":
            book.failed(worker, asked_s=now - pause_s / 2, now=now)
        elif kind == "m":
            book.malformed(worker, now=now)
        else:
            book.succeeded(worker)
        assert all(0 < left_s <= 3600.001 for left_s in book.banned(now).values())
    assert not book.banned(now + 3601)

"""No request is obeyed twice, within bounded memory, whatever the clock does; and how token buckets count."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.errors import RefusedError
from trainer.network.rpc.limits import ReplayGuard, Share
from trainer.network.rpc.token_buckets import TokenBuckets

_WINDOW_S = 100.0
_START = 1_000_000.0


class _Clock:
    def __init__(self) -> None:
        self.now = _START

    def __call__(self) -> float:
        return self.now


def _guard(clock: Callable[[], float], *, total: int = 1000, per_peer: int = 1000) -> ReplayGuard:
    return ReplayGuard(window_s=_WINDOW_S, max_entries=total, max_entries_per_peer=per_peer, now=clock)


def _take(guard: ReplayGuard, sender: str, nonce: int, sent_at: float, address: str = "") -> str:
    """``address``: of a sender that is not proven."""
    try:
        guard.check_clock(sent_at)
        share = Share(address, False) if address else Share(sender, True)
        guard.remember(sender, nonce.to_bytes(16, "big"), sent_at, share)
    except RefusedError as error:
        return error.reason
    return "taken"


def test_a_second_time_is_refused_but_not_from_another_sender() -> None:
    guard = _guard(_Clock())
    assert [_take(guard, sender, 1, _START) for sender in ("a", "a", "b", "b")] == ["taken", "replayed"] * 2
    # One nonce with another time is still one request.
    assert [_take(guard, "a", 2, _START + offset_s) for offset_s in (-90, 90)] == ["taken", "replayed"]


@pytest.mark.parametrize(("offset_s", "word"), [(-130.0, "130.0 s behind"), (101.5, "101.5 s ahead")])
def test_a_wrong_clock_is_told_by_how_much(offset_s: float, word: str) -> None:
    with pytest.raises(RefusedError, match=word) as caught:
        _guard(_Clock()).check_clock(_START + offset_s)
    assert caught.value.reason == "clock"


def test_when_full_the_new_are_refused_and_the_old_stay_known() -> None:
    clock = _Clock()
    guard = _guard(clock, per_peer=3)
    assert [_take(guard, "a", nonce, _START) for nonce in range(4)] == ["taken"] * 3 + ["rate"]
    assert [_take(guard, "a", nonce, _START) for nonce in range(3)] == ["replayed"] * 3
    assert _take(guard, "b", 0, _START) == "taken"
    clock.now += 2.2 * _WINDOW_S
    assert _take(guard, "a", 9, clock.now) == "taken"
    assert len(guard) == 1


def test_the_total_is_bounded_over_many_senders() -> None:
    guard = _guard(_Clock(), total=50)
    taken = [_take(guard, str(sender), 0, _START) for sender in range(1000)]
    assert taken.count("taken") == len(guard) == 50
    assert set(taken[50:]) == {"rate"}


def test_one_address_cannot_use_up_what_is_remembered_for_all() -> None:
    """However many senders it pretends to be and whatever clock; and it gets on again within seconds all the time."""
    clock = _Clock()
    guard = _guard(clock, total=4000)
    taken = 0
    for second in range(600):
        clock.now += 1.0
        flood = [_take(guard, f"{second}.{it}", it, clock.now + 90, "198.51.100.7") for it in range(30)]
        taken += flood.count("taken")
        assert set(flood) <= {"taken", "rate"}
        assert flood.count("taken") >= 3
        assert len(guard) <= 1000
    assert taken < 30 * 600 / 4
    assert _take(guard, "of another host", 0, clock.now, "192.0.2.1") == "taken"
    assert _take(guard, "proven", 0, clock.now) == "taken"


def test_many_addresses_leave_a_quarter_to_proven_senders() -> None:
    guard = _guard(_Clock(), total=400)
    taken = [_take(guard, f"{it}", 0, _START, f"192.0.2.{it}") for it in range(400)]
    assert taken == ["taken"] * 300 + ["rate"] * 100
    assert [_take(guard, "proven", nonce, _START) for nonce in range(101)] == ["taken"] * 100 + ["rate"]


def test_a_clock_set_back_reopens_nothing() -> None:
    clock = _Clock()
    guard = _guard(clock)
    assert _take(guard, "a", 1, _START) == "taken"
    clock.now += 300
    assert _take(guard, "a", 2, clock.now) == "taken"
    clock.now = _START
    assert _take(guard, "a", 1, _START) == "clock"


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5), st.floats(-150, 150), st.floats(-60, 120)), max_size=60)
)
def test_no_message_is_ever_taken_twice(events: list[tuple[int, int, float, float]]) -> None:
    """Whatever is sent again, at whatever times, under a clock that jumps both ways."""
    clock = _Clock()
    guard = _guard(clock, per_peer=8, total=20)
    seen: list[tuple[str, int, float]] = []
    for sender, nonce, offset_s, jump_s in events:
        clock.now += jump_s
        message = (str(sender), nonce, clock.now + offset_s)
        for candidate in [message, *seen]:
            if _take(guard, *candidate) == "taken":
                assert candidate not in seen
                seen.append(candidate)
        assert len(guard) <= 20


@given(
    st.floats(1.0, 50.0),
    st.floats(0.1, 100.0),
    st.lists(st.tuples(st.floats(0.0, 20.0), st.sampled_from("abc")), max_size=200),
)
def test_no_key_takes_more_than_its_bucket_and_the_time_give(
    capacity: float, per_s: float, steps: list[tuple[float, str]]
) -> None:
    now_s = 0.0
    buckets = TokenBuckets(capacity, per_s, lambda: now_s)
    taken = dict.fromkeys("abc", 0)
    for pause_s, key in steps:
        now_s += pause_s
        has, wait_s = buckets.left(key) >= 1.0, buckets.wait_s(key)
        assert has == (wait_s == 0.0) == buckets.take(key)
        taken[key] += has
    assert all(count <= capacity + per_s * now_s + 1e-6 for count in taken.values())


def test_a_token_given_back_can_be_taken_again_and_no_bucket_overflows() -> None:
    buckets = TokenBuckets(2.0, 0.5, lambda: 0.0)
    assert [buckets.take("a") for _ in range(3)] == [True, True, False]
    assert buckets.wait_s("a") == 2.0
    for _ in range(5):
        buckets.give_back("a")
        buckets.give_back("never taken from")
    assert [buckets.take("a") for _ in range(3)] == [True, True, False]


def test_full_buckets_are_not_remembered() -> None:
    now_s = 0.0
    buckets = TokenBuckets(8.0, 1.0, lambda: now_s)
    for number in range(50_000):
        now_s += 0.01
        buckets.take(str(number))
    assert len(buckets) <= 8192

"""No request is obeyed twice, within bounded memory, whatever the clock does."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.errors import RefusedError
from trainer.network.rpc.replay import ReplayGuard
from trainer.network.rpc.standing import Share

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
    assert [_take(guard, sender, 1, _START) for sender in ("a", "a", "b", "b")] == [
        "taken",
        "replayed",
        "taken",
        "replayed",
    ]


def test_one_nonce_with_another_time_is_still_one_request() -> None:
    guard = _guard(_Clock())
    assert _take(guard, "a", 1, _START - 90) == "taken"
    assert _take(guard, "a", 1, _START + 90) == "replayed"


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

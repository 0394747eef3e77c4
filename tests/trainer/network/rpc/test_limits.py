"""Counting what goes on at once."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import pytest

from tests.support.event_loop import on_event_loop
from trainer.errors import RefusedError
from trainer.network.rpc.limits import ByteBudget, Claim, Slot, Slots
from trainer.network.rpc.standing import Share

PROVEN_A, PROVEN_B = Share("a", True), Share("b", True)


@dataclass
class _Calls:
    """Calls that take slots, and what became of them."""

    slots: Slots
    shed: list[str] = field(default_factory=list)

    def take(self, name: str, share: Share, *, holder: str = "", stalled_s: float | None = None) -> Slot:
        now_s = asyncio.get_running_loop().time()
        since = None if stalled_s is None else now_s - stalled_s
        return self.slots.take(Claim(share, holder or name, lambda: since, lambda: self.shed.append(name), keep_s=0.25))

    def is_busy(self, share: Share, holder: str = "newcomer") -> bool:
        try:
            self.take("newcomer", share, holder=holder)
        except RefusedError as error:
            assert error.reason == "busy"
            return True
        return False


def _calls(*, total: int = 8, holder: int = 2, address: int = 4) -> _Calls:
    return _Calls(Slots("calls", total, holder, address))


def _stranger(address: str) -> Share:
    return Share(address, False)


@on_event_loop
async def test_slots_are_bounded_per_holder_and_in_all_and_come_back() -> None:
    calls = _calls(total=3)
    held = [calls.take("1", PROVEN_A, holder="a"), calls.take("2", PROVEN_A, holder="a")]
    assert calls.is_busy(PROVEN_A, "a")
    held.append(calls.take("3", PROVEN_B, holder="b"))
    assert calls.is_busy(PROVEN_B, "b")
    for slot in [*held, *held]:
        slot.give()
    assert len(calls.slots) == 0
    assert not calls.is_busy(PROVEN_A, "a")


@on_event_loop
async def test_strangers_share_what_their_address_may_take() -> None:
    calls = _calls()
    for name in "wxyz":
        calls.take(name, _stranger("192.0.2.1"))
    assert calls.is_busy(_stranger("192.0.2.1"))
    assert not calls.is_busy(_stranger("192.0.2.2"))
    assert not calls.is_busy(PROVEN_A), "a proven peer of that address counts for itself"


@on_event_loop
async def test_strangers_of_all_addresses_leave_a_quarter_to_proven_peers() -> None:
    calls = _calls()
    for number in range(6):
        calls.take(str(number), _stranger(f"192.0.2.{number}"))
    assert calls.is_busy(_stranger("192.0.2.100"))
    for name in ("a", "b"):
        calls.take(name, Share(name, True))
    assert calls.is_busy(Share("c", True))
    assert not calls.shed


@on_event_loop
async def test_a_newcomer_gets_the_place_of_what_has_stalled_for_longest() -> None:
    calls = _calls()
    for name, stalled_s in (("moves", None), ("just now", 0.1), ("long", 5.0), ("longest", 9.0)):
        calls.take(name, _stranger("192.0.2.1"), stalled_s=stalled_s)
    calls.take("elsewhere", _stranger("192.0.2.2"), stalled_s=100.0)
    for expected in (["longest"], ["longest", "long"]):
        calls.take(f"after {expected[-1]}", _stranger("192.0.2.1"))
        assert calls.shed == expected
    assert calls.is_busy(_stranger("192.0.2.1")), "what moves, or was about to, is not ended"


@on_event_loop
async def test_when_all_is_full_the_address_that_holds_most_gives_way_and_proven_peers_last() -> None:
    calls = _calls(total=8, address=3)
    for name in ("a", "b"):
        calls.take(name, Share(name, True), stalled_s=50.0)
    calls.take("single", _stranger("192.0.2.9"), stalled_s=40.0)
    for number in range(3):
        calls.take(f"many {number}", _stranger("192.0.2.1"), stalled_s=1.0 + number)
    calls.take("c", Share("c", True))
    calls.take("d", Share("d", True))
    calls.take("e", Share("e", True))
    assert calls.shed == ["many 2"]
    for name in ("f", "g", "h", "i"):
        calls.take(name, Share(name, True))
    assert calls.shed[1:] == ["many 1", "single", "many 0", "a"]


@on_event_loop
async def test_a_slot_given_back_is_not_shed() -> None:
    calls = _calls()
    slot = calls.take("a", PROVEN_A, stalled_s=3.0)
    slot.give()
    slot.shed()
    assert not calls.shed
    assert not calls.slots.stalled(asyncio.get_running_loop().time())


def test_a_budget_is_bounded_per_share_and_in_all() -> None:
    budget = ByteBudget(100, 60)
    budget.take(PROVEN_A, 50)
    assert not budget.has_room(PROVEN_A, 11)
    assert budget.has_room(PROVEN_B, 50)
    budget.take(PROVEN_B, 45)
    assert not budget.has_room(PROVEN_A, 6)
    budget.give(PROVEN_A, 50)
    assert budget.has_room(PROVEN_A, 55)
    assert budget.total_bytes == 45


@pytest.mark.parametrize("num_addresses", [1, 2])
def test_strangers_do_not_use_up_a_budget(num_addresses: int) -> None:
    budget = ByteBudget(100, 40)
    for number in range(num_addresses):
        budget.take(_stranger(f"192.0.2.{number}"), 40)
    assert not budget.has_room(_stranger("192.0.2.0"), 1)
    assert budget.has_room(PROVEN_A, 20)

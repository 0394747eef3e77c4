"""Counting what goes on at once."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from trainer.errors import RefusedError
from trainer.rpc.limits import ByteBudget, Slots


def test_slots_are_bounded_per_key_and_in_all_and_come_back() -> None:
    slots = Slots("calls", 3, 2)
    with ExitStack() as held:
        for key in ("a", "a", "b"):
            held.enter_context(slots.taken(key))
        for key in ("a", "b"):
            with pytest.raises(RefusedError, match="try again later") as caught, slots.taken(key):
                pass
            assert caught.value.reason == "busy"
    assert len(slots) == 0
    with slots.taken("a"), slots.taken("a"):
        assert len(slots) == 2


def test_a_slot_comes_back_after_an_error() -> None:
    slots = Slots("calls", 1, 1)
    for _ in range(3):
        with pytest.raises(KeyError), slots.taken("a"):
            raise KeyError


def test_a_budget_is_bounded_per_peer_and_in_all() -> None:
    budget = ByteBudget(100, 60)
    budget.take("a", 50)
    assert not budget.has_room("a", 11)
    assert budget.has_room("b", 50)
    budget.take("b", 45)
    assert not budget.has_room("a", 6)
    budget.give("a", 50)
    assert budget.has_room("a", 55)
    assert budget.total_bytes == 45

"""Evaluations, which train nothing, have a share of a worker's time and no more."""

from __future__ import annotations

import pytest

from trainer.errors import RefusedError
from trainer.pipeline.worker.evaluations import Evaluations


class Clock:
    """Stands until it is moved."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_a_driver_that_had_its_share_waits_and_the_others_do_not() -> None:
    clock = Clock()
    evaluations = Evaluations(clock)
    evaluations.check("a")
    evaluations.spent("a", 5.0)
    evaluations.check("a")
    evaluations.spent("a", 7.0)
    with pytest.raises(RefusedError, match="this driver"):
        evaluations.check("a")
    clock.now_s = 8.2
    evaluations.check("a")


def test_all_drivers_together_have_half_of_the_time() -> None:
    clock = Clock()
    evaluations = Evaluations(clock)
    for number in range(6):
        evaluations.spent(f"driver-{number}", 2.0)
    with pytest.raises(RefusedError, match="all drivers"):
        evaluations.check("another")
    clock.now_s = 4.1
    evaluations.check("another")


def test_what_was_not_used_is_not_saved_up() -> None:
    clock = Clock()
    evaluations = Evaluations(clock)
    clock.now_s = 1e6
    evaluations.spent("a", 20.0)
    with pytest.raises(RefusedError, match="took more"):
        evaluations.check("a")

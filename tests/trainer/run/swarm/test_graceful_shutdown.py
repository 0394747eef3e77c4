"""How a worker leaves, tried with a clock of the test's own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from trainer.errors import CheckpointError, TrainerError
from trainer.run.swarm.graceful_shutdown import GracefulShutdown

LEAVE_S = 30.0


def _at_once(_timeout_s: float) -> None: ...


@dataclass
class Leaver:
    """A worker with requests under way; what it does, in order."""

    answered_at_s: tuple[float, ...] = ()
    """When each of them has its answer."""
    save: Callable[[float], None] = _at_once
    share: Callable[[float], None] = _at_once
    now_s: float = 0.0
    did: list[tuple[str, float]] = field(default_factory=list)

    def leave(self) -> None:
        GracefulShutdown(
            leave_s=LEAVE_S,
            num_unanswered=lambda: sum(at_s > self.now_s for at_s in self.answered_at_s),
            refuse=lambda: self.did.append(("refuse", self.now_s)),
            save=lambda timeout_s: self._do("save", self.save, timeout_s),
            share=lambda timeout_s: self._do("share", self.share, timeout_s),
            clock=lambda: self.now_s,
            sleep=self._sleep,
        ).run()

    @property
    def order(self) -> list[str]:
        return [name for name, _ in self.did]

    def _do(self, name: str, work: Callable[[float], None], timeout_s: float) -> None:
        self.did.append((name, timeout_s))
        work(timeout_s)

    def _sleep(self, seconds: float) -> None:
        self.now_s += seconds


def test_what_is_under_way_is_answered_before_anything_is_refused() -> None:
    leaver = Leaver(answered_at_s=(2.0, 7.0))
    leaver.leave()
    assert leaver.order == ["refuse", "save", "share"]
    assert 7.0 <= leaver.did[0][1] < 7.5


def test_who_never_gets_an_answer_does_not_hold_it_up_for_longer_than_it_may() -> None:
    leaver = Leaver(answered_at_s=(1e9,))
    leaver.leave()
    assert leaver.order == ["refuse", "save", "share"]
    assert dict(leaver.did)["save"] == pytest.approx(LEAVE_S / 2, abs=0.5)
    assert leaver.now_s == pytest.approx(LEAVE_S, abs=0.5)


def test_a_round_that_cannot_be_had_costs_the_round_alone() -> None:
    def share(_timeout_s: float) -> None:
        raise TrainerError("busy")

    leaver = Leaver(share=share)
    leaver.leave()
    assert leaver.order == ["refuse", "save", "share"]


def test_what_could_not_be_saved_is_shared_and_said() -> None:
    def save(_timeout_s: float) -> None:
        raise CheckpointError("no space left")

    leaver = Leaver(save=save)
    with pytest.raises(CheckpointError, match="no space"):
        leaver.leave()
    assert leaver.order == ["refuse", "save", "share"]


def test_saving_has_time_even_if_nothing_is_left() -> None:
    leaver = Leaver()

    def late(_timeout_s: float) -> None:
        leaver.now_s += 100.0

    leaver.save = late
    leaver.leave()
    assert dict(leaver.did)["share"] == 0.0
    leaver.did.clear()
    leaver.answered_at_s = (1e9,)
    leaver.leave()
    assert dict(leaver.did)["save"] >= 5.0

"""A worker's way into its stage and out of it: what it is to the others meanwhile, and why it has to join anew."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from trainer.errors import UnfitNodeError
from trainer.network.discovery.stage_report import StageReport, StageUid
from trainer.outer.engine.strategy import OuterResult
from trainer.run.config.run import HealthConfig, JoinConfig
from trainer.run.node.health import Health
from trainer.run.swarm.joining import Joining
from trainer.run.swarm.withdrawals import Withdrawals

FAILED = OuterResult(round_index=3, fragment=0, outer_step=0, committed=False, num_batches=0, waited_s=0.0)
ROUND = 7


@dataclass
class World:
    """A worker, the others of its stage, and all that happens to them, in order."""

    serving: list[StageReport] = field(default_factory=list)
    happened: list[str] = field(default_factory=list)
    failed_without_it: bool = False
    is_behind: bool = False
    is_on_its_own: bool = False
    asked_for: list[int] = field(default_factory=list)
    looks: int = 0
    stops_after: int = 1000
    states: Iterator[bool] = field(default_factory=lambda: iter([True] * 9))
    follows: bool = False
    is_left_behind: bool = False
    place_of_others: float | None = None
    is_resumed: bool = True
    loses_touch_while_it_follows: bool = False
    round_index: int = ROUND
    fetches: int = 0

    def __post_init__(self) -> None:
        me = cast("Any", self)
        self.health = Health(HealthConfig(max_withdrawals=3))
        self.withdrawals = Withdrawals(self.health, me, me, cast("Any", Others(self)), self._is_on_its_own)

    def joining(self, *, follows_rounds: bool = False, has_common_state: bool = True) -> Joining:
        me, config = cast("Any", self), JoinConfig(first_peers_s=0.0, window=1.0)
        others = cast("Any", Others(self))
        options = {"has_common_state": has_common_state, "follows_rounds": follows_rounds}
        return Joining(config, me, others, me, me, me, me, self.withdrawals, **options)

    def _is_on_its_own(self, num_members: int) -> bool:
        self.asked_for.append(num_members)
        return self.is_on_its_own

    # What joining asks of the worker:

    def expects_others(self) -> bool:
        return True

    def check_and_name(self) -> None:
        self.happened.append("heard")

    def set_status(self, status: str) -> None:
        self.happened.append(status)

    def is_stopping(self) -> bool:
        return False

    def is_over(self) -> bool:
        self.looks += 1
        if self.follows and self.loses_touch_while_it_follows:
            self.loses_touch_while_it_follows, self.failed_without_it = False, True
            assert self.withdrawals.note_round(FAILED)
        return self.looks > self.stops_after

    # Its states, its rounds and the check of its beginning:

    def take_up(self) -> bool:
        self.happened.append(f"takes up, follows={self.follows}")
        self.fetches += 1
        if self.fetches > 1:
            self.round_index = ROUND
        return next(self.states)

    def is_current(self) -> bool:
        return False

    def let_go(self) -> None:
        self.happened.append("lets go")

    def may_serve(self) -> bool:
        return True

    def place(self) -> tuple[int, float]:
        return self.round_index, 0.0

    def is_lost(self) -> bool:
        return self.is_behind

    def has_lost_touch(self, result: OuterResult) -> bool:
        return not result.committed and self.failed_without_it


@dataclass
class Others:
    world: World

    def serving(self) -> list[StageReport]:
        return self.world.serving

    def move_to(self, round_index: int) -> None:
        self.world.happened.append(f"to round {round_index}")


def other() -> StageReport:
    content = {"uid": str(StageUid("tail", 1)), "incarnation": "0" * 16, "status": "serving", "round_index": ROUND}
    return StageReport.model_validate(content)


def test_others_wait_for_a_worker_only_while_it_serves() -> None:
    world = World([other()])
    joining = world.joining()
    assert not joining.is_current
    assert joining.join() and joining.is_current
    assert world.happened == ["heard", "takes up, follows=False", f"to round {ROUND}", "serving"]
    world.happened.clear()
    assert joining.rejoin() and joining.is_current
    assert world.happened[:3] == ["joining", "to round -1", "lets go"]
    assert world.happened[3:] == ["heard", "takes up, follows=False", f"to round {ROUND}", "serving"]


@pytest.mark.parametrize(("has_common_state", "fetches"), [(True, 2), (False, 1)])
def test_a_state_of_the_round_before_is_fetched_anew_where_it_would_be_in_no_round(
    monkeypatch: pytest.MonkeyPatch, has_common_state: bool, fetches: int
) -> None:
    monkeypatch.setattr("trainer.run.swarm.lifecycle._RETRY_S", 0.0)
    world = World([other()], round_index=ROUND - 1)
    assert world.joining(has_common_state=has_common_state).join()
    assert world.fetches == fetches
    assert world.happened[-2:] == [f"to round {ROUND if has_common_state else ROUND - 1}", "serving"]


@pytest.mark.parametrize("follows_rounds", [False, True])
def test_who_is_asked_to_stop_while_it_joins_is_not_current(follows_rounds: bool) -> None:
    world = World([other()], stops_after=0)
    joining = world.joining(follows_rounds=follows_rounds)
    assert not joining.join() and not joining.rejoin()
    assert not joining.is_current
    assert "serving" not in world.happened


def test_who_loses_touch_while_it_follows_takes_up_the_others_state_again_and_serves_then() -> None:
    world = World([other()], loses_touch_while_it_follows=True)
    joining = world.joining(follows_rounds=True)
    assert joining.join()
    takes_up = "takes up, follows=False"
    assert world.happened == [
        "heard", takes_up, f"to round {ROUND}", "to round -1", takes_up, f"to round {ROUND}", "serving"
    ]  # fmt: skip
    assert not world.follows, "it takes part with what it counts from now on"
    assert not world.withdrawals.has_lost_touch


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ({"is_behind": True}, "too many rounds behind"),
        ({"is_left_behind": True}, "too many steps behind"),
        ({"failed_without_it": True}, "its rounds failed while the others went on"),
    ],
)
def test_a_worker_withdraws_only_where_others_have_the_stage_s_state(what: dict[str, bool], reason: str) -> None:
    world = World(**what)  # type: ignore[arg-type]
    assert world.withdrawals.note_round(FAILED) == world.failed_without_it
    assert not world.withdrawals.due_because(), "there is no state to take up"
    world.serving = [other()]
    assert reason in world.withdrawals.due_because()


def test_most_others_having_another_state_is_looked_at_once_a_round() -> None:
    world = World(is_on_its_own=True)
    assert not world.withdrawals.due_because() and not world.asked_for, "no round has made a state"
    world.withdrawals.handed_out(1)
    assert "a state that it has never had" in world.withdrawals.due_because()
    assert not world.withdrawals.due_because()
    assert world.asked_for == [1]


def test_nonsense_is_a_reason_until_the_worker_begins_again() -> None:
    world = World([other()])
    for _ in range(world.health.config.max_skipped_steps):
        assert not world.withdrawals.due_because()
        world.withdrawals.stepped(is_skipped=True)
    world.withdrawals.stepped(is_skipped=False)
    assert "not finite" in world.withdrawals.due_because()
    world.withdrawals.begins_again()
    assert not world.withdrawals.due_because()


def test_a_round_with_others_forgives_withdrawals_and_missing_the_first_one_counts_once() -> None:
    world = World([other()], failed_without_it=True)
    found = world.withdrawals
    assert found.note_round(FAILED)
    for _ in range(5):  # It is still joining: within a minute that is one attempt.
        found.note("rounds")
    found.shared()
    for _ in range(2):
        found.note("rounds")
    found.shared()
    found.note("steps")
    found.note("steps")
    with pytest.raises(UnfitNodeError, match="3 times in a row: steps; then steps; then steps"):
        found.note("steps")

"""A change of the run holds from one outer step at all members, with overlap and without it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from tests.support.replica_group import MeetingCollective, Quadratic, ReplicaGroup, Scripted, run_replicas
from trainer.errors import RoundFailedError
from trainer.outer.diloco import DiLoCoConfig, DiLoCoTrainer
from trainer.outer.diloco.rounds import AgreedChanges
from trainer.outer.engine.collective import Contribution, RoundResult

AT_ROUND = 2
BEFORE = DiLoCoConfig(inner_steps=6, outer_lr=1.0, outer_momentum=0.0, merge_alpha=0.25)
AFTER = replace(BEFORE, inner_steps=4, outer_lr=0.5, merge_alpha=0.5)


class Member:
    """A member of a run in which change 1 is in force from `AT_ROUND`, once it has heard of it."""

    def __init__(self, rank: int, overlap_steps: int, *, has_heard: bool) -> None:
        self.rank = rank
        self.has_heard = has_heard
        self.configs = [replace(config, overlap_steps=overlap_steps) for config in (BEFORE, AFTER)]
        self.model = Quadratic(0)
        self.went_by: list[tuple[int, int]] = []
        """Number of a change and the round of the trainer when it went over to it."""
        self.anchors: list[float] = []
        self.merged: list[tuple[float, float]] = []
        """Of each merge what the parameters were before it, and after."""

    def join(self, collective: MeetingCollective | Scripted) -> None:
        self.trainer = DiLoCoTrainer(self.model, self.configs[0], collective)
        self.trainer.changes = AgreedChanges(lambda number: self.configs[number], self.go_by)

    def number_at(self, round_index: int) -> int:
        return int(self.has_heard and round_index >= AT_ROUND)

    def go_by(self, number: int) -> None:
        if number != (self.went_by[-1][0] if self.went_by else 0):
            self.went_by.append((number, self.trainer.round_index))
            self.trainer.configure(self.configs[number])

    def step(self) -> None:
        if not self.trainer.awaits_result:
            self.go_by(self.number_at(self.trainer.round_index))
        with torch.no_grad():
            self.model.x.sub_(1.0 + self.rank)
        before = self.model.x[0].item()
        result = self.trainer.after_inner_step()
        if result is not None and result.committed:
            self.anchors.append(float(self.trainer.shared_state().anchor[0]))
            self.merged.append((before, self.model.x[0].item()))


class Agreeing(MeetingCollective):
    """Members agree on the newest change that any of them knows, as coordinators fetch it; who lacks it hears of it."""

    def __init__(self, group: ReplicaGroup, member: Member) -> None:
        super().__init__(group, member.rank)
        self._member = member

    def reduce(self, contribution: Contribution) -> RoundResult:
        result = super().reduce(contribution)
        self._member.has_heard |= contribution.round_index >= AT_ROUND
        return replace(result, change=int(contribution.round_index >= AT_ROUND))


@pytest.mark.parametrize("overlap_steps", [0, 2])
@pytest.mark.parametrize("who_heard", [(True, True, True), (True, False, True)])
def test_a_change_takes_effect_at_one_outer_step_at_all_members(
    overlap_steps: int, who_heard: tuple[bool, ...]
) -> None:
    members = [Member(rank, overlap_steps, has_heard=heard) for rank, heard in enumerate(who_heard)]
    group = ReplicaGroup(len(members))
    for member in members:
        member.join(Agreeing(group, member))

    def run_of(member: Member) -> Callable[[], None]:
        def run() -> None:
            while len(member.anchors) < 5:
                member.step()

        return run

    run_replicas([run_of(member) for member in members])
    assert len({tuple(member.anchors) for member in members}) == 1, "replicas differ"
    anchor = 5.0
    for round_index, (brought, after) in enumerate(zip(group.history, members[0].anchors, strict=False)):
        mean = float(torch.stack([each.vector for each in brought]).mean(dim=0)[0])
        lr = (AFTER if round_index >= AT_ROUND else BEFORE).outer_lr
        assert after == pytest.approx(anchor - lr * mean), round_index
        anchor = after
        for each, heard in zip(brought, who_heard, strict=True):
            is_changed = round_index > AT_ROUND or (round_index == AT_ROUND and heard)
            assert each.num_batches == (AFTER if is_changed else BEFORE).inner_steps, round_index
    for member, heard in zip(members, who_heard, strict=True):
        assert member.went_by == [(1, AT_ROUND)]
        for round_index, ((before, after), anchor) in enumerate(zip(member.merged, member.anchors, strict=True)):
            alpha = (AFTER if round_index >= AT_ROUND else BEFORE).merge_alpha if overlap_steps else 0.0
            assert after == pytest.approx(alpha * before + (1.0 - alpha) * anchor), (heard, round_index)


def test_what_is_heard_of_while_a_round_is_under_way_holds_from_the_next_one_where_the_members_agreed_without_it() -> (
    None
):
    collective = Scripted()
    member = Member(0, 2, has_heard=False)
    member.join(collective)
    for _ in range(2 * BEFORE.inner_steps + 2):  # Two rounds, each merged two steps later.
        member.step()
    assert len(member.anchors) == AT_ROUND
    collective.gate.clear()
    for _ in range(BEFORE.inner_steps - 2):
        member.step()
    assert member.trainer.awaits_result
    member.has_heard = True  # In force from this very round, in which the others have agreed without it.
    member.step()
    assert member.went_by == []
    collective.gate.set()
    member.step()
    assert len(member.anchors) == AT_ROUND + 1
    member.step()
    assert member.went_by == [(1, AT_ROUND + 1)]


def test_behind_a_round_that_failed_a_member_goes_by_what_it_knows() -> None:
    collective, failed = Scripted(), threading.Event()

    def answer(contribution: Contribution) -> torch.Tensor:
        if contribution.round_index == AT_ROUND and not failed.is_set():
            failed.set()
            raise RoundFailedError("nobody came")
        return contribution.vector

    collective.answer = answer
    member = Member(0, 2, has_heard=False)
    member.join(collective)
    while not failed.is_set():
        member.step()
    member.has_heard = True
    while member.trainer.awaits_result:
        member.step()
    assert member.went_by == []
    member.step()
    assert member.went_by == [(1, AT_ROUND)]

"""Rounds that close by a quorum: members of other paces, real rounds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.paced_members import PacedMember, paced_members, steps_in_rounds, train
from trainer.outer.diloco import DiLoCoConfig, DiLoCoTrainer
from trainer.outer.diloco.attending import MOST_MISSED, rounds_between
from trainer.outer.engine.collective import LocalCollective

WHOLE = DiLoCoConfig(inner_steps=8, outer_lr=1.0, outer_momentum=0.0)
PACES = (0.05, 0.1, 0.2)


def check_alike(members: Sequence[PacedMember], num_rounds: int) -> None:
    """All held the same state after each round, bit for bit."""
    digests: dict[int, set[str]] = {}
    for member in members:
        for round_index, digest in member.anchors.items():
            digests.setdefault(round_index, set()).add(digest)
    assert len(digests) >= num_rounds
    assert all(len(found) == 1 for found in digests.values()), digests


@pytest.mark.slow
@pytest.mark.parametrize("quorum", [1, 0.6])
def test_no_step_of_any_member_is_lost_or_counts_twice_and_all_end_alike(quorum: float) -> None:
    with paced_members(PACES, WHOLE, quorum=quorum, max_grace_s=0.1) as members:
        train(members, until_round=7, within_s=120.0)
        counted = steps_in_rounds(members)
        for member in members:
            assert counted[member.number] + member.unshared_steps == pytest.approx(member.num_steps)
        check_alike(members, 7)
        assert members[2].num_steps < members[0].num_steps
        assert [outcome for outcome in members[2].outcomes if not outcome.num_batches], "the slow one attends rounds"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("diloco", "options"),
    [
        (DiLoCoConfig(inner_steps=8, overlap_steps=2), {}),
        (WHOLE, {"compression": "sparse", "residual_decay": 0.95}),
        (WHOLE, {"compression": "int8"}),
    ],
)
def test_rounds_in_the_background_and_lossy_ones_end_alike_too(diloco: DiLoCoConfig, options: dict[str, Any]) -> None:
    with paced_members(PACES, diloco, quorum=1, max_grace_s=0.1, **options) as members:
        train(members, until_round=5, within_s=120.0)
        check_alike(members, 5)
        assert [outcome for outcome in members[2].outcomes if outcome.committed and not outcome.num_batches]


def moved(steps: int) -> tuple[DiLoCoTrainer, nn.Linear]:
    """A member after so many steps of one each, in rounds of its own after every eighth."""
    model = nn.Linear(4, 1, bias=False)
    trainer = DiLoCoTrainer(model, WHOLE, LocalCollective())
    with torch.no_grad():
        trainer.adopt(trainer.shared_state())
        for _ in range(steps):
            model.weight[0, 0] -= 1.0
            trainer.after_inner_step(1)
    return trainer, model


@pytest.mark.parametrize("missed", [1, MOST_MISSED, MOST_MISSED + 1])
def test_work_of_a_node_that_could_not_attend_is_kept_for_some_rounds_on_the_new_anchor(missed: int) -> None:
    torch.manual_seed(0)
    others, _ = moved(8 * missed)
    torch.manual_seed(0)
    late, model = moved(3)
    before = late.shared_state().anchor.clone()
    late.adopt(others.shared_state(), keep_work=True)
    assert late.state_digest() == others.state_digest()
    own = late.shared_state().anchor - model.weight.detach().flatten()
    kept = missed <= MOST_MISSED
    torch.testing.assert_close(own, torch.tensor([3.0 if kept else 0.0, 0.0, 0.0, 0.0]))
    assert late.unshared == ((3, 3) if kept else (0, 0))
    assert not torch.equal(before, late.shared_state().anchor)
    saved = late.state_dict()["fragments"]
    assert isinstance(saved, list) and isinstance(saved[0], dict)
    assert saved[0]["lag"] == (missed if kept else 0), "a checkpoint knows how late its work is"


def test_rounds_between_two_states_are_counted_by_fragment() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    trainer = DiLoCoTrainer(model, DiLoCoConfig(inner_steps=2, num_fragments=2), LocalCollective())
    states = [trainer._state]
    for _ in range(5):
        trainer.after_inner_step(1)
        states.append(trainer._state)
    assert rounds_between(states[0], states[5]) == {0: 3, 1: 2}
    assert rounds_between(states[3], states[4]) == {1: 1}
    assert rounds_between(states[4], states[4]) == {0: 1, 1: 1}, "another state of the same round"

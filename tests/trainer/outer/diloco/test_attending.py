"""Rounds that close by a quorum: members of other paces, real rounds."""

from __future__ import annotations

import pytest

from tests.support.paced_members import paced_members, steps_in_rounds, train
from trainer.outer.diloco import DiLoCoConfig

WHOLE = DiLoCoConfig(inner_steps=8, outer_lr=1.0, outer_momentum=0.0)
OVERLAPPED = DiLoCoConfig(inner_steps=8, outer_lr=1.0, outer_momentum=0.0, overlap_steps=2, merge_alpha=0.0)


@pytest.mark.parametrize("quorum", [1, 0.6])
def test_no_step_of_any_member_is_lost_or_counts_twice_and_all_end_alike(quorum: float) -> None:
    with paced_members([0.05, 0.1, 0.2], WHOLE, quorum=quorum, max_grace_s=0.1) as members:
        train(members, until_round=7)
        counted = steps_in_rounds(members)
        for member in members:
            assert counted[member.number] + member.unshared_steps == pytest.approx(member.num_steps)
        digests: dict[int, set[str]] = {}
        for member in members:
            for round_index, digest in member.anchors.items():
                digests.setdefault(round_index, set()).add(digest)
        assert len(digests) >= 7
        assert all(len(found) == 1 for found in digests.values()), digests
        fast, slow = members[0], members[2]
        assert not [outcome.error for member in members for outcome in member.outcomes if not outcome.committed]
        print([(m.num_steps, m.num_fetched, len(m.outcomes)) for m in members])
        assert slow.num_steps < fast.num_steps
        attended = [outcome for outcome in slow.outcomes if not outcome.num_batches]
        assert attended, "the slow member has attended rounds"

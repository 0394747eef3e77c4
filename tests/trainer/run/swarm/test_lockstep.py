"""Four nodes, ten outer steps: one state at all of them after every one, and nothing goes wrong on the way."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from tests.support.training_swarm import TrainingSwarm

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

NAMES = ("north", "east", "south", "west")
OUTER_STEPS = 10
INNER_STEPS = 20


def test_four_nodes_hold_one_state_after_every_outer_step(tmp_path: Path) -> None:
    collective = {"min_members": len(NAMES)}
    with TrainingSwarm(tmp_path, max_steps=OUTER_STEPS * INNER_STEPS, collective=collective) as swarm:
        swarm.begin(*NAMES)
        swarm.wait_for_step(OUTER_STEPS // 2)
        rates = [swarm[name].api("/api/training/verify")["hash_agreement_rate"] for name in NAMES]
        assert rates == [100] * len(NAMES)
        assert [swarm[name].exit_code() for name in NAMES] == [0] * len(NAMES)

        states = [swarm[name].states() for name in NAMES]
        assert set(states[0]) == set(range(1, OUTER_STEPS + 1))
        assert all(other == states[0] for other in states)
        assert len(set(states[0].values())) == OUTER_STEPS
        for name in NAMES:
            rounds = swarm[name].events("round")
            assert [event.fields["round_index"] for event in rounds] == list(range(OUTER_STEPS))
            assert all(len(event.fields["members"]) == len(NAMES) for event in rounds)  # type: ignore[arg-type]
            assert all(event.fields["completeness"] == 1 and not event.fields["dropped"] for event in rounds)
            assert not swarm[name].events("round_failed")
            assert swarm[name].num_steps() == OUTER_STEPS * INNER_STEPS

        first, *others = (swarm[name].checkpoint() for name in NAMES)
        for other in others:
            for vector in ("anchor", "momentum", "reference"):
                ours, theirs = (saved["diloco"]["fragments"][0][vector] for saved in (first, other))
                assert torch.equal(ours, theirs)
        for other in others:
            assert all(
                torch.equal(first["layers"][layer][name], value)
                for layer, values in other["layers"].items()
                for name, value in values.items()
            )
        assert first["current_loss"] < math.log(1024) - 1

"""A node that comes late: it takes the state from several of the others at once, and is one of them a round later."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from tests.support.training_swarm import TrainingSwarm, check_agreement

pytestmark = [pytest.mark.long, pytest.mark.timeout(400)]

DONORS = ("north", "east", "south")
INNER_STEPS = 400
"""Some 15 s; were a transfer to take longer than that, the others would always be ahead."""
UPLOAD_BYTES_PER_S = 1_500_000
"""The state has 15 MB: with three donors it takes 3 s, with two 5."""


def test_a_donor_dies_in_mid_transfer(tmp_path: Path) -> None:
    state = {"max_upload_bytes_per_s": UPLOAD_BYTES_PER_S}
    with TrainingSwarm(tmp_path, state=state, diloco={"inner_steps": INNER_STEPS}) as swarm:
        swarm.begin(*DONORS)
        swarm.wait_for_step(1, timeout_s=120)
        swarm.begin("late")
        late, lost = swarm["late"], swarm["south"]
        swarm.wait(lambda: "fetching state" in late.output(), "the late node to fetch the state")
        found = re.search(r"fetching state ([0-9a-f]+) from (\d+) nodes", late.output())
        assert found is not None
        assert int(found[2]) == len(DONORS)
        time.sleep(0.5)
        lost.kill()
        lost.reap()

        left = [swarm["north"], swarm["east"], late]
        swarm.wait(lambda: bool(late.events("adopted")), "the late node to have the state", 120, left)
        assert re.search(rf"{lost.peer_id[:16]}… at \S+ is asked no more", late.output())
        adopted = int(late.events("adopted")[-1].number("outer_step"))
        together = max(node.outer_step for node in left) + 1
        assert together <= adopted + 2
        swarm.wait_for_step(together + 1, *(node.name for node in left), timeout_s=150)
        check_agreement(left, together, together + 1)
        # It began where the others were, not at the beginning of the schedule.
        assert late.events("step")[0].number("step") == INNER_STEPS * adopted
        for node in left[:2]:
            assert not node.events("round_failed")

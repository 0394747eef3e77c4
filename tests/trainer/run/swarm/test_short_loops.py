"""A node that dies again and again among others whose inner loops are short: they let it in each time."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.support.training_swarm import TrainingNode, TrainingSwarm

NAMES = ("north", "east", "south")
_EVERY_S = 20.0
_TIMES = 6


def first_round_with(node: TrainingNode, peer_id: str, after: int) -> int | None:
    """The first outer step behind ``after`` that a node made together with another."""
    rounds = ((int(event.number("outer_step")), event.fields["members"]) for event in node.events("round"))
    return next((step for step, members in rounds if step > after and peer_id in members), None)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_node_that_is_killed_and_restarted_is_a_member_again_within_three_rounds(tmp_path: Path) -> None:
    with TrainingSwarm(tmp_path, diloco={"inner_steps": 6}) as swarm:
        swarm.begin(*NAMES)
        swarm.wait_for_step(3)
        north, south = swarm["north"], swarm["south"]
        for _ in range(_TIMES):
            south.kill()
            south.reap()
            came_s, answers = time.monotonic(), south.output().count("answers at")
            south.start()
            swarm.wait(lambda least=answers: south.output().count("answers at") > least, "south to answer again")
            back = north.outer_step
            swarm.wait(lambda least=back: first_round_with(north, south.peer_id, least) is not None, "south in a round")
            joined = first_round_with(north, south.peer_id, back)
            assert joined is not None and joined <= back + 3, f"a member of round {joined}, back at round {back}"
            time.sleep(max(0.0, came_s + _EVERY_S - time.monotonic()))

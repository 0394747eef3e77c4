"""Nodes that stop, hang, die and come back, one at a time or all at once: the rest go on, and all agree again."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.support.training_swarm import TrainingNode, TrainingSwarm, check_agreement

pytestmark = [pytest.mark.long, pytest.mark.timeout(400)]

NAMES = ("north", "east", "south")


def steps_after(node: TrainingNode, num_before: int) -> list[int]:
    """Inner steps that it logged after the first ``num_before``."""
    return [int(event.number("step")) for event in node.events("step")[num_before:]]


def newest(nodes: list[TrainingNode]) -> int:
    return max(node.outer_step for node in nodes)


def test_all_are_asked_to_stop_and_start_again(tmp_path: Path) -> None:
    with TrainingSwarm(tmp_path) as swarm:
        swarm.begin(*NAMES)
        nodes = [swarm[name] for name in NAMES]
        swarm.wait_for_step(3)
        assert swarm.stop() == [128 + signal.SIGTERM] * 3
        saved = {node.name: node.checkpoint() for node in nodes}
        logged = {node.name: node.num_steps() for node in nodes}
        reached = newest(nodes)
        assert reached >= 3

        for node in nodes:
            node.start()
        swarm.wait_for_step(reached + 4)
        for node in nodes:
            assert steps_after(node, logged[node.name])[0] == saved[node.name]["training_rounds"]
        check_agreement(nodes, reached + 2, reached + 4)
        assert swarm.stop() == [128 + signal.SIGTERM] * 3
        # What was learned was not learned again: losses go on from where they were.
        for node in nodes:
            losses = [event.number("loss") for event in node.events("step")]
            again = losses[logged[node.name] : logged[node.name] + 20]
            assert sum(again) / len(again) < losses[0] - 1


def test_all_are_killed_at_different_outer_steps(tmp_path: Path) -> None:
    with TrainingSwarm(tmp_path) as swarm:
        swarm.begin(*NAMES)
        nodes = [swarm[name] for name in NAMES]
        for number, node in enumerate(nodes):
            left = nodes[number:]
            swarm.wait_for_step(newest(left) + 2 if number else 2, *(other.name for other in left))
            node.kill()
            node.reap()
        steps = [int(node.checkpoint()["diloco"]["outer_step"]) for node in nodes]
        assert len(set(steps)) > 1

        for node in nodes:
            node.start()
        swarm.wait_for_step(max(steps) + 3)
        check_agreement(nodes, max(steps) + 2, max(steps) + 3)
        assert all(node.events("adopted") for node, step in zip(nodes, steps, strict=True) if step < max(steps))


def test_one_hangs_and_another_dies_and_both_come_back(tmp_path: Path) -> None:
    with TrainingSwarm(tmp_path) as swarm:
        swarm.begin(*NAMES, "west")
        west, south = swarm["west"], swarm["south"]
        steady = [swarm["north"], swarm["east"]]
        swarm.wait_for_step(2)

        west.send(signal.SIGSTOP)
        rest = [*steady, south]
        hung_at = newest(rest)
        swarm.wait_for_step(hung_at + 4, "north", "east", "south")
        west.send(signal.SIGCONT)
        swarm.wait(lambda: west.outer_step > hung_at + 4, "west to catch up")
        together = newest([*rest, west]) + 2
        swarm.wait_for_step(together + 1)
        check_agreement(swarm.nodes.values(), together, together + 1)

        south.kill()
        south.reap()
        died_at = newest(steady)
        swarm.wait_for_step(died_at + 3, "north", "east", "west")
        south.start()
        swarm.wait(lambda: south.outer_step > died_at + 3, "south to catch up")
        together = newest(list(swarm.nodes.values())) + 2
        swarm.wait_for_step(together + 1)
        check_agreement(swarm.nodes.values(), together, together + 1)

        for node in steady:
            assert not node.events("round_failed")
            assert all(event.fields["completeness"] == 1 for event in node.events("round")[together:])
        assert swarm.stop() == [128 + signal.SIGTERM] * 4

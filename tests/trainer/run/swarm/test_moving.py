"""Workers and nodes as processes: one goes where it is needed, one that is of no use ends itself and nobody else."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.support.pipeline_swarm import STAGES, PipelineSwarm, steps_of
from tests.support.training_swarm import TERMINATED, TrainingSwarm

MOVES = {
    "swarm": {
        "rebalance": {"patience_s": 1.0, "stay_s": 0.0},
        "checkpoint": {"interval_s": 2.0},
    }
}


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_worker_that_nobody_placed_takes_over_a_stage_that_is_left_empty(tmp_path: Path) -> None:
    with PipelineSwarm(tmp_path, **MOVES) as swarm:
        driver = swarm.begin_driver()
        swarm.begin_workers(*STAGES)
        swarm.wait_for_steps("driver-1", 10)
        spare = swarm.begin_worker("spare", "auto")
        swarm.wait(lambda: "serves version" in spare.output(), "the spare worker to serve")
        swarm.wait(lambda: len(spare.events("step")) > 2, "the spare worker to step")
        [first] = {stage for stage in STAGES if f"{stage} needs help most" in spare.output()}
        # Its state is on this machine's disk, and with nobody else.
        emptied = next(stage for stage in STAGES if stage != first)
        folder = tmp_path / "stages" / swarm.config.run_id / emptied
        swarm.wait(lambda: any(folder.glob("*")), f"a checkpoint of {emptied}")
        swarm[emptied].kill()
        alive = [node for name, node in swarm.nodes.items() if name != emptied]
        swarm.wait(lambda: f"moves from {first} to {emptied}" in spare.output(), "the move", alive=alive)
        before = len(steps_of(driver))
        swarm.wait_for_steps("driver-1", before + 10, alive=alive)
        assert spare.output().count("serves version") == 2
        assert "going on from version" in spare.output()
        account = swarm.account()
        assert account is not None and account.micro_batches.adds_up
        assert swarm.stop("driver-1") == [TERMINATED]
        assert swarm.stop("spare") == [TERMINATED]
        assert "Traceback" not in spare.output()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_node_that_is_of_no_use_says_why_and_ends_alone(tmp_path: Path) -> None:
    with TrainingSwarm(tmp_path) as swarm:
        swarm.begin("north", "east")
        swarm.begin("west", options=["--set", "health.max_withdrawals=1"])
        swarm.wait_for_step(2)
        west = swarm["west"]
        others = [swarm["north"], swarm["east"]]
        # All are of one process group: whoever signalled it would take the others along.
        groups = {os.getpgid(node._running.pid) for node in (west, *others)}
        assert len(groups) == 1

        west.send(signal.SIGSTOP)
        hung_at = max(node.outer_step for node in others)
        swarm.wait_for_step(hung_at + 3, "north", "east")
        west.send(signal.SIGCONT)
        assert west.exit_code() == 1
        assert "had to take itself out 1 times in a row: the others hold another state" in west.output()
        assert "Traceback" not in west.output()

        there = max(node.outer_step for node in others)
        swarm.wait_for_step(there + 2, "north", "east")
        # Nothing keeps it from coming back, as one that may withdraw.
        west.command[west.command.index("health.max_withdrawals=1")] = "health.max_withdrawals=3"
        west.start()
        swarm.wait(lambda: west.outer_step > there + 2, "west to be back", alive=others)
        assert swarm.stop() == [TERMINATED] * 3


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_node_that_computes_nonsense_tries_again_and_then_gives_up(tmp_path: Path) -> None:
    with TrainingSwarm(tmp_path) as swarm:
        swarm.begin("north", "east")
        swarm.wait_for_step(2)
        others = [swarm["north"], swarm["east"]]
        # After one step at this rate nothing that it computes is finite.
        swarm.begin("west", options=["--lr", "1e30"])
        west = swarm["west"]
        assert west.exit_code() == 1
        num_withdrawals = west.output().count("this node takes itself out")
        assert 3 <= num_withdrawals <= 6, "a round that it missed on a busy machine is none of the three"
        assert "not finite at 3 steps in a row; then loss or gradient were not finite" in west.output()
        assert len(west.events("adopted")) >= 2
        assert "Traceback" not in west.output()
        there = max(node.outer_step for node in others)
        swarm.wait_for_step(there + 2, "north", "east")
        assert all(step["loss"] < 20 for node in others for step in [event.fields for event in node.events("step")])
        assert swarm.stop("north", "east") == [TERMINATED] * 2

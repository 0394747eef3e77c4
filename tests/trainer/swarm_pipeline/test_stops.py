"""A swarm under DiLoCo that is stopped at any moment: what it saves is as good a model as the checkpoint before."""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path

import pytest

from tests.support.pipeline_swarm import DRIVERS, STAGES, PipelineSwarm, held_out_loss, held_out_rows, steps_of
from tests.support.training_swarm import TERMINATED
from trainer.checkpoint.stages import newest_set, time_us
from trainer.checkpoint.stages.naming import named_files

INNER_STEPS = 20
OPTIONS = {
    "strategy": "diloco",
    "diloco": {"inner_steps": INNER_STEPS},
    "data": {"holdout": 1},
    "inner": {"lr": 1e-3},
    "swarm": {
        "checkpoint": {"interval_s": 3.0, "keep": 50},
        "stage": {"target_tokens": 512, "clip_factor": 1.0, "tail_clip_factor": 5.0},
    },
}
"""Clipped as by default: without, a replica's own loss jumps by more than 1 % between two steps."""


def rounds(swarm: PipelineSwarm, at_s: float | None = None) -> dict[str, int]:
    """The outer round each stage's newest checkpoint was taken in, now or at a moment (seconds since 1970)."""
    at_us = time_us(time.time() if at_s is None else at_s)
    found = newest_set(swarm.config.swarm.checkpoint.directory, swarm.config.run_id, at_us)
    return {stage: file.read().state.strategy["round_index"] for stage, file in found.files.items()}


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_stop_at_any_moment_saves_a_model_as_good_as_the_last_regular_checkpoint(tmp_path: Path) -> None:
    chance = random.Random(11)
    with PipelineSwarm(tmp_path, **OPTIONS) as swarm:
        config = swarm.config

        def num_steps() -> int:
            return max((step["step"] for name in DRIVERS for step in steps_of(swarm[name])), default=0)

        def saved_stages() -> set[str]:
            return {found.stage for found in named_files(config.swarm.checkpoint.directory, config.run_id)}

        rows, workers = held_out_rows(swarm, 512), swarm.begin_two_of_each()
        for life in range(10):
            for node in swarm.nodes.values() if life else ():
                node.start()
            after = num_steps() + chance.randint(8, 2 * INNER_STEPS)
            swarm.wait(lambda least=after: num_steps() >= least, f"step {after}", timeout_s=300.0)
            swarm.wait(lambda: len(saved_stages()) == len(STAGES), "a checkpoint of each stage")
            stopped_s = time.time()
            assert swarm.stop() == [TERMINATED] * len(swarm.nodes)
            regular, stopped = held_out_loss(swarm, rows, stopped_s), held_out_loss(swarm, rows)
            # A regular outer step between the two is not the stop's doing, and may cost a little for the moment.
            bound = 1.01 if rounds(swarm, stopped_s) == rounds(swarm) else 1.03
            sys.stdout.write(f"stop at step {num_steps()}: {stopped / regular:.4f} of the last checkpoint's loss\n")
            assert stopped <= bound * regular, f"{stopped:.3f} after {regular:.3f}, at step {num_steps()}"
        said = "".join(node.output() for node in workers.values())
        assert "is dropped when the others' state is taken up" not in said, "of those that were alive all the time"

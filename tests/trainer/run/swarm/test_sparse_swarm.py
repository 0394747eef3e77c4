"""A pipeline whose stages' workers share sparse contributions (`strategy: sparseloco`), as real processes."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from tests.support.mixed_run import STAGES, check_one_state, rounds_of_all
from tests.support.pipeline_swarm import PipelineSwarm, steps_of
from tests.support.training_swarm import WAIT_S

OPTIONS: dict[str, Any] = {
    "strategy": "sparseloco",
    "sparseloco": {"inner_steps": 5},
    "swarm": {
        "num_stages": len(STAGES),
        "activation_codec": "subspace",
        "subspace": {"rank": 16},
        "stage": {"target_tokens": 256, "clip_factor": 1.0, "tail_clip_factor": 1.0},
    },
}


@pytest.mark.long
@pytest.mark.timeout(900)
def test_two_workers_a_stage_end_each_round_with_one_state_at_a_fiftieth_of_the_bits(tmp_path: Path) -> None:
    with PipelineSwarm(tmp_path, **OPTIONS) as swarm:
        driver = swarm.begin_driver()
        for number in (1, 2):
            swarm.begin_workers(*STAGES, suffix=f".{number}")
        members = {stage: [swarm[f"{stage}.{number}"] for number in (1, 2)] for stage in STAGES}
        swarm.wait(
            lambda: all(len(rounds_of_all(members[stage], stage)) >= 4 for stage in STAGES),
            "four rounds of each stage",
            4 * WAIT_S,
        )
        swarm.stop_in_order(*(node.name for nodes in members.values() for node in nodes))
        for stage, (one, other) in members.items():
            assert check_one_state([one, other], stage) >= 2
            # The model has 1.2 million parameters, and half of them at least are the head's or the tail's.
            rounds = [event for event in one.events("round") if len(event.fields["members"]) == 2]
            assert max(event.number("sent_bytes") for event in rounds) < 4 * 1_250_000 / 8
        losses = [step["loss"] for step in steps_of(driver) if step["loss"] is not None]
        assert fmean(losses[-6:]) < losses[0] - 0.2

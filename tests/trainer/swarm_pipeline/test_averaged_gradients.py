"""3 stages of 2 workers with `strategy: grad`, each a process as users start it, take one process's steps.

The driver is synchronous: it sends nothing of a step before all six have taken the one before. So the micro-batches of
each step are those of one process, whichever worker had them, and losses, norms and the weights at the end are its own,
to 1e-5. Products and sums are grouped differently, which costs a few units of rounding a step.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import Tensor

from tests.support.pipeline_swarm import STAGES, OneProcess, PipelineSwarm, check_account, records_of, steps_of
from tests.support.token_store import TokenStore
from tests.support.training_swarm import TERMINATED, WAIT_S
from trainer.checkpoint.stages.contents import read_stage
from trainer.checkpoint.stages.naming import named_files

NUM_STEPS = 12
TOLERANCE = 1e-5
OPTIONS = {
    "strategy": "grad",
    # Gradients are handed over when all are there, however slow the machine is; agreeing ahead hands over late ones.
    "grad": {"ahead_s": 0.0, "average_state_every": 3, "num_slices": 4},
    "collective": {"powersgd_rank": 0},
    "rule": {"rule": "mean", "validation": "off"},
    "swarm": {
        "worker": {"auto_step_s": 3600.0},
        "driver": {"synchronous": True, "max_in_flight": 4},
        "join": {"first_peers_s": 1.0, "window": 0.5, "idle_s": 2.0},
    },
}


@pytest.mark.long
@pytest.mark.timeout(900)
def test_two_workers_a_stage_take_one_processs_steps(tmp_path: Path) -> None:
    store = TokenStore.of(tmp_path / "store", 3).folder
    with PipelineSwarm(tmp_path / "swarm", store, **OPTIONS) as swarm:
        names = [f"{stage}.{number}" for stage in STAGES for number in (1, 2)]
        for name in names:
            swarm.begin_worker(name, name.partition(".")[0])
        swarm.wait(lambda: all("serves version 0" in swarm[name].output() for name in names), "all workers", 4 * WAIT_S)
        driver = swarm.begin_driver("driver-1", "--max-steps", str(NUM_STEPS))
        assert driver.exit_code(400) == 0
        assert swarm.stop(*names) == [TERMINATED] * len(names)
        one = OneProcess(swarm.config, records_of(swarm.journal))
        steps, single = steps_of(driver), list(one.steps())
        assert [step["num_tokens"] for step in steps] == [step.num_tokens for step in single]
        assert [step["loss"] for step in steps] == pytest.approx([step.loss for step in single], rel=TOLERANCE)
        for stage in STAGES:
            expected = [step.grad_norms[stage] for step in single]
            for name in (f"{stage}.1", f"{stage}.2"):
                norms = [event.number("grad_norm") for event in swarm[name].events("step")]
                assert norms == pytest.approx(expected, rel=10 * TOLERANCE), name
            check_same_bits(swarm, stage, dict(one.model.named_parameters()))
        check_account(swarm)
    assert all("Traceback" not in swarm[name].output() for name in names)


def check_same_bits(swarm: PipelineSwarm, stage: str, expected: dict[str, Tensor]) -> None:
    """Both workers of a stage name one state after each round, and what they saved at last is one process's."""
    digests: dict[int, set[str]] = {}
    for name in (f"{stage}.1", f"{stage}.2"):
        for event in swarm[name].events("round"):
            digests.setdefault(int(event.number("round_index")), set()).add(str(event.fields["state_digest"]))
    assert len(digests) >= NUM_STEPS and all(len(each) == 1 for each in digests.values()), digests
    files = list(named_files(swarm.config.swarm.checkpoint.directory, swarm.config.run_id))
    saved = [state for file in files if file.stage == stage and (state := read_stage(file).state).version == NUM_STEPS]
    assert len(saved) == 2, files
    for state in saved:
        trained = {name: value for name, value in state.parameters.items() if name in expected}
        assert trained
        differing = {name: difference(value, expected[name].detach()) for name, value in trained.items()}
        assert max(differing.values()) < TOLERANCE, differing


def difference(one: Tensor, other: Tensor) -> float:
    """Relative to the other's norm."""
    return float((one - other).norm() / other.norm())

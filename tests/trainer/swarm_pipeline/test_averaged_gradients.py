"""3 stages of 2 workers with `strategy: grad`, as their users start them, train as one process does on those batches.

A driver may send the first micro-batches of a step to workers that have not heard yet that the last one's target is
reached: their forward passes see the weights before it. So losses have to agree to 2 %, and what the
workers of a stage hold exactly. That weights agree to 1e-5 step by step where nothing is sent early is shown in one
process, by `tests/trainer/pipeline/worker/test_grad_stepping.py`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.pipeline_swarm import STAGES, OneProcess, PipelineSwarm, check_account, records_of, steps_of
from tests.support.token_store import TokenStore
from tests.support.training_swarm import TERMINATED

NUM_STEPS = 12
LOSS_TOLERANCE = 0.02
OPTIONS = {
    "strategy": "grad",
    "grad": {"ahead_s": 0.5, "average_state_every": 3, "num_slices": 4},
    "rule": {"rule": "mean", "validation": "off"},
    "swarm": {
        "driver": {"synchronous": True, "max_in_flight": 4},
        "join": {"first_peers_s": 1.0, "window": 0.5, "idle_s": 2.0},
    },
}


@pytest.mark.long
@pytest.mark.timeout(400)
def test_two_workers_a_stage_train_as_one_process_does(tmp_path: Path) -> None:
    store = TokenStore.of(tmp_path / "store", 3).folder
    with PipelineSwarm(tmp_path / "swarm", store, **OPTIONS) as swarm:
        names = [f"{stage}.{number}" for stage in STAGES for number in (1, 2)]
        for name in names:
            swarm.begin_worker(name, name.partition(".")[0])
        swarm.wait(lambda: all("serves version 0" in swarm[name].output() for name in names), "all workers")
        driver = swarm.begin_driver("driver-1", "--max-steps", str(NUM_STEPS))
        assert driver.exit_code(240) == 0
        assert swarm.stop(*names) == [TERMINATED] * len(names)
        steps, single = steps_of(driver), list(OneProcess(swarm.config, records_of(swarm.journal)).steps())
        assert [step["num_tokens"] for step in steps] == [step.num_tokens for step in single]
        assert [step["loss"] for step in steps] == pytest.approx([step.loss for step in single], rel=LOSS_TOLERANCE)
        for stage in STAGES:
            norms: dict[int, set[float]] = {}
            digests: dict[int, set[str]] = {}
            for name in (f"{stage}.1", f"{stage}.2"):
                for event in swarm[name].events("step"):
                    norms.setdefault(int(event.number("step")), set()).add(event.number("grad_norm"))
                for event in swarm[name].events("round"):
                    digests.setdefault(int(event.number("round_index")), set()).add(str(event.fields["state_digest"]))
            assert all(len(each) == 1 for each in (*norms.values(), *digests.values())), (norms, digests)
            assert set(norms) >= set(range(NUM_STEPS)), stage
        check_account(swarm)
    assert all("Traceback" not in swarm[name].output() for name in names)

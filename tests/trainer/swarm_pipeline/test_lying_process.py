"""A process that announces itself as a worker and lies: the driver finds it like any other, and finds it out."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.one_process import records_of
from tests.support.pipeline_account import account_at_rest, recount_of
from tests.support.pipeline_swarm import STAGES, PipelineSwarm, steps_of

pytestmark = [pytest.mark.long, pytest.mark.timeout(400)]


def test_it_is_banned_for_an_hour_by_name_and_the_rest_train_on(tmp_path: Path) -> None:
    with PipelineSwarm(tmp_path / "swarm") as swarm:
        driver = swarm.begin_driver("driver-1")
        workers = swarm.begin_workers(*STAGES)
        lie = ["--stage", "body-1", "--lie", "NaN activations"]
        swarm.begin("liar", options=lie, program=("-m", "tests.support.lying_worker"))
        swarm.wait_for_steps("driver-1", 1, 240.0)
        swarm.wait(lambda: banned_for_s(swarm, "liar") > 3000, "the liar to be banned", 240.0)
        begun = len(steps_of(driver))
        swarm.wait_for_steps("driver-1", begun + 10, 240.0, [driver, *workers])
        assert banned_for_s(swarm, "liar") > 3000
        assert all(banned_for_s(swarm, worker.name) == 0 for worker in workers)
        assert driver.output().count("answers what no honest worker answers") == 1
        assert f"body1.0.666 ({swarm['liar'].peer_id[:12]}" in driver.output()
        assert swarm.stop("driver-1") == [143]
        records = records_of(swarm.journal)
        account = account_at_rest(swarm, recount_of(records), records)
        assert account.micro_batches.lost == 0
        assert account.micro_batches.open == account.waiting


def banned_for_s(swarm: PipelineSwarm, name: str) -> float:
    """As the driver tells it over HTTP; 0 where it does not know that worker."""
    stages = swarm.stages()
    workers = [] if stages is None else [worker for stage in stages.stages for worker in stage.workers]
    return max((worker.banned_for_s for worker in workers if worker.node_id == name), default=0.0)

"""Workers that are asked to stop: in the midst of work, before they are current, and where nothing can be written."""

from __future__ import annotations

import re
import shutil
import signal
from pathlib import Path

import pytest

from tests.support.one_process import records_of
from tests.support.pipeline_account import check_account
from tests.support.pipeline_swarm import STAGES, PipelineSwarm, steps_of
from trainer.checkpoint.stages.naming import named_files
from trainer.pipeline.ledger.records import Workers

pytestmark = pytest.mark.timeout(240)

TERMINATED = 128 + signal.SIGTERM
FAILED = 1


def files_of(swarm: PipelineSwarm, stage: str) -> set[Path]:
    config = swarm.config
    return {it.path for it in named_files(config.swarm.checkpoint.directory, config.run_id) if it.stage == stage}


@pytest.mark.parametrize(
    "routing", [pytest.param("hub", marks=pytest.mark.long), pytest.param("chain", marks=pytest.mark.slow)]
)
def test_nothing_is_lost_or_counted_twice_by_one_that_leaves_in_the_midst_of_work(routing: str, tmp_path: Path) -> None:
    options = {
        "driver": {"routing": routing, "max_in_flight": 8},
        "ledger": {"worker_gone_s": 1.0},
        "checkpoint": {"interval_s": 0},  # On the way out only, whatever the time of day is.
    }
    with PipelineSwarm(tmp_path, swarm=options, discovery={"announcement_lifetime_s": 3.0}) as swarm:
        driver = swarm.begin_driver("driver-1")
        swarm.begin_workers(*STAGES)
        swarm.begin_workers("body-1", suffix="-second")
        swarm.wait_for_steps("driver-1", 8)
        swarm.wait(lambda: "serves version" in swarm["body-1-second"].output(), "the second to serve")
        swarm.wait_for_steps("driver-1", len(steps_of(driver)) + 6)
        assert swarm.stop("body-1") == [TERMINATED]
        left_after = len(steps_of(driver))
        swarm.wait_for_steps("driver-1", left_after + 15, alive=[driver, swarm["body-1-second"]])
        assert swarm.stop("driver-1") == [TERMINATED]
        assert swarm.stop("head", "body-1-second", "tail") == [TERMINATED] * 3
        account, _ = check_account(swarm)
        assert not account.micro_batches.lost, account.lost
        assert not account.perished
        assert len(files_of(swarm, "body-1")) == 2  # One each, though each saves before its last round and behind it.
        assert all("Traceback" not in node.output() for node in swarm.nodes.values())


@pytest.mark.long
def test_what_all_saved_when_all_stopped_and_went_on_with_has_not_perished(tmp_path: Path) -> None:
    options = {"ledger": {"worker_gone_s": 1.0}}
    with PipelineSwarm(tmp_path, swarm=options, discovery={"announcement_lifetime_s": 3.0}) as swarm:
        driver = swarm.begin_driver("driver-1")
        swarm.begin_workers(*STAGES)
        swarm.wait_for_steps("driver-1", 6)
        for _ in range(2):
            assert swarm.stop("driver-1") == [TERMINATED]  # It hears nothing of what the workers save.
            assert swarm.stop(*STAGES) == [TERMINATED] * 3
            for name in ("driver-1", *STAGES):
                swarm[name].start()
            swarm.wait_for_steps("driver-1", len(steps_of(driver)) + 10)
        assert swarm.stop("driver-1") == [TERMINATED]
        assert swarm.stop(*STAGES) == [TERMINATED] * 3
        account, _ = check_account(swarm)
        gone = {each for record in records_of(swarm.journal) if isinstance(record, Workers) for each in record.gone}
        assert len(gone) >= 2 * len(STAGES)  # All that stopped before have been missed.
        assert not account.perished, account


@pytest.mark.long
def test_one_that_is_not_current_saves_nothing_and_one_that_cannot_save_says_so(tmp_path: Path) -> None:
    with PipelineSwarm(
        tmp_path, swarm={"join": {"window": 0.001, "idle_s": 3600.0}, "checkpoint": {"interval_s": 0}}
    ) as swarm:
        swarm.begin_driver("driver-1")
        swarm.begin_workers(*STAGES)
        swarm.wait_for_steps("driver-1", 5)
        late = swarm.begin_worker("tail-late", "tail")
        swarm.wait(
            lambda: re.search(r"node [0-9a-f]{64} answers at", late.output()) is not None, "the late one to listen"
        )
        swarm.wait_for_steps("driver-1", len(steps_of(swarm["driver-1"])) + 3)
        assert swarm.stop("tail-late") == [TERMINATED]
        assert "leaving without saving" in late.output()
        assert not files_of(swarm, "tail")
        assert swarm.stop("driver-1") == [TERMINATED]

        folder = Path(swarm.config.swarm.checkpoint.directory) / swarm.config.run_id / "tail"
        shutil.rmtree(folder)
        folder.write_text("not a folder")
        assert swarm.stop("tail") == [FAILED]
        assert "checkpoint could not be written" in swarm["tail"].output()
        assert "Traceback" not in swarm["tail"].output()
        assert swarm.stop("head", "body-1") == [TERMINATED] * 2

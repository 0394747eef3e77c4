"""All of a swarm stops and starts again, from where it was or from an earlier moment."""

from __future__ import annotations

import re
import signal
from datetime import UTC, datetime
from pathlib import Path
from statistics import mean

import pytest

from tests.support.pipeline_account import check_account
from tests.support.pipeline_swarm import STAGES, PipelineSwarm, steps_of
from trainer.checkpoint.stages.rolling import SET_ASIDE

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

TERMINATED = 128 + signal.SIGTERM
ALL = ("driver-1", *STAGES)


def stop_all(swarm: PipelineSwarm) -> None:
    """The driver first, so that it has somebody to finish with."""
    assert swarm.stop("driver-1") == [TERMINATED]
    assert swarm.stop(*STAGES) == [TERMINATED] * 3


def saved_versions(swarm: PipelineSwarm) -> dict[str, int]:
    return {stage: file.header.version for stage, file in swarm.checkpoints().files.items()}


def version_begun_at(swarm: PipelineSwarm, stage: str) -> int:
    """As the worker said when it began its latest life."""
    found: list[str] = re.findall(r"serves version (\d+) at", swarm[stage].output())
    return int(found[-1])


@pytest.mark.parametrize("strategy", ["diloco", "async_sparta"])
def test_all_stop_and_go_on_and_then_go_back(strategy: str, tmp_path: Path) -> None:
    with PipelineSwarm(tmp_path, strategy=strategy, diloco={"inner_steps": 5}) as swarm:
        driver = swarm.begin_driver("driver-1")
        swarm.begin_workers(*STAGES)
        swarm.wait_for_steps("driver-1", 40)
        stop_all(swarm)
        first, moment = saved_versions(swarm), datetime.now(UTC)
        assert min(first.values()) >= 40 - 1

        lives = [len(steps_of(driver))]
        for name in ALL:
            swarm[name].start()
        swarm.wait_for_steps("driver-1", lives[0] + 20)
        stop_all(swarm)
        assert {stage: version_begun_at(swarm, stage) for stage in STAGES} == first
        second = saved_versions(swarm)
        assert all(second[stage] >= first[stage] + 19 for stage in STAGES)

        lives.append(len(steps_of(driver)))
        driver.start()
        for stage in STAGES:
            swarm.begin_again(stage, "--at", moment.isoformat())
        swarm.wait_for_steps("driver-1", lives[1] + 10)
        stop_all(swarm)
        assert {stage: version_begun_at(swarm, stage) for stage in STAGES} == first
        assert all(first[stage] < version < second[stage] for stage, version in saved_versions(swarm).items())
        aside = list((tmp_path / "stages" / swarm.config.run_id / SET_ASIDE).rglob("*.pt"))
        assert sorted(path.parent.name for path in aside) == sorted(STAGES)

        losses = [step["loss"] for step in steps_of(driver)]
        check_account(swarm)
    # What was learned was not learned again, and going back unlearns no more than what came after.
    assert mean(losses[lives[0] - 5 : lives[0]]) < mean(losses[:5]) - 0.5
    assert mean(losses[lives[0] : lives[0] + 5]) < mean(losses[:5]) - 0.5
    assert mean(losses[lives[1] : lives[1] + 5]) < mean(losses[:5]) - 0.5
    assert all("Traceback" not in swarm[name].output() for name in ALL)

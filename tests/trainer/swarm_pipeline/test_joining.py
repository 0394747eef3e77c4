"""A worker takes the stage that has nobody, another joins it while it runs, and the first leaves by handing over."""

from __future__ import annotations

import re
import signal
import time
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from tests.support.pipeline_account import check_account
from tests.support.pipeline_swarm import PipelineSwarm, steps_of
from tests.support.training_swarm import TrainingNode

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

TERMINATED = 128 + signal.SIGTERM
STRATEGIES: dict[str, dict[str, Any]] = {
    "diloco": {"diloco": {"inner_steps": 5}},
    "async_sparta": {"swarm": {"sparta": {"every_steps": 4, "num_slices": 4, "ghost_rounds": 2}}},
}


def begun_at(worker: TrainingNode) -> int | None:
    """The version a worker said it serves, if it has said so."""
    found: list[str] = re.findall(r"serves version (\d+) at", worker.output())
    return int(found[-1]) if found else None


def rounds_together(worker: TrainingNode) -> int:
    return sum(len(event.fields["members"]) > 1 for event in worker.events("round"))


def stepped_with_tokens(worker: TrainingNode) -> int:
    return sum(event.number("num_tokens") > 0 for event in worker.events("step"))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_joiner_becomes_current_and_the_one_before_hands_over(strategy: str, tmp_path: Path) -> None:
    options = {"join": {"window": 0.5}, "ledger": {"worker_gone_s": 2.0}, **STRATEGIES[strategy].get("swarm", {})}
    with PipelineSwarm(tmp_path, strategy=strategy, **{**STRATEGIES[strategy], "swarm": options}) as swarm:
        driver = swarm.begin_driver("driver-1")
        swarm.begin_workers("head", "body-1")
        swarm.wait(lambda: all(begun_at(swarm[name]) == 0 for name in ("head", "body-1")), "two stages to be held")
        first = swarm.begin_worker("tail", "auto")
        swarm.wait_for_steps("driver-1", 20)
        assert "tail needs help most" in first.output()

        second = swarm.begin_worker("tail-second", "tail")
        swarm.wait(lambda: begun_at(second) is not None, "the joiner to serve")
        assert "took up the others' state" in second.output()
        assert (begun_at(second) or 0) >= 15
        swarm.wait(lambda: rounds_together(second) >= 3 and stepped_with_tokens(second) >= 5, "the joiner to take part")

        assert swarm.stop("tail") == [TERMINATED]
        left_s, left_after = time.monotonic(), len(steps_of(driver))
        alive = [driver, second, swarm["head"], swarm["body-1"]]
        swarm.wait_for_steps("driver-1", left_after + 10, alive=alive)
        # Its last announcement runs out, then it counts as gone, and what it took with it as perished.
        gone_s = left_s + swarm.config.discovery.announcement_lifetime_s + swarm.config.swarm.ledger.worker_gone_s + 3.0
        swarm.wait(lambda: time.monotonic() > gone_s, "the one that left to count as gone", alive=alive)
        assert swarm.stop("driver-1") == [TERMINATED]
        assert swarm.stop("head", "body-1", "tail-second") == [TERMINATED] * 3
        losses = [step["loss"] for step in steps_of(driver)]
        account, _ = check_account(swarm)
        versions = {stage: file.header.version for stage, file in swarm.checkpoints().files.items()}
    assert not account.micro_batches.lost
    assert not account.perished, account
    assert max(versions.values()) - min(versions.values()) <= 2
    # Neither who came nor who went took anything with it.
    assert mean(losses[left_after : left_after + 10]) < mean(losses[:5]) - 0.5
    assert mean(losses[left_after : left_after + 10]) < mean(losses[left_after - 10 : left_after]) + 0.3
    assert all("Traceback" not in node.output() for node in swarm.nodes.values())

"""The account of the data adds up, to what the workers have trained on, whatever becomes of drivers."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.support.pipeline_account import check_account
from tests.support.pipeline_swarm import STAGES, PipelineSwarm, steps_of
from tests.support.token_store import TokenStore
from trainer.run.swarm.shape import target_tokens_of

pytestmark = pytest.mark.timeout(600)

TERMINATED = 128 + signal.SIGTERM


@pytest.fixture
def swarm(tmp_path: Path) -> PipelineSwarm:
    """Three stages, not synchronous: several micro-batches are under way whenever a driver dies."""
    ledger = {"lease_s": 5.0, "lease_margin_s": 1.0, "inquiry_s": 5.0, "reissue_after_s": 3.0}
    store = TokenStore.of(tmp_path / "store", 6, shard_tokens=20_000)
    return PipelineSwarm(tmp_path / "swarm", store.folder, swarm={"ledger": ledger})


@pytest.mark.long
def test_the_keeper_is_killed_and_starts_again(swarm: PipelineSwarm) -> None:
    with swarm:
        driver = swarm.begin_driver("driver-1")
        workers = swarm.begin_workers(*STAGES)
        swarm.wait_for_steps("driver-1", 10)
        told = swarm.account()
        driver.kill()
        driver.reap()
        before = len(steps_of(driver))
        driver.start()
        swarm.wait(lambda: b'"kind":"resolved"' in swarm.journal.read_bytes(), "the dead driver's lease to be resolved")
        swarm.wait_for_steps("driver-1", before + 10)
        assert swarm.stop("driver-1") == [TERMINATED]
        assert swarm.stop(*STAGES) == [TERMINATED] * 3
        account, _ = check_account(swarm)
    assert told is not None
    assert steps_of(driver)[before]["step"] >= told.trained_tokens // target_tokens_of(swarm.config) - 1
    assert told.micro_batches.adds_up
    assert told.tokens.adds_up
    assert account.micro_batches.done > told.micro_batches.done
    assert account.micro_batches.lost <= swarm.config.swarm.driver.max_in_flight
    assert all("Traceback" not in node.output() for node in [driver, *workers])


@pytest.mark.long
def test_the_keeper_is_killed_while_another_driver_goes_on(swarm: PipelineSwarm) -> None:
    with swarm:
        keeper, other = swarm.begin_driver("driver-1"), swarm.begin_driver("driver-2")
        workers = swarm.begin_workers(*STAGES)
        for name in ("driver-1", "driver-2"):
            swarm.wait_for_steps(name, 5)
        keeper.kill()
        keeper.reap()
        before = len(steps_of(other))
        swarm.wait_for_steps("driver-2", before + 1, alive=[other, *workers])  # With what it held.
        keeper.start()
        swarm.wait(lambda: b'"kind":"resolved"' in swarm.journal.read_bytes(), "the dead driver's lease to be resolved")
        for name in ("driver-1", "driver-2"):
            swarm.wait_for_steps(name, len(steps_of(swarm[name])) + 10)
        accounts = [swarm.account(name) for name in ("driver-1", "driver-2")]
        assert swarm.stop("driver-2") == [TERMINATED]
        assert swarm.stop("driver-1") == [TERMINATED]
        assert swarm.stop(*STAGES) == [TERMINATED] * 3
        account, _ = check_account(swarm)
    assert all(told is not None and told.micro_batches.adds_up and told.tokens.adds_up for told in accounts)
    assert account.micro_batches.lost <= swarm.config.swarm.driver.max_in_flight
    assert all("Traceback" not in node.output() for node in [keeper, other, *workers])

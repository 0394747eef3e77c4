"""The account of the data adds up, to what the workers have trained on, whatever becomes of drivers and the keeper."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import pytest

from tests.support.pipeline_swarm import DRIVERS, STAGES, PipelineSwarm, check_account, steps_of
from tests.support.small_store import text_store
from tests.support.token_store import TokenStore
from tests.support.waiting import wait_until
from trainer.run.config import RunConfig, from_mapping
from trainer.run.node.identity import identity_of
from trainer.run.swarm.shape import target_tokens_of

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

logger = logging.getLogger(__name__)

AWAY_S = 45.0
LEAST_SHARE = 0.8


@pytest.fixture
def swarm(tmp_path: Path) -> PipelineSwarm:
    """Three stages, not synchronous: several micro-batches are under way whenever a driver dies."""
    ledger = {"lease_s": 5.0, "lease_margin_s": 1.0, "inquiry_s": 5.0, "reissue_after_s": 3.0}
    store = TokenStore.of(tmp_path / "store", 6, shard_tokens=20_000)
    return PipelineSwarm(tmp_path / "swarm", store.folder, swarm={"ledger": ledger})


def wait_for_resolved(swarm: PipelineSwarm) -> None:
    swarm.wait(lambda: b'"kind":"resolved"' in swarm.journal.read_bytes(), "the dead driver's lease to be resolved")


def test_the_keeper_is_killed_while_another_driver_goes_on_and_starts_again(swarm: PipelineSwarm) -> None:
    with swarm:
        keeper, other = (swarm.begin_driver(name) for name in DRIVERS)
        workers = swarm.begin_workers(*STAGES)
        for name in DRIVERS:
            swarm.wait_for_steps(name, 8)
        told = swarm.account()
        keeper.kill()
        before, own_before = len(steps_of(other)), len(steps_of(keeper))
        swarm.wait_for_steps("driver-2", before + 1, alive=[other, *workers])  # With what it held.
        keeper.start()
        wait_for_resolved(swarm)
        for name in DRIVERS:
            swarm.wait_for_steps(name, len(steps_of(swarm[name])) + 10)
        accounts = [told, *(swarm.account(name) for name in DRIVERS)]
        swarm.stop_in_order(drivers=DRIVERS[::-1])
        account = check_account(swarm)
    assert all(it is not None and it.micro_batches.adds_up and it.tokens.adds_up for it in accounts)
    assert told is not None
    assert steps_of(keeper)[own_before]["step"] >= told.trained_tokens // target_tokens_of(swarm.config) - 1
    assert account.micro_batches.done > told.micro_batches.done
    assert account.micro_batches.lost <= swarm.config.swarm.driver.max_in_flight


def test_another_driver_goes_on_at_its_speed_while_the_keeper_is_killed_and_away(tmp_path: Path) -> None:
    """With larger micro-batches than in other tests, so that a minute's are fewer than a driver may hold."""
    store = TokenStore.of(tmp_path / "store", 8, shard_tokens=200_000)
    home = from_mapping(RunConfig, {"node_id": "driver-1", "state_dir": str(tmp_path / "swarm" / "home")})
    options = {
        "inner": {"seq_len": 128, "micro_batch_size": 4},
        "swarm": {"stage": {"target_tokens": 2048}, "ledger": {"keeper": identity_of(home).peer_id}},
    }

    def speed(for_s: float) -> float:
        counts, began_s = [], time.monotonic()
        for wait_s in (0.0, for_s):
            time.sleep(wait_s)
            counts.append(sum(int(step["num_tokens"]) for step in steps_of(swarm["driver-2"])))
        return (counts[1] - counts[0]) / (time.monotonic() - began_s)

    with PipelineSwarm(tmp_path / "swarm", store.folder, **options) as swarm:
        keeper, other = (swarm.begin_driver(name) for name in DRIVERS)
        workers = swarm.begin_workers(*STAGES)
        for name in DRIVERS:
            swarm.wait_for_steps(name, 4)
        time.sleep(15.0)  # For its speed to be known.
        before = speed(20.0)
        keeper.kill()
        away = speed(AWAY_S)
        stages = swarm.stages("driver-2")
        assert stages is not None
        assert stages.keeper_away_s > AWAY_S / 2
        keeper.start()
        wait_until(lambda: (now := swarm.stages("driver-2")) is not None and now.keeper_away_s == 0.0, "the keeper")
        wait_for_resolved(swarm)
        swarm.wait_for_steps("driver-1", 1, alive=[keeper, other, *workers])
        told = swarm.account("driver-2")
        swarm.stop_in_order(drivers=DRIVERS[::-1])
        account = check_account(swarm)
    logger.info("tokens/s before %.0f, away %.0f; held %d; %s", before, away, stages.held, account.micro_batches)
    assert away >= LEAST_SHARE * before
    assert told is not None and told.micro_batches.adds_up
    assert account.micro_batches.lost <= swarm.config.swarm.driver.max_in_flight


def test_max_steps_are_the_runs_and_every_driver_ends(tmp_path: Path) -> None:
    """Two drivers share a run's steps, and the one that keeps the account is the last to go."""
    with PipelineSwarm(tmp_path, text_store()) as swarm:
        drivers = [swarm.begin_driver(name, "--max-steps", "12") for name in DRIVERS]
        swarm.begin_workers(*STAGES)
        assert [driver.exit_code() for driver in reversed(drivers)] == [0, 0]
        shares = [len(steps_of(driver)) for driver in drivers]
        assert 10 <= sum(shares) <= 12  # Of each driver's last step a part may be missing.
        again = swarm.begin_again("driver-1")
        assert again.exit_code() == 0
        assert len(steps_of(again)) == shares[0]

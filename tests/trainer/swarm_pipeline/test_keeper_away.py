"""While the keeper of the account is away, another driver goes on at its speed, and the account adds up afterwards."""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path

import pytest

from tests.support.pipeline_account import check_account
from tests.support.pipeline_swarm import STAGES, PipelineSwarm
from tests.support.token_store import TokenStore
from tests.support.training_swarm import wait_until
from trainer.run.config import RunConfig, from_mapping
from trainer.run.node.identity import identity_of

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

logger = logging.getLogger(__name__)

AWAY_S = 45.0
LEAST_SHARE = 0.8


def swarm_of(folder: Path) -> PipelineSwarm:
    """Larger micro-batches than other tests', so that a minute's are fewer than a driver may hold."""
    store = TokenStore.of(folder / "store", 8, shard_tokens=200_000)
    inner = {"seq_len": 128, "micro_batch_size": 4}
    home = from_mapping(RunConfig, {"node_id": "driver-1", "state_dir": str(folder / "swarm" / "home")})
    key = identity_of(home).peer_id
    return PipelineSwarm(
        folder / "swarm", store.folder, inner=inner, swarm={"stage": {"target_tokens": 2048}, "ledger": {"keeper": key}}
    )


def done_tokens(swarm: PipelineSwarm, driver: str) -> int:
    """Of all steps that a driver has printed."""
    lines = [line for line in swarm[driver].output().splitlines() if line.startswith('{"kind":"step"')]
    return sum(int(json.loads(line)["num_tokens"]) for line in lines if line.endswith("}"))


def test_another_driver_goes_on_while_the_keeper_is_killed_and_away(tmp_path: Path) -> None:
    with swarm_of(tmp_path) as swarm:
        keeper, other = swarm.begin_driver("driver-1"), swarm.begin_driver("driver-2")
        workers = swarm.begin_workers(*STAGES)
        for name in ("driver-1", "driver-2"):
            swarm.wait_for_steps(name, 4)
        time.sleep(15.0)  # For its speed to be known.
        counts = [done_tokens(swarm, "driver-2")]
        began_s = time.monotonic()
        time.sleep(20.0)
        counts.append(done_tokens(swarm, "driver-2"))
        before = (counts[1] - counts[0]) / (time.monotonic() - began_s)
        keeper.kill()
        keeper.reap()
        killed_s = time.monotonic()
        time.sleep(AWAY_S)
        away = (done_tokens(swarm, "driver-2") - counts[1]) / (time.monotonic() - killed_s)
        stages = swarm.stages("driver-2")
        assert stages is not None
        assert stages.keeper_away_s > AWAY_S / 2
        keeper.start()
        wait_until(lambda: (now := swarm.stages("driver-2")) is not None and now.keeper_away_s == 0.0, "the keeper")
        swarm.wait(lambda: b'"kind":"resolved"' in swarm.journal.read_bytes(), "the dead keeper's lease to be resolved")
        swarm.wait_for_steps("driver-1", 1, alive=[keeper, other, *workers])
        told = swarm.account("driver-2")
        swarm.stop("driver-2")
        swarm.stop("driver-1")
        swarm.stop(*STAGES)
        account, _ = check_account(swarm)
    logger.info("tokens/s before %.0f, away %.0f; held %d; %s", before, away, stages.held, account.micro_batches)
    assert away >= LEAST_SHARE * before
    assert told is not None and told.micro_batches.adds_up
    assert account.micro_batches.lost <= swarm.config.swarm.driver.max_in_flight

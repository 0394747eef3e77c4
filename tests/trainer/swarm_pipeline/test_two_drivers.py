"""Two drivers share a run's steps, and the one that keeps the account is the last to go."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.pipeline_swarm import STAGES, PipelineSwarm, steps_of
from tests.support.text_store import text_store


@pytest.mark.long
def test_max_steps_are_the_runs_and_every_driver_ends(tmp_path: Path) -> None:
    with PipelineSwarm(tmp_path, text_store()) as swarm:
        drivers = [swarm.begin_driver(name, "--max-steps", "12") for name in ("driver-1", "driver-2")]
        swarm.begin_workers(*STAGES)
        assert [driver.exit_code() for driver in reversed(drivers)] == [0, 0]
        shares = [len(steps_of(driver)) for driver in drivers]
        assert 10 <= sum(shares) <= 12  # Of each driver's last step a part may be missing.
        again = swarm.begin_again("driver-1")
        assert again.exit_code() == 0
        assert len(steps_of(again)) == shares[0]

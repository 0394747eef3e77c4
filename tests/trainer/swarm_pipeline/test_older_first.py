"""Two workers of a stage on two machines stop at different times; all start again, that with the older state first."""

from __future__ import annotations

import signal
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from tests.support.pipeline_swarm import PipelineSwarm, steps_of
from tests.trainer.swarm_pipeline.test_joining import STRATEGIES, begun_at

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

TERMINATED = 128 + signal.SIGTERM
NUM_STEPS = 120
"""More than 50 behind the older one's last, which is as far as a worker may be behind and still count as current."""


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_the_newer_one_learned_is_not_lost(strategy: str, tmp_path: Path) -> None:
    changes: dict[str, Any] = {**STRATEGIES[strategy], "strategy": strategy}
    changes["swarm"] = {"join": {"window": 0.5}, **changes.get("swarm", {})}
    with PipelineSwarm(tmp_path, **changes) as swarm:
        driver = swarm.begin_driver("driver-1")
        swarm.begin_workers("head", "body-1")
        for name in ("tail-older", "tail-newer"):
            swarm.begin_worker(name, "tail", ["--set", f"swarm.checkpoint.directory={tmp_path / name}"])
        swarm.wait(lambda: all(begun_at(swarm[f"tail-{it}"]) is not None for it in ("older", "newer")), "both tails")
        swarm.wait_for_steps("driver-1", 10)
        assert swarm.stop("tail-older") == [TERMINATED]
        others = ("head", "body-1", "tail-newer")
        swarm.wait_for_steps("driver-1", NUM_STEPS, alive=[driver, *(swarm[name] for name in others)])
        assert swarm.stop("driver-1") == [TERMINATED]
        assert swarm.stop(*others) == [TERMINATED] * 3
        before = len(steps_of(driver))

        workers = [swarm[name] for name in ("head", "body-1", "tail-older")]
        for worker in workers:
            worker.start()
        older, newer = swarm["tail-older"], swarm["tail-newer"]
        swarm.wait(lambda: older.output().count("serves version") == 2, "the older one to serve", alive=workers)
        newer.start()
        workers.append(newer)
        swarm.wait(lambda: newer.output().count("serves version") == 2, "the newer one to serve", alive=workers)
        assert (begun_at(newer) or 0) >= NUM_STEPS - 5
        driver.start()
        swarm.wait_for_steps("driver-1", before + 30)
        assert swarm.stop("driver-1") == [TERMINATED]
        assert swarm.stop(*others, "tail-older") == [TERMINATED] * 4
        losses = [step["loss"] for step in steps_of(driver)]
        begun = (begun_at(older), begun_at(newer))
    assert min(version or 0 for version in begun) >= NUM_STEPS - 5, (
        begun
    )  # Those who knew less have taken up what is known.
    assert mean(losses[-10:]) < mean(losses[before - 10 : before]) + 0.2

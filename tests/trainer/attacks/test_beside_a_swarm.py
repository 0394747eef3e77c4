"""Strangers attack a swarm of 3 stages × 2 workers and 2 drivers: it goes on, lets newcomers in, and no process ends.

The minute of each attack is ``long``; ``scripts/test.sh -m long tests/trainer/attacks`` runs all of them, in some five
minutes each. That defences hold in principle is asserted by the quick tests beside the code that has them.

The attack and the undisturbed times before and after it are alike but for the attack: each brings a newcomer, whose
start takes a good part of this machine's cores, and which leaves afterwards. The undisturbed speed is the mean of the
two, for a swarm's speed drifts by more within a few minutes than most attacks take of it. The attacker sits on the
victims' machine, whose cores are all taken: what its own process took of them, though it has the least priority, is no
effect of the attack and is not counted as one.
"""

from __future__ import annotations

import os
import re
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from scripts.swarm_bench.losses import curve_of
from tests.support.attacks import Target
from tests.support.attacks.__main__ import ATTACKS
from tests.support.pipeline_swarm import DRIVERS, SETTINGS, PipelineSwarm
from tests.support.training_swarm import TrainingNode
from trainer.network.discovery.config import DiscoveryConfig
from trainer.pipeline.driver.config import DriverConfig

_ROOT = Path(__file__).resolve().parents[3]

SECONDS = 60.0
MIN_PROGRESS = 0.8
MAX_NEWCOMER_S = 10.0
OPTIONS: dict[str, Any] = {
    "discovery": {name: getattr(DiscoveryConfig(), name) for name in SETTINGS["discovery"]},
    "inner": {"seq_len": 64, "micro_batch_size": 4, "lr": 1e-3},
    "swarm": {
        "stage": {"target_tokens": 2048, "clip_factor": 1.0, "tail_clip_factor": 5.0},
        "driver": {"unclear_s": 20.0, "ban_s": DriverConfig().ban_s, "max_ban_s": DriverConfig().max_ban_s},
        "ledger": {"lease_s": 30.0},
        "sparta": {"every_steps": 10},
    },
}
"""Discovery and bans as a user has them: tests' swarms ask ten times as often, and forgive at once."""
_NEWCOMER_WAIT_S = 60.0
_SETTLE_S = 5.0
_ENDS_WITHIN_S = 150.0
_TOOK = re.compile(r"took (\d+\.\d) s of a core")
_ANSWERS = re.compile(r"node ([0-9a-f]{64}) answers at (\S+)")


@dataclass(frozen=True)
class Attacked:
    """How a swarm fared."""

    tokens_per_s: float  # Trained by both drivers together while the attack lasted.
    undisturbed_tokens_per_s: tuple[float, float]  # For as long right before it and again right after, each.
    newcomer_s: float  # From its listening until both drivers know it, under attack; infinite: it did not get in.
    undisturbed_newcomer_s: float
    newcomer_served: bool  # It held its stage's state, and served, before the attack was over.
    ended: tuple[str, ...]
    attacker_share: float  # Of this machine's cores.
    said: str

    @property
    def progress(self) -> float:
        """Share of the mean undisturbed speed, on the cores that the attacker's process left to the swarm."""
        return self.tokens_per_s / statistics.fmean(self.undisturbed_tokens_per_s) / (1.0 - self.attacker_share)


def attacked(swarm: PipelineSwarm, name: str, source_host: str) -> Attacked:
    """Starts the swarm, lets it work undisturbed, attacks it, lets it work undisturbed again, and measures each."""
    swarm.begin_two_of_each()
    for driver in DRIVERS:
        swarm.wait_for_steps(driver, 2)
    before, first_newcomer_s = _speed(swarm, "body-1.3")
    _leave(swarm, "body-1.3")
    target_path = swarm.folder / "target.json"
    attack_s = SECONDS + 2 * _SETTLE_S
    _target(swarm, attack_s, source_host).save(target_path)
    command = [sys.executable, "-m", "tests.support.attacks", name, str(target_path)]
    with (swarm.folder / "attack.out").open("wb") as output:
        attacker = subprocess.Popen(command, cwd=_ROOT, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    try:
        time.sleep(_SETTLE_S)
        speed, newcomer_s = _speed(swarm, "body-1.4")
        served = " serves version " in swarm["body-1.4"].output()
        ended = tuple(name for name, node in swarm.nodes.items() if node.has_ended())
        attacker.wait(_ENDS_WITHIN_S)
    finally:
        attacker.send_signal(signal.SIGKILL)
        attacker.wait()
    said = (swarm.folder / "attack.out").read_text(encoding="utf-8", errors="replace")
    assert attacker.returncode == 0, said[-2000:]
    _leave(swarm, "body-1.4")
    after, _ = _speed(swarm, "body-1.5")
    found = _TOOK.search(said)
    assert found is not None, said[-2000:]
    attacker_share = float(found[1]) / attack_s / (os.cpu_count() or 1)
    return Attacked(speed, (before, after), newcomer_s, first_newcomer_s, served, ended, attacker_share, said)


def _leave(swarm: PipelineSwarm, name: str) -> None:
    """Lets a worker leave, and the swarm get over it."""
    node = swarm.nodes.pop(name)
    node.send(signal.SIGTERM)
    node.exit_code()
    assert " stopped at version " in node.output(), node.tail()
    time.sleep(_SETTLE_S)


def _speed(swarm: PipelineSwarm, newcomer: str) -> tuple[float, float]:
    """Tokens a second while a newcomer comes, and the seconds until the drivers know that one."""
    begun_s, begun_tokens = time.monotonic(), _num_tokens(swarm)
    node = swarm.begin_worker(newcomer, "body-1")
    took_s = _known_after_s(swarm, node)
    time.sleep(max(begun_s + SECONDS - time.monotonic(), 0.0))
    return (_num_tokens(swarm) - begun_tokens) / (time.monotonic() - begun_s), took_s


def _known_after_s(swarm: PipelineSwarm, node: TrainingNode) -> float:
    """Seconds from a newcomer's listening until both drivers know it; infinite: they never do."""
    listens_s = float("inf")
    unaware = set(DRIVERS)
    give_up_s = time.monotonic() + _NEWCOMER_WAIT_S
    while time.monotonic() < give_up_s:
        found = _ANSWERS.search(node.output() if node.has_output() else "")
        if found is not None:
            listens_s = min(listens_s, time.monotonic())
            unaware -= {driver for driver in unaware if _knows(swarm, driver, found[1])}
            if not unaware:
                return time.monotonic() - listens_s
        time.sleep(0.1)
    return float("inf")


def _knows(swarm: PipelineSwarm, driver: str, peer_id: str) -> bool:
    stages = swarm.stages(driver)
    return stages is not None and any(worker.peer_id == peer_id for stage in stages.stages for worker in stage.workers)


def _num_tokens(swarm: PipelineSwarm) -> int:
    return curve_of(event for name in DRIVERS for event in swarm[name].events("step")).num_tokens


def _target(swarm: PipelineSwarm, seconds: float, source_host: str) -> Target:
    addresses, peer_ids, apis = {}, {}, {}
    for name, node in swarm.nodes.items():
        answering = _ANSWERS.findall(node.output())
        if not answering:  # A newcomer that is slow to start on a busy machine is no target.
            continue
        peer_ids[name], addresses[name] = answering[-1]
        found = re.findall(r"API at (http://127\.0\.0\.1:\d+)/", node.output())
        if found:
            apis[name] = found[-1]
    return Target(str(swarm.run_file), addresses, peer_ids, apis, seconds, source_host=source_host)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("source_host", ["127.0.0.66", "127.0.0.1"])
@pytest.mark.parametrize("name", sorted(ATTACKS))
def test_honest_nodes_train_on(tmp_path: Path, name: str, source_host: str) -> None:
    with PipelineSwarm(tmp_path / "swarm", **OPTIONS) as swarm:
        result = attacked(swarm, name, source_host)
        sys.stdout.write(f"{name} from {source_host}: progress {result.progress:.2f}; {result}\n")
        assert not result.ended, result
        assert all("Traceback" not in node.output() for node in swarm.nodes.values()), result
    assert result.progress >= MIN_PROGRESS, result
    assert result.newcomer_s <= MAX_NEWCOMER_S and result.newcomer_served, result

"""Nodes that know two seeds only find each other through the DHT, also when one of the seeds is gone."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.dht_processes import descendants, wait_until_gone
from tests.support.training_swarm import TrainingSwarm, check_agreement, free_port, wait_until

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]

_ROOT = Path(__file__).resolve().parents[4]


@contextmanager
def seed(folder: Path, name: str, *initial_peers: str) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """A seed, and the address it says to give to nodes."""
    command = [sys.executable, "-m", "trainer", "seed", "--host", "127.0.0.1", "--port", str(free_port())]
    command += ["--identity", str(folder / f"{name}.id")]
    command += [part for address in initial_peers for part in ("--initial-peers", address)]
    said = folder / f"{name}.out"
    with said.open("wb") as output:
        process = subprocess.Popen(command, cwd=_ROOT, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    family: set[int] = set()
    try:
        wait_until(lambda: "--initial-peers /ip4/" in said.read_text(), f"the seed {name} to be ready")
        family = descendants(process.pid)
        yield process, said.read_text().split("--initial-peers ")[1].split()[0]
    finally:
        process.kill()
        process.wait(30)
        wait_until_gone(family)


def test_nodes_meet_through_seeds(tmp_path: Path) -> None:
    dht = {"dht_host": "127.0.0.1"}
    with (
        seed(tmp_path, "first") as (first, first_address),
        seed(tmp_path, "second", first_address) as (_, second_address),
        TrainingSwarm(tmp_path, discovery=dht) as swarm,
    ):
        seeds = [first_address, second_address]
        swarm.begin("north", "south", initial_peers=seeds)
        swarm.wait_for_step(2)
        together = max(swarm[name].outer_step for name in ("north", "south")) + 1
        swarm.wait_for_step(together + 1)
        check_agreement(swarm.nodes.values(), together, together + 1)

        first.kill()
        first.wait(30)
        swarm.begin("late", initial_peers=seeds)
        swarm.wait(lambda: bool(swarm["late"].events("adopted")), "the late node to have the others' state")
        together = max(node.outer_step for node in swarm.nodes.values()) + 2
        swarm.wait_for_step(together + 1)
        check_agreement(swarm.nodes.values(), together, together + 1)
        assert all(not swarm[name].events("round_failed") for name in ("north", "south"))
        assert swarm.stop() == [143, 143, 143]

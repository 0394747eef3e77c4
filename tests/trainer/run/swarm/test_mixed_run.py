"""A run of members only whose nodes know nothing but a seed: two workers of each stage, a driver and a whole node."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean

import pytest

from tests.support.mixed_run import STAGES, check_one_state, rounds_of_all
from tests.support.pipeline_swarm import steps_of
from tests.support.trainer_command import TrainerCommand, finished
from tests.support.training_swarm import TERMINATED, WAIT_S, TrainingNode, TrainingSwarm, free_port
from tests.support.waiting import wait_until

_ROOT = Path(__file__).resolve().parents[4]


@contextmanager
def serving(folder: Path, name: str, ready: str, *arguments: str) -> Iterator[re.Match[str]]:
    """A seed or an authority, ended behind the ``with``; yields what matched ``ready`` in what it printed."""
    path = folder / f"{name}.out"
    command = [sys.executable, "-m", "trainer", *arguments]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with path.open("wb") as output:
        process = subprocess.Popen(command, cwd=_ROOT, stdout=output, stderr=output, env=environment)
    try:
        wait_until(lambda: re.search(ready, path.read_text()) is not None, f"{name} to be ready", 90.0)
        found = re.search(ready, path.read_text())
        assert found is not None
        yield found
    finally:
        process.kill()
        process.wait(30)


@pytest.mark.long
@pytest.mark.timeout(1500)
def test_two_workers_a_stage_and_a_whole_node_meet_by_a_seed_and_an_authority(
    tmp_path: Path, trainer: TrainerCommand
) -> None:
    def command(*arguments: str) -> str:
        line = [sys.executable, "-m", "trainer", *arguments]
        return finished(line, trainer.environment(), 0, 120.0).stdout

    file, key, db = tmp_path / "run.yaml", tmp_path / "run.key", tmp_path / "authority.sqlite"
    port = free_port()
    shared = (
        *("--stages", "2", "--whole-nodes", "--strategy", "diloco", "--inner-steps", "8", "--preset", "tiny"),
        *("--seq-len", "32", "--batch-size", "2", "--seed", "7", "--lr", "1e-3"),
        *("--authority", f"http://127.0.0.1:{port}"),
        *("--set", "inner.accumulation_steps=4", "--set", "inner.warmup_steps=2", "--set", "data.plateau=off"),
        *("--set", "swarm.stage.target_tokens=256", "--set", "swarm.activation_codec=subspace"),
        *("--set", "swarm.subspace.rank=16", "--set", "swarm.join.first_peers_s=3"),
        *("--set", "discovery.announce_interval_s=0.5", "--set", "discovery.poll_interval_s=0.3"),
        *("--set", "collective.invite_after_s=2", "--set", "collective.min_members=2"),
        *("--set", "diloco.overlap_steps=3"),
    )
    own = {
        "state_dir": tmp_path / "home",
        "checkpoint.directory": tmp_path / "checkpoints",
        "swarm.checkpoint.directory": tmp_path / "stages",
        "log.directory": tmp_path / "log",
        "rpc.host": "127.0.0.1",
        "rpc.public_address": "127.0.0.1",
        "discovery.dht_host": "127.0.0.1",
        "api.port": 0,
        "device": "cpu",
        "threads": 1,
    }
    options = [part for name, value in own.items() for part in ("--set", f"{name}={value}")]
    options += ["--store", str(trainer.store)]
    seed = ("seed", "--host", "127.0.0.1", "--port", str(free_port()), "--identity", str(tmp_path / "seed.id"))
    authority = ("authority", "--run", str(file), "--key", str(key), "--db", str(db), "--host", "127.0.0.1")
    with TrainingSwarm(tmp_path, trainer.store) as swarm:
        file.write_text(command("run", "init", "corpus-5", *shared, "--key", str(key)), encoding="utf-8")
        with (
            serving(tmp_path, "seed", r"--initial-peers (/\S+)\n", *seed) as ready,
            serving(tmp_path, "authority", r"its key is [0-9a-f]{64}", *authority, "--port", str(port)),
        ):
            peers = [ready[1]]

            def token(role: str, uses: int) -> list[str]:
                said = command("authority", "invite", "--role", role, "--uses", str(uses), "--db", str(db))
                return ["--token", said.strip()]

            invited = {role: token(role, uses) for role, uses in (("driver", 1), ("worker", 4), ("node", 1))}
            swarm.begin(
                "driver-1",
                options=["--pipeline", "swarm", "--json", *invited["driver"], *options],
                initial_peers=peers,
            )
            for name in (f"{stage}.{number}" for stage in STAGES for number in (1, 2)):
                program = ("-m", "trainer", "worker", "--stage", name.partition(".")[0])
                swarm.begin(name, options=[*invited["worker"], *options], initial_peers=peers, program=program)
            swarm.begin("whole-1", options=[*invited["node"], *options], initial_peers=peers)
            whole = swarm["whole-1"]
            members: dict[str, list[TrainingNode]] = {
                stage: [swarm[f"{stage}.1"], swarm[f"{stage}.2"], whole] for stage in STAGES
            }
            swarm.wait(
                lambda: all(len(rounds_of_all(members[stage], stage)) >= 3 for stage in STAGES),
                "three rounds of each stage with all three",
                4 * WAIT_S,
            )
            assert swarm.stop("driver-1") == [TERMINATED]
            names = [*(f"{stage}.{number}" for stage in STAGES for number in (1, 2)), "whole-1"]
            assert swarm.stop(*names) == [TERMINATED] * len(names)
        for stage in STAGES:
            assert check_one_state(members[stage], stage) >= 3
        for node in swarm.nodes.values():
            assert "Traceback" not in node.output()
        losses = [event.number("loss") for event in whole.events("step")]
        assert fmean(losses[-8:]) < losses[0] - 0.3
        told = [step["loss"] for step in steps_of(swarm["driver-1"]) if step["loss"] is not None]
        assert fmean(told[-8:]) < told[0] - 0.3

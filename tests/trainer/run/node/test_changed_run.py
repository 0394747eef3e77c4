"""Six nodes of a signed run as a user starts them: a change made while two are stopped is in force in one round."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.trainer_command import ROOT, WAIT_S, TrainerCommand, TrainerHere, finished
from tests.support.training_swarm import TERMINATED, TrainingNode, TrainingSwarm, check_agreement

OPTIONS: dict[str, Any] = {
    "seed": 11,
    "model": {"preset": "tiny"},
    "inner": {"lr": 3e-3, "warmup_steps": 20, "decay_end_step": 100_000, "seq_len": 32, "micro_batch_size": 2},
    "diloco": {"inner_steps": 20},
    "data": {"plateau": "off", "holdout": 1},
    "collective": {"stall_timeout_s": 6.0, "invite_after_s": 2.0, "gather_timeout_s": 40.0, "round_timeout_s": 80.0},
}


def _settings(options: dict[str, Any], where: str = "") -> Iterator[str]:
    for name, value in options.items():
        if isinstance(value, dict):
            yield from _settings(value, f"{where}{name}.")
        else:
            yield from ("--set", f"{where}{name}={json.dumps(value)}")


class SignedSwarm(TrainingSwarm):
    """Nodes that get what they share from a signed file, and what is their own from the command line."""

    def init(self, environment: dict[str, str], **options: Any) -> Path:
        """Makes the run; its owner's key lies beside."""
        command = [sys.executable, "-m", "trainer", "run", "init", "corpus-8", "--key", str(self.key)]
        command += ["--store", str(self._store), *_settings({**OPTIONS, **options})]
        made = finished(command, environment, 0, WAIT_S)
        self.file.write_text(made.stdout, encoding="utf-8")
        return self.file

    @property
    def key(self) -> Path:
        return self.folder / "run.key"

    @property
    def file(self) -> Path:
        return self.folder / "corpus.yaml"

    def begin_signed(self, *names: str) -> None:
        """Starts nodes that share no folder but that of their logs, as if each had a machine of its own."""
        for name in names:
            self._begin_one(name)

    def _begin_one(self, name: str) -> None:
        places = {"state_dir": self.folder / "home" / name, "log.directory": self.folder / "log"}
        places["checkpoint.directory"] = self.folder / "checkpoints" / name
        options = [part for option, place in places.items() for part in ("--set", f"{option}={place}")]
        options += ["--set", "rpc.host=127.0.0.1", "--set", "rpc.public_address=127.0.0.1", "--set", "threads=1"]
        options += ["--set", "rpc.heartbeat_s=0.5", "--set", "rpc.stall_timeout_s=6.0", "--set", "api.port=0"]
        options += ["--set", "discovery.announce_interval_s=1.0", "--set", "discovery.announcement_lifetime_s=20.0"]
        options += ["--set", "discovery.poll_interval_s=0.3", "--set", "discovery.max_retry_interval_s=1.0"]
        options += ["--set", "device=cpu", "--set", "checkpoint.every_steps=20", "--max-steps", "20000"]
        self._config = self.file
        self.begin(name, options=options)

    def run_command(self, environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
        address = self.nodes["n0"].command[self.nodes["n0"].command.index("--port") + 1]
        command = [sys.executable, "-m", "trainer", "run", *arguments, "--run", str(self.file)]
        return finished([*command, "--initial-peers", f"127.0.0.1:{address}"], environment, 0, WAIT_S)


def _changes(node: TrainingNode) -> list[tuple[int, int, int]]:
    return [
        (int(event.number("number")), int(event.number("at_round")), int(event.number("round_index")))
        for event in node.events("run_change")
    ]


def _rates(node: TrainingNode) -> list[float]:
    return [float(event.number("lr")) for event in node.events("step")]


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_change_is_in_force_in_one_round_at_all_nodes_also_those_that_were_away(
    tmp_path: Path, trainer: TrainerCommand
) -> None:
    environment = trainer.environment()
    names = [f"n{number}" for number in range(6)]
    with SignedSwarm(tmp_path) as swarm:
        swarm.init(environment)
        swarm.begin_signed(*names)
        swarm.wait_for_step(1)
        assert swarm.stop("n4", "n5") == [TERMINATED] * 2
        here = [swarm[name] for name in names[:4]]
        made = swarm.run_command(
            environment, "set", "inner.lr=1e-3", "diloco.inner_steps=12", "rule.rule=median", "--key", str(swarm.key)
        )
        assert "change 1 of corpus-8, in force from round " in made.stdout
        assert "told 4 of 4 nodes" in made.stdout, made.stdout + made.stderr
        assert "inner.lr: 0.001 (was 0.003)" in made.stdout
        at_round = int(made.stdout.partition("from round ")[2].partition(":")[0])
        swarm.wait_for_step(at_round + 1, *names[:4])
        (swarm.folder / "corpus.changes.jsonl").unlink()  # Those that come back hear of it from the others alone.
        swarm.begin_signed("n4", "n5")
        away = [swarm["n4"], swarm["n5"]]
        swarm.wait(lambda: all(map(_changes, away)), "the change at those that were away", alive=[*here, *away])
        newest = max(node.outer_step for node in swarm.nodes.values())
        swarm.wait_for_step(newest + 3, timeout_s=2 * WAIT_S)
        last = min(node.outer_step for node in swarm.nodes.values())
        check_agreement(swarm.nodes.values(), last - 1, last)
        for name in names[:4]:
            assert _changes(swarm[name]) == [(1, at_round, at_round)], name
        for name in names[4:]:
            [(number, effective, round_index)] = _changes(swarm[name])
            assert (number, effective) == (1, at_round)
            assert round_index >= at_round
        for node in swarm.nodes.values():
            for event in node.events("round"):
                if len(event.fields["members"]) >= 4:  # Fewer have no trimmed mean.
                    expected = "median" if event.number("round_index") >= at_round else "trimmed_mean"
                    assert event.fields["rule"] == expected, event
            assert max(_rates(node)[-5:]) <= 1e-3
        assert max(_rates(swarm["n0"])) > 2e-3

        shown = swarm.run_command(environment, "show")
        assert f"  1  from round {at_round}" in shown.stdout
        assert shown.stdout.count("knows 1 changes") == 6, shown.stdout
        told = json.loads(swarm.run_command(environment, "show", "--json").stdout)
        assert told["in_force"] == 1
        assert told["changes"][0]["settings"] == {"inner.lr": 1e-3, "diloco.inner_steps": 12, "rule.rule": "median"}


@pytest.mark.slow
def test_a_node_needs_the_run_file_of_a_peer_and_a_name_and_no_more(tmp_path: Path, trainer: TrainerCommand) -> None:
    environment = trainer.environment()
    with SignedSwarm(tmp_path) as swarm:
        file = swarm.init(environment)
        swarm.begin_signed("n0")
        swarm.wait_for_step(0)
        owner = next(line for line in file.read_text().splitlines() if line.startswith("owner: ")).split()[1]
        address = swarm["n0"].command[swarm["n0"].command.index("--port") + 1]
        away = swarm.folder / "elsewhere"
        away.mkdir()
        line = [sys.executable, "-m", "trainer", "--node-id", "n1", "--max-steps", "3", "--no-api", "--threads", "1"]
        line += ["--run", f"peer://127.0.0.1:{address}/corpus-8#{owner}", "--initial-peers", f"127.0.0.1:{address}"]
        line += ["--set", f"state_dir={away}", "--set", f"checkpoint.directory={away}", "--set", "rpc.host=127.0.0.1"]
        done = finished(line, environment, 0, WAIT_S)
        assert "stopped at step 3" in done.stderr
        assert (away / "runs" / "corpus-8" / "run.json").exists()
        swarm.stop()
    assert ROOT.is_dir()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--lr", "1.0"), "inner.lr: the run file of corpus-8 says 0.0001, this node's options 1.0"),
        (("--run-id", "another"), "run_id: the run file of corpus-8 says corpus-8"),
        (("--seed", "4"), "seed: the run file of corpus-8 says 0"),
    ],
)
def test_options_that_contradict_the_file_end_the_command_with_a_line(
    trainer: TrainerCommand, here: TrainerHere, tmp_path: Path, options: tuple[str, ...], said: str
) -> None:
    printed = here.other(
        *("run", "init", "corpus-8", "--preset", "tiny", "--store", str(trainer.store), "--key", tmp_path / "run.key")
    )
    (tmp_path / "run.yaml").write_text(printed[printed.index("# The run") :], encoding="utf-8")
    places = ("--checkpoint-dir", trainer.checkpoints, "--set", f"state_dir={tmp_path}")
    found = here.other("--run", tmp_path / "run.yaml", "--node-id", "n", *places, *options, expect=2)
    assert said in found

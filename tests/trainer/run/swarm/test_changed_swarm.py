"""A swarm of a signed run: every stage goes over to a change at its own round of that number, and drivers with them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support.trainer_command import TrainerCommand, finished
from trainer.monitor import read_events

_SHARED = (
    *("--stages", "3", "--preset", "tiny", "--seq-len", "32", "--batch-size", "2", "--inner-steps", "5"),
    *("--set", "swarm.stage.target_tokens=256", "--set", "inner.warmup_steps=2", "--set", "data.plateau=off"),
    *("--set", "swarm.join.first_peers_s=1.5", "--set", "discovery.announce_interval_s=0.5"),
    *("--set", "discovery.poll_interval_s=0.2"),
)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_stages_go_over_to_another_target_and_rate_at_the_named_round(tmp_path: Path, trainer: TrainerCommand) -> None:
    def command(*arguments: str, seconds: float = 100.0) -> str:
        line = [sys.executable, "-m", "trainer", *arguments]
        return finished(line, trainer.environment(), 0, seconds).stdout

    file, key = tmp_path / "run.yaml", tmp_path / "run.key"
    file.write_text(command("run", "init", "corpus-3", *_SHARED, "--key", str(key)), encoding="utf-8")
    place = ("--run", str(file), "--key", str(key))
    settings = ("swarm.stage.target_tokens=512", "inner.lr=5e-5")
    assert "from round 1" in command("run", "set", *settings, *place, "--at-round", "1")
    folder = tmp_path / "swarm"
    up = ("swarm", "up", "--run", str(file), "--store", str(trainer.store), "--folder", str(folder), "--json")
    command(*up, "--max-steps", "20", "--set", "device=cpu", seconds=240.0)
    logged = list(read_events(folder / "events"))
    for worker in ("head.1", "body-1.1", "tail.1"):
        events = [event for event in logged if event.node == worker]
        [change] = [event.fields for event in events if event.kind == "run_change"]
        assert (change["number"], change["at_round"], change["round_index"]) == (1, 1, 1), worker
        steps = [event for event in events if event.kind == "step" and event.number("num_tokens")]
        before, behind = steps[:5], steps[5:]
        assert all(256 <= step.number("num_tokens") < 512 for step in before), worker
        assert behind
        assert all(step.number("num_tokens") >= 512 for step in behind[:-1]), worker  # The last has what is left.
        assert max(step.number("lr") for step in before) == pytest.approx(1e-4)
        assert max(step.number("lr") for step in behind) <= 5e-5, worker
    [driver] = [event for event in logged if event.node == "driver-1" and event.kind == "run_change"]
    assert driver.number("at_round") == 1

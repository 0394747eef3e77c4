"""One short training run, made by the command and looked at by many tests."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.text_store import text_store
from tests.support.trainer_command import TrainerCommand

STEPS = 150
INNER_STEPS = 40
"""So that the run does not end with an outer step: Nesterov's first ones overshoot, and the loss jumps for a while."""
TOKEN = "hunter2-of-the-test"
LEARNING = (
    *("--preset", "tiny", "--seq-len", "64", "--batch-size", "4", "--threads", "1", "--no-api", "--lr", "5e-3"),
    *("--set", "inner.warmup_steps=10", "--set", "inner.decay_end_step=250", "--holdout", "1"),
    *("--inner-steps", str(INNER_STEPS), "--plateau", "off", "--set", "checkpoint.every_steps=50"),
)


@dataclass(frozen=True)
class Trained:
    """A run that has ended: its command, and what it printed."""

    command: TrainerCommand
    output: str
    errors: str

    @property
    def logs(self) -> Path:
        return self.command.folder / "logs"


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """`STEPS` steps of 256 tokens each."""
    folder = tmp_path_factory.mktemp("trained")
    command = TrainerCommand(text_store(), folder, LEARNING)
    options = ("--node-id", "a", "--max-steps", str(STEPS), "--log-dir", folder / "logs", "--json")
    done = command(*options, GENESIS_TOKEN=TOKEN, GENESIS_LOG="DEBUG")
    return Trained(command, done.stdout, done.stderr)

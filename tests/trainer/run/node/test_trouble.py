"""What goes wrong outside the node: full disks, stores that are not there, numbers that are not finite."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support.text_store import text_store
from tests.support.trainer_command import TrainerCommand
from tests.support.trainer_here import TrainerHere
from trainer.monitor import read_events

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

TEN_MB = 10_000_000


def test_a_disk_that_takes_no_checkpoint_is_reported_and_training_goes_on(tmp_path: Path) -> None:
    """Only the last save is an error: until then there is something left to lose by stopping."""
    limited = ("prlimit", f"--fsize={TEN_MB}", sys.executable, "-m", "trainer")
    trainer = TrainerCommand(text_store(), tmp_path, starter=limited)
    options = ("--node-id", "a", "--max-steps", "8", "--set", "checkpoint.every_steps=2", "--log-dir", tmp_path)
    done = trainer(*options, expect=1)
    assert done.stderr.count("expected to write the checkpoint of step") >= 2
    assert "free some space or name another folder" in done.stderr.splitlines()[-1]
    events = list(read_events(tmp_path))
    assert len([event for event in events if event.kind == "step"]) == 8
    assert {event.fields["outcome"] for event in events if event.kind == "checkpoint"} >= {"failed"}


def test_a_store_that_is_not_there(here: TrainerHere, trainer: TrainerCommand) -> None:
    gone = ("--store", "http://127.0.0.1:9", "--set", "data.timeout_s=0.5")
    assert "127.0.0.1:9" in here("--node-id", "a", *gone, expect=1).splitlines()[-1]
    assert not trainer.checkpoints.exists()


def test_ten_steps_in_a_row_that_are_not_finite_end_the_run(
    here: TrainerHere, trainer: TrainerCommand, tmp_path: Path
) -> None:
    """The rate throws the weights so far off that no loss is finite any more; none of those steps is applied."""
    wild = ("--lr", "1e30", "--set", "inner.warmup_steps=0", "--set", "inner.max_grad_norm=1e30")
    said = here("--node-id", "a", *wild, "--log-dir", tmp_path, expect=1)
    assert "the last of 10 such steps in a row" in said
    told = [event.fields["skipped"] for event in read_events(tmp_path) if event.kind == "step"]
    assert told[-9:] == 9 * [True]  # The tenth is the error itself.


def test_a_checkpoint_of_another_store_is_refused(here: TrainerHere, trainer: TrainerCommand) -> None:
    here("--node-id", "a", "--max-steps", "2")
    said = here("--node-id", "a", "--max-steps", "4", "--store", text_store("other"), expect=1)
    assert "expected" in said.splitlines()[-1]
    assert trainer.saved("a")["training_rounds"] == 2


@pytest.mark.slow
def test_no_memory_is_told_in_a_line(trainer: TrainerCommand) -> None:
    limited = ("prlimit", f"--as={4_000_000_000}", sys.executable, "-m", "trainer")
    narrow = TrainerCommand(trainer.store, trainer.folder, starter=limited)
    done = narrow("--node-id", "a", "--preset", "1b", expect=1)
    assert "found none left" in done.stderr.splitlines()[-1]

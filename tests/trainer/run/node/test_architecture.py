"""Which architecture a node trains: a named preset, before that of the checkpoint, before what memory has room for."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tests.support.trainer_command import TrainerCommand, differences
from tests.support.trainer_here import TrainerHere
from trainer.checkpoint.node import checkpoint_path, wallet_id
from trainer.run.config import RunConfig
from trainer.run.node.starting import resolve

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

AUTO = ("--node-id", "a", "--preset", "auto", "--max-steps")


def dim(trainer: TrainerCommand) -> int:
    found = trainer.saved("a")["architecture"]["dim"]
    assert isinstance(found, int)
    return found


def newest(trainer: TrainerCommand) -> Path:
    return checkpoint_path(trainer.checkpoints, wallet_id("", "a"))


def test_memory_decides_for_a_node_that_begins(trainer: TrainerCommand, here: TrainerHere) -> None:
    """Below the first tier of 500 MB there is only the smallest."""
    here(*AUTO, "1", "--set", "model.memory_bytes=400_000_000")
    assert dim(trainer) == 128
    assert yaml.safe_load(newest(trainer).with_suffix(".yaml").read_text())["model"]["preset"] == "tiny"


def test_on_a_cpu_outer_steps_take_memory_too() -> None:
    """2,000 MB, 70 % of them for the state: 87.5 million parameters of 16 bytes, half as many of 32."""
    config = RunConfig(node_id="a")
    for shared, preset, dim in ((False, "60m", 512), (True, "30m", 320)):
        resolved, shape = resolve(config, None, 32_768, lambda: 2_000_000_000, shared_memory=shared)
        assert (resolved.model.preset, shape.dim, shape.vocab_size) == (preset, dim, 32_768)


def test_the_checkpoint_decides_against_memory(trainer: TrainerCommand, here: TrainerHere) -> None:
    here(*AUTO, "1", "--set", "model.memory_bytes=400_000_000")
    here(*AUTO, "2", "--set", "model.memory_bytes=64_000_000_000")
    assert dim(trainer) == 128
    assert trainer.saved("a")["training_rounds"] == 2


def test_a_named_preset_decides_against_the_checkpoint_which_is_put_aside(
    trainer: TrainerCommand, here: TrainerHere
) -> None:
    here("--node-id", "a", "--max-steps", "2")
    before = trainer.saved("a")
    said = here("--node-id", "a", "--preset", "15m", "--max-steps", "1")
    assert dim(trainer) == 192
    assert trainer.saved("a")["training_rounds"] == 1
    aside = f"replaced-{int(before['timestamp'])}-{newest(trainer).name}"
    assert aside in said
    (trainer.checkpoints / aside).rename(newest(trainer))  # As a user would who wants it back.
    assert not differences(trainer.saved("a"), before)


def test_the_same_preset_named_again_goes_on(trainer: TrainerCommand, here: TrainerHere) -> None:
    for steps in ("1", "2"):
        here("--node-id", "a", "--preset", "tiny", "--max-steps", steps)
    assert trainer.saved("a")["training_rounds"] == 2
    assert not list(trainer.checkpoints.glob("replaced-*"))


def test_the_batch_size_by_memory_is_kept(trainer: TrainerCommand, here: TrainerHere) -> None:
    here("--node-id", "a", "--batch-size", "0", "--set", "model.memory_bytes=100_000_000", "--max-steps", "1")
    chosen = trainer.saved("a")["config"]["inner"]["micro_batch_size"]
    assert 1 <= chosen <= 8
    here("--node-id", "a", "--batch-size", "0", "--set", "model.memory_bytes=64_000_000_000", "--max-steps", "2")
    assert trainer.saved("a")["config"]["inner"]["micro_batch_size"] == chosen
    assert trainer.saved("a")["training_rounds"] == 2


def test_what_does_not_fit_the_checkpoint_is_refused(trainer: TrainerCommand, here: TrainerHere) -> None:
    here("--node-id", "a", "--max-steps", "1")
    before = trainer.saved("a")
    for options, said in (
        (("--run-id", "another"), "found one of genesis"),
        (("--seq-len", "16"), "seq_len"),
        (("--batch-size", "3"), "batch_size"),
        (("--set", "diloco.num_fragments=2"), "diloco.num_fragments"),
        (("--seq-len", "2048"), "expected at most the 1024 tokens"),
    ):
        code = 2 if "2048" in options else 1
        assert said in here("--node-id", "a", "--max-steps", "2", *options, expect=code).splitlines()[-1]
        assert not differences(trainer.saved("a"), before)

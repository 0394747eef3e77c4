"""What a finished run leaves: a model that has learned, lines and events for programs, a configuration to repeat it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
import yaml

from genesis.store import FolderStore
from loader import GenesisDataset
from manifests import decode_shard, shard_key
from tests.support.small_store import text_store
from tests.support.trainer_command import TrainerCommand, TrainerHere, differences
from trainer.checkpoint.node import load_newest, wallet_id
from trainer.model import ModelConfig, Transformer, build_model
from trainer.monitor import read_events
from trainer.run.node.replica import parameters_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

NATS_UNDER_UNIGRAM = 0.5
STEPS = 150
INNER_STEPS = 40
"""So that the run does not end with an outer step: Nesterov's first ones overshoot, and the loss jumps for a while."""
TOKEN = "hunter2-of-the-test"
LEARNING = (
    *("--preset", "tiny", "--seq-len", "64", "--batch-size", "4", "--threads", "1", "--no-api", "--lr", "5e-3"),
    *("--set", "inner.warmup_steps=10", "--set", "inner.decay_end_step=250", "--holdout", "1"),
    *("--inner-steps", str(INNER_STEPS), "--plateau", "off", "--set", "checkpoint.every_steps=50"),
)


class Trained(NamedTuple):
    """A run that has ended: its command, and what it printed."""

    command: TrainerCommand
    logs: Path
    output: str
    errors: str


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """`STEPS` steps of 256 tokens each."""
    folder = tmp_path_factory.mktemp("trained")
    command = TrainerCommand(text_store(), folder, LEARNING)
    options = ("--node-id", "a", "--max-steps", str(STEPS), "--log-dir", folder / "logs", "--json")
    done = command(*options, GENESIS_TOKEN=TOKEN, GENESIS_LOG="DEBUG")
    return Trained(command, folder / "logs", done.stdout, done.stderr)


def saved_model(trained: Trained) -> Transformer:
    saved = trained.command.saved("a", token=TOKEN)
    model = build_model(ModelConfig.from_dict(saved["architecture"]), 0)
    model.load_state_dict(parameters_of(saved["layers"]))
    return model.eval()


def unigram_entropy(trained: Trained) -> float:
    """Of the tokens of all shards, in nats: the loss of a model that knows how frequent each is, and nothing else."""
    store = FolderStore(Path(trained.command.store))
    ids = np.concatenate([decode_shard(store.get(shard_key(shard)).body) for shard in range(10)])
    shares = np.bincount(ids) / len(ids)
    return float(-(shares[shares > 0] * np.log(shares[shares > 0])).sum())


def test_the_loss_falls_well_under_the_unigram_entropy_also_of_what_was_not_seen(trained: Trained) -> None:
    losses = [line["loss"] for line in map(json.loads, trained.output.splitlines()) if line["kind"] == "step"]
    assert losses[0] == pytest.approx(math.log(1024), abs=0.4), "that of guessing"
    assert np.mean(losses[-20:]) < unigram_entropy(trained) - NATS_UNDER_UNIGRAM
    held_out = GenesisDataset(
        trained.command.store, "a", seq_len=64, batch_size=32, split="holdout", holdout=1, epochs=1,
        cache_dir=trained.command.folder / "cache",
    )  # fmt: skip
    model = saved_model(trained)
    with torch.inference_mode():
        unseen = [float(model(it["input_ids"], it["labels"])) for it, _ in zip(held_out, range(8), strict=False)]
    held_out.close()
    assert np.mean(unseen) < unigram_entropy(trained) - NATS_UNDER_UNIGRAM


def test_lines_and_log_tell_every_step_and_round_and_the_log_every_checkpoint(trained: Trained) -> None:
    lines = [json.loads(line) for line in trained.output.splitlines()]
    assert [line["step"] for line in lines if line["kind"] == "step"] == list(range(STEPS))
    rounds = [line for line in lines if line["kind"] == "round"]
    assert all(line["committed"] and line["members"] == ["a"] and line["completeness"] == 1.0 for line in rounds)
    events = list(read_events(trained.logs))
    steps = [event.fields for event in events if event.kind == "step"]
    assert [step["step"] for step in steps] == list(range(STEPS))
    assert sum(step["num_tokens"] for step in steps) == STEPS * 4 * 64
    rounds = [event.fields for event in events if event.kind == "round"]
    assert [found["outer_step"] for found in rounds] == [1, 2, 3]
    checkpoints = [event.fields for event in events if event.kind == "checkpoint"]
    assert {found["step"] for found in checkpoints} >= {40, 80, 120, STEPS}
    assert {found["outcome"] for found in checkpoints} <= {"saved", "skipped"}
    assert checkpoints[-1]["outcome"] == "saved"


def test_the_token_is_in_no_file_and_no_line(trained: Trained) -> None:
    files = [path for path in trained.command.folder.rglob("*") if path.is_file()]
    assert any(path.suffix == ".yaml" for path in files)
    assert any(path.suffix == ".pt" and "dynamic_node" in path.name for path in files)
    assert not [path for path in files if TOKEN.encode() in path.read_bytes()]
    assert TOKEN not in trained.output + trained.errors


def test_the_kept_configuration_repeats_the_run(trained: Trained, here: TrainerHere, tmp_path: Path) -> None:
    kept = trained.command.checkpoints / f"dynamic_node_{wallet_id(TOKEN, 'a')}.yaml"
    told = next(line for line in trained.errors.splitlines() if "configuration:" in line)
    assert all(text in told for text in ("inner.lr=0.005", "diloco.inner_steps=40", str(kept)))
    assert yaml.safe_load(kept.read_text())["inner"]["betas"] == [0.9, 0.95]  # Those at their defaults, too.
    whole = TrainerCommand(trained.command.store, tmp_path / "whole", trained.command.common)
    here.other(*whole.line("--node-id", "a", "--max-steps", "5")[3:])
    again = ("--max-steps", "5", "--checkpoint-dir", tmp_path / "again", "--log-dir", tmp_path)
    here.other("--config", kept, *again)
    assert not differences(load_newest(tmp_path / "again", wallet_id("", "a")), whole.saved("a"))


def test_transformers_computes_the_same_logits_and_curves_are_drawn(trained: Trained, tmp_path: Path) -> None:
    picture, export = tmp_path / "curves.png", ("export", "--to", "hf", tmp_path / "hf", "--checkpoint-dir")
    assert str(picture) in trained.command.other("plot", trained.logs, "--out", picture).stdout
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert f"step {STEPS}" in trained.command.other(*export, trained.command.checkpoints).stdout
    from transformers import AutoModelForCausalLM, AutoTokenizer

    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    ids = torch.tensor([tokenizer("The history of the library.")["input_ids"]])
    with torch.inference_mode():
        expected = saved_model(trained)(ids)[..., : theirs.config.vocab_size]
        assert torch.allclose(theirs(ids).logits, expected, atol=1e-4)


def test_what_can_be_exported_by_a_token_and_what_cannot(here: TrainerHere, trained: Trained, tmp_path: Path) -> None:
    none = tmp_path / "none"
    for options, code, said in (
        (("--to", "gguf"), 2, "--to: expected hf or torchtitan, found 'gguf'"),
        (("--node-id", "nobody"), 1, "found none; check --node-id"),
        ((), 2, "expected one node's checkpoint in"),
        (("--at", "now"), 2, "--at: expected --run"),
    ):
        assert said in here.other("export", none, "--checkpoint-dir", none, *options, expect=code)
    places = ("--checkpoint-dir", trained.command.checkpoints, "--dtype", "bfloat16")
    assert f"step {STEPS}" in here.other("export", tmp_path / "out", *places, "--token", TOKEN)
    assert (tmp_path / "out" / "model.safetensors").stat().st_size < 3_000_000
    damaged = tmp_path / "damaged.pt"
    whole = next(trained.command.checkpoints.glob("*.step-*.pt")).read_bytes()
    damaged.write_bytes(whole[: len(whole) // 2])
    assert "expected a whole checkpoint" in here.other("export", none, "--checkpoint", damaged, expect=1)
    assert not none.exists()

"""From text to a model in transformers with a vocabulary that was made elsewhere, each step by its own command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from manifests import Manifest
from tests.support.documents import documents, write_parquet
from tests.support.foreign_tokenizers import foreign_json, reference, write_foreign
from tests.support.populating import genesis
from tests.support.trainer_command import SMALL, TrainerCommand

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.mark.parametrize("name", ["llama3", "olmo"])
def test_a_store_of_anothers_vocabulary_trains_and_exports_with_it(name: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    text = write_parquet(tmp_path / "a.parquet", [*documents(seed=41, count=900)], 50)
    tokenizer = write_foreign(tmp_path / "theirs", name)
    store = tmp_path / "store"
    places = ("--store", store, "--input", text, "--tokenizer", tokenizer, "--shard-tokens", "4000", "--workers", "1")
    genesis("populate", "--source", "fineweb-edu", *places)
    manifest = Manifest.from_json((store / "manifest.json").read_bytes())
    num_ids = manifest.tokenizer.next_merge_id if manifest.tokenizer else 0

    command = TrainerCommand(store, tmp_path / "run", SMALL)
    measured = ("--holdout", "1", "--eval-every", "30", "--sample-every", "30", "--set", "eval.tokens=2000")
    done = command("--node-id", "a", "--max-steps", "60", "--json", *measured)
    losses = [line["loss"] for line in map(json.loads, done.stdout.splitlines()) if line["kind"] == "step"]
    assert sum(losses[-10:]) / 10 < losses[0] - 0.5
    found = [line for line in map(json.loads, done.stdout.splitlines()) if line["kind"] in ("held_out", "sample")]
    assert [(line["kind"], line["step"]) for line in found] == [
        *(("held_out", 30), ("sample", 30)),
        *(("held_out", 60), ("sample", 60)),
    ]
    assert 1 < found[2]["bits_per_byte"] < found[0]["bits_per_byte"] < 10
    assert all(isinstance(line["text"], str) for line in found if line["kind"] == "sample")
    saved = command.saved("a")
    assert saved["architecture"]["vocab_size"] == 2048, "1,500 ids and more, rounded up to 1,024 rows"

    said = command.other("export", "--checkpoint-dir", command.checkpoints, "--to", "hf", tmp_path / "hf").stdout
    assert "step 60" in said
    assert (tmp_path / "hf" / "tokenizer.json").read_text(encoding="utf-8") == foreign_json(name)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert model.config.vocab_size == num_ids
    assert model.config.eos_token_id == model.generation_config.eos_token_id == manifest.eos_id
    assert theirs.eos_token_id == manifest.eos_id
    assert theirs("the of and", add_special_tokens=False).input_ids == reference(name)("the of and")
    assert torch.isfinite(model(torch.tensor([[1, 5, num_ids - 1]])).logits).all()

    titan = command.other("export", "--checkpoint-dir", command.checkpoints, "--to", "torchtitan", tmp_path / "titan")
    assert titan.returncode == 0
    assert (tmp_path / "titan" / "assets" / "tokenizer.json").read_text(encoding="utf-8") == foreign_json(name)

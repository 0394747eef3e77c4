"""`python -m trainer export`: a folder that transformers loads, with the same logits and the store's tokenizer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.trainer_here import TrainerHere
from tests.trainer.run.cli.conftest import STEPS, TOKEN, Trained
from tests.trainer.run.cli.test_trained import saved_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def test_transformers_computes_the_same_logits(trained: Trained, tmp_path: Path) -> None:
    done = trained.command.other(
        "export", "--to", "hf", tmp_path / "hf", "--checkpoint-dir", trained.command.checkpoints
    )
    assert f"step {STEPS}" in done.stdout
    from transformers import AutoModelForCausalLM, AutoTokenizer

    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    ids = torch.tensor([tokenizer("The history of the library.")["input_ids"]])
    with torch.inference_mode():
        expected = saved_model(trained)(ids)[..., : theirs.config.vocab_size]
        assert torch.allclose(theirs(ids).logits, expected, atol=1e-4)


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        (("--to", "gguf"), 2, "--to: expected hf or torchtitan, found 'gguf'"),
        (("--dtype", "int8"), 2, "--dtype: expected one of float32, bfloat16, float16, found 'int8'"),
        (("--node-id", "nobody"), 1, "found none; check --node-id"),
        (("--checkpoint", "nothing.pt"), 1, "expected a file, found none at nothing.pt"),
        ((), 2, "expected one node's checkpoint in"),
    ],
)
def test_what_cannot_be_exported(
    here: TrainerHere, tmp_path: Path, options: tuple[str, ...], code: int, said: str
) -> None:
    found = here.other("export", tmp_path / "out", "--checkpoint-dir", tmp_path / "none", *options, expect=code)
    assert said in found
    assert not (tmp_path / "out").exists()


def test_a_damaged_checkpoint_is_told(here: TrainerHere, trained: Trained, tmp_path: Path) -> None:
    whole = next(trained.command.checkpoints.glob("*.step-*.pt")).read_bytes()
    damaged = tmp_path / "damaged.pt"
    damaged.write_bytes(whole[: len(whole) // 2])
    said = here.other("export", tmp_path / "out", "--checkpoint", damaged, expect=1)
    assert "expected a whole checkpoint" in said


def test_a_token_finds_its_checkpoint(here: TrainerHere, trained: Trained, tmp_path: Path) -> None:
    places = ("--checkpoint-dir", trained.command.checkpoints, "--dtype", "bfloat16")
    assert f"step {STEPS}" in here.other("export", tmp_path / "out", *places, "--token", TOKEN)
    assert (tmp_path / "out" / "model.safetensors").stat().st_size < 3_000_000

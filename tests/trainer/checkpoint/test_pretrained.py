"""Models as transformers saves them: the same logits, the same bits back, and folders that are not believed."""

from __future__ import annotations

import json
import os
import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support.model_configs import NUM_IDS, random_model, small_config, write_tokenizer
from trainer.checkpoint.pretrained import Pretrained
from trainer.errors import CheckpointError, CheckpointMismatchError, CorruptCheckpointError, TrainerError
from trainer.model import ModelConfig, Transformer, build_model, export_hf

_FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "olmo2")
_ROPES: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"rope_type": "linear", "factor": 2.5},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 24,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 8.0},
    "yarn-mscale": {
        "rope_type": "yarn",
        "factor": 3.0,
        "original_max_position_embeddings": 20,
        "mscale": 0.7,
        "mscale_all_dim": 1.3,
        "truncate": False,
    },
}


@pytest.fixture
def tokenizer_json(tmp_path: Path) -> Path:
    return write_tokenizer(tmp_path)


def _random_config(family: str, rope: str, seed: int) -> dict[str, Any]:
    """A small shape of a family; each seed has other widths, heads, ties, biases."""
    draw = random.Random(f"{family} {rope} {seed}")
    num_heads = draw.choice([2, 4, 6])
    head_dim = draw.choice([4, 8, 16])
    has_head_dim = family in ("llama", "mistral", "qwen3") and draw.random() < 0.7
    width = num_heads * draw.choice([6, 10]) if has_head_dim else num_heads * head_dim
    values: dict[str, Any] = {
        "vocab_size": NUM_IDS,
        "hidden_size": width,
        "intermediate_size": draw.choice([24, 40, 56]),
        "num_hidden_layers": draw.choice([1, 2, 3]),
        "num_attention_heads": num_heads,
        "num_key_value_heads": draw.choice([each for each in (1, 2, num_heads) if num_heads % each == 0]),
        "max_position_embeddings": 64,
        "rms_norm_eps": draw.choice([1e-6, 1e-5]),
        "tie_word_embeddings": draw.random() < 0.5,
        "rope_parameters": {"rope_type": "default", "rope_theta": draw.choice([1e4, 5e5]), **_ROPES[rope]},
    }
    if has_head_dim or family == "qwen3":
        values["head_dim"] = head_dim if has_head_dim else width // num_heads
    if family in ("llama", "qwen3", "olmo2"):
        values["attention_bias"] = draw.random() < 0.5
    if family == "mistral":
        values["sliding_window"] = draw.choice([None, 7, 100])
    if family in ("qwen2", "qwen3") and draw.random() < 0.5:
        values |= {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 0}
    return values


def _theirs(family: str, rope: str, seed: int) -> Any:
    """A model of transformers' own, no weight of which is at a value that hides a mistake."""
    transformers = pytest.importorskip("transformers", reason="compares with transformers (extra dev)")
    config = transformers.AutoConfig.for_model(family, **_random_config(family, rope, seed))
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape), alpha=0.2)
    return model


def _ours(folder: Path, rows: int = 1024) -> tuple[Transformer, ModelConfig]:
    pretrained = Pretrained.open(folder)
    model = build_model(replace(pretrained.config, vocab_size=rows), 5)
    pretrained.fill_(model)
    return model.eval(), pretrained.config


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("family", "rope"), [(family, rope) for family in _FAMILIES for rope in _ROPES])
def test_transformers_and_we_compute_the_same_and_back_again(
    family: str, rope: str, seed: int, tokenizer_json: Path, tmp_path: Path
) -> None:
    theirs = _theirs(family, rope, seed)
    theirs.save_pretrained(tmp_path / "hf", max_shard_size="20KB" if seed else "5GB")
    ours, config = _ours(tmp_path / "hf")

    ids = torch.randint(0, NUM_IDS, (2, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected, found = theirs(ids).logits, ours(ids)[..., :NUM_IDS]
    assert expected.std() > 0.3
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-5 * max(1.0, float(expected.abs().max())))

    from transformers import AutoModelForCausalLM

    export_hf(ours, config, tokenizer_json, tmp_path / "back")
    again, told = AutoModelForCausalLM.from_pretrained(tmp_path / "back", output_loading_info=True)
    assert type(again) is type(theirs)
    assert not any(told.values()), told
    before = theirs.state_dict()
    assert before.keys() == again.state_dict().keys()
    assert all(torch.equal(value, before[name]) for name, value in again.state_dict().items())
    with torch.no_grad():
        torch.testing.assert_close(again.eval()(ids).logits, expected, rtol=0, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("family", _FAMILIES)
def test_bf16_weights_come_back_bit_for_bit(family: str, tokenizer_json: Path, tmp_path: Path) -> None:
    theirs = _theirs(family, "default", 7).to(torch.bfloat16)
    theirs.save_pretrained(tmp_path / "hf")
    ours, config = _ours(tmp_path / "hf", rows=NUM_IDS)
    export_hf(ours, config, tokenizer_json, tmp_path / "back", dtype="bfloat16")
    before, after = (_weights(tmp_path / name) for name in ("hf", "back"))
    assert before.keys() == after.keys()
    assert all(value.dtype == torch.bfloat16 and torch.equal(value, before[name]) for name, value in after.items())


def _weights(folder: Path) -> dict[str, Tensor]:
    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


# -- without transformers ----------------------------------------------------------------------------------------------

_CONFIG = small_config(vocab_size=1024, qkv_bias=True)


@pytest.fixture
def folder(tokenizer_json: Path, tmp_path: Path) -> Path:
    export_hf(random_model(_CONFIG), _CONFIG, tokenizer_json, tmp_path / "hf")
    return tmp_path / "hf"


def test_the_digest_is_of_the_values_and_not_of_files_or_types(
    folder: Path, tokenizer_json: Path, tmp_path: Path
) -> None:
    digest = Pretrained.open(folder).digest()
    export_hf(random_model(_CONFIG), _CONFIG, tokenizer_json, tmp_path / "parts", max_file_bytes=10_000)
    assert len(list((tmp_path / "parts").glob("*.safetensors"))) > 2
    assert Pretrained.open(tmp_path / "parts").digest() == digest
    rounded = random_model(_CONFIG).to(torch.bfloat16)
    export_hf(rounded, _CONFIG, tokenizer_json, tmp_path / "bf16", dtype="bfloat16")
    export_hf(rounded, _CONFIG, tokenizer_json, tmp_path / "fp32", dtype="float32")
    halves = {Pretrained.open(tmp_path / name).digest() for name in ("bf16", "fp32")}
    assert len(halves) == 1 and digest not in halves
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.3.self_attn.v_proj.bias"][0] += 1e-6
    save_file(weights, folder / "model.safetensors")
    assert Pretrained.open(folder).digest() != digest


def test_rows_beyond_the_folder_s_are_those_of_the_seed(folder: Path) -> None:
    ours, _ = _ours(folder, 2048)
    fresh = build_model(replace(_CONFIG, vocab_size=2048), 5)
    for name in ("embedding.weight", "readout.output.weight"):
        assert torch.equal(ours.state_dict()[name][NUM_IDS:], fresh.state_dict()[name][NUM_IDS:])
        assert torch.equal(ours.state_dict()[name][:NUM_IDS], random_model(_CONFIG).state_dict()[name][:NUM_IDS])


def test_a_model_of_another_shape_is_not_filled(folder: Path) -> None:
    for changes in ({"ffn_dim": 32}, {"num_layers": 5}, {"qkv_bias": False}):
        with pytest.raises(CheckpointMismatchError):
            Pretrained.open(folder).fill_(build_model(replace(_CONFIG, **changes), 0))


def _rewritten(folder: Path, change: Any) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors")


_NORM = "model.norm.weight"


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        (_NORM, None, r"expected a tensor model\.norm\.weight, found none"),
        (_NORM, torch.ones(17), r"of shape \(16,\), as config\.json states"),
        (_NORM, torch.ones(16, dtype=torch.int8), "of type F32, BF16, F16, found I8"),
        (_NORM, torch.ones(16).double(), "of type F32, BF16, F16, found F64"),
        ("model.layers.4.mlp.up_proj.weight", torch.ones(2), r"layers\.4\.mlp\.up_proj\.weight', which would be lost"),
        ("model.layers.0.self_attn.o_proj.bias", torch.ones(16), r"o_proj\.bias', which would be lost"),
    ],
)
def test_tensors_that_are_not_the_stated_model_s_are_refused_before_any_is_read(
    name: str, value: Tensor | None, said: str, folder: Path
) -> None:
    _rewritten(folder, lambda it: it.pop(name) if value is None else it.update({name: value}))
    with pytest.raises(CheckpointMismatchError, match=said):
        Pretrained.open(folder)


def test_values_that_are_not_finite_are_refused(folder: Path) -> None:
    _rewritten(folder, lambda it: it["model.norm.weight"].fill_(float("nan")))
    opened = Pretrained.open(folder)
    for use in (opened.digest, lambda: opened.fill_(build_model(_CONFIG, 0))):
        with pytest.raises(CorruptCheckpointError, match=r"expected finite weights of shape .* in model\.norm\.weight"):
            use()


def test_tables_that_old_releases_saved_are_passed_over(folder: Path) -> None:
    digest = Pretrained.open(folder).digest()
    _rewritten(folder, lambda it: it.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)}))
    assert Pretrained.open(folder).digest() == digest


def test_folders_that_are_none_are_told(folder: Path, tmp_path: Path) -> None:
    def expect(kind: type[TrainerError], said: str) -> None:
        with pytest.raises(kind, match=said) as told:
            Pretrained.open(folder)
        assert "\n" not in str(told.value)

    body = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(body[: len(body) // 2])
    expect(CorruptCheckpointError, "expected a whole tensor")
    (folder / "model.safetensors").write_bytes((2**40).to_bytes(8, "little") + body[8:])
    expect(CorruptCheckpointError, "expected a whole tensor")
    (folder / "model.safetensors").unlink()
    os.mkfifo(folder / "model.safetensors")
    expect(CheckpointError, "expected model.safetensors or")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../../etc/passwd"}}))
    expect(CorruptCheckpointError, "expected a weight_map of .safetensors files beside it")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "pytorch_model.bin"}}))
    expect(CorruptCheckpointError, "expected a weight_map of .safetensors files beside it")
    names = dict.fromkeys(json.loads((folder / "config.json").read_text()), "model.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    expect(CheckpointMismatchError, "expected a tensor model.embed_tokens.weight, found none in")
    (folder / "model.safetensors.index.json").unlink()
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"")
    expect(CheckpointError, "found pytorch_model.bin; pickles can run code and are not read")
    (folder / "config.json").write_text(" " * (1 << 20) + "{}")
    expect(CorruptCheckpointError, "expected a file of at most 1048576 bytes")
    (folder / "config.json").write_text("[" * 100_000)
    expect(CorruptCheckpointError, "expected JSON")
    (folder / "config.json").unlink()
    expect(CheckpointError, r"--init-from .*: expected a Hugging Face folder .* found no config\.json in it")
    shutil.rmtree(folder)
    expect(CheckpointError, "found no such folder")

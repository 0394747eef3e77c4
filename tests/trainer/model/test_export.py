from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from genesis.tokenizer import NeuroTokenizer
from manifests import FIRST_MERGE_ID, VocabularyFile
from tests.support.model_configs import small_config
from trainer.errors import ExportError
from trainer.model import ModelConfig, Transformer, build_model, export_hf, grow_vocabulary

_MERGES = [(114 + 10, 111), (266, 118), (42, 126)]
_NUM_IDS = FIRST_MERGE_ID + len(_MERGES)
_ROWS = 300


_CONFIG = small_config(vocab_size=_ROWS)


@pytest.fixture
def tokenizer_json(tmp_path: Path) -> Path:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(VocabularyFile.from_pairs(_MERGES, {"tiny": len(_MERGES)}).to_json())
    return path


def _trained(config: ModelConfig) -> Transformer:
    """A model no weight of which is at a value that hides a mistake, such as norms of one."""
    model = build_model(config, 3)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.2)
    return model


@pytest.mark.slow
@pytest.mark.parametrize(
    "config",
    [
        small_config(vocab_size=_ROWS),
        small_config(vocab_size=_ROWS, num_kv_heads=4, tie_embeddings=True, rope_theta=1000.0),
        small_config(vocab_size=_ROWS, qk_norm=True, reorder_norm=True, norm_eps=1e-3),
        small_config(vocab_size=_ROWS, qk_norm=True, reorder_norm=True, num_kv_heads=1, tie_embeddings=True),
    ],
    ids=["llama", "llama-tied", "olmo2", "olmo2-tied"],
)
def test_transformers_gives_the_same_logits(config: ModelConfig, tokenizer_json: Path, tmp_path: Path):
    from transformers import AutoModelForCausalLM

    model = _trained(config)
    export_hf(model, config, tokenizer_json, tmp_path / "hf")
    loaded, told = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert type(loaded).__name__ == ("Olmo2ForCausalLM" if config.qk_norm else "LlamaForCausalLM")
    assert not any(told.values()), told
    ids = torch.randint(0, _NUM_IDS, (2, 32), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        theirs, ours = loaded(ids).logits, model(ids)
    assert theirs.shape[-1] == _NUM_IDS
    torch.testing.assert_close(theirs, ours[..., :_NUM_IDS], rtol=0, atol=1e-5)
    assert ours.std() > 0.5


def test_the_folder_works_by_itself(tokenizer_json: Path, tmp_path: Path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    export_hf(_trained(_CONFIG), _CONFIG, tokenizer_json, tmp_path / "hf")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    text = "rov rover <|eos|>"
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    vocabulary = VocabularyFile.from_json(tokenizer_json.read_bytes())
    assert ids[0].tolist() == NeuroTokenizer.from_file(vocabulary).encode(text).tolist()
    generated = model.generate(ids, max_new_tokens=8, do_sample=True)
    assert int(generated.max()) < _NUM_IDS
    assert (model.generation_config.eos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (2, 2, 0)
    assert tokenizer.model_max_length == _CONFIG.max_seq_len


def test_a_state_dict_counts_with_the_rows_it_has(tokenizer_json: Path, tmp_path: Path):
    config = small_config(vocab_size=280)
    model = _trained(config)
    grow_vocabulary(model, 512, 3)
    export_hf(model.state_dict(), config, tokenizer_json, tmp_path / "hf")
    weights = load_file(tmp_path / "hf" / "model.safetensors")
    assert torch.equal(weights["model.embed_tokens.weight"], model.embedding.weight[:_NUM_IDS])
    assert weights["lm_head.weight"].shape == (_NUM_IDS, 16)
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["vocab_size"] == _NUM_IDS


def test_large_weights_are_split_with_an_index(tokenizer_json: Path, tmp_path: Path):
    from transformers import AutoModelForCausalLM

    model = _trained(_CONFIG)
    files = export_hf(model, _CONFIG, tokenizer_json, tmp_path / "hf", max_file_bytes=30_000)
    names = {path.name for path in files}
    assert "model.safetensors.index.json" in names
    assert sum(name.endswith(".safetensors") for name in names) >= 2
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    ids = torch.arange(20).view(1, 20)
    torch.testing.assert_close(loaded(ids).logits, model(ids)[..., :_NUM_IDS], rtol=0, atol=1e-5)


def test_weights_can_be_written_in_half_the_bytes(tokenizer_json: Path, tmp_path: Path):
    model = _trained(_CONFIG)
    export_hf(model, _CONFIG, tokenizer_json, tmp_path / "hf", dtype="bfloat16")
    weights = load_file(tmp_path / "hf" / "model.safetensors")
    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}
    assert torch.equal(weights["model.norm.weight"], model.readout.norm.weight.bfloat16())
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.parametrize("qk_norm", [True, False])
def test_half_of_olmo2_is_refused(qk_norm: bool, tokenizer_json: Path, tmp_path: Path):
    config = small_config(vocab_size=_ROWS, qk_norm=qk_norm, reorder_norm=not qk_norm)
    with pytest.raises(ExportError, match="no class of transformers"):
        export_hf(_trained(config), config, tokenizer_json, tmp_path / "hf")
    assert not (tmp_path / "hf").exists()


def test_states_that_are_not_this_model_are_refused(tokenizer_json: Path, tmp_path: Path):
    state = _trained(_CONFIG).state_dict()
    broken = {
        "missing": {name: value for name, value in state.items() if name != "readout.norm.weight"},
        "unknown": state | {"layers.9.attention.q_proj.weight": torch.zeros(16, 16)},
        "expected the shape": state | {"layers.0.attention.k_proj.weight": torch.zeros(16, 16)},
        "269 ids, found 268": state | {"embedding.weight": state["embedding.weight"][:268]},
        "finite": state | {"readout.norm.weight": torch.full((16,), float("nan"))},
    }
    for message, bad in broken.items():
        with pytest.raises(ExportError, match=message):
            export_hf(bad, _CONFIG, tokenizer_json, tmp_path / "hf")
    with pytest.raises(ExportError, match="own config"):
        export_hf(state, replace(_CONFIG, num_layers=3), tokenizer_json, tmp_path / "hf")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tokenizer.json"]


def test_weights_too_large_for_half_precision_are_refused(tokenizer_json: Path, tmp_path: Path):
    state = _trained(_CONFIG).state_dict() | {"readout.norm.weight": torch.full((16,), 1e6)}
    with pytest.raises(ExportError, match="float16"):
        export_hf(state, _CONFIG, tokenizer_json, tmp_path / "hf", dtype="float16")


def test_a_folder_with_something_in_it_is_left_alone(tokenizer_json: Path, tmp_path: Path):
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "notes.txt").write_text("mine")
    with pytest.raises(ExportError, match="new or empty folder"):
        export_hf(_trained(_CONFIG), _CONFIG, tokenizer_json, tmp_path / "hf")
    assert [path.name for path in (tmp_path / "hf").iterdir()] == ["notes.txt"]
    (tmp_path / "hf" / "notes.txt").unlink()
    assert export_hf(_trained(_CONFIG), _CONFIG, tokenizer_json, tmp_path / "hf")


def test_a_tokenizer_that_is_none_is_refused(tmp_path: Path):
    (tmp_path / "tokenizer.json").write_text("{}")
    for name in ("tokenizer.json", "absent.json"):
        with pytest.raises(ExportError, match=name):
            export_hf(_trained(_CONFIG), _CONFIG, tmp_path / name, tmp_path / "hf")

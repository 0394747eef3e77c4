from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from genesis.tokenizer import NeuroTokenizer
from manifests import VocabularyFile
from tests.support.model_configs import NUM_IDS, random_model, small_config, write_tokenizer
from trainer.errors import ExportError
from trainer.model import ModelConfig, export_hf
from trainer.model.subspace import SubspaceConfig

_CONFIG = small_config(vocab_size=300)
_OLMO2 = replace(_CONFIG, qk_norm=True, reorder_norm=True, norm_eps=1e-3)


@pytest.fixture
def tokenizer_json(tmp_path: Path) -> Path:
    return write_tokenizer(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "config",
    [
        _CONFIG,
        replace(_CONFIG, num_kv_heads=4, tie_embeddings=True, rope_theta=1000.0),
        _OLMO2,
        replace(_OLMO2, num_kv_heads=1, tie_embeddings=True),
        *(SubspaceConfig(rank=3).applied_to(each, 1) for each in (_CONFIG, _OLMO2)),
    ],
    ids=["llama", "llama-tied", "olmo2", "olmo2-tied", "llama-subspace", "olmo2-subspace"],
)
def test_transformers_gives_the_same_logits(config: ModelConfig, tokenizer_json: Path, tmp_path: Path):
    from transformers import AutoModelForCausalLM

    model = random_model(config)
    export_hf(model, config, tokenizer_json, tmp_path / "hf")
    loaded, told = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert type(loaded).__name__ == ("Olmo2ForCausalLM" if config.qk_norm else "LlamaForCausalLM")
    assert not any(told.values()), told
    ids = torch.randint(0, NUM_IDS, (2, 32), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        theirs, ours = loaded(ids).logits, model(ids)
    assert theirs.shape[-1] == NUM_IDS
    torch.testing.assert_close(theirs, ours[..., :NUM_IDS], rtol=0, atol=1e-5)
    assert ours.std() > 0.5


def test_the_folder_works_by_itself_and_large_weights_are_split_with_an_index(tokenizer_json: Path, tmp_path: Path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    ours = random_model(_CONFIG)
    names = [path.name for path in export_hf(ours, _CONFIG, tokenizer_json, tmp_path / "hf", max_file_bytes=30_000)]
    assert "model.safetensors.index.json" in names
    assert sum(name.endswith(".safetensors") for name in names) >= 2
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    text = "rov rover <|eos|>"
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    vocabulary = VocabularyFile.from_json(tokenizer_json.read_bytes())
    assert ids[0].tolist() == NeuroTokenizer.from_file(vocabulary).encode(text).tolist()
    torch.testing.assert_close(model(ids).logits, ours(ids)[..., :NUM_IDS], rtol=0, atol=1e-5)
    assert int(model.generate(ids, max_new_tokens=8, do_sample=True).max()) < NUM_IDS
    assert (model.generation_config.eos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (2, 2, 0)
    assert tokenizer.model_max_length == _CONFIG.max_seq_len


def test_states_that_are_not_this_model_are_refused(tokenizer_json: Path, tmp_path: Path):
    state = random_model(_CONFIG).state_dict()
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
    with pytest.raises(ExportError, match="float16"):
        large = state | {"readout.norm.weight": torch.full((16,), 1e6)}
        export_hf(large, _CONFIG, tokenizer_json, tmp_path / "hf", dtype="float16")
    for qk_norm in (True, False):
        config = replace(_CONFIG, qk_norm=qk_norm, reorder_norm=not qk_norm)
        with pytest.raises(ExportError, match="no class of transformers"):
            export_hf(random_model(config), config, tokenizer_json, tmp_path / "hf")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tokenizer.json"]


def test_a_folder_with_something_in_it_and_a_tokenizer_that_is_none_are_refused(tokenizer_json: Path, tmp_path: Path):
    model, notes = random_model(_CONFIG), tmp_path / "hf" / "notes.txt"
    notes.parent.mkdir()
    notes.write_text("mine")
    with pytest.raises(ExportError, match="new or empty folder"):
        export_hf(model, _CONFIG, tokenizer_json, tmp_path / "hf")
    assert [path.name for path in (tmp_path / "hf").iterdir()] == ["notes.txt"]
    notes.unlink()
    assert export_hf(model, _CONFIG, tokenizer_json, tmp_path / "hf")
    tokenizer_json.write_text("{}")
    for name in ("tokenizer.json", "absent.json"):
        with pytest.raises(ExportError, match=name):
            export_hf(model, _CONFIG, tmp_path / name, tmp_path / "new")

"""A run that begins with another model's weights: each stage reads its own, and only those."""

from __future__ import annotations

import json
import pickle
import shutil
from collections import ChainMap
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed import checkpoint

from tests.support.checkpoint_actor import Hostile, stage_parameters
from tests.support.model_configs import NUM_IDS, random_model, small_config
from trainer.checkpoint.stages import export_torchtitan, fingerprint, load_initial_state
from trainer.checkpoint.stages.torchtitan import from_halves, rotated_heads, torchtitan_names
from trainer.errors import CheckpointError, CheckpointMismatchError, CorruptCheckpointError
from trainer.model import ModelConfig, build_model, export_hf, grow_vocabulary
from trainer.model.plan import StagePlan

_LLAMA = small_config(vocab_size=300)
_OLMO = small_config(vocab_size=300, qk_norm=True, reorder_norm=True)
_Export = Callable[..., Path]


@pytest.fixture
def exported(tokenizer_json: Path, tmp_path: Path) -> _Export:
    """Exports a model; the folder."""

    def export(config: ModelConfig, form: str, **options: Any) -> Path:
        write = export_hf if form == "hf" else export_torchtitan
        write(random_model(config).state_dict(), config, tokenizer_json, tmp_path / form, **options)
        return tmp_path / form

    return export


def _all_stages(folder: Path, plan: StagePlan, seed: int = 0) -> dict[str, Tensor]:
    return dict(ChainMap(*(load_initial_state(folder, plan, stage, seed=seed) for stage in plan.names)))


def _assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor], rows: int) -> None:
    """Equal, of the vocabulary as far as the folder had rows."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        part = slice(rows) if name in ("embedding.weight", "readout.output.weight") else slice(None)
        assert found[name].shape == value.shape and torch.equal(found[name][part], value[part]), name


@pytest.mark.parametrize(
    ("config", "form", "dtype"),
    [(_LLAMA, "hf", "bfloat16"), (_OLMO, "hf", "float32"), (_LLAMA, "titan", "float32"), (_LLAMA, "titan", "bfloat16")],
)
def test_what_was_exported_comes_back_bit_for_bit_in_fp32(config, form, dtype, exported):
    found = _all_stages(exported(config, form, dtype=dtype), StagePlan.of(config, 3))
    state = random_model(config).state_dict()
    _assert_equal(found, {name: value.to(getattr(torch, dtype)).float() for name, value in state.items()}, NUM_IDS)


@pytest.mark.slow
def test_what_transformers_saves_is_read(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4, "num_attention_heads": 4}
    theirs = LlamaForCausalLM(LlamaConfig(vocab_size=64, num_key_value_heads=2, rms_norm_eps=1e-5, **shape)).eval()
    theirs.save_pretrained(tmp_path / "hf")
    config = small_config(rope_theta=10_000.0)

    ours = build_model(config, 1)
    ours.load_state_dict(_all_stages(tmp_path / "hf", StagePlan.of(config, 2)))

    ids = torch.randint(0, 64, (2, 20))
    with torch.no_grad():
        torch.testing.assert_close(ours(ids), theirs(ids).logits, rtol=0, atol=1e-5)


def test_a_tied_model_s_output_begins_as_its_embedding(exported: _Export) -> None:
    tied = small_config(vocab_size=NUM_IDS, tie_embeddings=True)
    plan = StagePlan.of(replace(tied, tie_embeddings=False), 2)
    found = load_initial_state(exported(tied, "hf"), plan, "tail")
    assert torch.equal(found["readout.output.weight"], random_model(tied).embedding.weight)


def test_rows_it_lacks_are_those_a_vocabulary_would_have_grown_by(exported: _Export) -> None:
    folder, config = exported(_LLAMA, "hf"), replace(_LLAMA, vocab_size=1024)
    found = _all_stages(folder, StagePlan.of(config, 3), seed=7)
    fresh = build_model(_LLAMA, 7)
    grow_vocabulary(fresh, 1024, 7)
    for name in ("embedding.weight", "readout.output.weight"):
        assert torch.equal(found[name][NUM_IDS:], fresh.state_dict()[name][NUM_IDS:])
        assert torch.equal(found[name][:NUM_IDS], random_model(_LLAMA).state_dict()[name][:NUM_IDS])


def test_only_the_stage_s_own_files_are_read(exported: _Export) -> None:
    folder, plan = exported(_LLAMA, "hf", max_file_bytes=3_000), StagePlan.of(_LLAMA, 3)
    places = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    needed = {file for name, file in places.items() if name.startswith("model.layers.2.")}
    for file in set(places.values()) - needed:
        (folder / file).unlink()
    expected = stage_parameters(random_model(_LLAMA).state_dict(), plan, "body-1")
    _assert_equal(load_initial_state(folder, plan, "body-1"), expected, 300)
    with pytest.raises(CorruptCheckpointError, match=r"expected a whole tensor model\."):
        load_initial_state(folder, plan, "head")


def _titan_state(config: ModelConfig) -> dict[str, Tensor]:
    state, found = random_model(config).state_dict(), {}
    for ours, theirs in torchtitan_names(config).items():
        found[theirs] = from_halves(state[ours], rotated_heads(ours, config))
    return found


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("layout", ["old", "new", "nested"])
def test_a_training_checkpoint_of_torchtitan_s_is_read(layout: str, tmp_path: Path) -> None:
    model: dict[str, Any] = _titan_state(_LLAMA)
    if layout == "old":  # Before 0.3.
        model = {name.replace("qkv_linear.", "").replace("lm_head", "output"): model[name] for name in model}
    training = {"optimizer": {"state": {"x": torch.ones(3)}, "step": 7}, "train_state": {"losses": [1.0, 2.0]}}
    state = {"model": model, **training} if layout == "nested" else {**model, **training}
    checkpoint.save(state, checkpoint_id=tmp_path / "step-7", no_dist=True)

    found = _all_stages(tmp_path / "step-7", StagePlan.of(_LLAMA, 3))
    _assert_equal(found, random_model(_LLAMA).state_dict(), 300)


@pytest.mark.parametrize("form", ["hf", "titan"])
def test_another_architecture_is_refused_by_name(form: str, exported: _Export) -> None:
    folder = exported(_LLAMA, form)
    for name, name_of_hf, value in (
        *(("num_heads", "num_attention_heads", 2), ("rope_theta", "rope_theta", 1000.0)),
        *(("norm_eps", "rms_norm_eps", 1e-3), ("num_layers", "num_hidden_layers", 3)),
        ("ffn_dim", "intermediate_size", 32),
    ):
        plan = StagePlan.of(replace(_LLAMA, **{name: value}), 2)
        with pytest.raises(CheckpointMismatchError, match=name_of_hf if form == "hf" else name):
            load_initial_state(folder, plan, "head")
    with pytest.raises(CheckpointMismatchError, match=r"expected embedding.weight of shape \(256, 16\)"):
        load_initial_state(folder, StagePlan.of(replace(_LLAMA, vocab_size=256), 2), "head")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_of_a_checkpoint_that_says_nothing_shapes_and_depth_are_looked_at(tmp_path: Path) -> None:
    checkpoint.save(_titan_state(_LLAMA), checkpoint_id=tmp_path / "step", no_dist=True)
    for changes, message in (
        ({"num_layers": 3}, "expected a model of 3 layers, found more"),
        ({"num_layers": 6}, "expected a tensor layers.4"),
        ({"ffn_dim": 32}, "feed_forward.gate_proj.weight of shape"),
    ):
        with pytest.raises(CheckpointMismatchError, match=message):
            _all_stages(tmp_path / "step", StagePlan.of(replace(_LLAMA, **changes), 2))


def test_what_only_the_config_says_is_looked_at_and_a_subspace_cannot_begin_with_it(exported: _Export) -> None:
    folder = exported(_LLAMA, "hf")
    path = folder / "config.json"
    whole = json.loads(path.read_text())
    for name, value, said in (
        ("architectures", ["MistralForCausalLM"], "found MistralForCausalLM"),
        ("rope_parameters", {"rope_type": "linear", "rope_theta": 500_000.0, "factor": 2.0}, "rope_type='linear'"),
        *(("attention_bias", True, "attention_bias True"), ("head_dim", 8, "head_dim 8")),
        ("hidden_act", "gelu", "hidden_act 'gelu'"),
    ):
        path.write_text(json.dumps(whole | {name: value}))
        with pytest.raises(CheckpointMismatchError, match=said):
            load_initial_state(folder, StagePlan.of(_LLAMA, 2), "tail")
    plan = StagePlan.of(replace(_LLAMA, subspace_rank=4, subspace_free_layers=1), 2)
    with pytest.raises(CheckpointMismatchError, match="in no subspace"):
        load_initial_state(folder, plan, "head")


def test_a_description_that_would_run_something_is_refused(exported: _Export, tmp_path: Path) -> None:
    folder, trap = exported(_LLAMA, "titan"), tmp_path / "trap"
    whole = (folder / ".metadata").read_bytes()
    hostile = {
        pickle.dumps(Hostile(trap)): "which describes no tensor",
        b"cbuiltins\neval\n(S'1'\ntR.": r"builtins\.eval",
        b"cbuiltins\ngetattr\n(ctorch\nSize\nS'mro'\ntR.": "an attribute, which describes no tensor",
        whole[:100]: "expected a description of tensors",
        pickle.dumps({"not": "one"}): "found dict",
    }
    for body, said in hostile.items():
        (folder / ".metadata").write_bytes(body)
        with pytest.raises(CorruptCheckpointError, match=said):
            load_initial_state(folder, StagePlan.of(_LLAMA, 2), "head")
    assert not trap.exists()


def test_damaged_folders_are_told(exported: _Export, tmp_path: Path) -> None:
    plan = StagePlan.of(_LLAMA, 2)
    titan, hf = exported(_LLAMA, "titan"), exported(_LLAMA, "hf")
    data = next(titan.glob("*.distcp"))
    data.write_bytes(data.read_bytes()[:5000])
    (hf / "model.safetensors").write_bytes((hf / "model.safetensors").read_bytes()[:5000])
    for folder in (titan, hf):
        with pytest.raises(CorruptCheckpointError, match="whole tensor"):
            load_initial_state(folder, plan, "tail")
    (hf / "config.json").write_text("{")
    with pytest.raises(CorruptCheckpointError, match="expected JSON"):
        load_initial_state(hf, plan, "tail")
    with pytest.raises(CheckpointError, match="found neither; name the folder of one step"):
        load_initial_state(tmp_path, plan, "tail")


def test_weights_that_are_not_finite_are_refused(exported: _Export) -> None:
    folder = exported(_LLAMA, "hf")
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"][0] = float("inf")
    save_file(weights, folder / "model.safetensors")
    load_initial_state(folder, StagePlan.of(_LLAMA, 2), "head")
    with pytest.raises(CorruptCheckpointError, match=r"infinity in readout\.norm\.weight"):
        load_initial_state(folder, StagePlan.of(_LLAMA, 2), "tail")


@pytest.mark.parametrize("form", ["hf", "titan"])
def test_another_byte_is_another_model_and_another_name_is_not(form: str, exported: _Export, tmp_path: Path) -> None:
    model = exported(_LLAMA, form)
    before = fingerprint(str(model))
    shutil.copytree(model, tmp_path / "copy")
    (tmp_path / "copy" / "README.md").write_text("another one")
    assert fingerprint(tmp_path / "copy") == before
    weights = next(path for path in sorted(model.rglob("*")) if path.suffix in (".safetensors", ".distcp"))
    body = weights.read_bytes()
    middle = len(body) // 2
    flipped = body[:middle] + bytes([body[middle] ^ 1]) + body[middle + 1 :]
    for changed in (flipped, body[:-1], body + b"\0"):
        weights.write_bytes(changed)
        assert fingerprint(model) != before


def test_all_files_that_the_index_names_count(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    places = {"a": "1.safetensors", "b": "2.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    for name in ("1", "2", "consolidated"):
        (tmp_path / f"{name}.safetensors").write_bytes(b"weights")
    before = fingerprint(tmp_path)
    (tmp_path / "consolidated.safetensors").write_bytes(b"of no account")
    assert fingerprint(tmp_path) == before
    (tmp_path / "2.safetensors").write_bytes(b"Weights")
    assert fingerprint(tmp_path) != before
    (tmp_path / "2.safetensors").unlink()
    with pytest.raises(CorruptCheckpointError, match=r"expected files that can be read, found: .*2\.safetensors"):
        fingerprint(tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(CheckpointError, match="expected a Hugging Face folder"):
        fingerprint(tmp_path)

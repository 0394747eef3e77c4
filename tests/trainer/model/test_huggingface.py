"""Shapes as transformers states them, there and back; what is not computed here is refused; shapes of one's own."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.model_configs import small_config
from trainer.errors import CheckpointMismatchError, ExportError, TrainerUsageError
from trainer.model import ModelConfig, Transformer, flops_per_token, num_parameters, preset
from trainer.model.choice import ModelChoice
from trainer.model.config import RopeScaling
from trainer.model.huggingface import config_from_hf, hf_config, hf_names
from trainer.model.stages import model_shapes

_LLAMA3 = RopeScaling(rope_type="llama3", factor=8.0, original_max_seq_len=16)
_YARN = RopeScaling(rope_type="yarn", factor=4.0, original_max_seq_len=8, beta_fast=16.0)
_SCALINGS = (
    RopeScaling(),
    RopeScaling(rope_type="linear", factor=2.5),
    RopeScaling(rope_type="dynamic", factor=2.0),
    _LLAMA3,
    _YARN,
    replace(_YARN, attention_factor=1.2, truncate=False),
)
FAMILIES: dict[str, list[dict[str, Any]]] = {
    "LlamaForCausalLM": [{}, {"qkv_bias": True, "o_bias": True}],
    "MistralForCausalLM": [{"sliding_window": 8}, {"family": "mistral"}],
    "Qwen2ForCausalLM": [{"qkv_bias": True}, {"qkv_bias": True, "sliding_window": 8}],
    "Qwen3ForCausalLM": [
        {"qk_norm": True, "qk_norm_per_head": True},
        {"qk_norm": True, "qk_norm_per_head": True, "qkv_bias": True, "o_bias": True, "sliding_window": 4},
    ],
    "Olmo2ForCausalLM": [
        {"qk_norm": True, "reorder_norm": True},
        {"qk_norm": True, "reorder_norm": True, "qkv_bias": True, "o_bias": True},
    ],
}
_SHAPES = [fields for variants in FAMILIES.values() for fields in variants]
_CLASSES = {str(fields): name for name, variants in FAMILIES.items() for fields in variants}


def _stated(config: ModelConfig) -> dict[str, Any]:
    """As it comes out of the file."""
    return dict(json.loads(json.dumps(hf_config(config, config.vocab_size, "float32", {}))))


@settings(max_examples=60, deadline=None)
@given(
    fields=st.sampled_from(_SHAPES),
    scaling=st.sampled_from(_SCALINGS),
    head_dim=st.sampled_from([0, 4, 10]),
    tied=st.booleans(),
    theta=st.sampled_from([10_000.0, 500_000.0]),
)
def test_a_shape_comes_back_from_its_own_config(
    fields: dict[str, Any], scaling: RopeScaling, head_dim: int, tied: bool, theta: float
) -> None:
    config = small_config(
        **fields, rope_scaling=scaling, head_dim=head_dim, tie_embeddings=tied, rope_theta=theta, norm_eps=1e-6
    )
    stated = _stated(config)
    assert stated["architectures"] == [_CLASSES[str(fields)]]
    assert config_from_hf(stated, "config.json") == config
    assert ModelConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    # transformers 4 leaves rope_parameters out.
    del stated["rope_parameters"]
    assert config_from_hf(stated, "config.json") == config


@pytest.mark.parametrize("fields", _SHAPES, ids=str)
@pytest.mark.parametrize("head_dim", [0, 10])
def test_parameters_are_counted_and_named_as_they_are(fields: dict[str, Any], head_dim: int) -> None:
    config = small_config(**fields, head_dim=head_dim)
    parameters = dict(Transformer(config).named_parameters())
    assert num_parameters(config) == sum(parameter.numel() for parameter in parameters.values())
    assert list(model_shapes(config)) == list(parameters)
    assert hf_names(config).keys() == parameters.keys()
    attention = 12 * config.num_layers * config.num_heads * config.head_dim * 7
    assert flops_per_token(config, 7) == 6 * (num_parameters(config) - 64 * 16) + attention


def test_what_earlier_releases_know_is_written_as_they_write_it() -> None:
    known = {"vocab_size", "dim", "num_layers", "num_heads", "num_kv_heads", "ffn_dim", "max_seq_len", "rope_theta"}
    assert preset("tiny", 1024).to_dict().keys() == known | {"norm_eps", "qk_norm", "reorder_norm", "tie_embeddings"}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"architectures": ["GemmaForCausalLM"]}, "found GemmaForCausalLM"),
        ({"architectures": ["Qwen2ForCausalLM"]}, r"found Qwen2ForCausalLM \(model_type llama\)"),
        ({"architectures": None, "model_type": "llama"}, "found None"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"mlp_bias": True}, "mlp_bias True"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"hidden_size": "16"}, "hidden_size '16'"),
        ({"hidden_size": None}, "hidden_size None"),
        ({"num_hidden_layers": 10**12}, "model.num_layers: expected a whole number of at least 1 and at most 1024"),
        ({"num_hidden_layers": True}, "num_hidden_layers True"),
        ({"vocab_size": 10**9}, "model.vocab_size"),
        ({"intermediate_size": 2**40}, "model.ffn_dim"),
        ({"max_position_embeddings": 2**40}, "model.max_seq_len"),
        ({"num_key_value_heads": 3}, "model.num_kv_heads: expected a divisor"),
        ({"head_dim": 5}, "model.head_dim: expected an even number"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps nan"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps 1000"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings 'yes'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2}}, "rope_type 'longrope'"),
        ({"rope_scaling": {"type": ["linear"]}}, "rope_type"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope_parameters.factor"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0.5}}, "rope_scaling.factor: expected a number from 1"),
        ({"rope_scaling": {"full_attention": {"rope_type": "default"}}}, "one set of rotary positions"),
        ({"rope_scaling": [1]}, "one set of rotary positions"),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 0.5}},
            "original_max_position_embeddings",
        ),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 4}},
            "high_freq_factor: expected more than low_freq_factor",
        ),
    ],
)
def test_a_config_that_is_not_computed_here_is_refused_by_name(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(CheckpointMismatchError, match=said) as told:
        config_from_hf(_stated(small_config()) | changes, "DIR/config.json")
    assert str(told.value).startswith("DIR/config.json: ")
    assert len(str(told.value)) < 400


def test_layers_of_two_kinds_of_attention_are_refused_and_all_alike_are_not() -> None:
    stated = _stated(small_config(qkv_bias=True, sliding_window=8))
    for changes, window in (
        ({"max_window_layers": 2}, None),
        ({"layer_types": ["full_attention"] * 3 + ["sliding_attention"]}, None),
        ({"layer_types": "all"}, None),
        ({"max_window_layers": 4}, 0),
        ({"layer_types": ["full_attention"] * 4}, 0),
        ({"layer_types": ["sliding_attention"] * 4}, 8),
        ({"use_sliding_window": False}, 0),
    ):
        if window is None:
            with pytest.raises(CheckpointMismatchError, match=r"max_window_layers|layer_types"):
                config_from_hf(stated | changes, "")
        else:
            assert config_from_hf(stated | changes, "").sliding_window == window


def test_what_a_config_leaves_out_is_as_its_class_has_it() -> None:
    """As in files that list only what differs."""
    needed = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 8, "num_hidden_layers": 1}
    needed |= {"num_attention_heads": 32}
    mistral = config_from_hf({**needed, "architectures": ["MistralForCausalLM"]}, "")
    assert (mistral.num_kv_heads, mistral.sliding_window, mistral.max_seq_len) == (8, 4096, 131_072)
    llama = config_from_hf({**needed, "architectures": ["LlamaForCausalLM"]}, "")
    assert (llama.num_kv_heads, llama.rope_theta, llama.norm_eps, llama.max_seq_len) == (32, 10_000.0, 1e-6, 2048)
    qwen = config_from_hf({**needed, "architectures": ["Qwen3ForCausalLM"]}, "")
    assert (qwen.head_dim, qwen.num_kv_heads, qwen.qkv_bias) == (128, 32, False)


@pytest.mark.parametrize(
    "fields",
    [
        {"o_bias": True},
        {"qk_norm": True, "sliding_window": 4},
        {"qk_norm": True, "qk_norm_per_head": True, "qkv_bias": True},
        {"qk_norm": True, "qk_norm_per_head": True, "reorder_norm": True},
        {"qkv_bias": True, "o_bias": True, "sliding_window": 4},
    ],
    ids=str,
)
def test_a_shape_that_no_class_has_is_not_exported(fields: dict[str, Any]) -> None:
    with pytest.raises(ExportError, match="no class of transformers"):
        hf_names(small_config(**fields))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"dim": 15}, "model.dim: expected num_heads"),
        ({"head_dim": 7}, "model.head_dim: expected an even number"),
        ({"head_dim": 2**20}, "model.head_dim: expected a whole number"),
        ({"sliding_window": -1}, "model.sliding_window"),
        ({"sliding_window": 2.0}, "model.sliding_window"),
        ({"qk_norm_per_head": True}, "model.qk_norm: expected true"),
        ({"family": "gemma"}, "model.family"),
        ({"family": "mistral", "qkv_bias": True}, "model.family"),
        ({"subspace_rank": 2, "o_bias": True}, "model.o_bias"),
        ({"rope_scaling": RopeScaling(rope_type="dynamic"), "head_dim": 2}, "model.head_dim"),
        ({"rope_scaling": _YARN, "rope_theta": 1.0}, "model.rope_theta"),
        ({"rope_scaling": {"rope_type": "linear"}}, "model.rope_scaling"),
    ],
    ids=str,
)
def test_shapes_that_make_no_sense_are_told(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(TrainerUsageError, match=said):
        small_config(**fields)


@pytest.mark.parametrize("hostile", [{"rope_scaling": {"rope": 1}}, {"rope_scaling": {"factor": "x"}}, {"dims": 1}])
def test_a_peer_s_shape_is_checked_as_a_file_s_is(hostile: dict[str, Any]) -> None:
    with pytest.raises(TrainerUsageError):
        ModelConfig.from_dict(small_config().to_dict() | hostile)


def test_biases_begin_at_zero_and_a_window_hides_what_is_before_it() -> None:
    from trainer.model import build_model

    model = build_model(small_config(qkv_bias=True, o_bias=True, sliding_window=3, num_layers=1), 0)
    assert all(not value.any() for name, value in model.named_parameters() if name.endswith(".bias"))
    ids = torch.arange(10).view(1, 10)
    changed = ids.clone()
    changed[0, 4] = 50
    with torch.no_grad():
        same = (model(ids) == model(changed)).all(-1)[0]
    assert same.tolist() == [True] * 4 + [False] * 3 + [True] * 3, "one layer sees the token itself and two before it"


# -- shapes of one's own -----------------------------------------------------------------------------------------------


def test_a_preset_with_changes_and_a_shape_without_one() -> None:
    assert ModelChoice().shape(1024) is None
    assert ModelChoice(preset="tiny").shape(2048) == preset("tiny", 2048)
    changed = ModelChoice(preset="tiny", tie_embeddings=True, num_layers=6).shape(1024)
    assert changed == replace(preset("tiny", 1024), tie_embeddings=True, num_layers=6)
    wider = ModelChoice(preset="tiny", dim=256).shape(1024)
    assert wider is not None and wider.head_dim == 64
    own = ModelChoice(dim=64, num_layers=2, num_heads=4, ffn_dim=96, rope_scaling=_LLAMA3).shape(1024)
    assert own == ModelConfig(
        vocab_size=1024, dim=64, num_layers=2, num_heads=4, num_kv_heads=4, ffn_dim=96, rope_scaling=_LLAMA3
    )


@pytest.mark.parametrize("fields", _SHAPES, ids=str)
def test_what_was_resolved_names_the_shape_it_came_from(fields: dict[str, Any]) -> None:
    shape = small_config(**fields, vocab_size=1024, head_dim=6, rope_scaling=_YARN)
    resolved = ModelChoice(memory_bytes=7).resolved(shape, "a" * 64)
    assert (resolved.shape(1024), resolved.memory_bytes, resolved.contradicts(shape)) == (shape, 7, "")
    other = replace(shape, num_layers=5)
    assert resolved.contradicts(other) == "model.num_layers 4 (there 5)"
    named = ModelChoice(init_from="/x").resolved(preset("15m", 3072))
    assert (named.preset, named.dim, named.init_from) == ("15m", None, "/x")


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"dim": 64}, "model.num_layers: expected a number, since a model of no preset needs"),
        ({"tie_embeddings": True}, "model.dim: expected a number"),
        ({"preset": "tiny", "dim": 0}, "model.dim: expected a whole number"),
        ({"preset": "tiny", "num_heads": 3}, "model.dim: expected num_heads"),
        ({"preset": "tiny", "num_kv_heads": 3}, "model.num_kv_heads: expected a divisor"),
        ({"init_digest": "abc"}, "model.init_digest: expected 64 hexadecimal digits"),
    ],
    ids=str,
)
def test_a_choice_that_makes_no_shape_is_told(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(TrainerUsageError, match=said):
        ModelChoice(**fields)

"""A shape as transformers states it (config.json), in both directions, and the names of parameters in its files.

Of the family, each class is recognised by what it computes: Llama (also with biases everywhere), Mistral (a sliding
window), Qwen 2 (biases of queries, keys and values), Qwen 3 (a norm in each head), OLMo 2 (norms behind the parts).
Fields that a config leaves out have the defaults of the class, as transformers reads them. A shape that no class has,
or a config with anything that is not computed here, is refused by name: leaving it out would train another model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Final, cast, get_args

from trainer.errors import CheckpointMismatchError, ExportError, TrainerUsageError
from trainer.model.config import ModelConfig, RopeScaling, RopeType
from trainer.model.init import EMBEDDING, OUTPUT


@dataclass(frozen=True, slots=True, kw_only=True)
class _Family:
    """A model's class in transformers, and the defaults of the fields that a config may leave out."""

    architecture: str
    model_type: str
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    has_bias_switch: bool = True
    """Whether ``attention_bias`` says that all four projections have a bias."""


_LLAMA: Final = _Family(architecture="LlamaForCausalLM", model_type="llama", max_position_embeddings=2048)
_OLMO2: Final = _Family(
    architecture="Olmo2ForCausalLM", model_type="olmo2", max_position_embeddings=2048, rms_norm_eps=1e-5
)
_MISTRAL: Final = _Family(
    architecture="MistralForCausalLM",
    model_type="mistral",
    max_position_embeddings=131_072,
    num_key_value_heads=8,
    has_bias_switch=False,
)
_QWEN2: Final = _Family(
    architecture="Qwen2ForCausalLM",
    model_type="qwen2",
    max_position_embeddings=32_768,
    num_key_value_heads=32,
    has_bias_switch=False,
)
_QWEN3: Final = _Family(
    architecture="Qwen3ForCausalLM",
    model_type="qwen3",
    max_position_embeddings=32_768,
    num_key_value_heads=32,
    head_dim=128,
)
_FAMILIES: Final = {each.architecture: each for each in (_LLAMA, _MISTRAL, _QWEN2, _QWEN3, _OLMO2)}
_DEFAULT_WINDOW: Final = 4096
_DEFAULT_WINDOW_LAYERS: Final = 28
_DEFAULT_THETA: Final = 10_000.0
_LARGEST_NUMBER: Final = 1e300  # JSON has whole numbers that no float holds.
_NAMES: Final = {
    "dim": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "ffn_dim": "intermediate_size",
    "norm_eps": "rms_norm_eps",
    "o_bias": "attention_bias",
}
_OF_SCALING: Final[Mapping[str, Mapping[str, str]]] = {
    "default": {},
    "linear": {"factor": "factor"},
    "dynamic": {"factor": "factor"},
    "llama3": {
        "factor": "factor",
        "low_freq_factor": "low_freq_factor",
        "high_freq_factor": "high_freq_factor",
        "original_max_seq_len": "original_max_position_embeddings",
    },
    "yarn": {
        "factor": "factor",
        "beta_fast": "beta_fast",
        "beta_slow": "beta_slow",
        "truncate": "truncate",
        "original_max_seq_len": "original_max_position_embeddings",
    },
}
"""Of each type, what it uses: our field and transformers' name."""


# -- to transformers ---------------------------------------------------------------------------------------------------


def hf_config(
    config: ModelConfig, num_ids: int, dtype: str, special_ids: Mapping[str, int | None]
) -> dict[str, object]:
    """Returns the content of config.json, as transformers 4 and 5 read it. Raises `ExportError`: no class has it."""
    family = _family_of(config)
    rope = _hf_rope(config)
    values: dict[str, object] = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "vocab_size": num_ids,
        "hidden_size": config.dim,
        "intermediate_size": config.ffn_dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "max_position_embeddings": config.max_seq_len,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_parameters": {"rope_type": config.rope_scaling.rope_type, "rope_theta": config.rope_theta, **rope},
        "hidden_act": "silu",
        "attention_dropout": 0.0,
        "tie_word_embeddings": config.tie_embeddings,
        "dtype": dtype,
        "torch_dtype": dtype,
        **special_ids,
    }
    if rope:  # For transformers 4.
        values["rope_scaling"] = {"rope_type": config.rope_scaling.rope_type, **rope}
    if family.has_bias_switch:
        values["attention_bias"] = config.o_bias
    if family is _LLAMA:
        values["mlp_bias"] = False
    if family in (_LLAMA, _MISTRAL, _QWEN3) or config.query_dim != config.dim:
        values["head_dim"] = config.head_dim
    window = config.sliding_window or None
    if family is _MISTRAL:
        values["sliding_window"] = window
    if family in (_QWEN2, _QWEN3):
        values |= {"use_sliding_window": window is not None, "sliding_window": window}
        values["max_window_layers"] = 0 if window else config.num_layers
    return values


def hf_names(config: ModelConfig) -> dict[str, str]:
    """Maps our names to Hugging Face's, in the model's order. Raises `ExportError`: it has no class for the model."""
    if _family_of(config) is _OLMO2:
        norms = {"attention_norm": "post_attention_layernorm", "feed_forward_norm": "post_feedforward_layernorm"}
    else:
        norms = {"attention_norm": "input_layernorm", "feed_forward_norm": "post_attention_layernorm"}
    if config.qk_norm:
        norms |= {"attention.q_norm": "self_attn.q_norm", "attention.k_norm": "self_attn.k_norm"}
    parts = {f"attention.{part}_proj": f"self_attn.{part}_proj" for part in "qkvo"}
    biased = [*("qkv" if config.qkv_bias else ""), *("o" if config.o_bias else "")]
    parts |= {f"feed_forward.{part}_proj": f"mlp.{part}_proj" for part in ("gate", "up", "down")}
    of_block = {f"{ours}.weight": f"{theirs}.weight" for ours, theirs in (parts | norms).items()}
    of_block |= {f"attention.{part}_proj.bias": f"self_attn.{part}_proj.bias" for part in biased}
    names = {EMBEDDING: "model.embed_tokens.weight"}
    for number in range(config.num_layers):
        names |= {f"layers.{number}.{ours}": f"model.layers.{number}.{theirs}" for ours, theirs in of_block.items()}
    names["readout.norm.weight"] = "model.norm.weight"
    return names if config.tie_embeddings else names | {OUTPUT: "lm_head.weight"}


def _family_of(config: ModelConfig) -> _Family:
    """Returns the class that computes what a model of this shape does. Raises `ExportError`: there is none."""
    is_olmo2 = config.reorder_norm and config.qk_norm and not config.qk_norm_per_head
    same_biases = config.qkv_bias == config.o_bias
    if is_olmo2 and same_biases and not config.sliding_window:
        return _OLMO2
    if config.qk_norm_per_head and not config.reorder_norm and same_biases:
        return _QWEN3
    if not (config.qk_norm or config.reorder_norm):
        if config.qkv_bias and not config.o_bias:
            return _QWEN2
        if same_biases and not (config.qkv_bias and config.sliding_window):
            return _MISTRAL if config.sliding_window or config.family == "mistral" else _LLAMA
    names = ("qk_norm", "qk_norm_per_head", "reorder_norm", "qkv_bias", "o_bias", "sliding_window")
    found = ", ".join(f"{name}={getattr(config, name)}" for name in names)
    raise ExportError(
        "expected a model with both qk_norm and reorder_norm (OLMo-2), a norm in each head (Qwen 3), or neither "
        f"(Llama, Mistral, Qwen 2), found {found}; no class of transformers reads it"
    )


def _hf_rope(config: ModelConfig) -> dict[str, object]:
    """Returns what scales rotary positions, by transformers' names; empty where nothing does."""
    scaling = config.rope_scaling
    values = {theirs: getattr(scaling, ours) for ours, theirs in _OF_SCALING[scaling.rope_type].items()}
    if scaling.rope_type == "yarn" and scaling.attention_factor:
        values["attention_factor"] = float(scaling.attention_factor)
    return values


# -- from transformers -------------------------------------------------------------------------------------------------


def config_from_hf(values: Mapping[str, Any], where: str) -> ModelConfig:
    """Returns the shape that a config.json states; its rows are the model's own, not padded.

    Args:
        values: the file's content; nothing of it is believed before it is checked.
        where: names the file in messages.

    Raises:
        CheckpointMismatchError: it is of no class of the family, or has what is not computed here, or a value that is
            missing, of another type or out of range.
    """
    stated = _Stated(values, where, _stated_family(values, where))
    try:
        return stated.config()
    except TrainerUsageError as error:
        raise CheckpointMismatchError(f"{where}: {error}") from error


def differences(found: ModelConfig, expected: ModelConfig) -> list[str]:
    """Returns what differs of two shapes, but rows, longest sequence, ties and class, by transformers' names."""
    ignored = ("vocab_size", "max_seq_len", "tie_embeddings", "family")
    return [
        f"{_NAMES.get(name, name)} {getattr(found, name)!r} (here {getattr(expected, name)!r})"
        for name in (each.name for each in fields(ModelConfig))
        if name not in ignored and getattr(found, name) != getattr(expected, name)
    ]


def _stated_family(values: Mapping[str, Any], where: str) -> _Family:
    classes, model_type = values.get("architectures"), values.get("model_type")
    named = str(classes[0] if isinstance(classes, list) and classes else classes)
    family = _FAMILIES.get(named)
    if family is None or model_type not in (None, family.model_type):
        raise CheckpointMismatchError(
            f"{where}: expected one of {', '.join(_FAMILIES)}, found {named[:60]} (model_type {str(model_type)[:60]})"
        )
    return family


@dataclass(frozen=True, slots=True)
class _Stated:
    """A config.json of one class."""

    values: Mapping[str, Any]
    where: str
    family: _Family

    def config(self) -> ModelConfig:
        self._refuse_what_is_not_computed()
        family = self.family
        num_heads, dim = self._count("num_attention_heads"), self._count("hidden_size")
        max_seq_len = self._count("max_position_embeddings", family.max_position_embeddings)
        theta, scaling = self._rope(max_seq_len)
        window = self._window(self._count("num_hidden_layers"))
        biased = family.has_bias_switch and self._flag("attention_bias")
        return ModelConfig(
            vocab_size=self._count("vocab_size"),
            dim=dim,
            num_layers=self._count("num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=self._count("num_key_value_heads", family.num_key_value_heads, if_null=num_heads),
            ffn_dim=self._count("intermediate_size"),
            head_dim=self._count("head_dim", family.head_dim, if_null=dim // num_heads),
            max_seq_len=max_seq_len,
            rope_theta=theta,
            rope_scaling=scaling,
            norm_eps=self._number(self.values, "rms_norm_eps", family.rms_norm_eps),
            qk_norm=family in (_OLMO2, _QWEN3),
            qk_norm_per_head=family is _QWEN3,
            reorder_norm=family is _OLMO2,
            qkv_bias=biased or family is _QWEN2,
            o_bias=biased,
            sliding_window=window,
            tie_embeddings=self._flag("tie_word_embeddings"),
            family="mistral" if family is _MISTRAL and not window else "",
        )

    def _refuse_what_is_not_computed(self) -> None:
        for name, plain in (("hidden_act", "silu"), ("mlp_bias", False), ("quantization_config", None)):
            found = self.values.get(name, plain)
            if found != plain and not (name == "mlp_bias" and self.family is not _LLAMA):
                raise self._mismatch(name, str(plain), found)

    def _count(self, name: str, default: int | None = None, if_null: int | None = None) -> int:
        """Returns a whole number of 1 or more; ``default`` where the file leaves it out, else ``if_null``."""
        value = self.values.get(name, default)
        value = if_null if value is None else value
        if type(value) is not int or value < 1:
            raise self._mismatch(name, "a whole number of at least 1", value)
        return value

    def _number(self, values: Mapping[str, Any], name: str, default: float) -> float:
        value = values.get(name)
        value = default if value is None else value
        if type(value) not in (int, float) or not abs(value) <= _LARGEST_NUMBER:
            raise self._mismatch(name, "a finite number", value)
        return float(value)

    def _flag(self, name: str) -> bool:
        value = self.values.get(name)
        if value is not None and type(value) is not bool:
            raise self._mismatch(name, "true or false", value)
        return bool(value)

    def _window(self, num_layers: int) -> int:
        """Returns the sliding window of all layers; 0 where none has one."""
        if self.family in (_LLAMA, _OLMO2):
            return 0
        if self.family is _MISTRAL and self.values.get("sliding_window", _DEFAULT_WINDOW) is None:
            return 0
        if self.family is not _MISTRAL and not self._flag("use_sliding_window"):
            return 0
        kinds = self.values.get("layer_types")
        if self.family is _MISTRAL:
            is_windowed = True
        elif kinds is None:
            first = self.values.get("max_window_layers", _DEFAULT_WINDOW_LAYERS)
            if type(first) is not int or 0 < first < num_layers:
                raise self._mismatch("max_window_layers", "0, or all layers", first)
            is_windowed = first <= 0
        else:
            is_windowed = self._is_windowed(kinds)
        return self._count("sliding_window", _DEFAULT_WINDOW) if is_windowed else 0

    def _is_windowed(self, kinds: object) -> bool:
        found = set(map(str, kinds)) if isinstance(kinds, list) else {str(kinds)}
        if found not in ({"full_attention"}, {"sliding_attention"}):
            raise self._mismatch("layer_types", "one kind of attention in all layers", sorted(found))
        return found == {"sliding_attention"}

    def _rope(self, max_seq_len: int) -> tuple[float, RopeScaling]:
        """Returns the base and the scaling; transformers 5 has them in ``rope_parameters``, 4 in ``rope_scaling``."""
        rope = self.values.get("rope_scaling") or self.values.get("rope_parameters") or {}
        if not isinstance(rope, dict) or any(isinstance(value, dict) for value in rope.values()):
            raise self._mismatch("rope_parameters", "one set of rotary positions for all layers", rope)
        for values in (rope, self.values):
            if self._number(values, "partial_rotary_factor", 1.0) != 1.0:
                raise self._mismatch("partial_rotary_factor", "1", values["partial_rotary_factor"])
        theta = self._number(rope, "rope_theta", self._number(self.values, "rope_theta", _DEFAULT_THETA))
        kind = rope.get("rope_type") or rope.get("type") or "default"
        if kind not in get_args(RopeType):
            raise self._mismatch("rope_type", f"one of {', '.join(get_args(RopeType))}", kind)
        used: dict[str, Any] = {}
        for ours, theirs in _OF_SCALING[kind].items():
            if rope.get(theirs) is not None:
                used[ours] = (
                    rope[theirs] if ours in ("truncate", "original_max_seq_len") else self._number(rope, theirs, 0)
                )
        if "original_max_position_embeddings" in _OF_SCALING[kind].values():
            outer = self.values.get("original_max_position_embeddings")
            used["original_max_seq_len"] = outer or used.get("original_max_seq_len") or max_seq_len
        if kind == "yarn":
            used |= self._yarn(rope, used, max_seq_len)
        elif kind != "default" and "factor" not in used:
            raise self._mismatch("rope_parameters.factor", f"a number for {kind}", None)
        return theta, RopeScaling(rope_type=cast("RopeType", kind), **used)

    def _yarn(self, rope: Mapping[str, Any], used: Mapping[str, Any], max_seq_len: int) -> dict[str, float]:
        """Returns factor and scale of queries and keys, where the file states them by something else."""
        original = used["original_max_seq_len"]
        if type(original) is not int or original < 1:
            raise self._mismatch("original_max_position_embeddings", "a whole number of at least 1", original)
        factor = used.get("factor", max_seq_len / original)
        scale, of_all = (self._number(rope, name, 0.0) for name in ("mscale", "mscale_all_dim"))
        if rope.get("attention_factor") is not None:
            attention_factor = self._number(rope, "attention_factor", 0.0)
            if attention_factor <= 0:
                raise self._mismatch("attention_factor", "a number above 0", attention_factor)
        elif scale and of_all and factor > 1:
            growth = 0.1 * math.log(factor)
            attention_factor = (scale * growth + 1.0) / (of_all * growth + 1.0)
        else:
            attention_factor = 1.0 if scale and of_all else 0.0
        return {"factor": factor, "attention_factor": attention_factor}

    def _mismatch(self, name: str, expected: str, found: object) -> CheckpointMismatchError:
        return CheckpointMismatchError(f"{self.where}: expected {name} to be {expected}, found {name} {found!r:.80}")

"""The shape of a model: the numbers and switches that two nodes must share to train together.

It covers the Llama family: Llama 2 and 3, Mistral, Qwen 2 and 3, OLMo 2. Every number has an upper bound, far above any
model there is, since a shape may come from a file or a peer. What Llama has not is left out of `ModelConfig.to_dict`
unless it is used, so that shapes of earlier releases stay equal to those of this one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from typing import Any, Final, Literal, get_args

from manifests import MAX_VOCABULARY
from trainer.errors import TrainerUsageError

Recomputation = Literal["off", "selective", "full"]
"""What a block computes again in the backward pass: nothing, all but products and attention, all."""

RopeType = Literal["default", "linear", "dynamic", "llama3", "yarn"]
Family = Literal["", "mistral"]

IGNORED_LABEL: Final = -100
"""A label that counts neither as a loss nor as a token."""

_LARGEST: Final = {
    "vocab_size": MAX_VOCABULARY + 1024,
    "dim": 1 << 17,
    "num_layers": 1 << 10,
    "num_heads": 1 << 10,
    "num_kv_heads": 1 << 10,
    "head_dim": 1 << 11,
    "ffn_dim": 1 << 19,
    "max_seq_len": 1 << 21,
}
_NUMBERS = ("rope_theta", "norm_eps")
_SWITCHES = ("qk_norm", "qk_norm_per_head", "reorder_norm", "tie_embeddings", "qkv_bias", "o_bias")
_SUBSPACE = ("subspace_rank", "subspace_seed", "subspace_free_layers")
_UNLESS_USED: Final = ("qk_norm_per_head", "qkv_bias", "o_bias", "sliding_window", "family")
_LARGEST_FACTOR: Final = 1e6


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeScaling:
    """How rotary frequencies are stretched for longer sequences; a field says which type uses it."""

    rope_type: RopeType = "default"
    """``default``: not at all. ``linear``: all by the factor. ``dynamic``: beyond the longest sequence only, so not in
    training, but the export has it. ``llama3``: slow ones. ``yarn``: slow ones, and queries and keys are scaled."""
    factor: float = 1.0
    """How many times longer sequences may be."""
    original_max_seq_len: int = 0
    """Longest sequence before it was stretched (llama3, yarn), in tokens."""
    low_freq_factor: float = 1.0
    """llama3: frequencies of fewer turns within the original length are divided by the factor."""
    high_freq_factor: float = 4.0
    """llama3: those of more turns stay as they are."""
    beta_fast: float = 32.0
    """yarn: frequencies of more turns within the original length stay as they are."""
    beta_slow: float = 1.0
    """yarn: those of fewer turns are divided by the factor."""
    truncate: bool = True
    """yarn: the two borders are rounded outwards to whole frequencies."""
    attention_factor: float = 0.0
    """yarn: scale of queries and keys; 0: 0.1 · ln(factor) + 1."""

    def __post_init__(self) -> None:
        if self.rope_type not in get_args(RopeType):
            raise TrainerUsageError(
                f"model.rope_scaling.rope_type: expected one of {', '.join(get_args(RopeType))}, found "
                f"{str(self.rope_type)[:40]!r}"
            )
        if type(self.truncate) is not bool:
            raise TrainerUsageError(f"model.rope_scaling.truncate: expected true or false, found {self.truncate!r}")
        least = {"factor": 1.0, "attention_factor": 0.0}
        for name in ("factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor"):
            value = getattr(self, name)
            if type(value) not in (int, float) or not least.get(name, 1e-6) <= value <= _LARGEST_FACTOR:
                raise TrainerUsageError(
                    f"model.rope_scaling.{name}: expected a number from {least.get(name, 1e-6):g} to "
                    f"{_LARGEST_FACTOR:g}, found {value!r}"
                )
        length, needed = self.original_max_seq_len, self.rope_type in ("llama3", "yarn")
        if type(length) is not int or not needed <= length <= _LARGEST["max_seq_len"]:
            raise TrainerUsageError(
                f"model.rope_scaling.original_max_seq_len: expected a whole number from {int(needed)} to "
                f"{_LARGEST['max_seq_len']} for {self.rope_type}, found {length!r}"
            )
        for low, high in (("low_freq_factor", "high_freq_factor"), ("beta_slow", "beta_fast")):
            if not getattr(self, low) < getattr(self, high):
                raise TrainerUsageError(
                    f"model.rope_scaling.{high}: expected more than {low} ({getattr(self, low)}), found "
                    f"{getattr(self, high)}"
                )


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """A decoder's shape. Raises `TrainerUsageError`: a field is out of range, or two do not go together."""

    vocab_size: int
    """Rows of embedding and output, padding included (`trainer.model.rows_for`)."""
    dim: int
    """Width of the residual stream."""
    num_layers: int
    num_heads: int
    """Query heads."""
    num_kv_heads: int
    """Key and value heads; each serves num_heads / num_kv_heads query heads."""
    ffn_dim: int
    head_dim: int = 0
    """Values of one head; 0: dim / num_heads."""
    max_seq_len: int = 1024
    """Longest sequence, in tokens; the table of rotary positions has that many rows."""
    rope_theta: float = 500_000.0
    rope_scaling: RopeScaling = field(default_factory=RopeScaling)
    norm_eps: float = 1e-5
    qk_norm: bool = False
    """Queries and keys are normalised over all heads before they are rotated (OLMo-2)."""
    qk_norm_per_head: bool = False
    """With `qk_norm`: each head by itself, all with the same weights (Qwen 3)."""
    reorder_norm: bool = False
    """Each part's output is normalised instead of its input (OLMo-2)."""
    qkv_bias: bool = False
    """Queries, keys and values have biases (Qwen 2)."""
    o_bias: bool = False
    """The attention's output has a bias too."""
    sliding_window: int = 0
    """Tokens that a token attends to, itself included (Mistral 0.1); 0: all before it."""
    tie_embeddings: bool = False
    """The output matrix is the embedding; such a model cannot be cut into stages."""
    family: Family = ""
    """``mistral``: exported as one where Llama's class computes the same; empty: as the shape says."""
    subspace_rank: int = 0
    """Dimensions in which the residual stream is written to (`trainer.model.subspace`); 0: all, an ordinary model."""
    subspace_seed: int = 0
    """Of a subspace's basis and fixed embedding."""
    subspace_free_layers: int = 0
    """Last layers that may write anywhere; they lie behind the last stage boundary."""

    def __post_init__(self) -> None:
        if self.head_dim == 0 and type(self.dim) is type(self.num_heads) is int and self.num_heads > 0:
            self._derive_head_dim()
        for name, largest in _LARGEST.items():
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= largest:
                raise TrainerUsageError(
                    f"model.{name}: expected a whole number of at least 1 and at most {largest}, found {value!r}"
                )
        for name in _NUMBERS:
            value = getattr(self, name)
            if type(value) not in (int, float) or not (math.isfinite(value) and value > 0):
                raise TrainerUsageError(f"model.{name}: expected a finite number above 0, found {value!r}")
        for name in _SWITCHES:
            value = getattr(self, name)
            if type(value) is not bool:
                raise TrainerUsageError(f"model.{name}: expected true or false, found {value!r}")
        if self.head_dim % 2:
            raise TrainerUsageError(f"model.head_dim: expected an even number, found {self.head_dim}")
        if self.num_heads % self.num_kv_heads:
            raise TrainerUsageError(
                f"model.num_kv_heads: expected a divisor of num_heads ({self.num_heads}), found {self.num_kv_heads}"
            )
        self._check_variants()
        self._check_subspace()

    def _derive_head_dim(self) -> None:
        if self.dim % self.num_heads or self.dim // self.num_heads % 2:
            raise TrainerUsageError(
                f"model.dim: expected num_heads ({self.num_heads}) times an even number, or a head_dim of its own, "
                f"found {self.dim}"
            )
        object.__setattr__(self, "head_dim", self.dim // self.num_heads)  # The dataclass is frozen.

    def _check_variants(self) -> None:
        if not isinstance(self.rope_scaling, RopeScaling):
            raise TrainerUsageError(f"model.rope_scaling: expected a RopeScaling, found {self.rope_scaling!r}")
        if self.rope_scaling.rope_type == "dynamic" and self.head_dim < 4:
            raise TrainerUsageError(f"model.head_dim: expected 4 or more for dynamic scaling, found {self.head_dim}")
        if self.rope_scaling.rope_type == "yarn" and self.rope_theta <= 1:
            raise TrainerUsageError(f"model.rope_theta: expected more than 1 for yarn, found {self.rope_theta}")
        if self.qk_norm_per_head and not self.qk_norm:
            raise TrainerUsageError("model.qk_norm: expected true with qk_norm_per_head, found false")
        window, largest = self.sliding_window, _LARGEST["max_seq_len"]
        if type(window) is not int or not 0 <= window <= largest:
            raise TrainerUsageError(
                f"model.sliding_window: expected a whole number from 0 to {largest}, found {window!r}"
            )
        if self.family not in get_args(Family):
            raise TrainerUsageError(f"model.family: expected mistral or nothing, found {str(self.family)[:40]!r}")
        if self.family and (self.qk_norm or self.reorder_norm or self.qkv_bias or self.o_bias):
            raise TrainerUsageError(f"model.family: expected none with such norms or biases, found {self.family}")
        if self.subspace_rank and self.o_bias:
            raise TrainerUsageError("model.o_bias: expected false for a subspace network, found true")

    def _check_subspace(self) -> None:
        highest = {"subspace_rank": self.dim - 1, "subspace_seed": 2**63, "subspace_free_layers": self.num_layers}
        for name in _SUBSPACE:
            value = getattr(self, name)
            if type(value) is not int or not 0 <= value <= highest[name]:
                raise TrainerUsageError(
                    f"model.{name}: expected a whole number from 0 to {highest[name]}, found {value!r}"
                )
        if self.subspace_rank == 0 and (self.subspace_seed or self.subspace_free_layers):
            raise TrainerUsageError("model.subspace_rank: expected 1 or more with a subspace's seed or free layers")
        if self.subspace_rank and self.tie_embeddings:
            raise TrainerUsageError("model.tie_embeddings: expected false for a subspace network, found true")

    def is_constrained(self, layer: int) -> bool:
        """Returns whether that layer has to write within the subspace."""
        return self.subspace_rank > 0 and layer < self.num_layers - self.subspace_free_layers

    @property
    def subspace_gain(self) -> float:
        """Constant gain of re-ordered norms: with it each dimension written to has a mean square of 1, as usual."""
        return math.sqrt(self.subspace_rank / self.dim)

    @property
    def query_dim(self) -> int:
        """Values of all query heads together."""
        return self.num_heads * self.head_dim

    @property
    def kv_dim(self) -> int:
        """Values of all key heads together."""
        return self.num_kv_heads * self.head_dim

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values by field name, without those of what the model has not: a subspace, biases, ..."""
        values = asdict(self)
        unused = [name for name in _UNLESS_USED if not values[name]]
        unused += [] if self.subspace_rank else _SUBSPACE
        unused += ["head_dim"] if self.query_dim == self.dim else []
        unused += ["rope_scaling"] if self.rope_scaling == RopeScaling() else []
        return {name: value for name, value in values.items() if name not in unused}

    @staticmethod
    def from_dict(values: Mapping[str, object]) -> ModelConfig:
        """Reads what `to_dict` wrote, or an earlier release. Raises `TrainerUsageError`: the fields are others."""
        known = {each.name: each.default is MISSING and each.default_factory is MISSING for each in fields(ModelConfig)}
        unknown = sorted(values.keys() - known.keys())
        missing = sorted(name for name, is_required in known.items() if is_required and name not in values)
        if unknown or missing:
            raise TrainerUsageError(
                f"model: expected the fields {', '.join(known)}; missing {missing}, unknown {unknown}"
            )
        arguments: dict[str, Any] = dict(values)
        scaling = arguments.get("rope_scaling")
        if isinstance(scaling, Mapping):
            arguments["rope_scaling"] = _rope_scaling(scaling)
        return ModelConfig(**arguments)  # __post_init__ checks each.


def _rope_scaling(values: Mapping[str, Any]) -> RopeScaling:
    unknown = sorted(str(name)[:40] for name in values.keys() - {each.name for each in fields(RopeScaling)})
    if unknown:
        raise TrainerUsageError(f"model.rope_scaling: expected no field {unknown[0]!r}, found one")
    return RopeScaling(**values)


def stage_names(num_stages: int) -> tuple[str, ...]:
    """Returns the names of a run's stages, in order. Raises `TrainerUsageError`: there are fewer than two."""
    if num_stages < 2:
        raise TrainerUsageError(f"swarm.num_stages: expected 2 or more, found {num_stages}")
    return ("head", *(f"body-{number}" for number in range(1, num_stages - 1)), "tail")

"""The shape of a model: the fifteen numbers and switches that two nodes must share to train together."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from typing import Literal

from trainer.errors import TrainerUsageError

Recomputation = Literal["off", "selective", "full"]
"""What a block computes again in the backward pass: nothing, all but products and attention, all."""

_COUNTS = ("vocab_size", "dim", "num_layers", "num_heads", "num_kv_heads", "ffn_dim", "max_seq_len")
_NUMBERS = ("rope_theta", "norm_eps")
_SWITCHES = ("qk_norm", "reorder_norm", "tie_embeddings")
_SUBSPACE = ("subspace_rank", "subspace_seed", "subspace_free_layers")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """A decoder's shape. Raises `TrainerUsageError`: a field is out of range, or two do not go together."""

    vocab_size: int
    """Rows of embedding and output, padding included (`trainer.model.rows_for`)."""
    dim: int
    """Width of the residual stream."""
    num_layers: int
    num_heads: int
    """Query heads; each has dim / num_heads values."""
    num_kv_heads: int
    """Key and value heads; each serves num_heads / num_kv_heads query heads."""
    ffn_dim: int
    max_seq_len: int = 1024
    """Longest sequence, in tokens; the table of rotary positions has that many rows."""
    rope_theta: float = 500_000.0
    norm_eps: float = 1e-5
    qk_norm: bool = False
    """Queries and keys are normalised over all heads before they are rotated (OLMo-2)."""
    reorder_norm: bool = False
    """Each part's output is normalised instead of its input (OLMo-2)."""
    tie_embeddings: bool = False
    """The output matrix is the embedding; such a model cannot be cut into stages."""
    subspace_rank: int = 0
    """Dimensions in which the residual stream is written to (`trainer.model.subspace`); 0: all, an ordinary model."""
    subspace_seed: int = 0
    """Of a subspace's basis and fixed embedding."""
    subspace_free_layers: int = 0
    """Last layers that may write anywhere; they lie behind the last stage boundary."""

    def __post_init__(self) -> None:
        for name in _COUNTS:
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise TrainerUsageError(f"model.{name}: expected a whole number of at least 1, found {value!r}")
        for name in _NUMBERS:
            value = getattr(self, name)
            if type(value) not in (int, float) or not (math.isfinite(value) and value > 0):
                raise TrainerUsageError(f"model.{name}: expected a finite number above 0, found {value!r}")
        for name in _SWITCHES:
            value = getattr(self, name)
            if type(value) is not bool:
                raise TrainerUsageError(f"model.{name}: expected true or false, found {value!r}")
        if self.dim % self.num_heads or self.head_dim % 2:
            raise TrainerUsageError(
                f"model.dim: expected num_heads ({self.num_heads}) times an even number, found {self.dim}"
            )
        if self.num_heads % self.num_kv_heads:
            raise TrainerUsageError(
                f"model.num_kv_heads: expected a divisor of num_heads ({self.num_heads}), found {self.num_kv_heads}"
            )
        self._check_subspace()

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
    def head_dim(self) -> int:
        """Values of one head."""
        return self.dim // self.num_heads

    @property
    def kv_dim(self) -> int:
        """Values of all key heads together."""
        return self.num_kv_heads * self.head_dim

    def to_dict(self) -> dict[str, int | float | bool]:
        """Returns plain values by field name; an ordinary model's without a subspace's."""
        values = asdict(self)
        return values if self.subspace_rank else {name: values[name] for name in values if name not in _SUBSPACE}

    @staticmethod
    def from_dict(values: Mapping[str, object]) -> ModelConfig:
        """Reads what `to_dict` wrote, or an earlier release. Raises `TrainerUsageError`: the fields are others."""
        known = {field.name: field.default is MISSING for field in fields(ModelConfig)}
        unknown = sorted(values.keys() - known.keys())
        missing = sorted(name for name, is_required in known.items() if is_required and name not in values)
        if unknown or missing:
            raise TrainerUsageError(
                f"model: expected the fields {', '.join(known)}; missing {missing}, unknown {unknown}"
            )
        return ModelConfig(**dict(values))  # type: ignore[arg-type]  # __post_init__ checks each


def stage_names(num_stages: int) -> tuple[str, ...]:
    """Returns the names of a run's stages, in order. Raises `TrainerUsageError`: there are fewer than two."""
    if num_stages < 2:
        raise TrainerUsageError(f"swarm.num_stages: expected 2 or more, found {num_stages}")
    return ("head", *(f"body-{number}" for number in range(1, num_stages - 1)), "tail")

"""Which model a run trains: a preset, a shape of its own, a preset with changes, or one that exists already.

A field that is not given is the preset's. A shape without a preset needs a width, layers, heads and the feed-forward's
width, and has defaults for the rest. What was chosen is written out whole beside the checkpoint, so that another node
can be given the very file.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final

from trainer.errors import TrainerUsageError
from trainer.model.config import Family, ModelConfig, RopeScaling
from trainer.model.sizing import PRESETS, preset

AUTO: Final = "auto"
_NEEDED: Final = ("dim", "num_layers", "num_heads", "ffn_dim")
_DIGEST: Final = re.compile(r"(?:[0-9a-f]{64})?")
_ANY_ROWS: Final = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelChoice:
    """Which model is trained. Raises `TrainerUsageError`: the fields make no shape."""

    preset: str = AUTO
    """A preset's name; ``auto``: that of the checkpoint, else by the memory this machine has."""
    memory_bytes: int = 0
    """For ``auto``: memory to plan with; 0: what the machine has available."""
    init_from: str = ""
    """Hugging Face folder (Llama, Mistral, Qwen 2 and 3, OLMo 2) to begin with; empty: first weights by the seed."""
    init_digest: str = ""
    """Digest of the weights the run began with, found by itself; with it alone a node takes its state from others."""
    dim: int | None = None
    """Width of the residual stream; this field and those below change the preset, or make a shape without one."""
    num_layers: int | None = None
    num_heads: int | None = None
    num_kv_heads: int | None = None
    """Heads of keys and values; without a preset as many as of queries."""
    head_dim: int | None = None
    """Values of one head; else dim / num_heads."""
    ffn_dim: int | None = None
    max_seq_len: int | None = None
    rope_theta: float | None = None
    rope_scaling: RopeScaling = field(default_factory=RopeScaling)
    norm_eps: float | None = None
    qk_norm: bool | None = None
    """Normalise queries and keys (OLMo 2)."""
    qk_norm_per_head: bool | None = None
    """Each head by itself (Qwen 3)."""
    reorder_norm: bool | None = None
    """Normalise what a part writes, in place of what it reads (OLMo 2)."""
    qkv_bias: bool | None = None
    """Biases of queries, keys and values (Qwen 2)."""
    o_bias: bool | None = None
    """A bias of the attention's output."""
    sliding_window: int | None = None
    """Tokens a token attends to; 0: all before it (Mistral 0.1)."""
    tie_embeddings: bool | None = None
    """The output matrix is the embedding."""
    family: Family | None = None
    """``mistral``: exported as one."""

    def __post_init__(self) -> None:
        if not _DIGEST.fullmatch(self.init_digest):
            raise TrainerUsageError(
                f"model.init_digest: expected 64 hexadecimal digits or nothing, found {self.init_digest[:80]!r}"
            )
        if self._given() and not self.init_from:
            self.shape(_ANY_ROWS)

    def shape(self, vocab_rows: int) -> ModelConfig | None:
        """Returns the shape with so many rows; None where checkpoint or memory decide.

        Raises `TrainerUsageError`: there is no such preset, or the fields are too few, out of range or do not fit.
        """
        given = self._given()
        if self.preset != AUTO:
            base = preset(self.preset, vocab_rows)
            if given.keys() & {"dim", "num_heads"} and "head_dim" not in given:
                given["head_dim"] = 0
            return replace(base, **given)
        if not given:
            return None
        for name in _NEEDED:
            if name not in given:
                raise TrainerUsageError(
                    f"model.{name}: expected a number, since a model of no preset needs {', '.join(_NEEDED)}, found "
                    "none; or name the preset that the other fields change"
                )
        return ModelConfig(vocab_size=vocab_rows, **{"num_kv_heads": given["num_heads"], **given})

    def contradicts(self, shape: ModelConfig) -> str:
        """Returns what this choice has otherwise than a shape (rows aside), by its fields; nothing where it fits."""
        is_partial = self.preset == AUTO and bool(self.init_from)
        wanted = replace(shape, **self._given()) if is_partial else self.shape(shape.vocab_size)
        if wanted is None:
            return ""
        return ", ".join(
            f"model.{name} {getattr(wanted, name)} (there {getattr(shape, name)})"
            for name in (*_FIELDS, "rope_scaling")
            if getattr(wanted, name) != getattr(shape, name)
        )

    def resolved(self, shape: ModelConfig, init_digest: str = "") -> ModelChoice:
        """Returns the choice that names this shape: a preset where it is one, else all its fields."""
        named = next((name for name in PRESETS if preset(name, shape.vocab_size) == shape), AUTO)
        values: dict[str, Any] = dict.fromkeys(_FIELDS)
        if named == AUTO:
            values = {name: getattr(shape, name) for name in _FIELDS}
        scaling = shape.rope_scaling if named == AUTO else RopeScaling()
        values |= {"preset": named, "rope_scaling": scaling, "init_digest": init_digest}
        return replace(self, **values)

    def _given(self) -> dict[str, Any]:
        given = {name: getattr(self, name) for name in _FIELDS if getattr(self, name) is not None}
        return given if self.rope_scaling == RopeScaling() else given | {"rope_scaling": self.rope_scaling}


_OTHERS: Final = ("preset", "memory_bytes", "init_from", "init_digest", "rope_scaling")
_FIELDS: Final = tuple(each.name for each in fields(ModelChoice) if each.name not in _OTHERS)
"""Those of `ModelConfig`, but for its rows and its scaling."""

"""`InnerConfig`: the options of the inner loop (spec T-5 to T-7), checked where they are given.

Rows that go through the model at once follow available memory (spec T-8): 30 % of what is left beside the training
state is for activations of 8 bytes a token, layer and channel, which is what activation checkpointing keeps. Without it
the blocks keep ten times as much, so the rows are also limited by that. The loss makes logits in chunks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Literal, get_args

from trainer.errors import TrainerUsageError
from trainer.model.config import ModelConfig, Recomputation
from trainer.model.sizing import TRAINING_BYTES_PER_PARAMETER, num_parameters

Schedule = Literal["cosine", "linear", "wsd", "constant"]
Precision = Literal["auto", "fp32", "bf16"]
Compile = Literal["auto", "on", "off"]
OptimizerName = Literal["adamw", "muon"]

_WITH_TOKENS: Final = "0, or more with decay_end_tokens"
_CHOICES: Final = {
    "schedule": get_args(Schedule),
    "precision": get_args(Precision),
    "compile": get_args(Compile),
    "optimizer": get_args(OptimizerName),
    "activation_checkpointing": get_args(Recomputation),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class InnerConfig:
    """How a node trains between two synchronisations."""

    optimizer: OptimizerName = "adamw"
    """muon: Muon for the matrices within the blocks, AdamW for the rest, at the same rates."""
    lr: float = 1e-4
    """Highest learning rate, reached at the end of the warm-up."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW: how much of the first and of the second moment is kept a step."""
    eps: float = 1e-8
    """AdamW: added to the root of the second moment."""
    weight_decay: float = 0.1
    """AdamW: decoupled decay of matrices and embeddings; norms and vectors have none."""
    max_grad_norm: float = 1.0
    """The gradient of the whole model is scaled down to this Euclidean norm."""
    schedule: Schedule = "cosine"
    """How the learning rate falls behind the warm-up; wsd: not until ``decay_steps`` before the end, then in a line."""
    warmup_steps: int = 1000
    """Steps over which the learning rate rises in a line from 0."""
    decay_end_step: int = 50_000
    """Step, counted from the beginning of the run, at which the learning rate has reached its lowest."""
    decay_steps: int = 0
    """Of wsd: steps of the fall; 0: a fifth of those between the warm-up and the end."""
    decay_end_tokens: int = 0
    """Given, warm-up and fall are in tokens: where the learning rate has reached its lowest; 0: they are in steps."""
    warmup_tokens: int = 0
    """With ``decay_end_tokens``: tokens over which the learning rate rises from 0."""
    decay_tokens: int = 0
    """With ``decay_end_tokens``, of wsd: tokens of the fall; 0: a fifth."""
    min_lr_ratio: float = 0.1
    """Lowest learning rate as a share of ``lr``."""
    rewarm_steps: int = 100
    """Steps over which the learning rate rises again at a node that was away for long; 0: it does not."""
    rewarm_after_steps: int = 1000
    """How many steps of the others a node must have missed for that: by default two rounds, since one is missed by
    accident and AdamW's moments of 500 steps ago still nearly fit."""
    micro_batch_size: int = 0
    """Rows of a batch that goes through the model at once; 0: by available memory, 1 to 8."""
    accumulation_steps: int = 1
    """Batches whose gradients make one step, each weighted by its tokens."""
    seq_len: int = 512
    """Tokens of a row."""
    precision: Precision = "auto"
    """Of the products in the model; parameters and moments are fp32. auto: bf16 on CUDA, fp32 elsewhere."""
    compile: Compile = "auto"
    """torch.compile. auto: on CUDA only."""
    activation_checkpointing: Recomputation | bool = "off"
    """What blocks compute again in the backward pass. full (or true): all of it, about a third more time for a tenth of
    the activations' memory; selective: all but products and attention, a few percent more time for two thirds."""
    fp8: bool = False
    """Products of the blocks in fp8 (extra ``fp8``), on GPUs that have it; models below 1B parameters stay in bf16."""
    document_mask: bool = False
    """No token sees one of another document of its row: FlexAttention on a GPU, a dense mask elsewhere."""
    max_skipped_in_a_row: int = 10
    """Steps in a row with a loss or gradient that is not finite, after which the run ends."""

    def __post_init__(self) -> None:
        """Raises TrainerUsageError, with the field and its value, if a value makes no sense."""
        if isinstance(self.activation_checkpointing, bool):  # As earlier releases wrote it.
            object.__setattr__(self, "activation_checkpointing", "full" if self.activation_checkpointing else "off")
        valid_betas = len(self.betas) == 2 and all(0.0 <= beta < 1.0 for beta in self.betas)
        in_tokens, is_constant = self.decay_end_tokens > 0, self.schedule == "constant"
        falls = is_constant or in_tokens or self.decay_end_step > self.warmup_steps
        falls_in_tokens = is_constant or not in_tokens or self.decay_end_tokens > self.warmup_tokens
        fits = self.schedule != "wsd" or in_tokens or self.decay_steps <= self.decay_end_step - self.warmup_steps
        fits_tokens = not in_tokens or self.decay_tokens <= self.decay_end_tokens - self.warmup_tokens
        checks = [
            *((name, getattr(self, name) in names, f"one of {', '.join(names)}") for name, names in _CHOICES.items()),
            ("lr", self.lr > 0, "a learning rate above 0"),
            ("betas", valid_betas, "two numbers of 0 or more, below 1"),
            ("eps", self.eps > 0, "a number above 0"),
            ("weight_decay", self.weight_decay >= 0, "0 or more"),
            ("max_grad_norm", self.max_grad_norm > 0, "a norm above 0"),
            ("warmup_steps", self.warmup_steps >= 0, "0 or more"),
            ("decay_end_step", falls, f"more than warmup_steps ({self.warmup_steps})"),
            ("decay_steps", self.decay_steps >= 0 and fits, "0, or steps that fit between warm-up and decay_end_step"),
            ("decay_end_tokens", self.decay_end_tokens >= 0 and falls_in_tokens, "0, or more than warmup_tokens"),
            ("warmup_tokens", self.warmup_tokens >= 0 and (in_tokens or not self.warmup_tokens), _WITH_TOKENS),
            ("decay_tokens", self.decay_tokens >= 0 and (in_tokens or not self.decay_tokens), _WITH_TOKENS),
            ("decay_tokens", fits_tokens, "0, or tokens that fit between warmup_tokens and decay_end_tokens"),
            ("rewarm_steps", self.rewarm_steps >= 0, "0 (off) or more"),
            ("rewarm_after_steps", self.rewarm_after_steps >= 1, "1 or more"),
            ("min_lr_ratio", 0.0 <= self.min_lr_ratio <= 1.0, "a share between 0 and 1"),
            ("micro_batch_size", self.micro_batch_size >= 0, "0 (by memory) or more"),
            ("accumulation_steps", self.accumulation_steps >= 1, "1 or more"),
            ("seq_len", self.seq_len >= 1, "1 or more"),
            ("max_skipped_in_a_row", self.max_skipped_in_a_row >= 1, "1 or more"),
        ]
        for name, holds, expected in checks:
            found = getattr(self, name)
            if isinstance(found, float) and not math.isfinite(found):
                raise TrainerUsageError(f"{name}: expected a finite number, found {found}")
            if not holds:
                raise TrainerUsageError(f"{name}: expected {expected}, found {found!r}")

    @property
    def tokens_per_step(self) -> int:
        """Tokens of a step of all ranks that share ``micro_batch_size``; 0 while these rows are still to be chosen."""
        return self.micro_batch_size * self.accumulation_steps * self.seq_len


_MAX_BATCH_SIZE: Final = 8  # Spec T-8; more rows a step come from accumulation.
_SPECIFIED_BYTES: Final = 8  # Activations for each token, layer and channel (spec T-8).
_SPECIFIED_SHARE: Final = 0.3  # Share of memory for them (spec T-8).
_FITTING_SHARE: Final = 0.7
"""Of what is left, for what the blocks keep; the rest for the loss's chunks, the allocator and the batches."""


def batch_size_for(
    available_memory_bytes: int,
    config: ModelConfig,
    seq_len: int,
    *,
    activation_checkpointing: Recomputation | bool = "off",
) -> int:
    """Returns the rows of a micro-batch, 1 to 8, for this memory; 1 also where the model hardly fits."""
    if seq_len < 1 or available_memory_bytes < 1:
        raise TrainerUsageError(
            f"expected memory and seq_len of 1 or more, found {available_memory_bytes} bytes and {seq_len} tokens"
        )
    left_bytes = available_memory_bytes - TRAINING_BYTES_PER_PARAMETER * num_parameters(config)
    row_layers = seq_len * config.num_layers
    rows = int(left_bytes * _SPECIFIED_SHARE) // (row_layers * config.dim * _SPECIFIED_BYTES)
    if activation_checkpointing not in (True, "full"):
        each = activation_bytes(config, selective=activation_checkpointing == "selective")
        rows = min(rows, int(left_bytes * _FITTING_SHARE) // (row_layers * each))
    return max(1, min(rows, _MAX_BATCH_SIZE))


def activation_bytes(config: ModelConfig, *, selective: bool = False) -> int:
    """Returns the bytes one block keeps of one token for the backward pass, within 4 % for tiny to 125m in fp32.

    ``selective`` activation checkpointing keeps the block's input and the outputs of products and attention.
    """
    if selective:
        return 4 * (5 * config.dim + 2 * config.ffn_dim + 2 * config.kv_dim)
    return 4 * (8 * config.dim + 4 * config.ffn_dim + 3 * config.kv_dim)

"""From what was asked for to what is run: architecture and batch size, decided once and then kept.

The order (issue, 000 "Architecture Stability"): a preset that was named; else what the checkpoint was trained with; else
what this machine's memory has room for. The result is written beside the checkpoint, so a restart decides alike.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

from trainer.checkpoint import CheckpointContents, checkpoint_path
from trainer.config import RunConfig, to_yaml
from trainer.errors import CheckpointError, TrainerUsageError
from trainer.inner import batch_size_for
from trainer.model import ModelConfig, available_memory_bytes, choose_architecture, preset

__all__ = ["fits", "resolve", "write_config"]

logger = logging.getLogger(__name__)

_BYTES_PER_PARAMETER_ALONE = 16
_BYTES_PER_PARAMETER_SHARED = 32
"""On a CPU the anchor, momentum and reference of DiLoCo lie in the same memory."""


def resolve(
    config: RunConfig, saved: CheckpointContents | None, vocab_rows: int, device_type: str
) -> tuple[RunConfig, ModelConfig]:
    """The configuration with nothing left to decide, and the model's shape.

    Args:
        config: what was asked for.
        saved: the checkpoint to go on from, if there is one.
        vocab_rows: rows for the store's vocabulary, for a model that begins anew.
        device_type: ``cpu``, ``cuda`` or ``mps``.
    """
    memory_bytes = config.model.memory_bytes or available_memory_bytes(device_type)
    if saved is not None:
        shape = ModelConfig.from_dict(dict(saved.architecture))
    elif config.model.preset != "auto":
        shape = preset(config.model.preset, vocab_rows)
    else:
        each = _BYTES_PER_PARAMETER_SHARED if device_type == "cpu" else _BYTES_PER_PARAMETER_ALONE
        shape = choose_architecture(memory_bytes, vocab_rows, bytes_per_parameter=each)
    inner = config.inner
    if inner.seq_len > shape.max_seq_len:
        raise TrainerUsageError(
            f"inner.seq_len: expected at most the {shape.max_seq_len} tokens this architecture is made for, found "
            f"{inner.seq_len}"
        )
    if not inner.micro_batch_size:
        rows = _saved_rows(saved) or batch_size_for(
            memory_bytes, shape, inner.seq_len, activation_checkpointing=inner.activation_checkpointing
        )
        inner = replace(inner, micro_batch_size=rows)
    return replace(config, inner=inner), shape


def fits(config: RunConfig, saved: CheckpointContents) -> bool:
    """Whether a checkpoint is of the preset that was named; always, if none was."""
    if config.model.preset == "auto":
        return True
    shape = ModelConfig.from_dict(dict(saved.architecture))
    return shape == preset(config.model.preset, shape.vocab_size)


def write_config(config: RunConfig, wallet: str, instance: str) -> Path:
    """Writes the resolved configuration beside the checkpoint.

    Raises:
        CheckpointError: the folder cannot be written to.
    """
    path = checkpoint_path(config.checkpoint.directory, wallet, instance).with_suffix(".yaml")
    hidden = replace(config, checkpoint=replace(config.checkpoint, token=""))
    try:
        path.write_text(to_yaml(hidden), encoding="utf-8")
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be written: {error.strerror}") from error
    return path


def _saved_rows(saved: CheckpointContents | None) -> int:
    inner = saved.config.get("inner") if saved is not None else None
    rows = inner.get("micro_batch_size") if isinstance(inner, dict) else None
    return rows if isinstance(rows, int) else 0

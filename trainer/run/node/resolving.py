"""From what was asked for to what is run: architecture and batch size, decided once and then kept.

The order (spec T-27): a preset that was named; else what the checkpoint was trained with; else
what this machine's memory has room for. The result is written beside the checkpoint, and given as ``--config`` it makes
the same run on any machine.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from genesis.store.durable import TemporaryFile
from trainer.checkpoint.node import CheckpointContents
from trainer.errors import CheckpointError, TrainerUsageError
from trainer.inner import batch_size_for
from trainer.model import PRESETS, ModelConfig, choose_architecture, preset
from trainer.run.config import RunConfig, changed_options, to_yaml

__all__ = ["resolve", "write_config"]

logger = logging.getLogger(__name__)

_AUTO = "auto"
_BYTES_PER_PARAMETER_ALONE = 16
_BYTES_PER_PARAMETER_SHARED = 32
"""On a CPU the anchor, momentum and reference of DiLoCo lie in the same memory."""


def resolve(
    config: RunConfig,
    saved: CheckpointContents | None,
    vocab_rows: int,
    memory_bytes: Callable[[], int],
    *,
    shared_memory: bool,
) -> tuple[RunConfig, ModelConfig]:
    """The configuration with nothing left to decide, and the model's shape.

    Args:
        config: what was asked for.
        saved: the checkpoint to go on from, if there is one.
        vocab_rows: rows for the store's vocabulary, for a model that begins anew.
        memory_bytes: how much memory there is, asked only where it decides.
        shared_memory: model and DiLoCo's vectors lie in the same memory (on a CPU).

    Raises:
        TrainerUsageError: there is no such preset, or its context is shorter than the rows asked for.
    """
    if saved is not None:
        shape = ModelConfig.from_dict(dict(saved.architecture))
    elif config.model.preset != _AUTO:
        shape = preset(config.model.preset, vocab_rows)
    else:
        each = _BYTES_PER_PARAMETER_SHARED if shared_memory else _BYTES_PER_PARAMETER_ALONE
        shape = choose_architecture(memory_bytes(), vocab_rows, bytes_per_parameter=each)
    inner = config.inner
    if inner.seq_len > shape.max_seq_len:
        raise TrainerUsageError(
            f"inner.seq_len: expected at most the {shape.max_seq_len} tokens this architecture is made for, found "
            f"{inner.seq_len}"
        )
    if not inner.micro_batch_size:
        rows = _saved_rows(saved) or batch_size_for(
            memory_bytes(), shape, inner.seq_len, activation_checkpointing=inner.activation_checkpointing
        )
        inner = replace(inner, micro_batch_size=rows)
    return replace(config, inner=inner, model=replace(config.model, preset=_name_of(shape))), shape


def write_config(config: RunConfig, path: Path) -> None:
    """Writes the resolved configuration, and says what in it is not at its default.

    Raises:
        CheckpointError: the folder cannot be written to.
    """
    text = to_yaml(config)
    try:
        with TemporaryFile(path.parent) as file:
            file.write(memoryview(text.encode()))
            file.replace(path)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be written: {error.strerror}") from error
    changed = "  ".join(f"{name}={value}" for name, value in changed_options(config).items())
    logger.info("configuration: %s  (all of it: %s)", changed, path)
    logger.debug("%s", text)


def _name_of(shape: ModelConfig) -> str:
    """The preset of this shape; of none, ``auto``: the checkpoint decides."""
    named = (name for name in PRESETS if preset(name, shape.vocab_size) == shape)
    return next(named, _AUTO)


def _saved_rows(saved: CheckpointContents | None) -> int:
    inner = saved.config.get("inner") if saved is not None else None
    rows = inner.get("micro_batch_size") if isinstance(inner, dict) else None
    return rows if isinstance(rows, int) else 0

"""What a node starts with: the checkpoint to resume, and the options that memory or the checkpoint decide.

The architecture is a preset that was named; else what the checkpoint was trained with; else what this machine's memory
has room for (spec T-27). The resolved configuration is written beside the checkpoint; given as ``--config`` it makes
the same run on any machine.

The newest whole checkpoint is resumed if it is of this run. One of another preset than was named is put aside and kept:
the command line wins, and nothing is lost. The ranks of a cluster save each for itself, so a job that was killed may
leave them at different rounds (or steps, under DDP): all go back to the one that the slowest of them had reached.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from genesis.store.durable import TemporaryFile
from trainer.checkpoint.node import CheckpointContents, checkpoint_path, load_newest, read_checkpoint
from trainer.checkpoint.node.naming import kept_paths
from trainer.errors import CheckpointError, CheckpointMismatchError, CorruptCheckpointError, TrainerUsageError
from trainer.inner import batch_size_for
from trainer.model import PRESETS, ModelConfig, choose_architecture, preset
from trainer.run.config import RunConfig, changed_options, to_yaml
from trainer.run.node.cluster import Ranks

__all__ = ["checkpoint_to_resume", "resolve", "write_config"]

logger = logging.getLogger(__name__)

_AUTO = "auto"
_BYTES_PER_PARAMETER_ALONE = 16
_BYTES_PER_PARAMETER_SHARED = 32
"""On a CPU the anchor, momentum and reference of DiLoCo lie in the same memory."""
_NO_POSITION = -1


def resolve(
    config: RunConfig,
    saved: CheckpointContents | None,
    vocab_rows: int,
    memory_bytes: Callable[[], int],
    *,
    shared_memory: bool,
) -> tuple[RunConfig, ModelConfig]:
    """Returns the configuration with nothing left to decide, and the model's shape.

    Args:
        config: as the user gave it.
        saved: the checkpoint to resume, if there is one.
        vocab_rows: rows for the store's vocabulary, for a model that begins anew.
        memory_bytes: returns how much memory there is; called only where it decides.
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
    # A shape that is no preset's is ``auto``: the checkpoint decides.
    name = next((name for name in PRESETS if preset(name, shape.vocab_size) == shape), _AUTO)
    return replace(config, inner=inner, model=replace(config.model, preset=name)), shape


def _saved_rows(saved: CheckpointContents | None) -> int:
    inner = saved.config.get("inner") if saved is not None else None
    rows = inner.get("micro_batch_size") if isinstance(inner, dict) else None
    return rows if isinstance(rows, int) else 0


def write_config(config: RunConfig, path: Path) -> None:
    """Writes the resolved configuration, and logs the options that are not at their defaults.

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


def checkpoint_to_resume(config: RunConfig, wallet: str, ranks: Ranks) -> CheckpointContents | None:
    """Returns the checkpoint to resume; None where training begins anew.

    Raises:
        CorruptCheckpointError: there are some, and none is whole.
        CheckpointMismatchError: it is of another run or release, or the ranks have none in common.
    """
    newest = checkpoint_path(config.checkpoint.directory, wallet, ranks.instance)
    found = load_newest(config.checkpoint.directory, wallet, ranks.instance)
    saved = CheckpointContents.from_mapping(found) if found is not None else None
    if saved is not None:
        _check_run(config, saved)
        shape = ModelConfig.from_dict(dict(saved.architecture))
        if config.model.preset != _AUTO and shape != preset(config.model.preset, shape.vocab_size):
            _put_aside(config, newest, saved)
            saved = None
    return _in_step(config, newest, ranks, saved) if ranks.in_cluster else saved


def _check_run(config: RunConfig, saved: CheckpointContents) -> None:
    for name in ("run_id", "strategy"):
        found, expected = saved.config.get(name), getattr(config, name)
        if found != expected:
            raise CheckpointMismatchError(
                f"expected a checkpoint of {name} {expected}, found one of {found}; name another folder "
                f"(--checkpoint-dir), or --{name.replace('_', '-')} {found} to go on with it"
            )


def _put_aside(config: RunConfig, newest: Path, saved: CheckpointContents) -> None:
    prefix = f"replaced-{int(saved.timestamp)}-"
    for path in (*kept_paths(newest), newest):
        path.rename(path.with_name(prefix + path.name))
    logger.warning(
        "the checkpoint is not of the preset %s: it was put aside as %s, and training begins anew",
        config.model.preset,
        newest.with_name(prefix + newest.name),
    )


def _in_step(
    config: RunConfig, newest: Path, ranks: Ranks, saved: CheckpointContents | None
) -> CheckpointContents | None:
    """Returns the newest checkpoint of the position that every rank has reached."""
    position = _position(config, saved)
    least, most = ranks.least(position), -ranks.least(-position)
    if least == _NO_POSITION < most:
        raise CheckpointMismatchError(
            "expected a checkpoint of every rank or of none, found some ranks without; start as many ranks as before, "
            f"or begin anew in another --checkpoint-dir than {config.checkpoint.directory}"
        )
    if position == least:
        return saved
    for path in kept_paths(newest):
        try:
            earlier = CheckpointContents.from_mapping(read_checkpoint(path))
        except CorruptCheckpointError as error:
            logger.warning("%s", error)
            continue
        if _position(config, earlier) == least:
            logger.warning("another rank had not come as far: going on from %s", path.name)
            return earlier
    raise CheckpointMismatchError(
        f"{newest}: expected a checkpoint of {'step' if config.strategy == 'ddp' else 'round'} {least}, where another "
        f"rank stands, found only later ones; keep more of them (checkpoint.keep), or begin anew"
    )


def _position(config: RunConfig, saved: CheckpointContents | None) -> int:
    """Returns what ranks must have in common: steps under DDP, committed rounds under DiLoCo."""
    if saved is None:
        return _NO_POSITION
    return saved.training_rounds if config.strategy == "ddp" else int(saved.diloco["round_index"])

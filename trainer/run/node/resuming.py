"""Which checkpoint a node goes on from, if from any.

The newest one that is whole, if it is of this run. One of another preset than was named is put aside and kept: the
command line wins, and nothing is lost. The ranks of a cluster save each for itself, so a job that was killed may leave
them at different rounds (or steps, under DDP): all go back to the one that the slowest of them had reached.
"""

from __future__ import annotations

import logging

from trainer.checkpoint.node import CheckpointContents, checkpoint_path, load_newest, read_checkpoint
from trainer.checkpoint.node.naming import kept_paths
from trainer.errors import CheckpointMismatchError, CorruptCheckpointError
from trainer.model import ModelConfig, preset
from trainer.run.config import RunConfig
from trainer.run.node.cluster import Ranks

__all__ = ["checkpoint_to_resume"]

logger = logging.getLogger(__name__)

_NONE = -1


def checkpoint_to_resume(config: RunConfig, wallet: str, ranks: Ranks) -> CheckpointContents | None:
    """The checkpoint to go on from; None where training begins anew.

    Raises:
        CorruptCheckpointError: there are some, and none is whole.
        CheckpointMismatchError: it is of another run or release, or the ranks have none in common.
    """
    found = load_newest(config.checkpoint.directory, wallet, ranks.instance)
    saved = CheckpointContents.from_mapping(found) if found is not None else None
    if saved is not None:
        _check_run(config, saved)
        if not _is_of_named_preset(config, saved):
            _put_aside(config, wallet, ranks, saved)
            saved = None
    return _in_step(config, wallet, ranks, saved) if ranks.in_cluster else saved


def _check_run(config: RunConfig, saved: CheckpointContents) -> None:
    for name in ("run_id", "strategy"):
        found, expected = saved.config.get(name), getattr(config, name)
        if found != expected:
            raise CheckpointMismatchError(
                f"expected a checkpoint of {name} {expected}, found one of {found}; name another folder "
                f"(--checkpoint-dir), or --{name.replace('_', '-')} {found} to go on with it"
            )


def _is_of_named_preset(config: RunConfig, saved: CheckpointContents) -> bool:
    """Always, if none was named."""
    if config.model.preset == "auto":
        return True
    shape = ModelConfig.from_dict(dict(saved.architecture))
    return shape == preset(config.model.preset, shape.vocab_size)


def _put_aside(config: RunConfig, wallet: str, ranks: Ranks, saved: CheckpointContents) -> None:
    newest = checkpoint_path(config.checkpoint.directory, wallet, ranks.instance)
    prefix = f"replaced-{int(saved.timestamp)}-"
    for path in (*kept_paths(newest), newest):
        path.rename(path.with_name(prefix + path.name))
    logger.warning(
        "the checkpoint is not of the preset %s: it was put aside as %s, and training begins anew",
        config.model.preset,
        newest.with_name(prefix + newest.name),
    )


def _in_step(
    config: RunConfig, wallet: str, ranks: Ranks, saved: CheckpointContents | None
) -> CheckpointContents | None:
    """The newest checkpoint of the position that every rank has reached."""
    position = _position(config, saved)
    least, most = ranks.least(position), -ranks.least(-position)
    if least == _NONE < most:
        raise CheckpointMismatchError(
            "expected a checkpoint of every rank or of none, found some ranks without; start as many ranks as before, "
            f"or begin anew in another --checkpoint-dir than {config.checkpoint.directory}"
        )
    if position == least:
        return saved
    newest = checkpoint_path(config.checkpoint.directory, wallet, ranks.instance)
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
    """What ranks must have in common: parameters under DDP, committed rounds under DiLoCo."""
    if saved is None:
        return _NONE
    return saved.training_rounds if config.strategy == "ddp" else int(saved.diloco["round_index"])

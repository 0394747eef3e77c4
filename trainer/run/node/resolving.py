"""What a node decides before it starts: the checkpoint it resumes, the architecture it trains, the rows of a step.

The architecture is a preset or shape that was named, or that of the model to begin with; else what the checkpoint was
trained with; else the largest that this machine's memory has room for (spec T-27). The newest whole checkpoint is
resumed if it is of this run, and one of another model than was named is put aside; ranks that a kill left at different
rounds go back to the slowest's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from trainer.checkpoint.files import read_checkpoint
from trainer.checkpoint.node import CheckpointContents, checkpoint_path, kept_paths, load_newest
from trainer.errors import CheckpointMismatchError, CorruptCheckpointError, TrainerUsageError
from trainer.inner import batch_size_for
from trainer.inner.memory import largest_preset
from trainer.inner.rank_place import Parallel, RankPlace, choose_parallel, rows_memory_bytes
from trainer.model import ModelConfig, choose_architecture, num_parameters
from trainer.model.sizing import SHARED_BYTES_PER_PARAMETER
from trainer.run.config import RunConfig
from trainer.run.node.cluster import Ranks

logger = logging.getLogger(__name__)

_WEIGHT_BYTES = 4
_NO_POSITION = -1
_ALONE = RankPlace()


def wanted_parallel(config: RunConfig) -> Parallel:
    """Returns how a node's ranks are to share a model; ``auto`` with Muon, which needs whole matrices, is ``ddp``."""
    return "ddp" if config.parallel == "auto" and config.inner.optimizer == "muon" else config.parallel


def resolve(
    config: RunConfig,
    saved: CheckpointContents | None,
    vocab_rows: int,
    memory_bytes: Callable[[], int],
    *,
    shared_memory: bool,
    place: RankPlace = _ALONE,
    first: ModelConfig | None = None,
) -> tuple[RunConfig, ModelConfig]:
    """Returns the configuration with nothing left to decide, and the model's shape.

    A model that begins anew has ``vocab_rows``, or the shape ``first`` of the model it begins with; ``memory_bytes``,
    what one rank has, is called only where it decides. In ``shared_memory`` (on a CPU) lie both the model and DiLoCo's
    vectors. Rows are those of all of a node's ranks.

    Raises:
        TrainerUsageError: too little memory for the weights of ``first``, rows longer than the architecture is made
            for, or fewer rows than ranks.
    """
    chosen = None if saved is not None else first or config.model.shape(vocab_rows)
    if saved is not None:
        shape = ModelConfig.from_dict(dict(saved.architecture))
    elif chosen is not None:
        shape = chosen
    else:
        shape = _largest_shape(config, memory_bytes(), vocab_rows, shared_memory=shared_memory, place=place)
    if first is not None and shared_memory and (free_bytes := memory_bytes()) < _WEIGHT_BYTES * num_parameters(shape):
        raise TrainerUsageError(
            f"--init-from: expected {_WEIGHT_BYTES * num_parameters(shape):,} bytes of memory for the weights alone, "
            f"found {free_bytes:,}; take a smaller model"
        )
    inner = config.inner
    if inner.seq_len > shape.max_seq_len:
        raise TrainerUsageError(
            f"inner.seq_len: expected at most the {shape.max_seq_len} tokens this architecture is made for, found "
            f"{inner.seq_len}"
        )
    if not inner.micro_batch_size:
        saved_inner = saved.config.get("inner") if saved is not None else None
        rows = saved_inner.get("micro_batch_size") if isinstance(saved_inner, dict) else None
        if not (isinstance(rows, int) and rows):
            checkpointing = inner.activation_checkpointing
            available = memory_bytes()
            if place.size > 1:
                kind = choose_parallel(wanted_parallel(config), shape, memory_bytes, place)
                available = rows_memory_bytes(kind, shape, available, place)
            rows = batch_size_for(available, shape, inner.seq_len, activation_checkpointing=checkpointing) * place.size
        inner = replace(inner, micro_batch_size=rows)
    if inner.micro_batch_size < place.size:
        raise TrainerUsageError(
            f"inner.micro_batch_size: expected a row for each of the node's {place.size} ranks or more, found "
            f"{inner.micro_batch_size}; it counts the rows of all ranks together"
        )
    return replace(config, inner=inner, model=config.model.resolved(shape, config.model.init_digest)), shape


def _largest_shape(
    config: RunConfig, memory_bytes: int, vocab_rows: int, *, shared_memory: bool, place: RankPlace
) -> ModelConfig:
    """Returns the largest preset for what one rank has: on a GPU by the model of a step, on a CPU by the parameter."""
    num_shards = 1 if wanted_parallel(config) == "ddp" else place.local_size
    if shared_memory:
        return choose_architecture(
            num_shards * memory_bytes, vocab_rows, bytes_per_parameter=SHARED_BYTES_PER_PARAMETER
        )
    overlaps = config.moves_anchor and config.outer.overlap_steps > 0 and place.size == 1
    beside = -(-_WEIGHT_BYTES // config.outer.num_fragments) if overlaps else 0  # Snapshot and merge of a round.
    return largest_preset(
        memory_bytes, vocab_rows, config.inner, num_ranks=place.size, num_shards=num_shards, beside=beside
    )


def checkpoint_to_resume(config: RunConfig, wallet: str, ranks: Ranks) -> CheckpointContents | None:
    """Returns the newest whole checkpoint, which all ranks have; None: training begins anew.

    One of another model than was chosen is put aside.

    Raises:
        CheckpointMismatchError: it is of another run or strategy, or ranks have come to no common position.
        CheckpointError: there are files, and none of them can be read.
    """
    newest = checkpoint_path(config.checkpoint.directory, wallet, ranks.instance)
    found = load_newest(config.checkpoint.directory, wallet, ranks.instance)
    saved = CheckpointContents.from_mapping(found) if found is not None else None
    if saved is not None:
        for name in ("run_id", "strategy"):
            value, expected = saved.config.get(name), getattr(config, name)
            if value != expected:
                raise CheckpointMismatchError(
                    f"expected a checkpoint of {name} {expected}, found one of {value}; name another folder "
                    f"(--checkpoint-dir), or --{name.replace('_', '-')} {value} to go on with it"
                )
        wrong = config.model.contradicts(ModelConfig.from_dict(dict(saved.architecture)))
        if wrong:
            _put_aside(newest, saved, wrong)
            saved = None
    return _in_step(config, newest, ranks, saved) if ranks.in_cluster else saved


def _put_aside(newest: Path, saved: CheckpointContents, wrong: str) -> None:
    prefix = f"replaced-{int(saved.timestamp)}-"
    for path in (*kept_paths(newest), newest):
        path.rename(path.with_name(prefix + path.name))
    logger.warning(
        "the checkpoint is of another model than was chosen (%s): it was put aside as %s, and training begins anew",
        wrong,
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

"""What a process of a swarm begins with: the model and its cut, the same for all, and a name of its own.

The store's vocabulary decides how many rows the embedding has; where workers cannot reach the store, the run file says
it (``swarm.vocab_rows``). The vocabulary does not grow during a run of a swarm.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast

from pydantic import JsonValue

from genesis.file_lock import FileLock, FileLockedError
from trainer.collective import Terms
from trainer.collective.messages import RUN_DIGEST
from trainer.errors import CheckpointError, LedgerError, TrainerUsageError
from trainer.model import VOCAB_STEP, ModelConfig, rows_for
from trainer.model.plan import StagePlan
from trainer.network.discovery.stage_report import StageReport, StageUid
from trainer.network.rpc.envelope import PROTOCOL_VERSION
from trainer.run.config import RunConfig, to_mapping
from trainer.run.node.data import lineage_of, open_session
from trainer.run.node.identity import identity_path

DRIVER = "driver"  # Stands for a stage in the terms of drivers, which hold none,
WHOLE = "whole"  # and in those of nodes that hold all.

_LOCAL = ("round_timeout_s", "background", "delayed", "ahead_s")
"""Options of a strategy in which workers may differ: they change when a round is over, not its result."""
_SHARED_INNER = (
    "lr",
    "betas",
    "eps",
    "weight_decay",
    "schedule",
    "warmup_steps",
    "decay_end_step",
    "min_lr_ratio",
    "micro_batch_size",
    "seq_len",
)
"""Options of `InnerConfig` that change the result of a stage's step; not those that change how it is computed."""


@dataclass(frozen=True, slots=True)
class SwarmShape:
    """What all processes of a swarm have to agree on."""

    plan: StagePlan
    tokenizer_lineage: str  # Empty where the run file gives the rows of the vocabulary.
    synchronisation: dict[str, JsonValue]
    num_ids: int
    """Ids of the vocabulary; losses leave further rows out. All rows where the run file gives their number."""

    @property
    def model(self) -> ModelConfig:
        """Configuration of the whole model."""
        return self.plan.config

    def terms(self, stage: str) -> Terms:
        """What the workers of a stage must have in common; a driver's stage is `DRIVER`, a whole node's `WHOLE`."""
        cut: dict[str, JsonValue] = {"stage": stage, "layers_of_stages": [len(layers) for layers in self.plan.ranges]}
        return Terms(
            architecture={**self.model.to_dict(), **cut},
            tokenizer_lineage=self.tokenizer_lineage,
            synchronisation=self.synchronisation,
        )


def shape_of(config: RunConfig) -> SwarmShape:
    """Plans the model and its cut; reads the store's vocabulary if the run file does not give its rows."""
    swarm = config.swarm
    if config.model.init_from or config.model.init_digest:
        raise TrainerUsageError(
            "model.init_from: expected none for a swarm, whose workers begin with the folder of swarm.start_from, "
            f"found {config.model.init_from or config.model.init_digest[:12]}"
        )
    if config.model.shape(VOCAB_STEP) is None:
        raise TrainerUsageError(
            "model.preset: expected a preset in the run file, since no single machine's memory decides for a swarm; "
            "found auto"
        )
    if config.inner.decay_end_tokens:
        raise TrainerUsageError(
            "inner.decay_end_tokens: expected 0 for a swarm, whose steps have swarm.stage.target_tokens tokens each; "
            f"found {config.inner.decay_end_tokens}: give inner.decay_end_step"
        )
    rows, num_ids, lineage = swarm.vocab_rows, swarm.vocab_rows, ""
    if not rows:
        vocabulary = open_session(config.data).catalog.vocabulary()
        num_ids, lineage = vocabulary.next_merge_id, lineage_of(vocabulary)
        rows = rows_for(num_ids)
    whole = cast("ModelConfig", config.model.shape(rows))
    plan = StagePlan.of(whole, swarm.num_stages, swarm.layers, swarm.cut)
    plan = StagePlan(swarm.subspace.applied_to(whole, len(plan.ranges[-1])), plan.names, plan.ranges)
    if config.inner.seq_len > whole.max_seq_len:
        raise TrainerUsageError(
            f"inner.seq_len: expected at most the {whole.max_seq_len} tokens this architecture is made for, found "
            f"{config.inner.seq_len}"
        )
    return SwarmShape(plan, lineage, _synchronisation(config), num_ids)


def _synchronisation(config: RunConfig) -> dict[str, JsonValue]:
    """The options that change the result of a step or a round."""
    values: dict[str, JsonValue] = {
        "protocol": PROTOCOL_VERSION,
        "seed": config.seed,
        "strategy": config.strategy,
        "compression": config.round_options.compression,
        "swarm.activation_codec": config.swarm.activation_codec,
        "swarm.target_tokens": target_tokens_of(config),
        "swarm.clip_factor": str(config.swarm.stage.clip_factor),  # JSON has no infinity.
        "swarm.tail_clip_factor": str(config.swarm.stage.tail_clip_factor),
        "swarm.outlier_factor": str(config.swarm.stage.outlier_factor),
        "swarm.start_from": bool(config.swarm.start_from),  # Workers compare the models themselves.
    }
    values |= {f"inner.{name}": value for name, value in to_mapping(config.inner).items() if name in _SHARED_INNER}
    by_strategy = {"async_sparta": config.swarm.sparta, "grad": config.grad, "sparseloco": config.sparseloco}
    options = by_strategy.get(config.strategy, config.diloco)
    values |= {f"{config.strategy}.{name}": value for name, value in to_mapping(options).items() if name not in _LOCAL}
    if config.strategy == "async_sparta":
        values["async_sparta.salt"] = 0  # Was an option; workers of earlier versions compare it.
    if config.run_digest:
        values[RUN_DIGEST] = config.run_digest
    if config.swarm.whole_nodes:  # Other workers weigh by the square root of their work, and call the rounds otherwise.
        values["swarm.whole_nodes"] = True
    if config.powersgd_rank:
        values["powersgd_rank"] = config.powersgd_rank
    return values | {f"rule.{name}": value for name, value in to_mapping(config.rule).items()}


def target_tokens_of(config: RunConfig) -> int:
    """Tokens of a stage's optimizer step: as the run file says, else eight micro-batches' worth."""
    rows = max(1, config.inner.micro_batch_size)
    return config.swarm.stage.target_tokens or 8 * rows * config.inner.seq_len


def stage_of(report: StageReport) -> str:
    """The stage a worker reports on, such as ``body-1``."""
    return StageUid.parse(report.uid).stage


@contextmanager
def as_usage_errors() -> Iterator[None]:
    """Encloses what a process reads and opens before it serves: what cannot be used is then a `TrainerUsageError`.

    Its exit code 2 tells `swarm up` and service managers (systemd's ``RestartPreventExitStatus=2``) not to restart it.
    A failure after it has served keeps its own class: another start may well succeed.
    """
    try:
        yield
    except (CheckpointError, LedgerError) as error:
        raise TrainerUsageError(str(error)) from error


@contextmanager
def only_process(config: RunConfig) -> Iterator[None]:
    """Nobody else on this machine goes by this node id and state folder meanwhile, or it is a `TrainerUsageError`.

    Both would announce themselves under one key.
    """
    file = identity_path(config).with_suffix(".lock")
    lock = FileLock(file)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except FileLockedError:
        raise TrainerUsageError(
            f"--node-id {config.node_id}: expected a name of its own, found that another process with the key in "
            f"{file.parent} is running; give this one another --node-id or state_dir (a second swarm up: another "
            "--folder)"
        ) from None
    except OSError as error:
        raise TrainerUsageError(f"state_dir: expected a folder that can be written, found {error}") from error
    with lock:
        yield

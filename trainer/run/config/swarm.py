"""`SwarmConfig`: the part of a run file about a model cut into stages (spec P-40, P-41, P-43)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from trainer.checkpoint.stages.config import StagewiseConfig
from trainer.errors import TrainerUsageError
from trainer.model.subspace.config import SubspaceConfig
from trainer.outer.sparta.config import SpartaConfig
from trainer.pipeline.driver.config import DriverConfig
from trainer.pipeline.ledger.config import LedgerConfig
from trainer.pipeline.stage import StageConfig
from trainer.pipeline.worker.config import WorkerConfig

__all__ = ["JoinConfig", "Pipeline", "SwarmConfig"]

Pipeline = Literal["none", "swarm"]


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinConfig:
    """How workers of a stage come and go.

    Raises:
        TrainerUsageError: a value is out of range.
    """

    window: float = 0.1
    """Share of a round, from its beginning, in which a newcomer may take up the stage's state (spec P-43)."""
    max_rounds_behind: int = 5
    """A newcomer that is further behind when it has the state fetches a newer one (spec P-43)."""
    max_failed_rounds: int = 2
    """Failed rounds in a row, while the others went on, after which a worker takes up their state (spec P-41)."""
    idle_s: float = 20.0
    """A stage whose round has not moved for so long waits for no other worker."""
    first_peers_s: float = 6.0
    """How long a worker looks for others of its stage before it acts as the first."""
    leave_s: float = 30.0
    """How long a stopping worker may take to finish its micro-batches and share its state."""

    def __post_init__(self) -> None:
        if not 0 < self.window <= 1:
            raise TrainerUsageError(f"swarm.join.window: expected more than 0 and at most 1, found {self.window}")
        for name in ("max_rounds_behind", "max_failed_rounds"):
            if getattr(self, name) < 1:
                raise TrainerUsageError(f"swarm.join.{name}: expected 1 or more, found {getattr(self, name)}")
        for name in ("idle_s", "first_peers_s", "leave_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise TrainerUsageError(f"swarm.join.{name}: expected seconds, 0 or more, found {value}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SwarmConfig:
    """A pipeline of stages; the same run file at all workers and drivers.

    Raises:
        TrainerUsageError: values that do not go together.
    """

    num_stages: int = 3
    """Head, tail, and bodies between them."""
    layers: tuple[int, ...] = ()
    """Of each stage; empty: by ``cut``."""
    cut: Literal["even", "memory"] = "even"
    """``even`` shares of the layers, or so that the stage with the most parameters has as few as can be."""
    vocab_rows: int = 0
    """Rows of the embedding, a multiple of 1,024; 0: as many as the store's vocabulary needs."""
    activation_codec: str = "fp32"
    """On the links: fp32, fp16, int8; with a subspace also subspace, subspace+fp16, subspace+int8."""
    start_from: str = ""
    """Folder of a checkpoint of Hugging Face or torchtitan to begin with; empty: first weights by the seed."""
    subspace: SubspaceConfig = field(default_factory=SubspaceConfig)
    stage: StageConfig = field(default_factory=StageConfig)
    worker: WorkerConfig = field(default_factory=WorkerConfig)
    driver: DriverConfig = field(default_factory=DriverConfig)
    ledger: LedgerConfig = field(default_factory=LedgerConfig)
    sparta: SpartaConfig = field(default_factory=SpartaConfig)
    checkpoint: StagewiseConfig = field(default_factory=StagewiseConfig)
    join: JoinConfig = field(default_factory=JoinConfig)

    def __post_init__(self) -> None:
        if self.num_stages < 2:
            raise TrainerUsageError(f"swarm.num_stages: expected 2 or more, found {self.num_stages}")
        if self.vocab_rows < 0 or self.vocab_rows % 1024:
            raise TrainerUsageError(f"swarm.vocab_rows: expected 0 or a multiple of 1024, found {self.vocab_rows}")
        if self.activation_codec.startswith("subspace") and not self.subspace.rank:
            raise TrainerUsageError(
                f"swarm.activation_codec: expected swarm.subspace.rank with {self.activation_codec}, found none"
            )

"""`SwarmConfig`: the part of a run file about a model cut into stages, each option beside what it configures."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from trainer.checkpoint.stages.config import StagewiseConfig
from trainer.errors import TrainerUsageError
from trainer.model.subspace.config import SubspaceConfig
from trainer.outer.sparta.config import SpartaConfig
from trainer.pipeline.driver.config import DriverConfig
from trainer.pipeline.ledger.config import LedgerConfig
from trainer.pipeline.stage.config import StageConfig
from trainer.pipeline.worker.config import WorkerConfig
from trainer.run.config.join import JoinConfig

__all__ = ["Pipeline", "SwarmConfig"]

Pipeline = Literal["none", "swarm"]


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

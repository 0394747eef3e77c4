"""Whom the doctor looks at: one node as it would start, and what is known of its model before it has a store."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from trainer.model.config import ModelConfig
from trainer.model.plan import StagePlan
from trainer.model.sizing import num_parameters
from trainer.network.rpc import Identity
from trainer.network.rpc.credential import Role
from trainer.run.config import RunConfig
from trainer.run.node.identity import identity_of
from trainer.run.signed.sources import FetchedRun

AUTO_STAGE = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A node as its options make it."""

    config: RunConfig
    role: Role
    stage: str = ""
    """Of a worker: the stage it wants, or ``auto``."""
    fetched: FetchedRun | None = None
    """The signed run that it is of, if it is of one."""
    is_named: bool = True
    """Whether it was given a node id: else it has no key of its own yet, and a new one stands for it."""
    clock: Callable[[], float] = time.time

    def identity(self) -> Identity:
        """Returns the node's key, made where there is none; raises `TrainerUsageError` where it cannot be read."""
        return identity_of(self.config) if self.is_named else Identity.create()

    @property
    def has_port(self) -> bool:
        """Whether others have to connect to it: a driver calls and need not be called."""
        return self.role in ("node", "worker")


@dataclass(frozen=True, slots=True)
class Share:
    """What a node holds of a model."""

    model: ModelConfig
    plan: StagePlan | None = None
    """How the model is cut; None: the node holds all of it."""
    stage: str = ""
    """Its stage; empty with a plan: any."""

    @property
    def num_parameters(self) -> int:
        """Of the stage, of the largest one where any may be its own, or of the whole model."""
        if self.plan is None:
            return num_parameters(self.model)
        stages = (self.stage,) if self.stage else self.plan.names
        return max(map(self.plan.num_parameters, stages))

    @property
    def name(self) -> str:
        """For messages."""
        if self.plan is None:
            return "the model"
        return self.stage or "the largest stage"

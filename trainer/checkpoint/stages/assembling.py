"""A set of stage checkpoints as one model: the state dict that the whole `Transformer` would have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from trainer.checkpoint.stages.contents import RunShape
from trainer.checkpoint.stages.parts import differences, stage_shapes
from trainer.checkpoint.stages.sets import StageSet
from trainer.errors import CheckpointMismatchError
from trainer.model import ModelConfig

__all__ = ["WholeModel", "assemble"]


@dataclass(frozen=True, slots=True)
class WholeModel:
    """A model put together; a subspace network as one, which the exports make plain."""

    shape: RunShape
    state: Mapping[str, Tensor]
    """As `Transformer.load_state_dict` takes it."""

    @property
    def config(self) -> ModelConfig:
        """Its architecture."""
        return self.shape.config


def assemble(found: StageSet) -> WholeModel:
    """Reads a set's files, one after the other, and puts their parameters together.

    Args:
        found: of `newest_set`.

    Raises:
        CheckpointMismatchError: a stage's parameters are not those its cut says.
        CorruptCheckpointError: a file was damaged or removed since it was chosen.
    """
    shape = found.shape
    plan = shape.plan
    state: dict[str, Tensor] = {}
    for name, file in found.files.items():
        parameters = file.read().state.parameters
        wrong = differences(parameters, stage_shapes(plan, name))
        if wrong:
            raise CheckpointMismatchError(
                f"{file.named.path}: expected the parameters of {name} of {shape.run_id}, found {wrong}"
            )
        state.update(parameters)
    return WholeModel(shape, state)

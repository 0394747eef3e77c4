"""A set of stage checkpoints as one model: the state dict that the whole `Transformer` would have."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from trainer.errors import CheckpointMismatchError
from trainer.model import ModelConfig
from trainer.stagewise.contents import RunShape, StageCheckpoint
from trainer.stagewise.parts import differences, stage_shapes
from trainer.stagewise.sets import StageSet

__all__ = ["Merge", "WholeModel", "assemble"]

Merge = Callable[[StageCheckpoint], Mapping[str, Tensor]]
"""A stage of a subspace as plain parameters: fixed and learnt embedding added up, constant gains filled in."""


@dataclass(frozen=True, slots=True)
class WholeModel:
    """A model put together."""

    config: ModelConfig
    state: Mapping[str, Tensor]
    """As `Transformer.load_state_dict` takes it."""
    shape: RunShape


def assemble(found: StageSet, merge: Merge | None = None) -> WholeModel:
    """Reads a set's files, one after the other, and puts their parameters together.

    Args:
        found: of `newest_set`.
        merge: makes a stage plain; asked for every stage of a set that has a basis, and only then.

    Raises:
        CheckpointMismatchError: a stage's parameters are not those its cut says, or a basis is there and no ``merge``.
        CorruptCheckpointError: a file was damaged or removed since it was chosen.
    """
    shape = found.shape
    plan = shape.plan
    if shape.basis and merge is None:
        raise CheckpointMismatchError(
            f"expected a way to write the subspace {shape.basis[:12]} as a plain model, found none; give assemble one"
        )
    state: dict[str, Tensor] = {}
    for name, file in found.files.items():
        checkpoint = file.read()
        parameters = merge(checkpoint) if shape.basis and merge is not None else checkpoint.state.parameters
        wrong = differences(parameters, stage_shapes(plan, name))
        if wrong:
            raise CheckpointMismatchError(
                f"{file.named.path}: expected the parameters of {name} of {shape.run_id}, found {wrong}"
            )
        state.update(parameters)
    return WholeModel(shape.config, state, shape)

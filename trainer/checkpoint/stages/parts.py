"""Parameters of a model by stage: their names and shapes, and a set of stage checkpoints put together again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from trainer.checkpoint.stages.contents import RunShape
from trainer.checkpoint.stages.sets import StageSet
from trainer.errors import CheckpointMismatchError
from trainer.model import ModelConfig
from trainer.model.layers import make_blocks
from trainer.model.plan import StagePlan
from trainer.model.stages import Readout

__all__ = ["EMBEDDING", "OUTPUT", "WholeModel", "assemble", "differences", "model_shapes", "stage_shapes"]

EMBEDDING, OUTPUT = "embedding.weight", "readout.output.weight"
"""The two parameters with a row for each id."""


def model_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of all parameters by name, in the model's order.

    They are taken from parts on the meta device, not from the whole model, whose table of positions would make torch
    import sympy: 2 s at the start of each worker.
    """
    with torch.device("meta"):
        parts = {"layers": nn.ModuleDict(make_blocks(config, range(config.num_layers))), "readout": Readout(config)}
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (config.vocab_size, config.dim)}
    for part, module in parts.items():
        shapes |= {f"{part}.{name}": tuple(parameter.shape) for name, parameter in module.named_parameters()}
    return shapes


def stage_shapes(plan: StagePlan, stage: str) -> dict[str, tuple[int, ...]]:
    """Shapes of the parameters of one stage.

    Raises:
        TrainerUsageError: the plan has no such stage.
    """
    index = plan.index(stage)
    prefixes = tuple(f"layers.{number}." for number in plan.ranges[index])
    if index == 0:
        prefixes = ("embedding.", *prefixes)
    if index == plan.num_stages - 1:
        prefixes = (*prefixes, "readout.")
    return {name: shape for name, shape in model_shapes(plan.config).items() if name.startswith(prefixes)}


def differences(state: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]]) -> str:
    """Describes how a state differs from these names and shapes; empty if it does not."""
    missing, unknown = sorted(shapes.keys() - state.keys()), sorted(state.keys() - shapes.keys())
    if missing or unknown:
        return f"missing {missing[:3] or 'none'}, unknown {unknown[:3] or 'none'}"
    for name, shape in shapes.items():
        if tuple(state[name].shape) != shape:
            return f"{name} of shape {tuple(state[name].shape)} in the place of {shape}"
    return ""


@dataclass(frozen=True, slots=True)
class WholeModel:
    """A whole model; a subspace network stays one until it is exported."""

    shape: RunShape
    state: Mapping[str, Tensor]
    """For `Transformer.load_state_dict`."""

    @property
    def config(self) -> ModelConfig:
        """The architecture."""
        return self.shape.config


def assemble(found: StageSet) -> WholeModel:
    """Reads the files of a set (`newest_set`) and merges their parameters.

    Raises:
        CheckpointMismatchError: a stage has other parameters than its cut.
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

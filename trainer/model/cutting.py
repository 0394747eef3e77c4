"""Building a model, or one stage of it, and cutting a whole into stages.

Stages cut from a whole share its modules: training them trains it. A stage built alone has the values it would have in
the whole, because first weights depend on seed and parameter name only. Layers are dealt out as evenly as they go,
the larger shares first.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch

from trainer.errors import TrainerUsageError
from trainer.model.config import ModelConfig
from trainer.model.init import init_weights
from trainer.model.layers import Block, Layers, make_blocks
from trainer.model.stages import BodyStage, HeadStage, Readout, Stage, TailStage, Transformer
from trainer.model.subspace.constraint import zero_writers_
from trainer.model.subspace.embedding import make_embedding

__all__ = ["build_model", "build_stage", "split", "stage_ranges"]


def stage_ranges(num_layers: int, num_stages: int) -> tuple[range, ...]:
    """The layers of each stage; sizes differ by one at most.

    Raises:
        TrainerUsageError: there are fewer layers than stages, or no stage.
    """
    if not 1 <= num_stages <= num_layers:
        raise TrainerUsageError(f"expected at most a stage for each of {num_layers} layers, found {num_stages} stages")
    each, larger = divmod(num_layers, num_stages)
    starts = [stage * each + min(stage, larger) for stage in range(num_stages + 1)]
    return tuple(range(start, stop) for start, stop in pairwise(starts))


def build_model(
    config: ModelConfig,
    seed: int,
    *,
    device: torch.device | str = "cpu",
    activation_checkpointing: bool = False,
) -> Transformer:
    """A whole model with its first weights."""
    with torch.device(device):
        model = Transformer(config, activation_checkpointing=activation_checkpointing)
    _first_weights(model, config, seed)
    return model


def build_stage(
    config: ModelConfig,
    ranges: Sequence[range],
    index: int,
    seed: int,
    *,
    device: torch.device | str = "cpu",
    activation_checkpointing: bool = False,
) -> Stage:
    """One stage of a cut, alone, with the first weights it has in the whole.

    Args:
        config: the shape of the whole model.
        ranges: the layers of every stage, such as `stage_ranges` gives.
        index: which of them.
        seed: the run's.
        device: where the weights go.
        activation_checkpointing: see `Layers`.

    Raises:
        TrainerUsageError: the ranges do not cover all layers in order, or the model cannot be cut.
    """
    _check_ranges(config, ranges)
    if not 0 <= index < len(ranges):
        raise TrainerUsageError(f"expected a stage from 0 to {len(ranges) - 1}, found {index}")
    if len(ranges) == 1:
        return build_model(config, seed, device=device, activation_checkpointing=activation_checkpointing)
    with torch.device(device):
        blocks = make_blocks(config, ranges[index])
        layers = Layers(config, blocks, activation_checkpointing=activation_checkpointing)
        stage: Stage
        if index == 0:
            stage = HeadStage(config, make_embedding(config), layers)
        elif index == len(ranges) - 1:
            stage = TailStage(config, layers, Readout(config))
        else:
            stage = BodyStage(config, layers)
    _first_weights(stage, config, seed)
    return stage


def split(model: Transformer, stages: int | Sequence[range]) -> list[Stage]:
    """Cuts a whole into stages that share its modules and parameters.

    Args:
        model: the whole.
        stages: how many, or the layers of each; head and tail may be without layers.

    Returns:
        Head, bodies, tail; the model itself where there is one stage.

    Raises:
        TrainerUsageError: there are more stages than layers, the ranges do not cover all layers in order, or the model
            is tied and so cannot be cut.
    """
    config = model.config
    ranges = stage_ranges(config.num_layers, stages) if isinstance(stages, int) else tuple(stages)
    _check_ranges(config, ranges)
    if len(ranges) == 1:
        return [model]
    head, *bodies, tail = (_part(model, layers) for layers in ranges)
    return [
        HeadStage(config, model.embedding, head),
        *(BodyStage(config, body) for body in bodies),
        TailStage(config, tail, model.readout),
    ]


def _first_weights(stage: Stage, config: ModelConfig, seed: int) -> None:
    init_weights(stage, config, seed)
    zero_writers_(stage, config)


def _part(model: Transformer, numbers: range) -> Layers:
    blocks = {name: block for name, block in model.layers.items() if int(name) in numbers and isinstance(block, Block)}
    part = Layers(model.config, blocks, activation_checkpointing=model.layers.activation_checkpointing)
    part.cos, part.sin = model.layers.cos, model.layers.sin
    return part


def _check_ranges(config: ModelConfig, ranges: Sequence[range]) -> None:
    covered = [number for layers in ranges for number in layers]
    if not ranges or covered != list(range(config.num_layers)):
        raise TrainerUsageError(
            f"expected stages that cover layers 0 to {config.num_layers - 1} in order, found {[*map(_spell, ranges)]}"
        )
    if len(ranges) > 1 and config.tie_embeddings:
        raise TrainerUsageError(
            "tie_embeddings: expected false for a model cut into stages, since head and tail would each change their "
            "own copy of the embedding"
        )
    if len(ranges) > 1 and config.subspace_free_layers > len(ranges[-1]):
        raise TrainerUsageError(
            f"model.subspace_free_layers: expected at most the {len(ranges[-1])} layers of the last stage, found "
            f"{config.subspace_free_layers}; what they write would cross a boundary"
        )


def _spell(layers: range) -> str:
    return f"{layers.start}:{layers.stop}"

"""Stages: the parts of a model that one node of a pipeline holds, the whole made of them, and cuts of the whole.

A head embeds ids and runs the first layers, a body runs layers, a tail runs the last layers and computes losses; the
`Transformer` has all of it. Parameters have the same names wherever they live (``embedding.weight``,
``layers.7.attention.q_proj.weight``, ``readout.output.weight``), so the state dicts of a cut partition the whole's.
Stages cut from a whole share its modules. A stage built alone has the values it would have in the whole, because first
weights depend on seed and parameter name only.

Losses are fp32. The mean counts tokens, not sequences; a pipeline that combines micro-batches of several lengths takes
``loss_sum`` (sum and count) and divides by all tokens at the end.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from trainer.errors import TrainerUsageError
from trainer.model.config import ModelConfig
from trainer.model.init import init_weights
from trainer.model.layers import Block, Layers, RMSNorm, make_blocks
from trainer.model.loss import IGNORED_LABEL, sum_of_losses
from trainer.model.plan import stage_ranges
from trainer.model.subspace.constraint import zero_writers_
from trainer.model.subspace.embedding import make_embedding

__all__ = [
    "BodyStage",
    "HeadStage",
    "Readout",
    "Stage",
    "TailStage",
    "Transformer",
    "build_model",
    "build_stage",
    "split",
]


class Readout(nn.Module):
    """The last norm and the output matrix: hidden states to logits or losses."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.norm = RMSNorm(config.dim, config.norm_eps)
        self.output = nn.Linear(config.dim, config.vocab_size, bias=False)
        self.num_ids = config.vocab_size
        """Ids of the vocabulary: losses are over the first so many rows, the rest is padding (`limit_ids`)."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Returns the scores [..., vocabulary] of every next token."""
        scores: Tensor = self.output(self.norm(hidden))
        return scores

    def loss_sum(self, hidden: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the sum of the losses (fp32 scalar) and the number of labels that are not -100 (int64 scalar)."""
        total = sum_of_losses(self.norm(hidden), self.output.weight, labels, self.num_ids)
        return total, (labels != IGNORED_LABEL).sum()

    def forward(self, hidden: Tensor, labels: Tensor | None = None) -> Tensor:
        """Returns the mean loss over the labels that are not -100 (0 without any), or logits without labels."""
        if labels is None:
            return self.logits(hidden)
        total, num_tokens = self.loss_sum(hidden, labels)
        return total / num_tokens.clamp(min=1)


class _WithReadout(nn.Module):
    """A stage with a readout: subclasses say what is computed before it."""

    readout: Readout

    def hidden(self, inputs: Tensor) -> Tensor:
        """Maps the stage's inputs to the hidden states [batch, tokens, dim] behind its last layer."""
        raise NotImplementedError

    def forward(self, inputs: Tensor, labels: Tensor | None = None) -> Tensor:
        """Returns the mean loss over the labels that are not -100, or the logits without labels.

        Args:
            inputs: hidden states, or for a whole model int64[batch, tokens].
            labels: int64[batch, tokens], the id that follows each position.
        """
        out: Tensor = self.readout(self.hidden(inputs), labels)
        return out

    def loss_sum(self, inputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """See `Readout.loss_sum`."""
        return self.readout.loss_sum(self.hidden(inputs), labels)

    def logits(self, inputs: Tensor) -> Tensor:
        """Returns the scores [batch, tokens, vocabulary] of every next token."""
        return self.readout.logits(self.hidden(inputs))


class HeadStage(nn.Module):
    """Embedding and the first layers: ids[batch, tokens] to hidden[batch, tokens, dim]."""

    def __init__(self, config: ModelConfig, embedding: nn.Embedding, layers: Layers) -> None:
        super().__init__()
        self.config = config
        self.embedding = embedding
        self.layers = layers

    def forward(self, input_ids: Tensor) -> Tensor:
        """Embeds ids and runs the layers."""
        hidden: Tensor = self.layers(self.embedding(input_ids))
        return hidden


class BodyStage(nn.Module):
    """Layers in the middle: hidden[batch, tokens, dim] to the same shape."""

    def __init__(self, config: ModelConfig, layers: Layers) -> None:
        super().__init__()
        self.config = config
        self.layers = layers

    def forward(self, hidden: Tensor) -> Tensor:
        """Runs the layers."""
        out: Tensor = self.layers(hidden)
        return out


class TailStage(_WithReadout):
    """The last layers, norm and output: hidden states and labels to losses."""

    def __init__(self, config: ModelConfig, layers: Layers, readout: Readout) -> None:
        super().__init__()
        self.config = config
        self.layers = layers
        self.readout = readout

    def hidden(self, inputs: Tensor) -> Tensor:
        """Runs the layers."""
        out: Tensor = self.layers(inputs)
        return out


class Transformer(_WithReadout):
    """The whole model: a head that is its own tail.

    Its weights are PyTorch's defaults until `build_model`, `init_weights` or a checkpoint sets them.
    """

    def __init__(self, config: ModelConfig, *, activation_checkpointing: bool = False) -> None:
        super().__init__()
        self.config = config
        self.embedding = make_embedding(config)
        blocks = make_blocks(config, range(config.num_layers))
        self.layers = Layers(config, blocks, activation_checkpointing=activation_checkpointing)
        self.readout = Readout(config)
        if config.tie_embeddings:
            self.readout.output.weight = self.embedding.weight

    def hidden(self, inputs: Tensor) -> Tensor:
        """Embeds ids and runs all layers."""
        out: Tensor = self.layers(self.embedding(inputs))
        return out


Stage = HeadStage | BodyStage | TailStage | Transformer
"""What a node of a pipeline may hold; a pipeline of one holds a `Transformer`."""


def build_model(
    config: ModelConfig,
    seed: int,
    *,
    device: torch.device | str = "cpu",
    activation_checkpointing: bool = False,
) -> Transformer:
    """Builds a whole model with its first weights."""
    with torch.device(device):
        model = Transformer(config, activation_checkpointing=activation_checkpointing)
    _set_first_weights(model, config, seed)
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
    """Builds the stage of this index of a cut into ``ranges`` of layers, with the first weights it has in the whole.

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
    _set_first_weights(stage, config, seed)
    return stage


def split(model: Transformer, stages: int | Sequence[range]) -> list[Stage]:
    """Cuts a whole into stages that share its modules and parameters: head, bodies, tail; or into itself alone.

    ``stages`` is how many, or the layers of each; head and tail may be without layers.

    Raises:
        TrainerUsageError: there are more stages than layers, the ranges do not cover all layers in order, or the model
            is tied and so cannot be cut.
    """
    config = model.config
    ranges = stage_ranges(config.num_layers, stages) if isinstance(stages, int) else tuple(stages)
    _check_ranges(config, ranges)
    if len(ranges) == 1:
        return [model]
    head, *bodies, tail = (_shared_layers(model, numbers) for numbers in ranges)
    return [
        HeadStage(config, model.embedding, head),
        *(BodyStage(config, body) for body in bodies),
        TailStage(config, tail, model.readout),
    ]


def _set_first_weights(stage: Stage, config: ModelConfig, seed: int) -> None:
    init_weights(stage, config, seed)
    zero_writers_(stage, config)


def _shared_layers(model: Transformer, numbers: range) -> Layers:
    blocks = {name: block for name, block in model.layers.items() if int(name) in numbers and isinstance(block, Block)}
    part = Layers(model.config, blocks, activation_checkpointing=model.layers.activation_checkpointing)
    part.cos, part.sin = model.layers.cos, model.layers.sin
    return part


def _check_ranges(config: ModelConfig, ranges: Sequence[range]) -> None:
    covered = [number for layers in ranges for number in layers]
    if not ranges or covered != list(range(config.num_layers)):
        found = [f"{layers.start}:{layers.stop}" for layers in ranges]
        raise TrainerUsageError(
            f"expected stages that cover layers 0 to {config.num_layers - 1} in order, found {found}"
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

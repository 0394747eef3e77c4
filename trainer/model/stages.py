"""Stages: the parts of a model that one node of a pipeline holds, and the whole, made of the same parts.

A head embeds ids and runs the first layers, a body runs layers, a tail runs the last layers and reads out losses; the
`Transformer` has all of it. Parameters have the same names wherever they live (``embedding.weight``,
``layers.7.attention.q_proj.weight``, ``readout.output.weight``), so the state dicts of a cut partition the whole's.

Losses are fp32. The mean counts tokens, not sequences; a pipeline that puts micro-batches of several lengths together
takes `Readout.loss_sum` (sum and count) and divides by all tokens at the end.
"""

from __future__ import annotations

from torch import Tensor, nn

from trainer.model.config import ModelConfig
from trainer.model.layers import Layers, RMSNorm, make_blocks
from trainer.model.loss import IGNORED_LABEL, sum_of_losses
from trainer.model.subspace.embedding import make_embedding

__all__ = ["BodyStage", "HeadStage", "Readout", "Stage", "TailStage", "Transformer"]


class Readout(nn.Module):
    """The last norm and the output matrix: hidden states to logits or losses."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.norm = RMSNorm(config.dim, config.norm_eps)
        self.output = nn.Linear(config.dim, config.vocab_size, bias=False)
        self.num_ids = config.vocab_size
        """Ids of the vocabulary: losses are over the first so many rows, the rest is padding (`limit_ids`)."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores [..., vocabulary] of every next token."""
        scores: Tensor = self.output(self.norm(hidden))
        return scores

    def loss_sum(self, hidden: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """The sum of the losses (fp32 scalar) and the number of tokens counted (int64 scalar); -100 does not count."""
        total = sum_of_losses(self.norm(hidden), self.output.weight, labels, self.num_ids)
        return total, (labels != IGNORED_LABEL).sum()

    def forward(self, hidden: Tensor, labels: Tensor | None = None) -> Tensor:
        """The mean loss over the tokens that count (0 where none does), or the logits where labels is None."""
        if labels is None:
            return self.logits(hidden)
        total, num_tokens = self.loss_sum(hidden, labels)
        return total / num_tokens.clamp(min=1)


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


class TailStage(nn.Module):
    """The last layers, norm and output: hidden states and labels to losses."""

    def __init__(self, config: ModelConfig, layers: Layers, readout: Readout) -> None:
        super().__init__()
        self.config = config
        self.layers = layers
        self.readout = readout

    def forward(self, hidden: Tensor, labels: Tensor | None = None) -> Tensor:
        """The mean loss over the tokens whose label is not -100, or the logits where labels is None."""
        out: Tensor = self.readout(self.layers(hidden), labels)
        return out

    def loss_sum(self, hidden: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """The sum of the losses (fp32 scalar) and the number of tokens counted (int64 scalar)."""
        return self.readout.loss_sum(self.layers(hidden), labels)

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores [batch, tokens, vocabulary] of every next token."""
        return self.readout.logits(self.layers(hidden))


class Transformer(nn.Module):
    """The whole model: a head that is its own tail.

    Its weights are PyTorch's defaults until `trainer.model.init.init_weights` or a checkpoint sets them;
    `trainer.model.cutting.build_model` does the former.

    Args:
        config: the model's shape.
        activation_checkpointing: see `Layers`.
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

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Tensor:
        """The mean loss over the tokens whose label is not -100, or the logits where labels is None.

        Args:
            input_ids: int64[batch, tokens].
            labels: int64[batch, tokens], the id that follows each input id.
        """
        out: Tensor = self.readout(self.layers(self.embedding(input_ids)), labels)
        return out

    def loss_sum(self, input_ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """The sum of the losses (fp32 scalar) and the number of tokens counted (int64 scalar)."""
        return self.readout.loss_sum(self.layers(self.embedding(input_ids)), labels)

    def logits(self, input_ids: Tensor) -> Tensor:
        """Scores [batch, tokens, vocabulary] of every next token."""
        return self.readout.logits(self.layers(self.embedding(input_ids)))


Stage = HeadStage | BodyStage | TailStage | Transformer
"""What a node of a pipeline may hold; a pipeline of one holds a `Transformer`."""

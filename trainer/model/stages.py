"""Stages: the parts of a model that one node of a pipeline holds, the whole made of them, cuts of the whole, growth.

Parameters have the same names wherever they live (``embedding.weight``, ``layers.7.attention.q_proj.weight``,
``readout.output.weight``), so the state dicts of a cut partition the whole's. Losses are fp32, and means count tokens,
not sequences. A vocabulary grows in steps of 1,024 rows, so that a few new merges change no shape. The new rows have
the values they would have had from the start, so nodes that grow at the same outer step stay identical.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from manifests import FIRST_MERGE_ID
from trainer.errors import TrainerUsageError
from trainer.model.config import ModelConfig, Recomputation
from trainer.model.init import EMBEDDING, OUTPUT, fill_seeded_, init_std, init_weights
from trainer.model.layers import Layers, RMSNorm, make_blocks
from trainer.model.loss import IGNORED_LABEL, Terms, loss_terms, sum_of_losses
from trainer.model.plan import StagePlan, stage_ranges
from trainer.model.subspace.constraint import SubspaceEmbedding, make_embedding, zero_writers_

VOCAB_STEP = 1024  # Rows of embedding and output are a multiple of this.


class Readout(nn.Module):
    """The last norm and the output matrix: hidden states to logits or losses."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.norm = RMSNorm(config.dim, config.norm_eps)
        self.output = nn.Linear(config.dim, config.vocab_size, bias=False)
        self.num_ids = config.vocab_size
        """Ids of the vocabulary: losses are over the first so many rows, the rest is padding (`limit_ids`)."""
        self._terms: Terms = loss_terms

    def compile_regions(self) -> None:
        """Compiles what a chunk of logits goes through at its first call."""
        if self._terms is loss_terms:
            self._terms = torch.compile(loss_terms)

    def logits(self, hidden: Tensor) -> Tensor:
        """Returns the scores [..., vocabulary] of every next token."""
        scores: Tensor = self.output(self.norm(hidden))
        return scores

    def loss_sum(self, hidden: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the sum of the losses (fp32 scalar) and the number of labels that are not -100 (int64 scalar)."""
        total = sum_of_losses(self.norm(hidden), self.output.weight, labels, self.num_ids, self._terms)
        return total, (labels != IGNORED_LABEL).sum()


class _Part(nn.Module):
    """Layers of a model, and the embedding before or the readout behind them; ``config`` is the whole model's."""

    embedding: nn.Embedding
    readout: Readout
    document_end: int | None = None
    """The id that ends documents, where attention is to stay within them (`within_documents`)."""

    def __init__(
        self,
        config: ModelConfig,
        layers: Layers,
        *,
        embedding: nn.Embedding | None = None,
        readout: Readout | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        if embedding is not None:
            self.embedding = embedding
        self.layers = layers
        if readout is not None:
            self.readout = readout

    def hidden(self, inputs: Tensor) -> Tensor:
        """Maps ids[batch, tokens] or hidden states to the hidden states [batch, tokens, dim] behind the last layer."""
        mask = None
        if "embedding" in self._modules:
            if self.document_end is not None:
                mask = self.layers.document_mask(inputs, self.document_end)
            inputs = self.embedding(inputs)
        out: Tensor = self.layers(inputs, mask)
        return out


class _WithoutReadout(_Part):
    def forward(self, inputs: Tensor) -> Tensor:
        """Returns `hidden`."""
        return self.hidden(inputs)


class _WithReadout(_Part):
    def forward(self, inputs: Tensor, labels: Tensor | None = None) -> Tensor:
        """Returns the mean loss over the labels that are not -100 (0 without any), or the logits without labels.

        ``labels`` are int64[batch, tokens], the id that follows each position.
        """
        if labels is None:
            return self.logits(inputs)
        total, num_tokens = self.loss_sum(inputs, labels)
        return total / num_tokens.clamp(min=1)

    def loss_sum(self, inputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """See `Readout.loss_sum`."""
        return self.readout.loss_sum(self.hidden(inputs), labels)

    def logits(self, inputs: Tensor) -> Tensor:
        """Returns the scores [batch, tokens, vocabulary] of every next token."""
        return self.readout.logits(self.hidden(inputs))


class HeadStage(_WithoutReadout):
    """Embedding and the first layers: ids[batch, tokens] to hidden[batch, tokens, dim]."""


class BodyStage(_WithoutReadout):
    """Layers in the middle: hidden[batch, tokens, dim] to the same shape."""


class TailStage(_WithReadout):
    """The last layers, norm and output: hidden states and labels to losses."""


class Transformer(_WithReadout):
    """The whole model: a head that is its own tail, with PyTorch's weights until others are set."""

    def __init__(self, config: ModelConfig, *, activation_checkpointing: Recomputation | bool = "off") -> None:
        embedding = make_embedding(config)
        layers = Layers(config, range(config.num_layers), activation_checkpointing=activation_checkpointing)
        super().__init__(config, layers, embedding=embedding, readout=Readout(config))
        if config.tie_embeddings:
            self.readout.output.weight = self.embedding.weight


Stage = HeadStage | BodyStage | TailStage | Transformer
"""What a node of a pipeline may hold; a pipeline of one holds a `Transformer`."""


def build_model(
    config: ModelConfig,
    seed: int,
    *,
    device: torch.device | str = "cpu",
    activation_checkpointing: Recomputation | bool = "off",
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
    activation_checkpointing: Recomputation | bool = "off",
) -> Stage:
    """Builds a stage of a cut, with the weights it has in the whole. Raises `TrainerUsageError`: no such cut."""
    _check_ranges(config, ranges)
    if not 0 <= index < len(ranges):
        raise TrainerUsageError(f"expected a stage from 0 to {len(ranges) - 1}, found {index}")
    if len(ranges) == 1:
        return build_model(config, seed, device=device, activation_checkpointing=activation_checkpointing)
    with torch.device(device):
        layers = Layers(config, ranges[index], activation_checkpointing=activation_checkpointing)
        stage: Stage
        if index == 0:
            stage = HeadStage(config, layers, embedding=make_embedding(config))
        elif index == len(ranges) - 1:
            stage = TailStage(config, layers, readout=Readout(config))
        else:
            stage = BodyStage(config, layers)
    _set_first_weights(stage, config, seed)
    return stage


def split(model: Transformer, stages: int | Sequence[range]) -> list[Stage]:
    """Cuts a whole into stages that share its modules and parameters: head, bodies, tail; or into itself alone.

    ``stages`` is how many, or the layers of each; head and tail may be without layers. Raises `TrainerUsageError`: too
    many stages, ranges that do not cover all layers in order, or a tied model.
    """
    config = model.config
    ranges = stage_ranges(config.num_layers, stages) if isinstance(stages, int) else tuple(stages)
    _check_ranges(config, ranges)
    if len(ranges) == 1:
        return [model]
    head, *bodies, tail = (_shared_layers(model, numbers) for numbers in ranges)
    return [
        HeadStage(config, head, embedding=model.embedding),
        *(BodyStage(config, body) for body in bodies),
        TailStage(config, tail, readout=model.readout),
    ]


def model_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of all parameters by name, in the model's order."""
    # Not of the whole model, whose table of positions would make torch import sympy: 2 s at the start of each worker.
    with torch.device("meta"):
        blocks = make_blocks(config, range(config.num_layers))
        parts = {"layers": nn.ModuleDict(blocks), "readout": Readout(config)}
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (config.vocab_size, config.dim)}
    for part, module in parts.items():
        shapes |= {f"{part}.{name}": tuple(parameter.shape) for name, parameter in module.named_parameters()}
    return shapes


def stage_shapes(plan: StagePlan, stage: str) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of one stage's parameters. Raises `TrainerUsageError`: the plan has no such stage."""
    index = plan.index(stage)
    prefixes = [f"layers.{number}." for number in plan.ranges[index]]
    prefixes += ["embedding."] if index == 0 else []
    prefixes += ["readout."] if index == plan.num_stages - 1 else []
    return {name: shape for name, shape in model_shapes(plan.config).items() if name.startswith(tuple(prefixes))}


def rows_for(next_merge_id: int) -> int:
    """Returns the rows for so many ids, padded to a full step. Raises `TrainerUsageError`: fewer ids than bytes."""
    if next_merge_id < FIRST_MERGE_ID:
        raise TrainerUsageError(f"next_merge_id: expected at least {FIRST_MERGE_ID}, found {next_merge_id}")
    return -(-next_merge_id // VOCAB_STEP) * VOCAB_STEP


def grow_rows(tensor: Tensor, rows: int) -> Tensor:
    """Returns a copy of so many rows, the new ones zeros. Raises `TrainerUsageError`: the tensor has more rows."""
    if tensor.ndim == 0 or tensor.shape[0] > rows:
        raise TrainerUsageError(f"expected a tensor of at most {rows} rows to grow, found shape {tuple(tensor.shape)}")
    grown = tensor.new_zeros((rows, *tensor.shape[1:]))
    grown[: tensor.shape[0]] = tensor.detach()
    return grown


def grow_vocabulary(model: Stage, new_vocab_rows: int, seed: int) -> tuple[str, ...]:
    """Grows embedding, output and config in place, and drops gradients; returns the names of what grew.

    Raises `TrainerUsageError`: the model has more rows already; a vocabulary does not shrink.
    """
    old_rows = model.config.vocab_size
    if new_vocab_rows < old_rows:
        raise TrainerUsageError(f"vocabulary rows: expected at least the present {old_rows}, found {new_vocab_rows}")
    if new_vocab_rows == old_rows:
        return ()
    names = [name for name, _ in model.named_parameters() if name in (EMBEDDING, OUTPUT)]
    for name in names:
        parameter = model.get_parameter(name)
        grown = grow_rows(parameter.data, new_vocab_rows)
        fill_seeded_(grown.view(-1), seed, name, init_std(name, model.config), start=parameter.numel())
        parameter.grad = None
        parameter.data = grown
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            module.num_embeddings = new_vocab_rows
        if isinstance(module, SubspaceEmbedding):
            module.grow(new_vocab_rows)
            module.weight.data[old_rows:] = 0.0
    readout = getattr(model, "readout", None)
    if readout is not None:
        readout.output.out_features = new_vocab_rows
        readout.num_ids = new_vocab_rows if readout.num_ids == old_rows else readout.num_ids
    model.config = replace(model.config, vocab_size=new_vocab_rows)
    return tuple(names)


def limit_ids(model: Stage, num_ids: int) -> None:
    """Leaves the rows from ``num_ids`` on, which only pad the vocabulary, out of the losses of a whole or a stage."""
    readout = getattr(model, "readout", None)
    if readout is not None:
        readout.num_ids = min(num_ids, model.config.vocab_size)


def within_documents(model: Transformer, end_id: int) -> None:
    """Keeps attention within documents from now on; ``end_id`` ends each.

    Raises `TrainerUsageError`: the model attends within a window.
    """
    if model.config.sliding_window:
        raise TrainerUsageError(
            f"inner.document_mask: expected a model without a sliding window, found one of "
            f"{model.config.sliding_window} tokens; leave document_mask out"
        )
    model.document_end = end_id


def _set_first_weights(stage: Stage, config: ModelConfig, seed: int) -> None:
    init_weights(stage, config, seed)
    zero_writers_(stage, config)


def _shared_layers(model: Transformer, numbers: range) -> Layers:
    part = Layers(model.config, (), activation_checkpointing=model.layers.activation_checkpointing)
    part.update({name: block for name, block in model.layers.items() if int(name) in numbers})
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

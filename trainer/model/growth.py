"""A vocabulary that grows: more rows for embedding and output, the old ones kept bit for bit.

Rows come in steps of 1,024, so that a few new merges change no shape: the step costs at most 1,023 rows that no text
uses (0.6 % of a 125M model; they are in no loss and in no export), and spares every node a resize, and a recompilation,
at each new tokenizer. A new row's values are the ones it would have had from the start (a function of seed and row
number), so nodes that grow at the same outer step stay identical, whatever sizes they went through before.

Growth keeps the `torch.nn.Parameter` objects, which optimizers and hooks hold on to, and replaces their data; what is
kept beside them (Adam's moments, anchor, momentum) grows by `grow_rows`, with zeros.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from manifests import FIRST_MERGE_ID
from trainer.errors import TrainerUsageError
from trainer.model.init import init_std, seeded_normal
from trainer.model.stages import Stage
from trainer.model.subspace.embedding import SubspaceEmbedding

__all__ = ["VOCAB_STEP", "grow_rows", "grow_vocabulary", "limit_ids", "rows_for"]

VOCAB_STEP = 1024
"""Rows of embedding and output are a multiple of this."""


def rows_for(next_merge_id: int) -> int:
    """Rows for a vocabulary whose ids end before ``next_merge_id`` (``tokenizer.json``), padded to a full step.

    Raises:
        TrainerUsageError: that is fewer ids than special tokens and bytes take.
    """
    if next_merge_id < FIRST_MERGE_ID:
        raise TrainerUsageError(f"next_merge_id: expected at least {FIRST_MERGE_ID}, found {next_merge_id}")
    return -(-next_merge_id // VOCAB_STEP) * VOCAB_STEP


def grow_rows(tensor: Tensor, rows: int, fill: float = 0.0) -> Tensor:
    """A copy with ``rows`` rows: the old ones bit for bit, then ``fill``.

    Raises:
        TrainerUsageError: the tensor has more rows than that.
    """
    if tensor.ndim == 0 or tensor.shape[0] > rows:
        raise TrainerUsageError(f"expected a tensor of at most {rows} rows to grow, found shape {tuple(tensor.shape)}")
    grown = tensor.new_full((rows, *tensor.shape[1:]), fill)
    grown[: tensor.shape[0]] = tensor.detach()
    return grown


def grow_vocabulary(model: Stage, new_vocab_rows: int, seed: int) -> tuple[str, ...]:
    """Grows embedding and output, as far as the stage has them, and its config, in place; drops the two's gradients.

    Args:
        model: the whole, or any stage.
        new_vocab_rows: rows after growth, such as `rows_for` gives.
        seed: the run's, as for `trainer.model.init.init_weights`.

    Returns:
        Names of the parameters that grew (none where nothing was to grow), as in ``named_parameters``.

    Raises:
        TrainerUsageError: the model has more rows already; a vocabulary does not shrink.
    """
    old_rows = model.config.vocab_size
    if new_vocab_rows < old_rows:
        raise TrainerUsageError(f"vocabulary rows: expected at least the present {old_rows}, found {new_vocab_rows}")
    if new_vocab_rows == old_rows:
        return ()
    names = [name for name, _ in model.named_parameters() if name in ("embedding.weight", "readout.output.weight")]
    for name in names:
        _grow_parameter(model.get_parameter(name), name, new_vocab_rows, seed, init_std(name, model.config))
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
    """Leaves the rows that only pad the vocabulary out of the losses, where the stage computes any.

    Args:
        model: the whole, or any stage.
        num_ids: ids the vocabulary has; at most the model's rows count.
    """
    readout = getattr(model, "readout", None)
    if readout is not None:
        readout.num_ids = min(num_ids, model.config.vocab_size)


def _grow_parameter(parameter: nn.Parameter, name: str, rows: int, seed: int, std: float) -> None:
    start, stop = parameter.numel(), rows * parameter.shape[1]
    grown = grow_rows(parameter.data, rows)
    flat = grown.view(-1)
    for values in seeded_normal(seed, name, start, stop - start, std):
        flat[start : start + values.numel()].copy_(values)
        start += values.numel()
    with torch.no_grad():
        parameter.grad = None
        parameter.data = grown

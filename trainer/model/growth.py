"""A vocabulary that grows: more rows for embedding and output, the old ones kept bit for bit.

Rows come in steps of 1,024, so that a few new merges change no shape: that costs at most 1,023 rows that no text uses
(0.6 % of a 125M model, in no loss and in no export) and spares every node a resize and a recompilation at each new
tokenizer. A new row has the values it would have had from the start, so nodes that grow at the same outer step stay
identical, whatever sizes they had before.

Growth keeps the `torch.nn.Parameter` objects, to which optimizers and hooks refer, and replaces their data; tensors
beside them (Adam's moments, anchor, momentum) grow by `grow_rows`, with zeros.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor, nn

from manifests import FIRST_MERGE_ID
from trainer.errors import TrainerUsageError
from trainer.model.init import fill_seeded_, init_std
from trainer.model.stages import Stage
from trainer.model.subspace.embedding import SubspaceEmbedding

__all__ = ["VOCAB_STEP", "grow_rows", "grow_vocabulary", "limit_ids", "rows_for"]

VOCAB_STEP = 1024
"""Rows of embedding and output are a multiple of this."""


def rows_for(next_merge_id: int) -> int:
    """Returns the rows for a vocabulary whose ids end before ``next_merge_id``, padded to a full step.

    Raises:
        TrainerUsageError: that is fewer ids than special tokens and bytes take.
    """
    if next_merge_id < FIRST_MERGE_ID:
        raise TrainerUsageError(f"next_merge_id: expected at least {FIRST_MERGE_ID}, found {next_merge_id}")
    return -(-next_merge_id // VOCAB_STEP) * VOCAB_STEP


def grow_rows(tensor: Tensor, rows: int) -> Tensor:
    """Returns a copy with ``rows`` rows: the old ones bit for bit, then zeros.

    Raises:
        TrainerUsageError: the tensor has more rows than that.
    """
    if tensor.ndim == 0 or tensor.shape[0] > rows:
        raise TrainerUsageError(f"expected a tensor of at most {rows} rows to grow, found shape {tuple(tensor.shape)}")
    grown = tensor.new_zeros((rows, *tensor.shape[1:]))
    grown[: tensor.shape[0]] = tensor.detach()
    return grown


def grow_vocabulary(model: Stage, new_vocab_rows: int, seed: int) -> tuple[str, ...]:
    """Grows embedding and output, as far as the stage has them, and its config, in place; drops their gradients.

    Returns:
        Names of the parameters that grew, as in ``named_parameters``.

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

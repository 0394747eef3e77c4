"""Cross entropy of next tokens straight from hidden states, never holding the logits of a whole batch.

The gradient of a sum of losses needs nothing the forward pass does not know. So each chunk of tokens makes its logits,
its losses and both gradients at once: forward and backward of 2,048 tokens, 32,768 logits and 128 dimensions take 1.1 s
instead of 1.4 on one CPU core. The trade-off: one more copy of the output matrix between the passes, and no second
derivative. Rows that pad the vocabulary are left out of the softmax, so that padding changes no loss.

torch 2.13 has the same as `torch.nn.functional.linear_cross_entropy` with options; it is used for fp32 products on a
GPU. In bf16 it returns the sum in bf16, which leaves a loss three digits, so there the chunks are our own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from trainer.errors import TrainerUsageError
from trainer.model.config import IGNORED_LABEL as IGNORED_LABEL

TORCHS: Callable[..., Tensor] | None = (
    getattr(functional, "linear_cross_entropy", None) if hasattr(torch.nn, "LinearCrossEntropyOptions") else None
)
"""torch's chunked function, from 2.13 on."""
_TORCHS_DEVICES = ("cuda",)

_CHUNK_LOGITS_CPU = 1 << 24  # 64 MB of fp32; smaller chunks gain nothing.
_CHUNK_LOGITS_ACCELERATOR = 1 << 27
"""512 MB of fp32: chunks large enough that adding up the output matrix's gradient stays a small part."""


def filled_up(ids: Tensor, labels: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """Returns a batch of at least ``num_rows`` rows; those added have labels that do not count."""
    missing = num_rows - ids.shape[0]
    if missing <= 0:
        return ids, labels
    return (
        torch.cat([ids, ids.new_zeros(missing, ids.shape[1])]),
        torch.cat([labels, labels.new_full((missing, labels.shape[1]), IGNORED_LABEL)]),
    )


Terms = Callable[[Tensor, Tensor, Tensor, torch.dtype, torch.dtype | None], tuple[Tensor, Tensor | None]]
"""`loss_terms`, or the same compiled."""


def loss_terms(
    logits: Tensor, wanted: Tensor, ignored: Tensor, dtype: torch.dtype, gradient_dtype: torch.dtype | None
) -> tuple[Tensor, Tensor | None]:
    """Returns the sum of a chunk's losses in ``dtype`` and, in ``gradient_dtype`` unless it is None, that of logits.

    Args:
        logits: [tokens, ids].
        wanted: int64[tokens, 1], ids.
        ignored: bool[tokens, 1], tokens that do not count.
        dtype: of the softmax.
        gradient_dtype: of the gradient [tokens, ids].
    """
    log_probabilities = functional.log_softmax(logits, dim=1, dtype=dtype)
    total = -log_probabilities.gather(1, wanted).masked_fill_(ignored, 0.0).sum()
    if gradient_dtype is None:
        return total, None
    certain = log_probabilities.new_ones(wanted.shape)
    of_logits = log_probabilities.exp_().scatter_add_(1, wanted, -certain).masked_fill_(ignored, 0.0)
    return total, of_logits.to(gradient_dtype)


def sum_of_losses(
    hidden: Tensor, weight: Tensor, labels: Tensor, num_ids: int | None = None, terms: Terms = loss_terms
) -> Tensor:
    """Returns the sum of the cross entropies of labels under softmax(hidden · weightᵀ), a scalar of at least fp32.

    Args:
        hidden: [..., dim].
        weight: [vocabulary, dim].
        labels: int64, of hidden's shape without the last dimension; -100 and rows that are no ids are left out.
        num_ids: the softmax is over the first so many rows of ``weight``, the rest gets no gradient; None: over all.
        terms: what computes a chunk of logits.
    """
    num_ids = weight.shape[0] if num_ids is None else num_ids
    hidden, labels = hidden.flatten(0, -2), labels.flatten()
    with_gradients = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    device_type = hidden.device.type
    dtype = torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else hidden.dtype
    with torch.autocast(device_type, enabled=False):
        if TORCHS is not None and device_type in _TORCHS_DEVICES and hidden.dtype == dtype == torch.float32:
            return sum_by_torch(hidden, weight, labels, num_ids, dtype)
        if with_gradients:
            total: Tensor = _SumOfLosses.apply(hidden, weight, labels, num_ids, dtype, terms)  # type: ignore[no-untyped-call]
            return total
        return _losses_and_gradients(hidden, weight, labels, num_ids, dtype, terms, None)


def sum_by_torch(hidden: Tensor, weight: Tensor, labels: Tensor, num_ids: int, dtype: torch.dtype) -> Tensor:
    """Returns the same by torch's chunked function, where `TORCHS` has it; the sum has the products' ``dtype``."""
    if TORCHS is None:
        raise TrainerUsageError(f"expected torch 2.13 or later for its chunked loss, found {torch.__version__}")
    options = torch.nn.LinearCrossEntropyOptions()
    wanted = labels.flatten().masked_fill(labels.flatten() >= num_ids, IGNORED_LABEL)
    inputs = hidden.flatten(0, -2).to(dtype), weight[:num_ids].to(dtype), wanted
    total: Tensor = TORCHS(*inputs, reduction="sum", ignore_index=IGNORED_LABEL, options=options)
    return total


class _SumOfLosses(torch.autograd.Function):
    """`sum_of_losses` with its gradients made in the forward pass."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, num_ids: int, dtype: torch.dtype, terms: Terms
    ) -> Tensor:
        of_hidden, of_weight = torch.empty_like(hidden), torch.zeros_like(weight)
        total = _losses_and_gradients(hidden, weight, labels, num_ids, dtype, terms, (of_hidden, of_weight))
        ctx.save_for_backward(of_hidden, of_weight)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None, None, None]:
        of_hidden, of_weight = ctx.saved_tensors
        scale = gradients[0]
        return of_hidden * scale.to(of_hidden.dtype), of_weight * scale.to(of_weight.dtype), None, None, None, None


def _losses_and_gradients(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    num_ids: int,
    dtype: torch.dtype,
    terms: Terms,
    gradients: tuple[Tensor, Tensor] | None,
) -> Tensor:
    """Sums the losses; with ``gradients`` = (of hidden, of weight), fills the first and adds to the second."""
    total = hidden.new_zeros((), dtype=torch.promote_types(dtype, torch.float32))
    num_rows, cast_weight = weight.shape[0], weight[:num_ids].to(dtype)
    size = max(128, (_CHUNK_LOGITS_CPU if hidden.device.type == "cpu" else _CHUNK_LOGITS_ACCELERATOR) // num_ids)
    for start in range(0, hidden.shape[0], size):
        chunk, wanted = hidden[start : start + size].to(dtype), labels[start : start + size].unsqueeze(1)
        ignored = (wanted == IGNORED_LABEL) | ((wanted >= num_ids) & (wanted < num_rows))
        wanted = wanted.masked_fill(ignored, 0)
        logits = functional.linear(chunk, cast_weight)
        loss, of_logits = terms(logits, wanted, ignored, total.dtype, None if gradients is None else dtype)
        total = total + loss
        if gradients is not None and of_logits is not None:
            of_hidden, of_weight = gradients
            of_hidden[start : start + size] = of_logits @ cast_weight
            if of_weight.dtype == of_logits.dtype:  # Without a temporary.
                of_weight[:num_ids].addmm_(of_logits.t(), chunk)
            else:
                of_weight[:num_ids].add_(of_logits.t() @ chunk)
    return total

"""Cross entropy of next tokens straight from hidden states, never holding the logits of a whole batch.

The gradient of a sum of losses needs nothing the forward pass does not know. So each chunk of tokens makes its logits,
its losses and both gradients at once: forward and backward of 2,048 tokens, 32,768 logits and 128 dimensions take 1.1 s
instead of 1.4 on one CPU core. The trade-off: one more copy of the output matrix between the passes, and no second
derivative. Rows that pad the vocabulary are left out of the softmax, so that padding changes no loss.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

IGNORED_LABEL = -100  # A label that counts neither as a loss nor as a token.

_CHUNK_LOGITS_CPU = 1 << 24  # 64 MB of fp32; smaller chunks gain nothing.
_CHUNK_LOGITS_ACCELERATOR = 1 << 27
"""512 MB of fp32: chunks large enough that adding up the output matrix's gradient stays a small part."""


def sum_of_losses(hidden: Tensor, weight: Tensor, labels: Tensor, num_ids: int | None = None) -> Tensor:
    """Returns the sum of the cross entropies of labels under softmax(hidden · weightᵀ), a scalar of at least fp32.

    Args:
        hidden: [..., dim].
        weight: [vocabulary, dim].
        labels: int64, of hidden's shape without the last dimension; -100 and rows that are no ids are left out.
        num_ids: the softmax is over the first so many rows of ``weight``, the rest gets no gradient; None: over all.
    """
    num_ids = weight.shape[0] if num_ids is None else num_ids
    hidden, labels = hidden.flatten(0, -2), labels.flatten()
    with_gradients = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    device_type = hidden.device.type
    dtype = torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else hidden.dtype
    with torch.autocast(device_type, enabled=False):
        if with_gradients:
            total: Tensor = _SumOfLosses.apply(hidden, weight, labels, num_ids, dtype)  # type: ignore[no-untyped-call]
            return total
        return _losses_and_gradients(hidden, weight, labels, num_ids, dtype, None)


class _SumOfLosses(torch.autograd.Function):
    """`sum_of_losses` with its gradients made in the forward pass."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, num_ids: int, dtype: torch.dtype) -> Tensor:
        of_hidden, of_weight = torch.empty_like(hidden), torch.zeros_like(weight)
        total = _losses_and_gradients(hidden, weight, labels, num_ids, dtype, (of_hidden, of_weight))
        ctx.save_for_backward(of_hidden, of_weight)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        of_hidden, of_weight = ctx.saved_tensors
        scale = gradients[0]
        return of_hidden * scale.to(of_hidden.dtype), of_weight * scale.to(of_weight.dtype), None, None, None


def _losses_and_gradients(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    num_ids: int,
    dtype: torch.dtype,
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
        log_probabilities = functional.log_softmax(functional.linear(chunk, cast_weight), dim=1, dtype=total.dtype)
        total = total - log_probabilities.gather(1, wanted).masked_fill_(ignored, 0.0).sum()
        if gradients is not None:
            certain = log_probabilities.new_ones(wanted.shape)
            of_logits = log_probabilities.exp_().scatter_add_(1, wanted, -certain).masked_fill_(ignored, 0.0).to(dtype)
            of_hidden, of_weight = gradients
            of_hidden[start : start + size] = of_logits @ cast_weight
            if of_weight.dtype == of_logits.dtype:  # Without a temporary.
                of_weight[:num_ids].addmm_(of_logits.t(), chunk)
            else:
                of_weight[:num_ids].add_(of_logits.t() @ chunk)
    return total

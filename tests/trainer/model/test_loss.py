"""The chunked loss against logits that are all there, and against torch's own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from trainer.model import loss as module
from trainer.model.loss import sum_of_losses

TOKENS, DIM, ROWS, IDS = 700, 16, 96, 90


def _inputs(seed: int = 0, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(2, TOKENS // 2, DIM, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(ROWS, DIM, generator=generator).to(dtype).requires_grad_()
    labels = torch.randint(0, ROWS, (2, TOKENS // 2), generator=generator)
    labels[0, ::7] = -100
    return hidden, weight, labels


def _gradients(total: Tensor, *leaves: Tensor) -> list[Tensor]:
    return [total.detach(), *torch.autograd.grad(total * 0.3, leaves)]


def _reference(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    wanted = labels.masked_fill(labels >= IDS, -100).flatten()
    logits = functional.linear(hidden.flatten(0, 1), weight[:IDS])
    return functional.cross_entropy(logits, wanted, ignore_index=-100, reduction="sum")


@pytest.mark.parametrize("chunk_logits", [128 * IDS, 250 * IDS, 1 << 24])
def test_chunks_of_any_size_are_the_whole(monkeypatch, chunk_logits):
    monkeypatch.setattr(module, "_CHUNK_LOGITS_CPU", chunk_logits)
    hidden, weight, labels = _inputs()
    expected = _gradients(_reference(hidden, weight, labels), hidden, weight)
    found = _gradients(sum_of_losses(hidden, weight, labels, IDS), hidden, weight)
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=1e-5)
    with torch.no_grad():
        assert sum_of_losses(hidden, weight, labels, IDS).item() == pytest.approx(expected[0].item(), rel=1e-5)
    assert torch.count_nonzero(found[2][IDS:]) == 0


@pytest.mark.skipif(module.TORCHS is None, reason="this torch has no linear_cross_entropy with options")
def test_torchs_own_is_the_same_sum_with_the_same_gradients():
    hidden, weight, labels = _inputs(1)
    ours = _gradients(sum_of_losses(hidden, weight, labels, IDS), hidden, weight)
    torchs = _gradients(module.sum_by_torch(hidden, weight, labels, IDS, torch.float32), hidden, weight)
    torch.testing.assert_close(torchs, ours, rtol=2e-5, atol=1e-5)


def test_under_autocast_products_are_bf16_and_the_sum_stays_fp32():
    hidden, weight, labels = _inputs(2)
    exact = _reference(hidden, weight, labels)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        total = sum_of_losses(hidden, weight, labels, IDS)
    assert total.dtype == torch.float32
    assert total.item() == pytest.approx(exact.item(), rel=5e-3)
    of_hidden, of_weight = torch.autograd.grad(total, (hidden, weight))
    assert of_hidden.dtype == of_weight.dtype == torch.float32

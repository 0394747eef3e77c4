from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from trainer.model import loss as loss_module
from trainer.model.loss import IGNORED_LABEL, sum_of_losses


def _inputs(num_tokens: int, num_ids: int = 50, dim: int = 8, *, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(num_tokens, dim, generator=generator, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(num_ids, dim, generator=generator, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(0, num_ids, (num_tokens,), generator=generator)
    return hidden, weight, labels


def _reference(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(hidden @ weight.t(), labels, reduction="sum", ignore_index=IGNORED_LABEL)


@pytest.mark.slow
@given(num_tokens=st.integers(1, 700), ignored=st.floats(0, 1), seed=st.integers(0, 99))
def test_losses_and_gradients_are_those_of_cross_entropy_whatever_the_chunks(
    num_tokens: int, ignored: float, seed: int
):
    hidden, weight, labels = _inputs(num_tokens, seed=seed)
    labels[torch.rand(num_tokens, generator=torch.Generator().manual_seed(seed)) < ignored] = IGNORED_LABEL
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loss_module, "_CHUNK_LOGITS_CPU", 1)  # the least: 128 tokens
        ours = sum_of_losses(hidden, weight, labels)
    of_ours = torch.autograd.grad(ours * 0.25, (hidden, weight))
    reference = _reference(hidden, weight, labels)
    of_reference = torch.autograd.grad(reference * 0.25, (hidden, weight))
    assert ours.dtype is torch.float64
    torch.testing.assert_close(ours, reference)
    torch.testing.assert_close(of_ours, of_reference)


def test_an_infinite_logit_of_an_ignored_token_does_no_harm():
    hidden, weight, labels = _inputs(3)
    with torch.no_grad():
        hidden[1] = 1e200
    labels[1] = IGNORED_LABEL
    total = sum_of_losses(hidden, weight, labels)
    total.backward()
    assert torch.isfinite(total)
    assert hidden.grad is not None
    assert torch.isfinite(hidden.grad[[0, 2]]).all()


def test_nothing_of_the_size_of_all_logits_waits_for_the_backward_pass():
    hidden, weight, labels = _inputs(600, num_ids=900)
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: kept.append(tensor.numel()) or tensor, lambda kept: kept
    ):
        sum_of_losses(hidden, weight, labels)
    assert sum(kept) == hidden.numel() + weight.numel()


@pytest.mark.parametrize("num_ids", [1, 300, 399, 400])
def test_rows_that_only_pad_the_vocabulary_are_left_out(num_ids: int) -> None:
    hidden, weight, labels = _inputs(50, 400, 16)
    labels %= num_ids
    labels[::7] = IGNORED_LABEL
    total = sum_of_losses(hidden, weight, labels, num_ids)
    expected = _reference(hidden, weight[:num_ids], labels)
    torch.testing.assert_close(total, expected)
    found = torch.autograd.grad(total, (hidden, weight))
    for mine, theirs in zip(found, torch.autograd.grad(expected, (hidden, weight)), strict=True):
        torch.testing.assert_close(mine, theirs)
    assert not found[1][num_ids:].any()


def test_a_label_of_a_row_that_is_no_id_is_not_learned() -> None:
    hidden, weight = torch.ones(2, 4, requires_grad=True), torch.eye(6, 4)
    total = sum_of_losses(hidden, weight, torch.tensor([1, 5]), 5)
    torch.testing.assert_close(total, sum_of_losses(hidden, weight, torch.tensor([1, IGNORED_LABEL]), 5))

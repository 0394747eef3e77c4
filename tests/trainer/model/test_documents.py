"""Attention within documents: what a token may see, in both forms of the mask, as if each document were alone."""

from __future__ import annotations

import pytest
import torch

from tests.support.model_configs import random_model, small_config
from trainer.model import within_documents
from trainer.model.documents import attend, block_mask, dense_mask, document_numbers

END = 3
IDS = torch.tensor([[5, 9, END, 7, END, END, 8, 6], [1, 2, 4, 5, 6, 7, 8, END]])


def test_an_end_belongs_to_the_document_it_ends():
    numbers = document_numbers(IDS, END)
    assert numbers.tolist() == [[0, 0, 0, 1, 1, 2, 3, 3], [0] * 8]
    mask = dense_mask(numbers)[:, 0]
    assert mask[0, 4].tolist() == [False, False, False, True, True, False, False, False]
    assert torch.equal(mask[1], torch.ones(8, 8, dtype=torch.bool).tril())


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("num_tokens", [8, 200])
@pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))]
)
def test_flex_attention_and_the_dense_mask_are_the_same(num_tokens, device):
    """With gradients on a GPU: torch has none for FlexAttention on a CPU."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 30, (2, num_tokens), generator=generator).to(device)
    numbers = document_numbers(ids, END)
    heads = [torch.randn(2, heads, num_tokens, 16, generator=generator).to(device) for heads in (4, 2, 2)]
    inputs = [each.requires_grad_(device == "cuda") for each in heads]
    found = []
    for mask in (dense_mask(numbers), block_mask(numbers)):
        mixed = attend(*inputs, mask, is_grouped=True)
        found.append([mixed, *(torch.autograd.grad(mixed.square().sum(), inputs) if device == "cuda" else ())])
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("checkpointing", ["off", "selective", "full"])
def test_a_row_of_documents_is_each_document_alone(checkpointing):
    model = random_model(small_config())
    model.layers.activation_checkpointing = checkpointing
    plain = model(IDS)
    within_documents(model, END)
    found = model(IDS)
    start = 0
    for stop in (3, 5, 6, 8):
        # Rotary positions are relative, so a document may begin anywhere.
        alone = model(IDS[:1, start:stop])
        torch.testing.assert_close(found[:1, start:stop], alone, rtol=1e-4, atol=1e-4)
        start = stop
    torch.testing.assert_close(found[1], plain[1])
    assert not torch.allclose(found[0, 3:], plain[0, 3:], atol=1e-3)
    model(IDS, IDS).backward()
    assert all(torch.isfinite(parameter.grad).all() for parameter in model.parameters() if parameter.grad is not None)

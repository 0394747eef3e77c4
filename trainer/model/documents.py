"""Attention within documents: no token sees one of another document of its row.

A row of the loader is a window of a shard, with several documents in it; each ends with the vocabulary's id for that,
which belongs to the document it ends. In compiled code on a GPU attention is torch's FlexAttention, which leaves out
whole blocks of 128 by 128 pairs that nobody may see; elsewhere it is SDPA with a dense mask, of batch · tokens² bytes,
which rules out the flash kernel. Both compute the same (`tests/trainer/model/test_documents.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias, Union

import torch
from torch import Tensor
from torch.nn import functional

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask  # It imports sympy: a second of each start.

Mask: TypeAlias = Union[Tensor, "BlockMask"]


def document_numbers(ids: Tensor, end_id: int) -> Tensor:
    """Returns the number of each token's document within its row, int64[batch, tokens], for ids of that shape."""
    ends = (ids == end_id).to(torch.int64)
    return ends.cumsum(dim=1) - ends


def dense_mask(numbers: Tensor) -> Tensor:
    """Returns which token (second to last dimension) may see which, bool[batch, 1, tokens, tokens]."""
    same = numbers.unsqueeze(2) == numbers.unsqueeze(1)
    return same.tril_().unsqueeze(1)


def block_mask(numbers: Tensor) -> BlockMask:
    """Returns the same as `dense_mask` for FlexAttention."""
    from torch.nn.attention.flex_attention import create_block_mask

    num_rows, num_tokens = numbers.shape

    def may_see(row: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (numbers[row, query] == numbers[row, key])

    return create_block_mask(may_see, num_rows, None, num_tokens, num_tokens, device=numbers.device)


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Mask | None, *, is_grouped: bool) -> Tensor:
    """Returns causal attention [batch, heads, tokens, head_dim]; with a mask it is the mask that keeps it causal."""
    if mask is None or isinstance(mask, Tensor):
        return functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, enable_gqa=is_grouped
        )
    from torch.nn.attention.flex_attention import flex_attention

    mixed: Tensor = flex_attention(query, key, value, block_mask=mask, enable_gqa=is_grouped)
    return mixed

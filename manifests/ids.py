"""The id space of every vocabulary: 0–9 special, 10–265 the 256 bytes in order, 266 and up the merges as learned."""

from __future__ import annotations

from typing import Final

SPECIAL_TOKENS: Final = (
    "<|pad|>",
    "<|bos|>",
    "<|eos|>",
    "<|unk|>",
    *(f"<|reserved_{number}|>" for number in range(4, 10)),
)
EOS_ID: Final = SPECIAL_TOKENS.index("<|eos|>")
"""Ends every document in a shard, and never comes from text."""
BYTE_OFFSET: Final = len(SPECIAL_TOKENS)
FIRST_MERGE_ID: Final = BYTE_OFFSET + 256
MAX_VOCABULARY: Final = 10_000_000

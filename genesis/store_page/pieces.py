"""Ids → what each of them spells, and where documents begin and end in a shard. Pure functions over arrays.

The pieces of a document, put together, are exactly its bytes, each id once (`tests/genesis/store_page` holds it for any
ids): a piece is text where its bytes are UTF-8 by themselves, else hexadecimal digits. Only a token of more than 4 kB,
which no vocabulary of our own has, is cut, and says so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from genesis.store_page.models import Piece

MAX_PIECE_BYTES = 4_096

Ends = npt.NDArray[np.int32]
"""int32[E]: where a shard's ids that end a document stand, ascending."""


def num_documents(ends: Ends, num_tokens: int) -> int:
    """How many documents a shard holds something of."""
    is_open = len(ends) == 0 or int(ends[-1]) < num_tokens - 1
    return len(ends) + is_open


def document_bounds(ends: Ends, num_tokens: int, document: int) -> tuple[int, int]:
    """Start and end of a document's ids in a shard, its end id included.

    Args:
        ends: see `Ends`.
        num_tokens: ids of the shard.
        document: from 0, below `num_documents`.
    """
    start = int(ends[document - 1]) + 1 if document else 0
    end = int(ends[document]) + 1 if document < len(ends) else num_tokens
    return start, end


def pieces_of(
    ids: Sequence[int] | npt.NDArray[np.integer[Any]], token_bytes: Sequence[bytes], special: Mapping[int, str]
) -> tuple[Piece, ...]:
    """What ids spell, one piece an id.

    Args:
        ids: any numbers; those that the vocabulary lacks are named so.
        token_bytes: of each id.
        special: names of ids that spell nothing.
    """
    numbers: list[int] = np.asarray(ids).tolist()
    return tuple(_piece(number, token_bytes, special) for number in numbers)


def _piece(number: int, token_bytes: Sequence[bytes], special: Mapping[int, str]) -> Piece:
    if number in special:
        return Piece(id=number, special=special[number])
    if not 0 <= number < len(token_bytes):
        return Piece(id=number, special="not in the vocabulary")
    spelled = token_bytes[number]
    if not spelled:
        return Piece(id=number, special="spells nothing")
    whole = len(spelled) if len(spelled) > MAX_PIECE_BYTES else None
    spelled = spelled[:MAX_PIECE_BYTES]
    try:
        return Piece(id=number, text=spelled.decode(), num_bytes=whole)
    except UnicodeDecodeError:
        return Piece(id=number, hex=spelled.hex(), num_bytes=whole)

"""What each id of a vocabulary spells, in bytes.

Guarantees: every id from 10 up spells at least one byte, no two the same bytes, none more than `MAX_TOKEN_BYTES`; a
list of merges that breaks this is refused before memory is spent on it. Both rules hold for whatever was learned (the
learner cuts words at `MAX_TOKEN_BYTES`), and both are needed: rank files name tokens by their bytes, and forty merges
of a token with itself would spell a terabyte.
"""

from __future__ import annotations

from collections.abc import Sequence

from genesis.errors import TokenizerError
from manifests import BYTE_OFFSET

MAX_TOKEN_BYTES = 1024
"""The longest token: 256 code points of 4 bytes, where the learner cuts words (`words.MAX_WORD_CHARACTERS`)."""

Pair = tuple[int, int]
"""The ids a merge joins, left and right."""

_REMEDY = "take a sound copy from the store's vocabulary/ folder"


def token_bytes_of(pairs: Sequence[Pair]) -> list[bytes]:
    """The bytes of every id; those of the ten special tokens are empty, so that decoding drops them.

    Args:
        pairs: the merges, in the order of their ids.

    Returns:
        bytes of id *i* at index *i*; ``266 + len(pairs)`` entries.

    Raises:
        TokenizerError: a token would be longer than `MAX_TOKEN_BYTES`.
    """
    token_bytes = [b""] * BYTE_OFFSET + [bytes([byte]) for byte in range(256)]
    for left, right in pairs:
        spelled = token_bytes[left] + token_bytes[right]
        if len(spelled) > MAX_TOKEN_BYTES:
            raise TokenizerError(
                f"tokenizer.json: expected tokens of at most {MAX_TOKEN_BYTES} bytes, found {len(spelled)} bytes for "
                f"id {len(token_bytes)} ({left}_{right}); {_REMEDY}"
            )
        token_bytes.append(spelled)
    return token_bytes


def check_token_bytes(token_bytes: Sequence[bytes]) -> None:
    """Refuses a vocabulary two of whose ids spell the same bytes.

    Raises:
        TokenizerError: naming the first such id.
    """
    tokens = token_bytes[BYTE_OFFSET:]
    if len(set(tokens)) == len(tokens):
        return
    first_ids: dict[bytes, int] = {}
    for token_id, token in enumerate(tokens, start=BYTE_OFFSET):
        first_id = first_ids.setdefault(token, token_id)
        if first_id != token_id:
            raise TokenizerError(
                f"tokenizer.json: expected every id to spell bytes of its own, found {token[:40]!r} for ids {first_id} "
                f"and {token_id}; {_REMEDY}"
            )

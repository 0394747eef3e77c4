"""Documents and tokens of a shard: nothing is lost, nothing is twice, whatever the ids."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from genesis.errors import UsageError
from genesis.store_page.models import Piece
from genesis.store_page.pieces import MAX_PIECE_BYTES, document_bounds, num_documents, pieces_of
from genesis.store_page.vocabulary import MAX_QUERY_BYTES, TokenTable
from genesis.tokenizer import NeuroTokenizer
from manifests import EOS_ID
from tests.support.documents import documents

TOKENIZER = NeuroTokenizer.empty()
TOKENIZER.learn_merges([*documents(seed=5, count=60), "日本語のテキスト 👩‍👩‍👧 " * 40], 300, source="some")
TABLE = TokenTable.of(TOKENIZER.to_file())


def bytes_of(pieces: tuple[Piece, ...]) -> bytes:
    parts = [piece.text.encode() if piece.text is not None else bytes.fromhex(piece.hex or "") for piece in pieces]
    return b"".join(parts)


@given(st.lists(st.binary(max_size=60) | st.text(max_size=40).map(str.encode), max_size=6))
def test_pieces_put_together_are_the_documents_bytes(texts: list[bytes]) -> None:
    for text in texts:
        ids = TOKENIZER.encode(text)
        pieces = TABLE.pieces(ids.tolist())
        assert [piece.id for piece in pieces] == ids.tolist()
        assert bytes_of(pieces) == text
        assert all((piece.text is None) != (piece.hex is None) for piece in pieces)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=60), st.integers(1, 9))
def test_documents_cover_a_shard_exactly(values: list[int], page_tokens: int) -> None:
    ids = np.array(values)
    ends = np.flatnonzero(ids == EOS_ID).astype(np.int32)
    count = num_documents(ends, len(ids))
    covered = []
    for document in range(count):
        start, end = document_bounds(ends, len(ids), document)
        assert start < end
        inside = ids[start:end]
        assert EOS_ID not in inside[:-1]
        assert inside[-1] == EOS_ID or document == count - 1
        for first in range(start, end, page_tokens):
            covered += ids[first : min(end, first + page_tokens)].tolist()
    assert covered == values


@given(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=20))
def test_ids_of_a_hostile_shard_are_named(ids: list[int]) -> None:
    pieces = TABLE.pieces(ids)
    assert [piece.id for piece in pieces] == ids
    for piece in pieces:
        inside = 0 <= piece.id < len(TABLE.token_bytes)
        assert (piece.special == "not in the vocabulary") == (not inside)


def test_a_token_of_ten_megabytes_is_cut() -> None:
    (piece,) = pieces_of([0], [b"x" * 10_000_000], {})
    assert piece.text == "x" * MAX_PIECE_BYTES
    assert piece.num_bytes == 10_000_000


def test_search_by_text_finds_what_a_look_at_every_token_finds() -> None:
    for text in ("e", " t", "th", "日", "不在"):
        found = TABLE.search(text=text)
        holding = [number for number, spelled in enumerate(TABLE.token_bytes) if text.encode() in spelled]
        assert found.num_matches == len(holding)
        assert {piece.id for piece in found.matches} <= set(holding)
        assert bytes_of(found.encoded) == text.encode()
        exact = [number for number in holding if TABLE.token_bytes[number] == text.encode()]
        assert ([found.token.piece.id] if found.token else []) == exact


def test_search_by_id_tells_what_it_was_merged_from() -> None:
    number = len(TABLE.token_bytes) - 1
    found = TABLE.search(token_id=number).token
    assert found is not None
    assert bytes_of(found.parents) == TABLE.token_bytes[number]
    assert [piece.id for piece in found.parents] == list(TOKENIZER.merges[-1])
    parent = TABLE.search(token_id=found.parents[0].id).token
    assert parent is not None and parent.num_used_in >= 1


@pytest.mark.parametrize("asked", [{"token_id": 10**9}, {"text": "x" * (MAX_QUERY_BYTES + 1)}, {"text": "\ud800"}])
def test_searches_that_cannot_be_are_refused(asked: dict[str, object]) -> None:
    with pytest.raises(UsageError, match="expected"):
        TABLE.search(**asked)  # type: ignore[arg-type]

"""A vocabulary to look things up in: what an id spells, which ids hold a text, how a text is cut.

All tokens stand in one string of bytes, so a search of 32,000 takes 0.2 ms and needs 10 bytes an id beside the table.
What is looked for is bounded (200 bytes of text, 100 answers, 20,000 places looked at), and so is the vocabulary: one
of more than 2^20 ids, 120 MB as a table, is not read.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from genesis.errors import InvalidTextError, UsageError
from genesis.store_page.models import Piece, TokenFacts, VocabularySearch
from genesis.store_page.pieces import pieces_of
from genesis.tokenizer import StoreTokenizer, tokenizer_of
from genesis.tokenizer.export import token_bytes_of as own_token_bytes
from genesis.tokenizer.frozen import token_bytes_of as frozen_token_bytes
from genesis.tokenizer.neuro import NeuroTokenizer
from manifests import FIRST_MERGE_ID, SPECIAL_TOKENS, FrozenVocabularyFile, Vocabulary

MAX_IDS = 1 << 20
MAX_QUERY_BYTES = 200
_MAX_MATCHES = 100
_MAX_PLACES = 20_000
_MAX_USED_IN = 20
_MAX_LONGEST = 20
_MAX_ENCODED = 200


class TokenTable:
    """One vocabulary. Safe from many threads."""

    def __init__(
        self, tokenizer: StoreTokenizer, token_bytes: Sequence[bytes], special: Mapping[int, str], eos_id: int
    ) -> None:
        """Use `of`."""
        self.token_bytes = token_bytes
        self.special = special
        self.eos_id = eos_id
        self._tokenizer = tokenizer
        self._pairs: npt.NDArray[np.int64] | None = None
        if isinstance(tokenizer, NeuroTokenizer):
            self._pairs = np.asarray(tokenizer.merges, np.int64).reshape(-1, 2)
        self._joined = b"".join(token_bytes)
        self._starts = np.cumsum([0, *map(len, token_bytes)])
        self._lock = threading.Lock()

    @classmethod
    def of(cls, file: Vocabulary) -> TokenTable:
        """The table of a vocabulary file.

        Raises:
            UsageError: it has too many ids for a page.
            TokenizerError, ContractError: it is not sound.
        """
        if file.next_merge_id > MAX_IDS:
            raise UsageError(
                f"the vocabulary has {file.next_merge_id:,} ids; a page reads at most {MAX_IDS:,}, "
                "'genesis inspect tokenizer' any"
            )
        if isinstance(file, FrozenVocabularyFile):
            special = {token.id: token.token[:100] for token in file.special_tokens.values()}
            return cls(tokenizer_of(file), frozen_token_bytes(file), special, file.eos_id)
        # The engine that holds nothing of what it encoded: texts come from anybody.
        tokenizer = NeuroTokenizer.from_file(file, engine="tiktoken")
        return cls(tokenizer, own_token_bytes(tokenizer.merges), dict(enumerate(SPECIAL_TOKENS)), file.eos_id)

    def pieces(self, ids: Sequence[int]) -> tuple[Piece, ...]:
        """What ids spell."""
        return pieces_of(ids, self.token_bytes, self.special)

    def search(self, *, token_id: int | None = None, text: str = "") -> VocabularySearch:
        """Looks up an id, or a text; what is most worth seeing if neither is given.

        Raises:
            UsageError: the vocabulary has no such id, or the text is too long or not valid Unicode.
        """
        if token_id is not None:
            if not 0 <= token_id < len(self.token_bytes):
                raise UsageError(f"expected an id of 0 to {len(self.token_bytes) - 1}, found {str(token_id)[:30]}")
            return self._result(token=self._facts(token_id))
        if text:
            return self._search_text(text)
        lengths = np.diff(self._starts)
        longest = np.lexsort((np.arange(len(lengths)), -lengths))[:_MAX_LONGEST]
        merged = lengths[lengths > 1]
        return self._result(
            longest=self.pieces(longest[lengths[longest] > 1].tolist()),
            mean_token_bytes=round(float(merged.mean()), 2) if len(merged) else None,
        )

    def _result(self, **found: object) -> VocabularySearch:
        return VocabularySearch.model_validate({"ids": len(self.token_bytes), "eos_id": self.eos_id, **found})

    def _search_text(self, text: str) -> VocabularySearch:
        try:
            wanted = text.encode()
        except UnicodeEncodeError:
            raise UsageError("expected a text of valid Unicode, found a lone surrogate") from None
        if len(wanted) > MAX_QUERY_BYTES:
            raise UsageError(f"expected at most {MAX_QUERY_BYTES} bytes of text, found {len(wanted)}")
        found, is_complete = self._holding(wanted)
        exact = next((number for number in found if self.token_bytes[number] == wanted), None)
        try:
            with self._lock:
                encoded = self._tokenizer.encode(text)[:_MAX_ENCODED].tolist()
        except InvalidTextError as error:
            raise UsageError(str(error)) from None
        found.sort(key=lambda number: (len(self.token_bytes[number]), number))
        return self._result(
            token=None if exact is None else self._facts(exact),
            encoded=self.pieces(encoded),
            matches=self.pieces(found[:_MAX_MATCHES]),
            num_matches=len(found),
            is_complete=is_complete,
        )

    def _holding(self, wanted: bytes) -> tuple[list[int], bool]:
        """Ids whose bytes hold these, ascending; and whether that is all of them."""
        found: list[int] = []
        at = self._joined.find(wanted)
        for _ in range(_MAX_PLACES):
            if at < 0:
                return found, True
            number = int(np.searchsorted(self._starts, at, side="right")) - 1
            end = int(self._starts[number + 1])
            is_inside = at + len(wanted) <= end
            if is_inside:
                found.append(number)
            at = self._joined.find(wanted, end if is_inside else at + 1)
        return found, at < 0

    def _facts(self, number: int) -> TokenFacts:
        pairs = self._pairs
        (piece,) = self.pieces([number])
        num_bytes = len(self.token_bytes[number])
        if pairs is None:
            return TokenFacts(piece=piece, num_bytes=num_bytes)
        merge = number - FIRST_MERGE_ID
        used_in = np.flatnonzero((pairs == number).any(axis=1)) + FIRST_MERGE_ID
        return TokenFacts(
            piece=piece,
            num_bytes=num_bytes,
            parents=self.pieces(pairs[merge].tolist()) if merge >= 0 else (),
            used_in=self.pieces(used_in[:_MAX_USED_IN].tolist()),
            num_used_in=len(used_in),
        )

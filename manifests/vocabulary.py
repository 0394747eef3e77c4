"""``tokenizer.json``: a byte-level BPE vocabulary that grows without changing an old id.

`ids` says which ids there are. A file is
valid only if its merges are exactly the ids 266 … next_merge_id − 1, each joining two lower ids that are bytes or
merges; so a vocabulary is determined by its list of pairs, and one extends another exactly if the other's list is a
prefix of its own.
"""

from __future__ import annotations

import re
from operator import itemgetter
from typing import Any, ClassVar, Self

from pydantic import Field, StrictInt, model_validator

from manifests.documents import Document
from manifests.errors import InvalidDocumentError, UnsupportedFormatError
from manifests.fields import Count, SourceName
from manifests.ids import BYTE_OFFSET, EOS_ID, FIRST_MERGE_ID, MAX_VOCABULARY

PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
)
"""The GPT-4 (cl100k) split in the spelling that every engine accepts literally."""

_MERGE = re.compile(r"([1-9][0-9]{0,7})_([1-9][0-9]{0,7})", re.ASCII)
"""One spelling a pair: a second one, such as ``0266_111``, would be the same merge again."""


class VocabularyFile(Document):
    """``tokenizer.json`` and ``vocabulary/{sha256[:16]}.json``."""

    FILE: ClassVar[str] = "tokenizer.json"

    vocab_size: int = Field(default=MAX_VOCABULARY, ge=FIRST_MERGE_ID, le=MAX_VOCABULARY)
    """The cap, not the present size (spec G-7)."""
    next_merge_id: int = Field(ge=FIRST_MERGE_ID, le=MAX_VOCABULARY)
    merges: dict[str, StrictInt]
    """``"left_right": id``."""
    sources_contributed: dict[SourceName, Count]
    """Merges learned from each source."""
    pattern: str = PATTERN

    @property
    def eos_id(self) -> int:
        """The id that ends every document."""
        return EOS_ID

    @model_validator(mode="after")
    def _ids_are_dense(self) -> Self:
        expected = self.next_merge_id - FIRST_MERGE_ID
        if len(self.merges) != expected:
            raise ValueError(f"next_merge_id {self.next_merge_id} means {expected} merges, found {len(self.merges)}")
        if self.pattern != PATTERN:
            raise ValueError(f"expected the pattern {PATTERN!r}, found {self.pattern!r}")
        return self

    @classmethod
    def from_object(cls, value: dict[str, Any], *, name: str | None = None) -> Self:
        """`from_json` for JSON that is parsed already; names a vocabulary made elsewhere as such."""
        if value.get("format") == 2:
            raise UnsupportedFormatError(
                f"{name or cls.FILE}: expected a vocabulary that grows (format 1), found one made elsewhere (2); "
                "genesis.tokenizer.read_tokenizer reads both"
            )
        return super().from_object(value, name=name)

    def pairs(self) -> list[tuple[int, int]]:
        """The merges as (left id, right id), in the order of their own ids.

        Raises:
            InvalidDocumentError: a merge is not spelt ``left_right``, ids are not 266, 267, … without a gap, or a
                merge refers to an id that does not exist before it.
        """
        pairs: list[tuple[int, int]] = []
        for key, merge_id in sorted(self.merges.items(), key=itemgetter(1)):
            if merge_id != FIRST_MERGE_ID + len(pairs):
                raise InvalidDocumentError(
                    f"tokenizer.json: expected merge id {FIRST_MERGE_ID + len(pairs)} next, found {key!r}: {merge_id}; "
                    "take a sound copy from the store's vocabulary/ folder"
                )
            pairs.append(_parse_pair(key, merge_id))
        return pairs

    @classmethod
    def from_pairs(cls, pairs: list[tuple[int, int]], sources_contributed: dict[str, int]) -> Self:
        """The file for a list of merges; the inverse of `pairs`."""
        merges = {f"{left}_{right}": FIRST_MERGE_ID + order for order, (left, right) in enumerate(pairs)}
        return cls(
            next_merge_id=FIRST_MERGE_ID + len(pairs), merges=merges, sources_contributed=dict(sources_contributed)
        )


def _parse_pair(key: str, merge_id: int) -> tuple[int, int]:
    matched = _MERGE.fullmatch(key)
    if matched is None:
        raise InvalidDocumentError(f"tokenizer.json: expected a merge such as '266_111', found {key[:40]!r}")
    pair = (int(matched[1]), int(matched[2]))
    if not all(BYTE_OFFSET <= side < merge_id for side in pair):
        raise InvalidDocumentError(
            f"tokenizer.json: merge {key!r} (id {merge_id}) refers to an id that does not exist: expected both in "
            f"{BYTE_OFFSET}…{merge_id - 1}; take a sound copy from the store's vocabulary/ folder"
        )
    return pair

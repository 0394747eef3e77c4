"""``tokenizer.json`` in format 2: a byte-level BPE vocabulary that was made elsewhere, and neither learns nor grows.

The maker's file stands in it verbatim, with its digest, so that what a store exports is what the maker published, and
anybody can hold the two against each other. Around it is what a reader must know without understanding that file: how
many ids there are, and which one ends a document. The trade-off of keeping JSON in a JSON string: quotes and line ends
are escaped, some 20 % more bytes of a file that is read once a start.

A store has vocabularies of one kind only. `read_vocabulary_file` reads either.
"""

from __future__ import annotations

from typing import ClassVar, Self

from pydantic import Field, model_validator

from manifests.documents import Document, Part
from manifests.errors import InvalidDocumentError
from manifests.fields import Sha256, TokenId
from manifests.ids import FIRST_MERGE_ID, MAX_VOCABULARY
from manifests.serialisation import parse_object, sha256_hex
from manifests.vocabulary import VocabularyFile

_FROZEN_BYTES_PER_ID = 512
"""Published files take 60 to 250 bytes an id, the merges and the escapes counted."""
_FROZEN_BYTES = 4 << 20
_BYTES_PER_ID = 64
"""A merge of our own takes 20."""
_BYTES = 2**16


class SpecialToken(Part):
    """A token that stands for no text."""

    id: TokenId
    token: str = Field(min_length=1)
    """How its maker spells it."""


class FrozenVocabularyFile(Document):
    """``tokenizer.json`` and ``vocabulary/{sha256[:16]}.json`` of a vocabulary made elsewhere."""

    FILE: ClassVar[str] = "tokenizer.json"
    FORMAT: ClassVar[int] = 2
    FORMATS: ClassVar[tuple[int, ...]] = (2,)

    format: int = 2
    origin: str
    """``tokenizer.json``, or ``tiktoken:`` and the name of an encoding that the file was made from."""
    next_merge_id: int = Field(ge=FIRST_MERGE_ID, le=MAX_VOCABULARY)
    """How many ids there are, added tokens included: one more than the largest."""
    eos: SpecialToken
    """Ends every document in a shard, and never comes from text."""
    bos: SpecialToken | None = None
    pad: SpecialToken | None = None
    unk: SpecialToken | None = None
    tokenizer_json: str
    """The file itself, in Hugging Face's form."""
    tokenizer_sha256: Sha256
    """Of that file in UTF-8."""

    @property
    def eos_id(self) -> int:
        """The id that ends every document."""
        return self.eos.id

    @property
    def special_tokens(self) -> dict[str, SpecialToken]:
        """Those there are, by their names: ``eos``, ``bos``, ``pad``, ``unk``."""
        named = {"eos": self.eos, "bos": self.bos, "pad": self.pad, "unk": self.unk}
        return {name: token for name, token in named.items() if token is not None}

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        found = sha256_hex(self.tokenizer_json.encode())
        if found != self.tokenizer_sha256:
            raise ValueError(f"tokenizer_sha256 is {self.tokenizer_sha256}, the file's is {found}")
        for name, token in self.special_tokens.items():
            if token.id >= self.next_merge_id:
                raise ValueError(f"{name}.id {token.id} is not below next_merge_id {self.next_merge_id}")
        return self


Vocabulary = VocabularyFile | FrozenVocabularyFile
"""What a store's ids mean: a vocabulary of our own that may grow, or one made elsewhere."""


def max_vocabulary_bytes(next_merge_id: int, *, is_frozen: bool) -> int:
    """The largest vocabulary file a reader accepts; a populator refuses to make a larger one.

    Args:
        next_merge_id: how many ids it has.
        is_frozen: whether it was made elsewhere.
    """
    if is_frozen:
        return _FROZEN_BYTES + _FROZEN_BYTES_PER_ID * next_merge_id
    return _BYTES + _BYTES_PER_ID * next_merge_id


def read_vocabulary_file(data: bytes, *, name: str | None = None) -> Vocabulary:
    """Reads a vocabulary of either kind, by its ``format``.

    Args:
        data: the file's bytes.
        name: what to call the file in messages.

    Raises:
        UnsupportedFormatError: it is of a format that this release does not know.
        InvalidDocumentError: it is no vocabulary; a bare file of Hugging Face is named as such.
    """
    what = name or VocabularyFile.FILE
    value = parse_object(data, what)
    if value.get("format") == FrozenVocabularyFile.FORMAT:
        return FrozenVocabularyFile.from_object(value, name=name)
    if "format" not in value and isinstance(value.get("model"), dict):
        raise InvalidDocumentError(
            f"{what}: expected a store's vocabulary, found Hugging Face's form of one; give it to "
            "'genesis populate --tokenizer' instead of putting it into the store"
        )
    return VocabularyFile.from_object(value, name=name)

"""A vocabulary made elsewhere: what is accepted, how it is encoded, what its ids spell.

Accepted is a byte-level BPE in Hugging Face's form (GPT-2, Llama 3, Qwen, OLMo …): every byte has a token, so no text
is lost. Refused with one line are models that are none (Unigram, WordPiece, BPE with byte fallback, as SentencePiece's
are), and parts that throw text away: readers could not tell what is missing.

Guarantees, for what is accepted:

- Ids are those of ``tokenizers`` with ``encode_special_tokens=True`` and ``add_special_tokens=False``: a document that
  spells a special token is bytes, and nothing is put before or behind it. Added tokens that are *not* special (OLMo's
  runs of spaces) are matched, as their maker meant them.
- The EOS counts as special even where its maker's file does not say so.
- `FrozenTokenizer.decode_bytes` gives the bytes back if `is_lossless`; a normalizer (Qwen's NFC) or a prefix space
  changes text before it is encoded, and that does not come back.

The vocabulary neither learns nor grows.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from genesis.errors import TokenizerError, UsageError, VocabularyMismatchError
from genesis.tokenizer.engines import EncodedBatch, Engine, HuggingFaceEngine
from genesis.tokenizer.export import PRINTABLE_BYTES
from genesis.tokenizer.neuro import NeuroTokenizer, as_bytes, joined_bytes
from manifests import FrozenVocabularyFile, Vocabulary, VocabularyFile, read_vocabulary_file, sha256_hex

_BYTES: Final = {character: byte for byte, character in enumerate(PRINTABLE_BYTES)}
_KEEPING_TEXT: Final = ("Split", "ByteLevel", "Digits", "Punctuation")
"""Parts of a pre-tokenizer that cut text and throw nothing away, unless their behavior is ``Removed``."""
_OTHER_SPELLINGS: Final = ("continuing_subword_prefix", "end_of_word_suffix", "byte_fallback", "dropout")
"""Fields of a BPE model that make it another one than a deterministic byte-level BPE."""

Json = dict[str, Any]


class FrozenTokenizer:
    """Encodes and decodes with a vocabulary made elsewhere; not for several threads at once."""

    def __init__(self, vocabulary: FrozenVocabularyFile) -> None:
        """Notes the vocabulary; it is parsed at the first use."""
        self._vocabulary = vocabulary
        self._engine: Engine | None = None
        self._token_bytes: list[bytes] | None = None

    def to_file(self) -> FrozenVocabularyFile:
        """The contents of the store's ``tokenizer.json``."""
        return self._vocabulary

    @property
    def sha256(self) -> str:
        """Digest of the store's file; computed at each call."""
        return sha256_hex(self._vocabulary.to_json())

    @property
    def next_merge_id(self) -> int:
        """How many ids there are, added tokens included."""
        return self._vocabulary.next_merge_id

    @property
    def current_vocab_size(self) -> int:
        """`next_merge_id`."""
        return self._vocabulary.next_merge_id

    @property
    def eos_id(self) -> int:
        """The id that ends every document."""
        return self._vocabulary.eos_id

    def encode(self, text: str | bytes) -> npt.NDArray[np.uint32]:
        """The ids of one text, uint32[N]; special tokens in it are bytes.

        Raises:
            InvalidTextError: it is not valid Unicode.
        """
        return self.encode_batch([text]).ids

    def encode_batch(self, texts: Sequence[str | bytes]) -> EncodedBatch:
        """The ids of many texts, by ``tokenizers``.

        Returns:
            ``(ids, offsets)``: uint32[N] and int64[D + 1]; text *i* is ``ids[offsets[i]:offsets[i + 1]]``.

        Raises:
            InvalidTextError: a text is not valid Unicode.
        """
        if self._engine is None:
            self._engine = HuggingFaceEngine(encoding_form(self._vocabulary))
        return self._engine.encode_batch([as_bytes(text, order) for order, text in enumerate(texts)])

    def decode(self, ids: Sequence[int] | npt.NDArray[np.integer[Any]]) -> str:
        """The text of ids; special tokens spell nothing, and bytes that are not UTF-8 become U+FFFD.

        Raises:
            InvalidTextError: an id is not in the vocabulary.
        """
        return self.decode_bytes(ids).decode(errors="replace")

    def decode_bytes(self, ids: Sequence[int] | npt.NDArray[np.integer[Any]]) -> bytes:
        """The bytes of ids; special tokens spell nothing.

        Raises:
            InvalidTextError: an id is not in the vocabulary.
        """
        if self._token_bytes is None:
            self._token_bytes = token_bytes_of(self._vocabulary)
        return joined_bytes(ids, self._token_bytes)

    def update_from_dict(self, value: Mapping[str, Any]) -> bool:
        """Compares with the store's newest vocabulary; it cannot have grown, so the answer is False.

        Raises:
            VocabularyMismatchError: it is another one.
            ContractError: it is not a sound ``tokenizer.json``.
        """
        found = FrozenVocabularyFile.from_object(dict(value))
        ours = self._vocabulary
        if (found.tokenizer_sha256, found.eos_id) != (ours.tokenizer_sha256, ours.eos_id):
            raise VocabularyMismatchError(
                f"tokenizer.json: expected the vocabulary made elsewhere of sha256 {ours.tokenizer_sha256[:12]}, which "
                f"never changes, found {found.tokenizer_sha256[:12]}; one vocabulary belongs to one store"
            )
        return False


StoreTokenizer = NeuroTokenizer | FrozenTokenizer
"""What a store's documents are encoded and decoded with."""


def tokenizer_of(vocabulary: Vocabulary) -> StoreTokenizer:
    """The tokenizer of a store's vocabulary.

    Raises:
        ContractError: its merges are not sound.
    """
    if isinstance(vocabulary, VocabularyFile):
        return NeuroTokenizer.from_file(vocabulary)
    return FrozenTokenizer(vocabulary)


def read_tokenizer(data: bytes, *, name: str | None = None) -> StoreTokenizer:
    """A tokenizer from the bytes of a store's ``tokenizer.json``, called ``name`` in messages.

    Raises:
        ContractError: it is not one, is damaged, or was written by a newer program.
    """
    return tokenizer_of(read_vocabulary_file(data, name=name))


def parse_form(text: str, what: str) -> Json:
    """Parses a file in Hugging Face's form.

    Args:
        text: the file.
        what: names it in messages.

    Raises:
        TokenizerError: it is none.
    """
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TokenizerError(f"{what}: expected Hugging Face's tokenizer.json, found no JSON ({error})") from None
    model = value.get("model") if isinstance(value, dict) else None
    if not isinstance(model, dict) or not isinstance(value.get("added_tokens") or [], list):
        raise TokenizerError(
            f"{what}: expected Hugging Face's tokenizer.json, with a model in it, found another file; give the "
            "tokenizer.json of the model's folder"
        )
    found: Json = value
    return found


_MAX_GROWTH: Final = 64
"""Of text by its normalizers; those of tokenizers in use replace a character by three."""


def check_form(value: Json, what: str) -> None:
    """Refuses what is not a byte-level BPE that keeps all text.

    Args:
        value: as `parse_form` returns it.
        what: names it in messages.

    Raises:
        TokenizerError: saying which part it is.
    """
    model = value["model"]
    kind = model.get("type") or ("BPE" if "merges" in model else "unnamed")
    vocab = model.get("vocab")
    if kind != "BPE" or not isinstance(vocab, dict):
        raise _refused(what, f"a {kind} model")
    for name in _OTHER_SPELLINGS:
        if model.get(name):
            raise _refused(what, f"a BPE model with {name} {model[name]!r}")
    parts = _parts(value.get("pre_tokenizer"), "pretokenizers")
    if not any(part.get("type") == "ByteLevel" for part in parts):
        raise _refused(what, f"the pre-tokenizer {_names(parts)}")
    for part in parts:
        if part.get("type") not in _KEEPING_TEXT or str(part.get("behavior", "")).lower() == "removed":
            raise _refused(what, f"the pre-tokenizer {_names(parts)}, whose {part.get('type')} throws text away")
    growth = 1
    for part in _parts(value.get("normalizer"), "normalizers"):  # Each may replace what the one before it put in.
        growth = min(growth * max(len(str(part.get("content", ""))), 1), _MAX_GROWTH + 1)
    if growth > _MAX_GROWTH:
        raise _refused(what, f"a normalizer that can make text over {_MAX_GROWTH} times as long")
    missing = [byte for byte, character in enumerate(PRINTABLE_BYTES) if character not in vocab]
    if missing:
        raise _refused(what, f"one in which {len(missing)} of the 256 bytes have no token (0x{missing[0]:02x} first)")


def _refused(what: str, found: str) -> TokenizerError:
    return TokenizerError(
        f"{what}: expected a byte-level BPE that keeps all text (GPT-2, Llama 3, Qwen, OLMo), found {found}; take "
        "another tokenizer, or let the store learn its own vocabulary"
    )


def ids_of(value: Json) -> dict[str, int]:
    """The id of every token by its name in the file, added ones included."""
    ids: dict[str, int] = dict(value["model"]["vocab"])
    ids.update({added["content"]: added["id"] for added in value.get("added_tokens") or []})
    return ids


def is_lossless(value: Json) -> bool:
    """Whether decoding gives the encoded bytes back: nothing changes text before it is cut."""
    normalizers = _parts(value.get("normalizer"), "normalizers")
    prefixed = any(part.get("add_prefix_space") for part in _parts(value.get("pre_tokenizer"), "pretokenizers"))
    swallowing = any(
        not added.get("special") and (added.get("lstrip") or added.get("rstrip"))
        for added in value.get("added_tokens") or []
    )
    return not (normalizers or prefixed or swallowing)


def split_pattern(value: Json) -> str:
    """The regular expression that cuts text, for people; of several, joined by `` then ``."""
    patterns = []
    for part in _parts(value.get("pre_tokenizer"), "pretokenizers"):
        pattern = part.get("pattern")
        if isinstance(pattern, dict):
            patterns.append(str(next(iter(pattern.values()), "")))
        elif part.get("type") != "ByteLevel" or part.get("use_regex", True):
            patterns.append(f"({part.get('type')})")
    return " then ".join(patterns)


def encoding_form(vocabulary: FrozenVocabularyFile, *, without_special: bool = False) -> bytes:
    """The file as an engine wants it: nothing but what decides the ids of text.

    Truncation, padding and what adds tokens around a document are left out, and the EOS is marked as special.

    Args:
        vocabulary: the store's.
        without_special: leave the special tokens out, for gigatoken, which would match them in text; ``tokenizers``
            must have them, because it numbers added tokens by their order.
    """
    value = parse_form(vocabulary.tokenizer_json, vocabulary.FILE)
    added = [
        {**token, "special": bool(token.get("special")) or token["id"] == vocabulary.eos_id}
        for token in value.get("added_tokens") or []
    ]
    if without_special:
        added = [token for token in added if not token["special"]]
    nothing = dict.fromkeys(("truncation", "padding", "post_processor"))
    return json.dumps({**value, **nothing, "added_tokens": added}, ensure_ascii=False).encode()


def token_bytes_of(vocabulary: FrozenVocabularyFile) -> list[bytes]:
    """The bytes of every id; empty for special tokens, and for ids that have no token.

    Raises:
        TokenizerError: the file in it is no byte-level BPE of that many ids.
    """
    value = parse_form(vocabulary.tokenizer_json, vocabulary.FILE)
    table = [b""] * vocabulary.next_merge_id
    try:
        for token, token_id in value["model"]["vocab"].items():
            table[token_id] = _spelled(token)
        for added in value.get("added_tokens") or []:
            table[added["id"]] = b"" if added.get("special") else added["content"].encode()
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise TokenizerError(
            f"tokenizer.json: expected a vocabulary of {vocabulary.next_merge_id} ids, found another "
            f"({type(error).__name__}: {error}); take a sound copy from the store's vocabulary/ folder"
        ) from None
    for special in vocabulary.special_tokens.values():
        table[special.id] = b""
    return table


def _spelled(token: str) -> bytes:
    """The bytes of a token of the model; one with a character that stands for no byte spells itself."""
    try:
        return bytes([_BYTES[character] for character in token])
    except KeyError:
        return token.encode()


def _parts(value: Any, name: str) -> list[Json]:
    """The elements of a normalizer or pre-tokenizer, which may be none, one, or a sequence of sequences."""
    if not isinstance(value, dict):
        return []
    if value.get("type") != "Sequence":
        return [value]
    each_of = value.get(name)
    return [part for each in (each_of if isinstance(each_of, list) else []) for part in _parts(each, name)]


def _names(parts: Sequence[Json]) -> str:
    return " + ".join(str(part.get("type")) for part in parts) or "none"


def refuse_growth(tokenizer: StoreTokenizer | None, url: str) -> NeuroTokenizer | None:
    """Returns the tokenizer if it can learn.

    Args:
        tokenizer: the store's; None if it has none yet.
        url: the store's address, for the message.

    Raises:
        UsageError: it was made elsewhere.
    """
    if isinstance(tokenizer, FrozenTokenizer):
        raise UsageError(
            f"{url} has a vocabulary that was made elsewhere ({tokenizer.to_file().origin}, "
            f"{tokenizer.next_merge_id} ids), which neither learns nor grows; learn into another --store"
        )
    return tokenizer

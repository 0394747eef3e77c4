"""What is inside a store, for people: a shard's first documents, a vocabulary's statistics (`genesis inspect`).

A shard is cut into documents at its EOS ids. Its first document may have begun in an earlier shard of the same source,
its last may go on in a later one; which is the case is read from the index, not guessed. Costs one shard (20 MB), its
index segment and the vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict

from genesis.errors import TokenizerError, UsageError
from genesis.snapshot import find_shard, previous_of_source, read_vocabulary
from genesis.store import ReadableStore
from genesis.tokenizer import FrozenTokenizer, StoreTokenizer, tokenizer_of
from genesis.tokenizer.frozen import is_lossless, parse_form, split_pattern, token_bytes_of
from manifests import (
    BYTE_OFFSET,
    FIRST_MERGE_ID,
    SPECIAL_TOKENS,
    FrozenVocabularyFile,
    Manifest,
    ShardEntry,
    Vocabulary,
    decode_shard,
    sha256_hex,
    shard_key,
)

_LONGEST = 10


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True)


class Token(_Part):
    """An id and what it spells; bytes that are not UTF-8 by themselves become U+FFFD."""

    id: int
    text: str


class DocumentView(_Part):
    """The beginning of one document of a shard."""

    ordinal: int
    """Of the document within its source."""
    begins_before: bool
    """It began in an earlier shard: what follows is its remainder."""
    continues_after: bool
    """It goes on in a later shard."""
    num_tokens: int
    """Of its ids in this shard, EOS included."""
    text: str
    is_cut: bool
    """Only its first ids were decoded."""
    tokens: tuple[Token, ...] | None = None


class ShardInspection(_Part):
    """One shard."""

    format: int = 1
    url: str
    key: str
    segment: str
    entry: ShardEntry
    num_eos: int
    """Documents that end in the shard."""
    sha256_matches: bool
    documents: tuple[DocumentView, ...]


class VocabularyInspection(_Part):
    """A vocabulary in numbers."""

    format: int = 1
    url: str
    key: str | None
    sha256: str
    ids: int
    merges: int
    limit: int
    sources_contributed: dict[str, int]
    pattern: str
    mean_token_bytes: float
    """Over the merges."""
    longest: tuple[Token, ...]
    eos_id: int
    origin: str | None = None
    """Of a vocabulary made elsewhere, and so what follows; None of our own."""
    special_tokens: dict[str, Token] | None = None
    """By what they are for: ``eos``, ``bos``, ``pad``, ``unk``."""
    is_lossless: bool = True
    """Decoding gives the very text back; else a normalizer or a prefix space changes it before it is encoded."""


class EncodedText(_Part):
    """A text and its ids."""

    format: int = 1
    text: str
    tokens: tuple[Token, ...]


def inspect_shard(
    store: ReadableStore,
    manifest: Manifest,
    shard_id: int,
    *,
    num_documents: int = 1,
    max_tokens: int | None = None,
    with_tokens: bool = False,
) -> ShardInspection:
    """A shard's facts and its first documents, decoded.

    Args:
        store: where it is.
        manifest: the store's.
        shard_id: which.
        num_documents: how many documents to decode.
        max_tokens: decode only so many ids of each document; None for all.
        with_tokens: list the ids one by one, too.

    Raises:
        UsageError: there is no such shard.
        StoreError: it cannot be read.
        ContractError: it is not a shard, or the index is damaged.
    """
    reference, entry = find_shard(store, manifest, shard_id)
    key = shard_key(shard_id)
    body = store.get(key).body
    ids = decode_shard(body)
    documents: tuple[DocumentView, ...] = ()
    if num_documents:
        tokenizer = tokenizer_of(read_vocabulary(store, manifest))
        before = previous_of_source(store, manifest, entry)
        begins_before = before is not None and before.last_document == entry.first_document
        documents = tuple(
            _documents(ids, entry, begins_before, tokenizer, manifest.eos_id, num_documents, max_tokens, with_tokens)
        )
    return ShardInspection(
        url=store.url,
        key=key,
        segment=reference.key,
        entry=entry,
        num_eos=int(np.count_nonzero(ids == manifest.eos_id)),
        sha256_matches=sha256_hex(body) == entry.sha256,
        documents=documents,
    )


def _documents(
    ids: npt.NDArray[np.int64],
    entry: ShardEntry,
    begins_before: bool,
    tokenizer: StoreTokenizer,
    eos_id: int,
    num_documents: int,
    max_tokens: int | None,
    with_tokens: bool,
) -> Iterator[DocumentView]:
    for number, (start, end) in enumerate(_bounds(ids, eos_id, num_documents)):
        shown = ids[start:end] if max_tokens is None else ids[start : min(end, start + max_tokens)]
        yield DocumentView(
            ordinal=entry.first_document + number,
            begins_before=begins_before and number == 0,
            continues_after=ids[end - 1] != eos_id,
            num_tokens=end - start,
            text=tokenizer.decode(shown),
            is_cut=len(shown) < end - start,
            tokens=_tokens(shown, tokenizer) if with_tokens else None,
        )


def _bounds(ids: npt.NDArray[np.int64], eos_id: int, num_documents: int) -> list[tuple[int, int]]:
    """Start and end (EOS included) of the first documents."""
    ends = (np.flatnonzero(ids == eos_id)[:num_documents] + 1).tolist()
    if len(ends) < num_documents and (not ends or ends[-1] < len(ids)):
        ends.append(len(ids))
    return list(zip([0, *ends[:-1]], ends, strict=True))


def _tokens(ids: npt.NDArray[np.integer], tokenizer: StoreTokenizer) -> tuple[Token, ...]:
    return tuple(Token(id=number, text=_text_of(number, tokenizer)) for number in ids.tolist())


def _text_of(number: int, tokenizer: StoreTokenizer) -> str:
    if isinstance(tokenizer, FrozenTokenizer):
        special = {token.id: token.token for token in tokenizer.to_file().special_tokens.values()}
        return special.get(number) or tokenizer.decode([number])
    return SPECIAL_TOKENS[number] if number < BYTE_OFFSET else tokenizer.decode([number])


def inspect_vocabulary(store: ReadableStore, manifest: Manifest | None) -> VocabularyInspection:
    """The store's newest vocabulary in numbers.

    Raises:
        StoreEmptyError, StoreError, ContractError: there is none, or it cannot be read.
    """
    file = read_vocabulary(store, manifest)
    key = manifest.tokenizer.key if manifest and manifest.tokenizer else None
    if isinstance(file, FrozenVocabularyFile):
        return _inspect_frozen(store.url, key, file)
    tokenizer = tokenizer_of(file)
    token_bytes = [(number, tokenizer.decode_bytes([number])) for number in range(FIRST_MERGE_ID, file.next_merge_id)]
    longest = sorted(token_bytes, key=lambda item: (-len(item[1]), item[0]))[:_LONGEST]
    total_bytes = sum(len(spelled) for _, spelled in token_bytes)
    return VocabularyInspection(
        url=store.url,
        key=key,
        sha256=tokenizer.sha256,
        ids=file.next_merge_id,
        merges=len(token_bytes),
        limit=file.vocab_size,
        sources_contributed=file.sources_contributed,
        pattern=file.pattern,
        mean_token_bytes=round(total_bytes / len(token_bytes), 2) if token_bytes else 0.0,
        longest=tuple(Token(id=number, text=spelled.decode(errors="replace")) for number, spelled in longest),
        eos_id=file.eos_id,
    )


def _inspect_frozen(url: str, key: str | None, file: FrozenVocabularyFile) -> VocabularyInspection:
    form = parse_form(file.tokenizer_json, key or file.FILE)
    spelled = [(number, spelling) for number, spelling in enumerate(token_bytes_of(file)) if len(spelling) > 1]
    longest = sorted(spelled, key=lambda item: (-len(item[1]), item[0]))[:_LONGEST]
    merges = form["model"].get("merges")
    if not isinstance(merges, list):
        raise TokenizerError(f"{key or file.FILE}: expected a list of merges, found none; restore it from a copy")
    return VocabularyInspection(
        url=url,
        key=key,
        sha256=tokenizer_of(file).sha256,
        ids=file.next_merge_id,
        merges=len(merges),
        limit=file.next_merge_id,
        sources_contributed={},
        pattern=split_pattern(form),
        mean_token_bytes=round(sum(len(each) for _, each in spelled) / len(spelled), 2) if spelled else 0.0,
        longest=tuple(Token(id=number, text=each.decode(errors="replace")) for number, each in longest),
        eos_id=file.eos_id,
        origin=file.origin,
        special_tokens={name: Token(id=token.id, text=token.token) for name, token in file.special_tokens.items()},
        is_lossless=is_lossless(form),
    )


def encode_text(vocabulary: Vocabulary, text: str) -> EncodedText:
    """The ids of ``text``.

    Raises:
        InvalidTextError: it is not valid Unicode.
        UsageError: it is empty.
    """
    if not text:
        raise UsageError("--encode: expected a text, found an empty one")
    tokenizer = tokenizer_of(vocabulary)
    return EncodedText(text=text, tokens=_tokens(tokenizer.encode(text), tokenizer))

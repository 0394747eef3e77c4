"""The vocabularies: sound, named by their digest, and each an earlier state of the newest.

Ids never change their meaning, so a reader with the newest vocabulary can decode every shard. That holds exactly if
every vocabulary that shards were written with is a prefix of the newest. One made elsewhere never changes: it is the
newest, and the only one.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

from genesis.errors import ObjectNotFoundError, StoreError
from genesis.store import ReadableStore
from genesis.verification.report import Findings
from genesis.verification.shards import Listing
from manifests import (
    MANIFEST_KEY,
    TOKENIZER_KEY,
    Checkpoints,
    ContractError,
    FrozenVocabularyFile,
    Manifest,
    TokenizerRef,
    Vocabulary,
    read_vocabulary_file,
    sha256_hex,
    vocabulary_key,
)

_Pairs = list[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    sha256: str
    next_merge_id: int
    eos_id: int | None
    """Of one made elsewhere, which has no ``pairs``; None of our own."""
    pairs: _Pairs

    @classmethod
    def of(cls, file: Vocabulary, sha256: str) -> _Vocabulary:
        """Raises `ContractError`: the merges of our own are not sound."""
        if isinstance(file, FrozenVocabularyFile):
            return cls(sha256, file.next_merge_id, file.eos_id, [])
        return cls(sha256, file.next_merge_id, None, file.pairs())

    def extends(self, other: _Vocabulary) -> bool:
        """Whether ``other`` is this one or an earlier state of it."""
        if self.eos_id is not None or other.eos_id is not None:
            return self.sha256 == other.sha256
        return self.pairs[: len(other.pairs)] == other.pairs


def check_vocabularies(
    store: ReadableStore,
    manifest: Manifest,
    checkpoints: Checkpoints | None,
    listing: Listing | None,
    used_sizes: Set[int],
    findings: Findings,
) -> int:
    """Checks the newest vocabulary, tokenizer.json, and every other that is named or found.

    Args:
        store: where they are.
        manifest: names the newest.
        checkpoints: names one for each source, if it can be read.
        listing: tells of the others, if the store can be listed.
        used_sizes: every ``next_merge_id`` that shards were written with.
        findings: gets the problems.

    Returns:
        How many sound vocabularies there are.
    """
    if manifest.tokenizer is None:
        return 0
    newest = _newest(store, manifest.tokenizer, findings)
    if newest is None:
        return 0
    _check_copy(store, newest, findings)
    named = {source.tokenizer_sha256 for source in checkpoints.sources.values()} if checkpoints else set()
    named_keys = {vocabulary_key(digest) for digest in named if digest}
    listed = set(listing.vocabularies) if listing else set()
    sizes = {newest.next_merge_id}
    sound = 1
    for key in sorted((named_keys | listed) - {manifest.tokenizer.key}):
        found = _read(store, key, findings)
        if found is None:
            continue
        sound += 1
        if newest.extends(found):
            sizes.add(found.next_merge_id)
        else:
            _report_other(
                key, found, newest, used=key in named_keys or found.next_merge_id in used_sizes, findings=findings
            )
    if listing is not None:
        for size in sorted(used_sizes - sizes):
            findings.problem(
                "vocabulary/", f"expected the vocabulary of {size} ids that shards were written with, found none"
            )
    return sound


def _newest(store: ReadableStore, reference: TokenizerRef, findings: Findings) -> _Vocabulary | None:
    if reference.key != vocabulary_key(reference.sha256):
        findings.problem(
            MANIFEST_KEY, f"expected tokenizer.key {vocabulary_key(reference.sha256)}, found {reference.key}"
        )
    found = _read(store, reference.key, findings, expected_sha256=reference.sha256)
    if found is not None and found.next_merge_id != reference.next_merge_id:
        findings.problem(
            MANIFEST_KEY, f"expected tokenizer.next_merge_id {found.next_merge_id}, found {reference.next_merge_id}"
        )
    if found is not None and found.eos_id != reference.eos_id:
        findings.problem(MANIFEST_KEY, f"expected tokenizer.eos_id {found.eos_id}, found {reference.eos_id}")
    return found


def _read(
    store: ReadableStore, key: str, findings: Findings, *, expected_sha256: str | None = None
) -> _Vocabulary | None:
    try:
        body = store.get(key).body
        findings.count_bytes(len(body))
        found = sha256_hex(body)
        if expected_sha256 is not None and found != expected_sha256:
            findings.problem(key, f"expected sha256 {expected_sha256}, found {found}")
        elif expected_sha256 is None and key != vocabulary_key(found):
            findings.problem(key, f"expected the sha256 in its name, found {found}; restore it from a copy")
            return None
        return _Vocabulary.of(read_vocabulary_file(body, name=key), found)
    except (StoreError, ContractError) as error:
        findings.problem(key, error)
        return None


def _check_copy(store: ReadableStore, newest: _Vocabulary, findings: Findings) -> None:
    """tokenizer.json is written before the manifest: it may be a step ahead of it, never another vocabulary."""
    try:
        body = store.get(TOKENIZER_KEY).body
        if sha256_hex(body) == newest.sha256:
            return
        found = _Vocabulary.of(read_vocabulary_file(body), sha256_hex(body))
    except ObjectNotFoundError:
        findings.problem(TOKENIZER_KEY, "expected a copy of the newest vocabulary, found no such object")
        return
    except (StoreError, ContractError) as error:
        findings.problem(TOKENIZER_KEY, error)
        return
    if found.next_merge_id > newest.next_merge_id and found.extends(newest):
        findings.note("tokenizer.json is ahead of manifest.json: a populator is at work, or was stopped in a commit")
        return
    state = "an earlier state of it" if newest.extends(found) else "another vocabulary"
    findings.problem(
        TOKENIZER_KEY,
        f"expected a copy of the vocabulary of {newest.next_merge_id} ids that the manifest names, found {state}",
    )


def _report_other(key: str, found: _Vocabulary, newest: _Vocabulary, *, used: bool, findings: Findings) -> None:
    """A vocabulary that is not an earlier state of the newest: a fault if shards may have been written with it."""
    if found.extends(newest):
        findings.note(f"{key}: a later vocabulary that is not committed")
    elif used:
        findings.problem(
            key, f"expected an earlier state of the newest vocabulary, found another of {found.next_merge_id} ids"
        )
    else:
        findings.note(f"{key}: another vocabulary, which was never committed")

"""Shards: one held against its entry in the index, and all of them against a listing of the store.

Checked of a shard are digest, size, exact form, ids, document ends, and the packed form. A document's ids are followed
by one EOS, and text never yields it. So the number of EOS ids is not merely plausible but determined: it is
the number of the shard's documents, less one if the last goes on in a later shard.

The packed form is expanded to a shard file, whose sha256 must be the shard's: so it is known to be sound even where the
shard itself is damaged or gone, and then names a way to restore it. That takes 20 ms for 2,500,000 ids.

A listing tells objects that nothing names, and shards (in either form) missing or of the wrong size. Orphans are no
fault: a populator that was killed leaves shards beyond the manifest and replaced segments behind, and the next one
reuses or deletes them. The sizes cost nothing and cover the shards that a sample leaves out.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from genesis.errors import ObjectNotFoundError, StoreError
from genesis.store import ReadableStore
from genesis.verification.report import Findings
from manifests import (
    BYTE_OFFSET,
    EOS_ID,
    Manifest,
    PackedEntry,
    ShardEntry,
    ShardFormatError,
    ShardImage,
    decode_shard,
    max_packed_bytes,
    packed_key,
    sha256_hex,
    shard_key,
    unpack_ids,
)


@dataclass(frozen=True, slots=True)
class ShardCheck:
    """What is to be checked."""

    entry: ShardEntry
    continues: bool | None
    """Whether the shard's last document goes on in a later shard; None where that cannot be known."""
    eos_id: int = EOS_ID
    """The store's."""
    is_frozen: bool = False
    """The store's vocabulary was made elsewhere: ids below 10 are tokens like others."""


@dataclass(frozen=True, slots=True)
class ShardVerdict:
    """What came of it."""

    shard_id: int
    sound: bool
    num_eos: int = 0
    unreachable: StoreError | None = None
    """Why the shard could not be read at all, though the store should have it."""


def check_shard(store: ReadableStore, check: ShardCheck, findings: Findings) -> ShardVerdict:
    """Reads a shard and reports everything that is wrong with it."""
    entry = check.entry
    key = shard_key(entry.id)
    try:
        problems, num_eos = _check_file(store, check, findings)
    except ObjectNotFoundError:
        problems, num_eos = ["expected a shard, found no such object; restore it from a copy"], 0
    except ShardFormatError as error:
        problems, num_eos = [f"the index vouches for it, but it is not a shard: {error}"], 0
    except StoreError as error:
        findings.problem(key, error)
        return ShardVerdict(entry.id, sound=False, unreachable=error)
    for problem in problems:
        findings.problem(key, problem)
    packed_sound = entry.packed is None or _check_packed(store, entry, entry.packed, findings)
    return ShardVerdict(entry.id, sound=packed_sound and not problems, num_eos=num_eos)


def _check_file(store: ReadableStore, check: ShardCheck, findings: Findings) -> tuple[list[str], int]:
    """What is wrong with the shard itself, and its EOS ids; apart, so that its memory is free for the packed form."""
    entry = check.entry
    body = store.get(shard_key(entry.id)).body
    findings.count_bytes(len(body))
    wrong = _file_problem(body, entry)
    if wrong is not None:
        return [wrong], 0
    ids = decode_shard(body, expected_tokens=entry.tokens)
    return _id_problems(ids, check), int(np.count_nonzero(ids == check.eos_id))


def _file_problem(body: bytes, entry: ShardEntry) -> str | None:
    """What is wrong with the file as such: the most telling of what there is to say."""
    if len(body) != entry.size_bytes:
        return f"expected {entry.size_bytes} bytes, found {len(body)}; restore it from a copy"
    found = sha256_hex(body)
    if found == entry.sha256:
        return None
    try:
        decode_shard(body, expected_tokens=entry.tokens)
    except ShardFormatError as error:
        detail = str(error)
    else:
        detail = "it is a shard, but another one"
    return f"expected sha256 {entry.sha256}, found {found} ({detail})"


def _id_problems(ids: npt.NDArray[np.int64], check: ShardCheck) -> list[str]:
    entry = check.entry
    problems = []
    lowest, highest = int(ids.min()), int(ids.max())
    if highest >= entry.next_merge_id:
        position = int(np.argmax(ids))
        problems.append(f"expected ids below {entry.next_merge_id}, found {highest} at position {position}")
    special = np.flatnonzero((ids < (0 if check.is_frozen else BYTE_OFFSET)) & (ids != check.eos_id))
    if lowest < 0 or len(special):
        found = f"{int(ids[special[0]])} at position {special[0]} ({len(special)} in all)"
        problems.append(f"expected no special id but EOS ({check.eos_id}), found {found}")
    ends = ids == check.eos_id
    problems += _boundary_problems(int(np.count_nonzero(ends)), bool(ends[-1]), check)
    return problems


def _boundary_problems(num_eos: int, ends_with_eos: bool, check: ShardCheck) -> list[str]:
    entry = check.entry
    touched = entry.last_document - entry.first_document + 1
    expected = touched if ends_with_eos else touched - 1
    problems = []
    if num_eos != expected:
        problems.append(
            f"expected {expected} EOS ids for documents {entry.first_document} to {entry.last_document}, "
            f"found {num_eos}"
        )
    if check.continues is not None and check.continues == ends_with_eos:
        expected_end = "go on in" if check.continues else "end before"
        problems.append(
            f"expected document {entry.last_document} to {expected_end} the source's next shard, "
            f"found the last id {'is' if ends_with_eos else 'is not'} EOS"
        )
    return problems


def _check_packed(store: ReadableStore, entry: ShardEntry, packed: PackedEntry, findings: Findings) -> bool:
    """Reports what is wrong with the packed form; True if nothing is."""
    try:
        problem = _packed_problem(store, entry, packed, findings)
    except ShardFormatError as error:
        problem = f"the index vouches for it, but it is not a packed shard: {error}"
    except ObjectNotFoundError:
        problem = "expected a packed shard, found no such object; restore it from a copy"
    except StoreError as error:
        problem = str(error)
    if problem is not None:
        findings.problem(packed.key, problem)
    return problem is None


def _packed_problem(store: ReadableStore, entry: ShardEntry, packed: PackedEntry, findings: Findings) -> str | None:
    if packed.key != packed_key(entry.id):
        return f"expected the packed form of shard {entry.id} under the key {packed_key(entry.id)}"
    largest = max_packed_bytes(entry.tokens, entry.next_merge_id)
    if packed.size_bytes > largest:
        return f"expected at most {largest} bytes for {entry.tokens} ids, the index says {packed.size_bytes}"
    body = store.get(packed.key, max_bytes=largest).body
    findings.count_bytes(len(body))
    if len(body) != packed.size_bytes:
        return f"expected {packed.size_bytes} bytes, found {len(body)}; restore it from a copy"
    if sha256_hex(body) != packed.sha256:
        return f"expected sha256 {packed.sha256}, found {sha256_hex(body)}; restore it from a copy"
    image = ShardImage.empty(entry.tokens)
    unpack_ids(body, image.ids, entry.next_merge_id)
    image.seal()
    found = sha256_hex(image.buffer)
    if found != entry.sha256:
        return f"expected it to expand to the shard of sha256 {entry.sha256}, found the ids of another, {found}"
    return None


_SHARD = re.compile(r"shard_(0|[1-9][0-9]{0,15})\.pt")
_PACKED = re.compile(r"packed/shard_(0|[1-9][0-9]{0,15})\.zst")
_SHOWN = 3


@dataclass(frozen=True, slots=True)
class Sizes:
    """The objects of one form that a shard may have."""

    size_bytes: npt.NDArray[np.int64]
    """int64[total_shards], of each shard; −1 where there is none."""
    beyond: tuple[int, ...]
    """Ids of shards that the manifest does not name."""


@dataclass(frozen=True, slots=True)
class Listing:
    """A store's objects, as far as they matter here."""

    shards: Sizes
    packed: Sizes
    segments: tuple[str, ...]
    vocabularies: tuple[str, ...]

    def problems(self, entry: ShardEntry) -> list[tuple[str, str]]:
        """What the listing says against a shard, as (key, problem)."""
        expected = [(shard_key(entry.id), self.shards, entry.size_bytes)]
        if entry.packed is not None and entry.packed.key == packed_key(entry.id):
            expected.append((entry.packed.key, self.packed, entry.packed.size_bytes))
        problems = []
        for key, sizes, size_bytes in expected:
            found = int(sizes.size_bytes[entry.id])
            if found < 0:
                problems.append((key, "expected a shard, found no such object; restore it from a copy"))
            elif found != size_bytes:
                problems.append((key, f"expected {size_bytes} bytes, found {found}; restore it from a copy"))
        return problems

    def note_orphans(self, manifest: Manifest, findings: Findings) -> None:
        """Notes what nothing names."""
        named = {reference.key for reference in manifest.index}
        superseded = [key for key in self.segments if key not in named]
        beyond = [shard_key(number) for number in self.shards.beyond]
        packed_beyond = [packed_key(number) for number in self.packed.beyond]
        uncommitted = "beyond the manifest (not committed yet, or left by a stopped populator)"
        for keys, what in (
            (beyond, f"shards {uncommitted}"),
            (packed_beyond, f"packed shards {uncommitted}"),
            (superseded, "index segments that longer ones replaced (deleted an hour after)"),
        ):
            if keys:
                more = ", …" if len(keys) > _SHOWN else ""
                findings.note(f"{len(keys)} {what}: {', '.join(keys[:_SHOWN])}{more}")


def read_listing(store: ReadableStore, manifest: Manifest, findings: Findings) -> Listing | None:
    """Lists the store; None, with a note, where that is not possible.

    A store of 600,000 shards takes 1,200 requests and 10 MB.
    """
    known = manifest.total_shards if manifest.index else 0
    try:
        return Listing(
            shards=_sizes(store, "shard_", _SHARD, known),
            packed=_sizes(store, "packed/shard_", _PACKED, known),
            segments=tuple(info.key for info in store.list("index/")),
            vocabularies=tuple(info.key for info in store.list("vocabulary/")),
        )
    except StoreError as error:
        findings.note(f"the store is not looked through for what nothing names ({error})")
        return None


def _sizes(store: ReadableStore, prefix: str, name: re.Pattern[str], known: int) -> Sizes:
    sizes = np.full(known, -1, dtype=np.int64)
    beyond: list[int] = []
    for info in store.list(prefix):
        matched = name.fullmatch(info.key)
        number = int(matched[1]) if matched else None
        if number is not None and number < known:
            sizes[number] = info.size_bytes
        elif number is not None:
            beyond.append(number)
    return Sizes(sizes, tuple(sorted(beyond)))

"""`verify_store` on sound stores, and on stores with one thing wrong each."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from genesis.errors import ObjectNotFoundError, StoreError, StoreUnavailableError, UsageError
from genesis.snapshot import StoreEmptyError
from genesis.store import FolderStore, ObjectInfo, StoredObject, open_readable
from genesis.verification import Problem, ShardSample, VerifyReport, verify_store
from manifests import (
    CHECKPOINTS_KEY,
    MANIFEST_KEY,
    TOKENIZER_KEY,
    PackedEntry,
    Segment,
    ShardEntry,
    VocabularyFile,
    decode_shard,
    encode_shard,
    generate_private_key,
    pack_ids,
    packed_key,
    segment_key,
    sha256_hex,
    shard_key,
    sign_manifest,
    vocabulary_key,
)
from tests.support.s3_servers import rclone_http
from tests.support.small_store import (
    PRIVATE_KEY,
    checkpoints_of,
    copy_small_store,
    manifest_of,
    segment_of,
    write_manifest,
    write_segment,
)

EOS = 2


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    copy_small_store(tmp_path / "store")
    return tmp_path / "store"


def verify(folder: Path, **options: object) -> VerifyReport:
    return verify_store(FolderStore(folder), threads=2, **options)  # type: ignore[arg-type]


def flip(path: Path, position: int) -> None:
    body = bytearray(path.read_bytes())
    body[position] ^= 0x10
    path.write_bytes(body)


def vouch_for_shard(folder: Path, shard_id: int, body: bytes, **changes: object) -> None:
    """Puts a shard in place that index and manifest vouch for: what a faulty populator would have written."""
    (folder / shard_key(shard_id)).write_bytes(body)
    change_entry(folder, shard_id, sha256=sha256_hex(body), size_bytes=len(body), packed=None, **changes)


def vouch_for_packed(folder: Path, shard_id: int, body: bytes) -> None:
    """The same for a packed form."""
    (folder / packed_key(shard_id)).write_bytes(body)
    entry = PackedEntry(key=packed_key(shard_id), sha256=sha256_hex(body), size_bytes=len(body))
    change_entry(folder, shard_id, packed=entry)


def change_entry(folder: Path, shard_id: int, **changes: object) -> None:
    shards = list(segment_of(folder).shards)
    shards[shard_id] = ShardEntry.model_construct(**{**dict(shards[shard_id]), **changes})
    write_segment(folder, Segment.model_construct(format=1, shards=tuple(shards)))


def change_totals(folder: Path, name: str, **changes: object) -> None:
    manifest = manifest_of(folder)
    totals = manifest.sources[name].model_copy(update=changes)
    write_manifest(folder, manifest.model_copy(update={"sources": {**manifest.sources, name: totals}}))


def change_checkpoint(folder: Path, name: str, **changes: object) -> None:
    checkpoints = checkpoints_of(folder)
    source = checkpoints.sources[name].model_copy(update=changes)
    changed = checkpoints.model_copy(update={"sources": {**checkpoints.sources, name: source}})
    (folder / CHECKPOINTS_KEY).write_bytes(changed.to_json())


def ids_of(folder: Path, shard_id: int) -> np.ndarray:
    return decode_shard((folder / shard_key(shard_id)).read_bytes()).copy()


def test_a_sound_store(folder: Path) -> None:
    report = verify(folder)
    manifest = manifest_of(folder)
    assert report.ok, report.problems
    assert report.counts.shards_verified == report.counts.shards == manifest.total_shards
    assert report.counts.tokens_verified == manifest.total_tokens
    assert report.counts.bytes_read > manifest.total_size_bytes
    assert report.counts.vocabularies == 2
    assert report.counts.documents_verified == sum(
        int(np.count_nonzero(ids_of(folder, number) == EOS)) for number in range(manifest.total_shards)
    )
    assert report.signature == "unsigned"


def test_a_signed_store(tmp_path: Path) -> None:
    copy_small_store(tmp_path / "store", signed=True)
    assert verify(tmp_path / "store").signature == "not checked"
    report = verify(tmp_path / "store", public_key=PRIVATE_KEY.public_key())
    assert report.ok
    assert report.signature == "verified"


def test_an_unsigned_store_where_a_signature_is_asked_for(folder: Path) -> None:
    report = verify(folder, public_key=PRIVATE_KEY.public_key())
    assert wheres(report) == [MANIFEST_KEY]
    assert "not signed" in report.problems[0].what


def test_another_key(tmp_path: Path) -> None:
    copy_small_store(tmp_path / "store", signed=True)
    report = verify(tmp_path / "store", public_key=generate_private_key().public_key())
    assert report.signature == "invalid"
    assert wheres(report) == [MANIFEST_KEY]


def test_a_manifest_that_was_changed_after_signing(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    copy_small_store(folder)
    manifest = sign_manifest(manifest_of(folder), PRIVATE_KEY)
    changed = manifest.model_copy(update={"tokenizer_version": "bpe_v2"})
    (folder / MANIFEST_KEY).write_bytes(changed.to_json())
    report = verify(folder, public_key=PRIVATE_KEY.public_key())
    assert any("changed after it was signed" in problem.what for problem in report.problems)


def wheres(report: VerifyReport) -> list[str]:
    return [problem.where for problem in report.problems]


def damage_flip_shard(folder: Path) -> str:
    flip(folder / shard_key(3), 5000)
    return "CRC-32"


def damage_shorten_shard(folder: Path) -> str:
    path = folder / shard_key(3)
    path.write_bytes(path.read_bytes()[:-1])
    return "bytes, found"


def damage_remove_shard(folder: Path) -> str:
    (folder / shard_key(3)).unlink()
    return "no such object"


def damage_swap_shards(folder: Path) -> str:
    (folder / shard_key(3)).write_bytes((folder / shard_key(4)).read_bytes())
    return "another one"


def damage_id_beyond_the_vocabulary(folder: Path) -> str:
    ids = ids_of(folder, 3)
    ids[17] = segment_of(folder).shards[3].next_merge_id
    vouch_for_shard(folder, 3, encode_shard(ids))
    return f"found {ids[17]} at position 17"


def damage_special_id(folder: Path) -> str:
    ids = ids_of(folder, 3)
    ids[[17, 30]] = 0
    vouch_for_shard(folder, 3, encode_shard(ids))
    return "found 0 at position 17 (2 in all)"


def damage_negative_id(folder: Path) -> str:
    ids = ids_of(folder, 3)
    ids[17] = -1
    vouch_for_shard(folder, 3, encode_shard(ids))
    return "found -1 at position 17"


def damage_missing_eos(folder: Path) -> str:
    ids = ids_of(folder, 3)
    ids[np.flatnonzero(ids == EOS)[0]] = 40
    vouch_for_shard(folder, 3, encode_shard(ids))
    return "EOS ids for documents"


def damage_end_of_shard(folder: Path) -> str:
    """The last document ends here, though by the index it goes on: as many EOS as the index alone would allow."""
    ids = ids_of(folder, 3)
    before, after = segment_of(folder).shards[3:5]
    assert before.last_document == after.first_document
    ids[-1] = EOS
    vouch_for_shard(folder, 3, encode_shard(ids))
    return f"expected document {before.last_document} to go on in the source's next shard"


def damage_not_a_shard(folder: Path) -> str:
    size_bytes = (folder / shard_key(3)).stat().st_size
    vouch_for_shard(folder, 3, b"\x80\x02" + b"." * (size_bytes - 2))
    return "not a shard"


SHARD_DAMAGES = [
    damage_flip_shard,
    damage_shorten_shard,
    damage_remove_shard,
    damage_swap_shards,
    damage_id_beyond_the_vocabulary,
    damage_special_id,
    damage_negative_id,
    damage_missing_eos,
    damage_end_of_shard,
    damage_not_a_shard,
]


@pytest.mark.parametrize("damage", SHARD_DAMAGES)
def test_a_damaged_shard_is_named(folder: Path, damage: Callable[[Path], str]) -> None:
    expected = damage(folder)
    report = verify(folder)
    assert set(wheres(report)) == {shard_key(3)}
    assert any(expected in problem.what for problem in report.problems), report.problems
    assert report.counts.shards_verified == report.counts.shards - 1


def damage_flip_packed(folder: Path) -> str:
    flip(folder / packed_key(3), 1000)
    return "expected sha256"


def damage_shorten_packed(folder: Path) -> str:
    path = folder / packed_key(3)
    path.write_bytes(path.read_bytes()[:-1])
    return "bytes, found"


def damage_remove_packed(folder: Path) -> str:
    (folder / packed_key(3)).unlink()
    return "no such object"


def damage_packed_ids_of_another_shard(folder: Path) -> str:
    vouch_for_packed(folder, 3, (folder / packed_key(4)).read_bytes())
    return "expand to the shard of sha256"


def damage_one_packed_id(folder: Path) -> str:
    ids = ids_of(folder, 3)
    ids[1234] ^= 1
    vouch_for_packed(folder, 3, pack_ids(ids, 32_000))
    return "expand to the shard of sha256"


def damage_packed_frame(folder: Path) -> str:
    vouch_for_packed(folder, 3, (folder / packed_key(3)).read_bytes() + b"\0")
    return "unused data"


def damage_packed_id_beyond_the_vocabulary(folder: Path) -> str:
    vouch_for_packed(folder, 3, pack_ids(np.full(2000, 60_000), 65_536))
    return "found 60000 at position 0"


def damage_packed_bomb(folder: Path) -> str:
    vouch_for_packed(folder, 3, pack_ids(np.zeros(10_000_000, np.int64), 65_536))
    return "content size of 4000 bytes, found 20000000 bytes"


def damage_packed_size(folder: Path) -> str:
    packed = segment_of(folder).shards[3].packed.model_copy(update={"size_bytes": 10**12})
    change_entry(folder, 3, packed=packed)
    return "the index says 1000000000000"


PACKED_DAMAGES = [
    damage_flip_packed,
    damage_shorten_packed,
    damage_remove_packed,
    damage_packed_ids_of_another_shard,
    damage_one_packed_id,
    damage_packed_frame,
    damage_packed_id_beyond_the_vocabulary,
    damage_packed_bomb,
    damage_packed_size,
]


@pytest.mark.parametrize("damage", PACKED_DAMAGES)
def test_a_damaged_packed_form_is_named(folder: Path, damage: Callable[[Path], str]) -> None:
    expected = damage(folder)
    report = verify(folder)
    assert set(wheres(report)) == {packed_key(3)}
    assert any(expected in problem.what for problem in report.problems), report.problems
    assert report.counts.shards_verified == report.counts.shards - 1


def test_a_packed_form_under_another_key_is_named(folder: Path) -> None:
    packed = segment_of(folder).shards[3].packed.model_copy(update={"key": packed_key(4)})
    change_entry(folder, 3, packed=packed)
    report = verify(folder)
    assert set(wheres(report)) == {packed_key(4)}
    assert f"of shard 3 under the key {packed_key(3)}" in report.problems[0].what


def test_a_store_without_packed_forms_is_sound(folder: Path) -> None:
    shards = tuple(entry.model_copy(update={"packed": None}) for entry in segment_of(folder).shards)
    write_segment(folder, Segment(shards=shards))
    shutil.rmtree(folder / "packed")
    assert verify(folder).ok


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"first_document": 0}, "expected first_document"),
        ({"next_merge_id": 10_000}, "expected next_merge_id of at most"),
        ({"next_merge_id": 300}, "expected next_merge_id of at least"),
        ({"size_bytes": 17}, "bytes, found 17"),
        ({"tokens": 10}, "expected 2000 tokens, found 10"),
        ({"source": "gamma"}, "expected a source of the manifest"),
    ],
)
def test_a_wrong_entry_is_named(folder: Path, changes: dict[str, object], expected: str) -> None:
    change_entry(folder, 5, **changes)
    report = verify(folder)
    key = manifest_of(folder).index[0].key
    assert any(each.where == key and expected in each.what and "shard 5" in each.what for each in report.problems)


@pytest.mark.parametrize("changes", [{"documents_processed": 7}, {"last_shard_id": 1}, {"documents_processed": 2**50}])
def test_wrong_totals_are_named(folder: Path, changes: dict[str, object]) -> None:
    change_totals(folder, "alpha", **changes)
    report = verify(folder)
    (field,) = changes
    assert any(each.where == MANIFEST_KEY and f"alpha: expected {field}" in each.what for each in report.problems)


def test_a_wrong_total_size_is_named(folder: Path) -> None:
    write_manifest(folder, manifest_of(folder).model_copy(update={"total_size_bytes": 1}))
    assert [str(problem) for problem in verify(folder).problems] == [
        f"manifest.json: expected total_size_bytes {23 * (folder / shard_key(0)).stat().st_size} by the index, found 1"
    ]


def test_a_changed_segment_is_named_and_its_shards_are_checked_all_the_same(folder: Path) -> None:
    key = manifest_of(folder).index[0].key
    body = (folder / key).read_bytes()
    (folder / key).write_bytes(body + b" ")
    flip(folder / shard_key(3), 5000)
    assert wheres(verify(folder)) == [key, shard_key(3)]


def test_a_lost_segment_is_named_and_hides_nothing_else(folder: Path) -> None:
    key = manifest_of(folder).index[0].key
    (folder / key).unlink()
    (folder / TOKENIZER_KEY).unlink()
    assert wheres(verify(folder)) == [key, TOKENIZER_KEY]


def test_a_segment_of_another_length_is_named(folder: Path) -> None:
    segment = segment_of(folder)
    write_segment(folder, segment.model_copy(update={"shards": segment.shards[:-1]}))
    report = verify(folder)
    assert wheres(report) == [manifest_of(folder).index[0].key]
    assert "found 22 from 0" in report.problems[0].what


def test_a_manifest_that_is_none(folder: Path) -> None:
    (folder / MANIFEST_KEY).write_bytes(b'{"total_shards": -1}')
    report = verify(folder)
    assert wheres(report) == [MANIFEST_KEY]
    assert report.sequence is None


def test_a_manifest_without_an_index_vouches_for_nothing(folder: Path) -> None:
    write_manifest(folder, manifest_of(folder).model_copy(update={"index": ()}))
    report = verify(folder)
    assert "nothing vouches" in report.problems[0].what
    assert report.counts.shards_verified == 0


def replace_vocabulary(folder: Path, pairs: list[tuple[int, int]]) -> str:
    """Puts another vocabulary beside the others; returns its key."""
    body = VocabularyFile.from_pairs(pairs, {"alpha": len(pairs)}).to_json()
    key = vocabulary_key(sha256_hex(body))
    (folder / key).write_bytes(body)
    return key


def newest_pairs(folder: Path) -> list[tuple[int, int]]:
    return VocabularyFile.from_json((folder / TOKENIZER_KEY).read_bytes()).pairs()


def older_key(folder: Path) -> str:
    newest = manifest_of(folder).tokenizer
    keys = [info.key for info in FolderStore(folder).list("vocabulary/")]
    (older,) = [key for key in keys if newest is None or key != newest.key]
    return older


def test_a_damaged_vocabulary_is_named(folder: Path) -> None:
    newest = manifest_of(folder).tokenizer
    assert newest is not None
    flip(folder / newest.key, 3000)
    assert newest.key in wheres(verify(folder))


def test_a_damaged_older_vocabulary_is_named(folder: Path) -> None:
    key = older_key(folder)
    flip(folder / key, 3000)
    assert key in wheres(verify(folder))


def test_a_lost_older_vocabulary_is_named(folder: Path) -> None:
    key = older_key(folder)
    (folder / key).unlink()
    report = verify(folder)
    assert key in wheres(report)
    assert any("566 ids that shards were written with" in problem.what for problem in report.problems)


def test_a_vocabulary_that_shards_may_have_been_written_with_must_be_a_prefix(folder: Path) -> None:
    pairs = newest_pairs(folder)[:300]
    key = replace_vocabulary(folder, [*pairs[:-1], (10, 10)])
    assert wheres(verify(folder)) == [key]


def test_vocabularies_that_were_never_committed_are_notes(folder: Path) -> None:
    pairs = newest_pairs(folder)
    later = replace_vocabulary(folder, [*pairs, (11, 11)])
    other = replace_vocabulary(folder, [(12, 12)])
    report = verify(folder)
    assert report.ok, report.problems
    assert any(later in note and "later" in note for note in report.notes)
    assert any(other in note and "never committed" in note for note in report.notes)


@pytest.mark.parametrize(("length", "expected"), [(300, "an earlier state"), (1, "an earlier state")])
def test_a_tokenizer_json_that_lags_is_named(folder: Path, length: int, expected: str) -> None:
    older = VocabularyFile.from_pairs(newest_pairs(folder)[:length], {"alpha": length})
    (folder / TOKENIZER_KEY).write_bytes(older.to_json())
    report = verify(folder)
    assert wheres(report) == [TOKENIZER_KEY]
    assert expected in report.problems[0].what


def test_a_tokenizer_json_that_is_another_is_named(folder: Path) -> None:
    (folder / TOKENIZER_KEY).write_bytes(VocabularyFile.from_pairs([(10, 10)], {}).to_json())
    assert "another vocabulary" in verify(folder).problems[0].what


def test_a_tokenizer_json_that_is_ahead_is_a_note(folder: Path) -> None:
    newer = VocabularyFile.from_pairs([*newest_pairs(folder), (11, 11)], {"alpha": 341})
    (folder / TOKENIZER_KEY).write_bytes(newer.to_json())
    report = verify(folder)
    assert report.ok
    assert any("ahead" in note for note in report.notes)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"last_shard_id": 2}, "expected last_shard_id"),
        ({"documents_processed": 2}, "expected documents_processed"),
        ({"leftover_tokens": (40, 10_000, EOS)}, "below 606, found 10000"),
        ({"leftover_tokens": (40, 41)}, "end with their only EOS"),
        ({"leftover_tokens": (EOS, 40, EOS)}, "end with their only EOS"),
        ({"leftover_tokens": (0, EOS)}, "end with their only EOS"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_named(folder: Path, changes: dict[str, object], expected: str) -> None:
    change_checkpoint(folder, "beta", **changes)
    report = verify(folder)
    assert CHECKPOINTS_KEY in wheres(report)
    assert any(expected in problem.what for problem in report.problems), report.problems


def test_a_checkpoint_older_than_the_manifest_is_named(folder: Path) -> None:
    manifest = manifest_of(folder)
    (folder / MANIFEST_KEY).write_bytes(manifest.model_copy(update={"sequence": manifest.sequence + 1}).to_json())
    assert wheres(verify(folder)) == [CHECKPOINTS_KEY]


def test_a_commit_that_is_not_published_is_a_note(folder: Path) -> None:
    manifest = manifest_of(folder)
    (folder / MANIFEST_KEY).write_bytes(manifest.model_copy(update={"sequence": manifest.sequence - 1}).to_json())
    report = verify(folder)
    assert report.ok
    assert any("stands at commit" in note for note in report.notes)


def test_a_damaged_checkpoint_is_named(folder: Path) -> None:
    (folder / CHECKPOINTS_KEY).write_bytes(b"\xff")
    assert wheres(verify(folder)) == [CHECKPOINTS_KEY]


def test_it_goes_on_after_every_problem(folder: Path) -> None:
    for number in (1, 4, 9):
        flip(folder / shard_key(number), 4000)
    (folder / shard_key(12)).unlink()
    (folder / TOKENIZER_KEY).write_bytes(b"{")
    (folder / CHECKPOINTS_KEY).write_bytes(b"{")
    told: list[Problem] = []
    report = verify(folder, on_problem=told.append)
    expected = {shard_key(1), shard_key(4), shard_key(9), shard_key(12), TOKENIZER_KEY, CHECKPOINTS_KEY}
    assert set(wheres(report)) == expected
    assert told == list(report.problems)
    assert report.num_problems == len(expected)


def test_orphans_are_notes(folder: Path) -> None:
    (folder / shard_key(23)).write_bytes(b"not committed")
    (folder / shard_key(999_999)).write_bytes(b"not committed")
    (folder / packed_key(999_999)).write_bytes(b"not committed")
    (folder / segment_key(0, "0" * 64)).write_bytes(b"replaced")
    report = verify(folder)
    assert report.ok, report.problems
    notes = "\n".join(report.notes)
    assert "2 shards beyond the manifest" in notes
    assert shard_key(999_999) in notes
    assert "1 packed shards beyond the manifest" in notes
    assert packed_key(999_999) in notes
    assert segment_key(0, "0" * 64) in notes


def test_a_sample_is_seeded_and_read_whole(folder: Path) -> None:
    read: list[tuple[int, int]] = []
    progress = lambda done, total: read.append((done, total))  # noqa: E731
    reports = [verify(folder, sample=ShardSample.parse("20%"), seed=seed, on_progress=progress) for seed in (1, 1, 2)]
    assert [report.counts.shards_verified for report in reports] == [5, 5, 5]
    assert reports[0].counts.documents_verified == reports[1].counts.documents_verified
    assert reports[0].seed == 1
    assert read[:5] == [(1, 5), (2, 5), (3, 5), (4, 5), (5, 5)]


def test_a_sample_misses_no_shard_that_is_gone(folder: Path) -> None:
    (folder / shard_key(7)).unlink()
    (folder / shard_key(8)).write_bytes(b"short")
    (folder / packed_key(9)).unlink()
    (folder / packed_key(10)).write_bytes(b"short")
    gone = {shard_key(7), shard_key(8), packed_key(9), packed_key(10)}
    for seed in range(3):
        assert set(wheres(verify(folder, sample=ShardSample.parse("1"), seed=seed))) == gone


@pytest.mark.parametrize("text", ["", "0", "0%", "101%", "-1%", "x", "1e3", "1.5"])
def test_samples_that_make_no_sense(text: str) -> None:
    with pytest.raises(UsageError, match="--sample"):
        ShardSample.parse(text)


@pytest.mark.slow
@settings(deadline=None)
@given(total=st.integers(1, 5_000), share=st.floats(0.001, 100), seed=st.integers(0, 2**32))
def test_samples_have_the_size_asked_for(total: int, share: float, seed: int) -> None:
    chosen = ShardSample.parse(f"{share:.4f}%").choose(total, seed)
    wanted = max(1, round(total * float(f"{share:.4f}") / 100))
    assert (total if chosen is None else len(chosen)) == min(wanted, total)
    assert chosen is None or max(chosen) < total


def test_an_empty_store(tmp_path: Path) -> None:
    with pytest.raises(StoreEmptyError):
        verify(tmp_path)


@pytest.mark.slow
def test_over_http_without_a_listing(folder: Path) -> None:
    with rclone_http(folder) as server:
        store = open_readable(server.endpoint)
        sound = verify_store(store)
        flip(folder / shard_key(3), 5000)
        damaged = verify_store(store)
        store.close()
    assert sound.ok, sound.problems
    assert any("cannot be listed" in note for note in sound.notes)
    assert wheres(damaged) == [shard_key(3)]


class FailingStore(FolderStore):
    """A store that does not answer for some of its shards."""

    def __init__(self, root: Path, silent: frozenset[int]) -> None:
        super().__init__(root)
        self._silent = {shard_key(number) for number in silent}

    def get(self, key: str, *, max_bytes: int | None = None) -> StoredObject:
        if key in self._silent:
            raise StoreUnavailableError(f"cannot read {key}: timed out")
        return super().get(key, max_bytes=max_bytes)


def test_a_shard_that_cannot_be_read_is_a_problem(folder: Path) -> None:
    report = verify_store(FailingStore(folder, frozenset({3, 8})))
    assert set(wheres(report)) == {shard_key(3), shard_key(8)}


def test_a_store_that_is_gone_is_given_up(folder: Path) -> None:
    report = verify_store(FailingStore(folder, frozenset(range(23))), threads=1)
    assert "gave up" in report.problems[-1].what
    assert report.num_problems < report.counts.shards


class ChangingStore(FolderStore):
    """A store whose populator deletes the last segment as soon as any other object than the first few is read."""

    def get(self, key: str, *, max_bytes: int | None = None) -> StoredObject:
        found = super().get(key, max_bytes=max_bytes)
        if key.startswith("shard_"):
            for info in list(super().list("index/")):
                self.delete(info.key)
        return found


def test_the_last_segment_is_read_before_any_shard(folder: Path) -> None:
    assert verify_store(ChangingStore(folder)).ok


class UnlistableStore(FolderStore):
    """A store that may be read but not listed."""

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        raise StoreError("may not be listed")

    def get(self, key: str, *, max_bytes: int | None = None) -> StoredObject:
        if key == CHECKPOINTS_KEY:
            raise ObjectNotFoundError("none")
        return super().get(key, max_bytes=max_bytes)


def test_what_may_not_be_looked_at_is_noted(folder: Path) -> None:
    report = verify_store(UnlistableStore(folder))
    assert report.ok
    assert len(report.notes) == 2


def test_a_report_survives_json(folder: Path) -> None:
    flip(folder / shard_key(3), 5000)
    report = verify(folder, sample=ShardSample.parse("22"), seed=4)
    assert VerifyReport.model_validate_json(report.model_dump_json()) == report


@pytest.fixture(scope="module")
def signed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("signed") / "store"
    copy_small_store(folder, signed=True)
    return folder


@pytest.mark.slow
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_changed_byte_goes_unnoticed(signed: Path, data: st.DataObject) -> None:
    manifest = manifest_of(signed)
    vouched = [MANIFEST_KEY, TOKENIZER_KEY, manifest.index[0].key, older_key(signed)]
    shards = [form(number) for number in range(manifest.total_shards) for form in (shard_key, packed_key)]
    key = data.draw(st.sampled_from([*vouched, *shards]))
    path = signed / key
    body = path.read_bytes()
    position = data.draw(st.integers(0, len(body) - 1))
    changed = data.draw(st.integers(0, 255).filter(lambda value: value != body[position]))
    path.write_bytes(body[:position] + bytes([changed]) + body[position + 1 :])
    try:
        report = verify(signed, public_key=PRIVATE_KEY.public_key())
    finally:
        path.write_bytes(body)
    assert not report.ok
    assert key in wheres(report) or key == TOKENIZER_KEY

"""`verify_store` on sound stores, and on stores with one thing wrong each."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from genesis.errors import StoreUnavailableError
from genesis.snapshot import StoreEmptyError
from genesis.store import FolderStore, StoredObject, open_readable
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
Damage: TypeAlias = tuple[Callable[[Path], object], str]
"""What is done to a store, and what is said of it."""
BOMB = pack_ids(np.zeros(10_000_000, np.int64), 65_536)


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


def vouch_for_packed(folder: Path, body: bytes) -> None:
    """The same for the packed form of shard 3."""
    (folder / packed_key(3)).write_bytes(body)
    change_entry(folder, 3, packed=PackedEntry(key=packed_key(3), sha256=sha256_hex(body), size_bytes=len(body)))


def change_entry(folder: Path, shard_id: int, **changes: object) -> None:
    shards = list(segment_of(folder).shards)
    shards[shard_id] = ShardEntry.model_construct(**{**dict(shards[shard_id]), **changes})
    write_segment(folder, Segment.model_construct(format=1, shards=tuple(shards)))


def change_fifth(folder: Path, **changes: object) -> None:
    change_entry(folder, 5, **changes)


def change_manifest(folder: Path, **changes: object) -> None:
    write_manifest(folder, manifest_of(folder).model_copy(update=changes))


def change_totals(folder: Path, **changes: object) -> None:
    sources = manifest_of(folder).sources
    change_manifest(folder, sources={**sources, "alpha": sources["alpha"].model_copy(update=changes)})


def change_checkpoint(folder: Path, **changes: object) -> None:
    checkpoints = checkpoints_of(folder)
    sources = {**checkpoints.sources, "beta": checkpoints.sources["beta"].model_copy(update=changes)}
    (folder / CHECKPOINTS_KEY).write_bytes(checkpoints.model_copy(update={"sources": sources}).to_json())


def ids_of(folder: Path, shard_id: int) -> np.ndarray:
    return decode_shard((folder / shard_key(shard_id)).read_bytes()).copy()


def test_a_sound_store(folder):
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
    report = verify(folder, public_key=PRIVATE_KEY.public_key())
    assert wheres(report) == [MANIFEST_KEY]
    assert "not signed" in report.problems[0].what


def test_signatures_and_an_empty_store(tmp_path):
    folder = tmp_path / "store"
    copy_small_store(folder, signed=True)
    assert verify(folder).signature == "not checked"
    report = verify(folder, public_key=PRIVATE_KEY.public_key())
    assert report.ok
    assert report.signature == "verified"
    report = verify(folder, public_key=generate_private_key().public_key())
    assert report.signature == "invalid"
    assert wheres(report) == [MANIFEST_KEY]
    changed = manifest_of(folder).model_copy(update={"tokenizer_version": "bpe_v2"})
    (folder / MANIFEST_KEY).write_bytes(changed.to_json())
    report = verify(folder, public_key=PRIVATE_KEY.public_key())
    assert any("changed after it was signed" in problem.what for problem in report.problems)
    with pytest.raises(StoreEmptyError):
        verify(tmp_path)


def wheres(report: VerifyReport) -> list[str]:
    return [problem.where for problem in report.problems]


def shorten(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def vouch_for_ids(folder: Path, changes: dict[int, int]) -> None:
    """Puts other ids at some positions of shard 3."""
    ids = ids_of(folder, 3)
    ids[list(changes)] = list(changes.values())
    vouch_for_shard(folder, 3, encode_shard(ids))


def lose_eos(folder: Path) -> None:
    vouch_for_ids(folder, {int(np.flatnonzero(ids_of(folder, 3) == EOS)[0]): 40})


def end_the_last_document(folder: Path) -> None:
    """By the index it goes on: as many EOS as the index alone would allow."""
    before, after = segment_of(folder).shards[3:5]
    assert before.last_document == after.first_document
    vouch_for_ids(folder, {-1: EOS})


def pack_another_id(folder: Path) -> None:
    ids = ids_of(folder, 3)
    ids[1234] ^= 1
    vouch_for_packed(folder, pack_ids(ids, 32_000))


def packed_of(folder: Path, shard_id: int) -> bytes:
    return (folder / packed_key(shard_id)).read_bytes()


def change_packed(folder: Path, **changes: object) -> None:
    packed = segment_of(folder).shards[3].packed
    assert packed is not None
    change_entry(folder, 3, packed=packed.model_copy(update=changes))


DAMAGES: dict[str, list[Damage]] = {
    shard_key(3): [
        (lambda folder: flip(folder / shard_key(3), 5000), "CRC-32"),
        (lambda folder: shorten(folder / shard_key(3)), "bytes, found"),
        (lambda folder: (folder / shard_key(3)).unlink(), "no such object"),
        (lambda folder: shutil.copy(folder / shard_key(4), folder / shard_key(3)), "another one"),
        (lambda folder: vouch_for_ids(folder, {17: 566}), "found 566 at position 17"),
        (lambda folder: vouch_for_ids(folder, {17: 0, 30: 0}), "found 0 at position 17 (2 in all)"),
        (lose_eos, "EOS ids for documents"),
        (end_the_last_document, "to go on in the source's next shard"),
        (lambda folder: vouch_for_shard(folder, 3, b"\x80\x02" + b"." * 17_575), "not a shard"),
    ],
    packed_key(3): [
        (lambda folder: flip(folder / packed_key(3), 1000), "expected sha256"),
        (lambda folder: shorten(folder / packed_key(3)), "bytes, found"),
        (lambda folder: (folder / packed_key(3)).unlink(), "no such object"),
        (lambda folder: vouch_for_packed(folder, packed_of(folder, 4)), "expand to the shard of sha256"),
        (pack_another_id, "expand to the shard of sha256"),
        (lambda folder: vouch_for_packed(folder, packed_of(folder, 3) + b"\0"), "unused data"),
        (lambda folder: vouch_for_packed(folder, pack_ids(np.full(2000, 60_000), 65_536)), "found 60000 at position 0"),
        (lambda folder: vouch_for_packed(folder, BOMB), "content size of 4000 bytes, found 20000000 bytes"),
        (lambda folder: change_packed(folder, size_bytes=10**12), "the index says 1000000000000"),
    ],
}


@pytest.mark.parametrize(("where", "number"), [(key, number) for key in DAMAGES for number in range(len(DAMAGES[key]))])
def test_a_damaged_shard_or_packed_form_is_named(folder, where, number):
    harm, expected = DAMAGES[where][number]
    harm(folder)
    report = verify(folder)
    assert set(wheres(report)) == {where}
    assert any(expected in problem.what for problem in report.problems), report.problems
    assert report.counts.shards_verified == report.counts.shards - 1


def test_a_packed_form_under_another_key_is_named_and_none_at_all_is_sound(folder):
    change_packed(folder, key=packed_key(4))
    report = verify(folder)
    assert set(wheres(report)) == {packed_key(4)}
    assert f"of shard 3 under the key {packed_key(3)}" in report.problems[0].what
    shards = tuple(entry.model_copy(update={"packed": None}) for entry in segment_of(folder).shards)
    write_segment(folder, Segment(shards=shards))
    shutil.rmtree(folder / "packed")
    assert verify(folder).ok


Named: TypeAlias = tuple[Callable[..., object], dict[str, object], str, str]
"""How a document is changed, to what, and what is said of which object; an empty name is the segment's."""
WRONG: list[Named] = [
    (change_fifth, {"first_document": 0}, "", "expected first_document"),
    (change_fifth, {"next_merge_id": 10_000}, "", "expected next_merge_id of at most"),
    (change_fifth, {"next_merge_id": 300}, "", "expected next_merge_id of at least"),
    (change_fifth, {"size_bytes": 17}, "", "bytes, found 17"),
    (change_fifth, {"tokens": 10}, "", "expected 2000 tokens, found 10"),
    (change_fifth, {"source": "gamma"}, "", "expected a source of the manifest"),
    (change_totals, {"documents_processed": 7}, MANIFEST_KEY, "alpha: expected documents_processed"),
    (change_totals, {"last_shard_id": 1}, MANIFEST_KEY, "alpha: expected last_shard_id"),
    (change_manifest, {"total_size_bytes": 1}, MANIFEST_KEY, "expected total_size_bytes 404271 by the index, found 1"),
    (change_checkpoint, {"last_shard_id": 2}, CHECKPOINTS_KEY, "expected last_shard_id"),
    (change_checkpoint, {"documents_processed": 2}, CHECKPOINTS_KEY, "expected documents_processed"),
    (change_checkpoint, {"leftover_tokens": (40, 10_000, EOS)}, CHECKPOINTS_KEY, "below 606, found 10000"),
    (change_checkpoint, {"leftover_tokens": (40, 41)}, CHECKPOINTS_KEY, "end with their only EOS"),
    (change_checkpoint, {"leftover_tokens": (EOS, 40, EOS)}, CHECKPOINTS_KEY, "end with their only EOS"),
]


@pytest.mark.parametrize(("change", "changes", "where", "expected"), WRONG)
def test_what_is_wrong_in_a_document_is_named(folder, change, changes, where, expected):
    change(folder, **changes)
    report = verify(folder)
    key = where or manifest_of(folder).index[0].key
    assert any(each.where == key and expected in each.what for each in report.problems), report.problems


def test_a_changed_or_shorter_segment_is_named_and_its_shards_are_checked_all_the_same(folder):
    segment, key = segment_of(folder), manifest_of(folder).index[0].key
    (folder / key).write_bytes((folder / key).read_bytes() + b" ")
    flip(folder / shard_key(3), 5000)
    assert wheres(verify(folder)) == [key, shard_key(3)]
    flip(folder / shard_key(3), 5000)
    write_segment(folder, segment.model_copy(update={"shards": segment.shards[:-1]}))
    report = verify(folder)
    assert wheres(report) == [manifest_of(folder).index[0].key]
    assert "found 22 from 0" in report.problems[0].what


def test_a_lost_segment_is_named_and_hides_nothing_else(folder):
    key = manifest_of(folder).index[0].key
    (folder / key).unlink()
    (folder / TOKENIZER_KEY).unlink()
    assert wheres(verify(folder)) == [key, TOKENIZER_KEY]


def test_manifests_that_are_none_or_have_no_index(folder):
    write_manifest(folder, manifest_of(folder).model_copy(update={"index": ()}))
    report = verify(folder)
    assert "nothing vouches" in report.problems[0].what
    assert report.counts.shards_verified == 0
    (folder / MANIFEST_KEY).write_bytes(b'{"total_shards": -1}')
    report = verify(folder)
    assert wheres(report) == [MANIFEST_KEY]
    assert report.sequence is None


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


def test_a_damaged_or_lost_vocabulary_is_named(folder):
    newest = manifest_of(folder).tokenizer
    assert newest is not None
    for key in (newest.key, older_key(folder)):
        flip(folder / key, 3000)
        assert key in wheres(verify(folder))
        flip(folder / key, 3000)
    (folder / key).unlink()
    report = verify(folder)
    assert key in wheres(report)
    assert any("566 ids that shards were written with" in problem.what for problem in report.problems)


def test_vocabularies_beside_the_newest_are_prefixes_or_were_never_committed(folder):
    pairs = newest_pairs(folder)
    later = replace_vocabulary(folder, [*pairs, (11, 11)])
    other = replace_vocabulary(folder, [(12, 12)])
    report = verify(folder)
    assert report.ok, report.problems
    assert any(later in note and "later" in note for note in report.notes)
    assert any(other in note and "never committed" in note for note in report.notes)
    key = replace_vocabulary(folder, [*pairs[:299], (10, 10)])
    assert wheres(verify(folder)) == [key]


def test_a_tokenizer_json_that_lags_or_is_another_is_named_and_one_ahead_is_a_note(folder):
    pairs = newest_pairs(folder)
    for found, expected in ((pairs[:300], "an earlier state"), ([(10, 10)], "another vocabulary")):
        (folder / TOKENIZER_KEY).write_bytes(VocabularyFile.from_pairs(found, {"alpha": len(found)}).to_json())
        report = verify(folder)
        assert wheres(report) == [TOKENIZER_KEY]
        assert expected in report.problems[0].what
    (folder / TOKENIZER_KEY).write_bytes(VocabularyFile.from_pairs([*pairs, (11, 11)], {"alpha": 341}).to_json())
    report = verify(folder)
    assert report.ok
    assert any("ahead" in note for note in report.notes)


def test_a_checkpoint_beside_another_manifest(folder):
    manifest = manifest_of(folder)
    (folder / MANIFEST_KEY).write_bytes(manifest.model_copy(update={"sequence": manifest.sequence + 1}).to_json())
    assert wheres(verify(folder)) == [CHECKPOINTS_KEY]
    (folder / MANIFEST_KEY).write_bytes(manifest.model_copy(update={"sequence": manifest.sequence - 1}).to_json())
    report = verify(folder)
    assert report.ok
    assert any("stands at commit" in note for note in report.notes)
    (folder / CHECKPOINTS_KEY).write_bytes(b"\xff")
    assert wheres(verify(folder)) == [CHECKPOINTS_KEY]


def test_orphans_are_notes_and_it_goes_on_after_every_problem(folder):
    (folder / shard_key(23)).write_bytes(b"not committed")
    (folder / shard_key(999_999)).write_bytes(b"not committed")
    (folder / packed_key(999_999)).write_bytes(b"not committed")
    (folder / segment_key(0, "0" * 64)).write_bytes(b"replaced")
    report = verify(folder)
    assert report.ok, report.problems
    notes = "\n".join(report.notes)
    assert "2 shards beyond the manifest" in notes
    assert "1 packed shards beyond the manifest" in notes
    assert all(key in notes for key in (shard_key(999_999), packed_key(999_999), segment_key(0, "0" * 64)))
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


def test_a_sample_is_seeded_and_misses_no_shard_that_is_gone(folder):
    read: list[tuple[int, int]] = []
    progress = lambda done, total: read.append((done, total))  # noqa: E731
    reports = [verify(folder, sample=ShardSample.parse("20%"), seed=seed, on_progress=progress) for seed in (1, 1, 2)]
    assert [report.counts.shards_verified for report in reports] == [5, 5, 5]
    assert reports[0].counts.documents_verified == reports[1].counts.documents_verified
    assert read[:5] == [(1, 5), (2, 5), (3, 5), (4, 5), (5, 5)]
    (folder / shard_key(7)).unlink()
    (folder / shard_key(8)).write_bytes(b"short")
    (folder / packed_key(9)).unlink()
    (folder / packed_key(10)).write_bytes(b"short")
    gone = {shard_key(7), shard_key(8), packed_key(9), packed_key(10)}
    for seed in range(3):
        assert set(wheres(verify(folder, sample=ShardSample.parse("1"), seed=seed))) == gone


@pytest.mark.slow
@settings(deadline=None)
@given(total=st.integers(1, 5_000), share=st.floats(0.001, 100), seed=st.integers(0, 2**32))
def test_samples_have_the_size_asked_for(total, share, seed):
    chosen = ShardSample.parse(f"{share:.4f}%").choose(total, seed)
    wanted = max(1, round(total * float(f"{share:.4f}") / 100))
    assert (total if chosen is None else len(chosen)) == min(wanted, total)
    assert chosen is None or max(chosen) < total


@pytest.mark.slow
def test_over_http_without_a_listing(folder):
    with rclone_http(folder) as server:
        store = open_readable(server.endpoint)
        (folder / CHECKPOINTS_KEY).unlink()
        sound = verify_store(store)
        flip(folder / shard_key(3), 5000)
        damaged = verify_store(store)
        store.close()
    assert sound.ok, sound.problems
    assert any("cannot be listed" in note for note in sound.notes)
    assert len(sound.notes) == 2
    assert wheres(damaged) == [shard_key(3)]


class OddStore(FolderStore):
    """A store of which some objects cannot be read, or whose populator deletes the index once a shard is read."""

    def __init__(self, root: Path, *silent: str, is_changing: bool = False) -> None:
        super().__init__(root)
        self._silent = silent
        self._is_changing = is_changing

    def get(self, key: str, *, max_bytes: int | None = None) -> StoredObject:
        if key in self._silent:
            raise StoreUnavailableError(f"cannot read {key}: timed out")
        found = super().get(key, max_bytes=max_bytes)
        for info in list(self.list("index/")) if self._is_changing and key.startswith("shard_") else ():
            self.delete(info.key)
        return found


def test_shards_that_cannot_be_read_are_problems_until_it_is_given_up(folder):
    report = verify_store(OddStore(folder, shard_key(3), shard_key(8)))
    assert set(wheres(report)) == {shard_key(3), shard_key(8)}
    report = verify_store(OddStore(folder, *map(shard_key, range(23))), threads=1)
    assert "gave up" in report.problems[-1].what
    assert report.num_problems < report.counts.shards
    assert verify_store(OddStore(folder, is_changing=True)).ok, "the last segment is read before any shard"


@pytest.fixture(scope="module")
def signed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("signed") / "store"
    copy_small_store(folder, signed=True)
    return folder


@pytest.mark.slow
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_changed_byte_goes_unnoticed(signed, data):
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

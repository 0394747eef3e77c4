"""`read_status` on a store that the real populator made, and looking inside: documents are cut at EOS."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from genesis.errors import GenesisError, UsageError
from genesis.inspection import inspect_shard, inspect_vocabulary
from genesis.snapshot import StoreEmptyError, find_shard, previous_of_source, read_vocabulary
from genesis.status import StoreStatus, read_status
from genesis.store import FolderStore, open_readable
from manifests import (
    CHECKPOINTS_KEY,
    FIRST_MERGE_ID,
    MANIFEST_KEY,
    ContractError,
    SourcesFile,
    Writer,
    decode_shard,
    format_time,
    shard_file_bytes,
    shard_key,
)
from tests.support.small_store import (
    SHARD_TOKENS,
    checkpoints_of,
    copy_small_store,
    manifest_of,
    segment_of,
    spec,
    write_input,
)

SOURCES = SourcesFile(sources=(spec("alpha"), spec("beta"), spec("gamma")))
NOW = datetime(2026, 11, 20, 17, 32, 3, tzinfo=UTC)
PAGE = Path(__file__).parents[2] / "docs" / "status.md"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    copy_small_store(tmp_path / "store")
    return tmp_path / "store"


def status_of(folder: Path, now: datetime | None = None) -> StoreStatus:
    return read_status(FolderStore(folder), SOURCES, now=now)


def change_writer(folder: Path, writer: Writer) -> None:
    checkpoints = checkpoints_of(folder).model_copy(update={"writer": writer})
    (folder / CHECKPOINTS_KEY).write_bytes(checkpoints.to_json())


def set_ended(folder: Path, name: str, ended: bool) -> None:
    checkpoints = checkpoints_of(folder)
    source = checkpoints.sources[name].model_copy(update={"ended": ended})
    changed = checkpoints.model_copy(update={"sources": {**checkpoints.sources, name: source}})
    (folder / CHECKPOINTS_KEY).write_bytes(changed.to_json())


def test_figures_are_the_stores(folder):
    manifest, checkpoints = manifest_of(folder), checkpoints_of(folder)
    status = status_of(folder)
    assert [row.name for row in status.sources] == ["alpha", "beta"]
    for row in status.sources:
        totals, position = manifest.sources[row.name], checkpoints.sources[row.name]
        assert (row.shards, row.tokens, row.documents) == (totals.shards, totals.tokens, totals.documents_processed)
        assert row.target_shards == 20
        assert row.shard_bytes == totals.shards * shard_file_bytes(SHARD_TOKENS)
        assert row.text_bytes == position.text_bytes > 0
        assert row.rows_skipped == position.rows_skipped > 0
        assert row.leftover_tokens == len(position.leftover_tokens)
        assert row.unsharded_tokens == position.unsharded_tokens
        assert row.ended
    assert status.totals.tokens == manifest.total_tokens
    assert status.totals.shard_bytes == manifest.total_size_bytes == sum(row.shard_bytes for row in status.sources)
    assert status.pending == ("gamma",)
    assert status.published_sequence == status.sequence == manifest.sequence
    assert status.notes == ()
    vocabulary = status.vocabulary
    assert vocabulary is not None
    assert vocabulary.sources_contributed == {"alpha": 300, "beta": 40}
    assert (vocabulary.merges, vocabulary.ids) == (340, 266 + 340)


def test_a_writer_at_work_gives_speed_and_time_left(folder):
    expires_at = format_time(NOW + timedelta(seconds=30))
    writer = Writer(id="elsewhere:1:1:boot", token=9, expires_at=expires_at, source="alpha", tokens_per_s=1000.0)
    change_writer(folder, writer)
    set_ended(folder, "alpha", False)
    status = status_of(folder, NOW)
    assert status.writer is not None
    assert status.writer.state == "alive"
    alpha, beta = status.sources
    assert alpha.tokens_per_s == 1000.0
    assert alpha.eta_s == (20 - alpha.shards) * SHARD_TOKENS / 1000
    assert beta.tokens_per_s is beta.eta_s is None
    set_ended(folder, "alpha", True)
    assert status_of(folder, NOW).sources[0].eta_s is None


@pytest.mark.parametrize(
    ("expires_at", "state"), [(None, "released"), (NOW, "stale"), (NOW + timedelta(seconds=1), "alive")]
)
def test_lease_states(folder, expires_at, state):
    change_writer(folder, Writer(id="w", token=1, expires_at=format_time(expires_at) if expires_at else None))
    writer = status_of(folder, NOW).writer
    assert writer is not None
    assert writer.state == state


def test_without_a_checkpoint_the_manifest_tells_what_it_can(folder):
    whole = status_of(folder)
    (folder / CHECKPOINTS_KEY).unlink()
    status = status_of(folder)
    assert status.totals.tokens == whole.totals.tokens
    assert [row.shards for row in status.sources] == [row.shards for row in whole.sources]
    assert status.totals.text_bytes is None
    assert status.sources[0].leftover_tokens is None
    assert "checkpoints.json" in status.notes[0]


def test_a_commit_that_is_not_published_counts_and_an_old_one_does_not(folder):
    manifest = manifest_of(folder)
    (folder / MANIFEST_KEY).write_bytes(manifest.model_copy(update={"sequence": manifest.sequence - 1}).to_json())
    status = status_of(folder)
    assert (status.sequence, status.published_sequence) == (manifest.sequence, manifest.sequence - 1)
    assert "not published" in status.notes[0]
    (folder / MANIFEST_KEY).write_bytes(manifest.model_copy(update={"sequence": manifest.sequence + 5}).to_json())
    assert status_of(folder).sequence == manifest.sequence + 5


def test_a_populator_that_has_not_committed_yet_is_shown(tmp_path):
    store = tmp_path / "store"
    store.mkdir()
    writer = {"id": "host:1:1:b", "token": 1, "expires_at": format_time(NOW), "source": "alpha"}
    (store / CHECKPOINTS_KEY).write_text(json.dumps({"format": 1, "writer": writer}))
    status = status_of(store, NOW - timedelta(seconds=9))
    assert status.writer is not None
    assert [row.name for row in status.sources] == ["alpha"]
    assert status.totals.shards == 0
    assert status.vocabulary is None


def test_a_store_that_is_empty_or_damaged(tmp_path, folder):
    with pytest.raises(StoreEmptyError, match="genesis populate"):
        status_of(tmp_path / "store" / "index")
    with pytest.raises(GenesisError, match="no such folder"):
        read_status(open_readable(tmp_path / "missing"), SOURCES)
    (folder / MANIFEST_KEY).write_bytes(b"[]")
    with pytest.raises(ContractError, match=r"manifest\.json"):
        status_of(folder)


def test_a_damaged_vocabulary_is_a_note(folder):
    reference = manifest_of(folder).tokenizer
    assert reference is not None
    (folder / reference.key).write_bytes(b"{}")
    status = status_of(folder)
    assert status.vocabulary is not None
    assert status.vocabulary.ids == reference.next_merge_id
    assert status.vocabulary.sources_contributed is None
    assert "vocabulary" in status.notes[0]


def test_the_page_describes_every_field_and_its_example_has_them(folder):
    page = PAGE.read_text(encoding="utf-8")
    example = re.findall(r"```json\n(.*?)```", page, re.DOTALL)[0]
    documented = StoreStatus.model_validate_json(example)
    assert json.loads(documented.model_dump_json()) == json.loads(example)
    found = json.loads(status_of(folder).model_dump_json())
    assert found.keys() == json.loads(example).keys()
    parts = (documented.totals, documented.sources[0], documented.writer, documented.vocabulary)
    for model in (StoreStatus, *map(type, parts)):
        for name in model.model_fields:
            assert f"`{name}`" in page, f"docs/status.md does not describe {name}"


def documents_of(folder: Path, name: str) -> list[str]:
    lines = write_input(folder.parent, name).read_text(encoding="utf-8").splitlines()
    return [text for line in lines if (text := json.loads(line)["text"]) is not None]


@pytest.mark.slow
def test_all_documents_put_together_are_the_text(folder):
    store, manifest = FolderStore(folder), manifest_of(folder)
    found: dict[str, list[str]] = {"alpha": [], "beta": []}
    for number in range(manifest.total_shards):
        shard = inspect_shard(store, manifest, number, num_documents=10_000)
        assert shard.sha256_matches
        documents = found[shard.entry.source]
        for document in shard.documents:
            if document.begins_before:
                assert document.ordinal == len(documents) - 1
                documents[-1] += document.text
            else:
                assert document.ordinal == len(documents)
                documents.append(document.text)
        assert sum(document.num_tokens for document in shard.documents) == shard.entry.tokens
        assert sum(not document.continues_after for document in shard.documents) == shard.num_eos
        assert shard.documents[-1].ordinal == shard.entry.last_document
    for name, documents in found.items():
        whole = documents_of(folder, name)
        assert documents[:-1] == whole[: len(documents) - 1]
        assert whole[len(documents) - 1].startswith(documents[-1])


@pytest.mark.slow
def test_the_shard_before_is_the_one_of_the_same_source(folder):
    store, manifest, shards = FolderStore(folder), manifest_of(folder), segment_of(folder).shards
    before = {shard.id: previous_of_source(store, manifest, shard) for shard in shards}
    assert [number for number, found in before.items() if found is None] == [0, 9]
    assert all(found.id == number - 1 for number, found in before.items() if found is not None)
    for number in (0, 9):
        first = inspect_shard(store, manifest, number).documents[0]
        assert (first.ordinal, first.begins_before) == (0, False)


def test_a_document_can_be_cut_and_listed(folder):
    store, manifest = FolderStore(folder), manifest_of(folder)
    whole = inspect_shard(store, manifest, 2, num_documents=3)
    cut = inspect_shard(store, manifest, 2, num_documents=3, max_tokens=5, with_tokens=True)
    for long, short in zip(whole.documents, cut.documents, strict=True):
        assert short.num_tokens == long.num_tokens
        assert long.text.startswith(short.text.rstrip("\N{REPLACEMENT CHARACTER}"))
        assert short.is_cut == (long.num_tokens > 5)
        assert short.tokens is not None
        ids = decode_shard((folder / shard_key(2)).read_bytes())
        assert {token.id for token in short.tokens} <= set(ids.tolist())
    assert not any(document.is_cut for document in whole.documents)
    assert inspect_shard(store, manifest, 0, num_documents=0).documents == ()


def test_what_is_not_the_manifests(folder):
    store, manifest = FolderStore(folder), manifest_of(folder)
    (folder / shard_key(1)).write_bytes((folder / shard_key(2)).read_bytes())
    assert not inspect_shard(store, manifest, 1).sha256_matches
    assert manifest.tokenizer is not None
    path = folder / manifest.tokenizer.key
    path.write_bytes(path.read_bytes().replace(b'"beta":40', b'"beta":41'))
    with pytest.raises(ContractError, match="expected sha256"):
        read_vocabulary(store, manifest)
    path = folder / manifest.index[0].key
    path.write_bytes(path.read_bytes() + b" ")
    with pytest.raises(ContractError, match="expected sha256"):
        inspect_shard(store, manifest, 0)


def test_vocabulary_in_numbers_and_what_is_not_there(folder, tmp_path):
    found = inspect_vocabulary(FolderStore(folder), manifest_of(folder))
    assert found.ids == FIRST_MERGE_ID + found.merges == 606
    assert found.key is not None
    assert found.sha256.startswith(Path(found.key).stem)
    with pytest.raises(StoreEmptyError, match="genesis learn"):
        read_vocabulary(FolderStore(tmp_path), None)
    for number in (-1, 23, 10**12):
        with pytest.raises(UsageError, match="shards 0 to 22"):
            find_shard(FolderStore(folder), manifest_of(folder), number)

"""`read_status` on a store that the real populator made."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from genesis.errors import GenesisError, StoreAccessError
from genesis.snapshot import StoreEmptyError
from genesis.status import StoreStatus, read_status
from genesis.store import FolderStore, StoredObject, open_readable
from manifests import CHECKPOINTS_KEY, MANIFEST_KEY, ContractError, SourcesFile, Writer, format_time, shard_file_bytes
from tests.support.small_store import SHARD_TOKENS, checkpoints_of, copy_small_store, manifest_of, spec

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
    assert vocabulary.merges == 340
    assert vocabulary.ids == 266 + 340
    assert [row.last_commit_age_s for row in status_of(folder, datetime(2020, 1, 1, tzinfo=UTC)).sources] == [0, 0]


def test_a_writer_at_work_gives_speed_and_time_left(folder):
    writer = Writer(
        id="elsewhere:1:1:boot",
        token=9,
        expires_at=format_time(NOW + timedelta(seconds=30)),
        source="alpha",
        tokens_per_s=1000.0,
    )
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


class PrivateCheckpoints(FolderStore):
    """A store that does not give checkpoints.json out."""

    def get(self, key: str, *, max_bytes: int | None = None) -> StoredObject:
        if key == CHECKPOINTS_KEY:
            raise StoreAccessError("403")
        return super().get(key, max_bytes=max_bytes)


def test_without_a_checkpoint_the_manifest_tells_what_it_can(folder):
    whole = status_of(folder)
    (folder / CHECKPOINTS_KEY).write_bytes(b"{")
    assert "checkpoints.json" in status_of(folder).notes[0]
    (folder / CHECKPOINTS_KEY).unlink()
    status = status_of(folder)
    assert status.totals.tokens == whole.totals.tokens
    assert [row.shards for row in status.sources] == [row.shards for row in whole.sources]
    assert status.totals.text_bytes is None
    assert status.sources[0].leftover_tokens is None
    assert "checkpoints.json" in status.notes[0]
    status = read_status(PrivateCheckpoints(folder), SOURCES)
    assert status.totals.tokens == whole.totals.tokens
    assert "403" in status.notes[0]


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


def test_a_vocabulary_is_not_read_again_and_a_damaged_one_is_a_note(folder):
    first = status_of(folder)
    reference = manifest_of(folder).tokenizer
    assert reference is not None
    (folder / reference.key).unlink()
    second = read_status(FolderStore(folder), SOURCES, previous=first)
    assert second.vocabulary == first.vocabulary
    assert second.notes == ()
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

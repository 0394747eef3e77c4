"""The transfer form beside the shards: always what the shard is, whatever was left there, whoever wrote it."""

import numpy as np
import pytest

from genesis.errors import LeaseLostError
from genesis.populate.commit_log import CommitLog, read_checkpoints
from genesis.populate.committer import ShardWriter
from genesis.populate.packer import FilledShard, Position
from genesis.store import CachePolicy, FolderStore, open_store
from genesis.verification import verify_store
from manifests import ShardImage, Writer, pack_ids, packed_key, sha256_hex, shard_key
from tests.support.populating import check_packed, entries, genesis, populate_arguments, snapshot, stray_objects

TOKENS = 3_000
VOCABULARY = 32_000
IDS = np.repeat(np.random.default_rng(5).integers(10, VOCABULARY, TOKENS // 6), 6)


@pytest.mark.slow
def test_every_shard_has_its_packed_form(small_input, undisturbed, tmp_path):
    genesis(*populate_arguments(tmp_path, small_input), "--workers", "2")
    store = FolderStore(tmp_path)
    found = entries(store)
    assert len(found) == len(undisturbed["shards"]) > 40
    for entry in found:
        check_packed(store, entry)
    assert snapshot(tmp_path) == undisturbed
    assert verify_store(store).ok


@pytest.mark.slow
def test_a_store_may_be_mixed(small_input, undisturbed, tmp_path):
    arguments = populate_arguments(tmp_path, small_input)
    genesis(*arguments, "--max-shards", "3", GENESIS_PACKED="0")
    genesis(*arguments, "--max-shards", "5")
    genesis(*arguments, "--no-packed")
    store = FolderStore(tmp_path)
    assert [entry.id for entry in entries(store) if entry.packed] == [3, 4]
    assert {path.name for path in (tmp_path / "packed").iterdir()} == {"shard_3.zst", "shard_4.zst"}
    assert snapshot(tmp_path)["shards"] == undisturbed["shards"]
    assert stray_objects(tmp_path) == []
    assert verify_store(store).ok


@pytest.fixture
def store(tmp_path):
    return open_store(str(tmp_path / "store"))


@pytest.fixture
def writer(store):
    commit_log = CommitLog(store, TOKENS, source="s")
    commit_log.open()
    return ShardWriter(commit_log, "s", VOCABULARY, packed=True)


def filled(ids=IDS):
    image = ShardImage.empty(TOKENS)
    image.ids[:] = ids
    return FilledShard(image, first_document=0, last_document=0, position=Position(documents=1))


def leave(store, key, body):
    store.put(key, body, cache=CachePolicy.IMMUTABLE)


def test_an_entry_names_the_forms_there_are_and_the_same_again_is_success(store, writer):
    plain = ShardWriter(writer.commit_log, "s", VOCABULARY, packed=False)
    assert plain.write(7, filled()).packed is None
    assert store.head(packed_key(7)) is None
    entry = writer.write(7, filled())
    assert entry.sha256 == sha256_hex(store.get(shard_key(7)).body)
    check_packed(store, entry)
    assert entry.packed.size_bytes < TOKENS
    assert writer.write(7, filled()) == entry


def test_an_equivalent_leftover_is_kept(store, writer):
    body = pack_ids(IDS, VOCABULARY, level=19)
    leave(store, packed_key(7), body)
    before = store.head(packed_key(7))
    entry = writer.write(7, filled())
    assert entry.packed.sha256 == sha256_hex(body)
    assert entry.packed.size_bytes == len(body)
    assert store.head(packed_key(7)) == before
    check_packed(store, entry)


LEFTOVERS = {
    "other ids": pack_ids(IDS[::-1], VOCABULARY),
    "one id fewer": pack_ids(IDS[:-1], VOCABULARY),
    "no zstd": b"half a file",
    "nothing": b"",
    "a bomb": pack_ids(np.zeros(20_000_000, np.int64), VOCABULARY),
    "a large file": bytes(100_000),
}


@pytest.mark.parametrize("what", LEFTOVERS)
def test_any_other_leftover_is_replaced(what, store, writer):
    leave(store, packed_key(7), LEFTOVERS[what])
    entry = writer.write(7, filled())
    assert store.get(packed_key(7)).body == pack_ids(IDS, VOCABULARY)
    check_packed(store, entry)


@pytest.mark.parametrize("key", [shard_key(7), packed_key(7)])
def test_an_ousted_writer_replaces_nothing(key, store, writer):
    leave(store, key, LEFTOVERS["other ids"])
    checkpoints, etag = read_checkpoints(store)
    usurped = checkpoints.model_copy(update={"writer": Writer(id="gpu-9:1:1:", token=99)})
    store.put("checkpoints.json", usurped.to_json(), cache=CachePolicy.NONE, if_match=etag)
    with pytest.raises(LeaseLostError, match="taken over by process 1 on gpu-9"):
        writer.write(7, filled())
    assert store.get(key).body == LEFTOVERS["other ids"]

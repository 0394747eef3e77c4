"""The commit protocol over a real folder: what is committed is whole, in order, and one writer's."""

import os
import shutil
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from genesis.errors import (
    LeaseHeldError,
    LeaseLostError,
    StoreError,
    StoreRemovedError,
    TokenizerError,
    UsageError,
)
from genesis.populate.commit_log import CommitLog, read_checkpoints, read_tail
from genesis.populate.lease import ProcessId, check_free, lease_end, this_process
from genesis.store import CachePolicy, open_store
from genesis.tokenizer import NeuroTokenizer
from manifests import (
    Checkpoints,
    ContractError,
    InputRead,
    Manifest,
    Segment,
    ShardEntry,
    SourceCheckpoint,
    Writer,
    generate_private_key,
    sha256_hex,
    verify_manifest,
)

TOKENS = 4


def entry(shard_id, source="s"):
    return ShardEntry(
        id=shard_id, sha256=sha256_hex(str(shard_id).encode()), size_bytes=1600, tokens=TOKENS, source=source,
        first_document=shard_id, last_document=shard_id, next_merge_id=266,
    )  # fmt: skip


def checkpoint(last_shard_id, documents=0):
    return SourceCheckpoint(
        documents_processed=documents or last_shard_id + 1,
        last_shard_id=last_shard_id,
        leftover_tokens=(7, 8),
        timestamp="2026-01-01T00:00:00Z",
    )


@pytest.fixture
def store(tmp_path):
    return open_store(str(tmp_path / "store"))


def opened(store, **options):
    commit_log = CommitLog(store, TOKENS, **options)
    commit_log.open()
    return commit_log


def committed(store, *shard_ids):
    """Commits shards one by one."""
    commit_log = opened(store)
    for shard_id in shard_ids:
        commit_log.commit_shards([entry(shard_id)], "s", checkpoint(shard_id))
    commit_log.close()


def learned(texts="banana bandana ", count=4):
    tokenizer = NeuroTokenizer.empty()
    tokenizer.learn_merges([texts * 20], count, source="s")
    return tokenizer


def published(store):
    return Manifest.from_json(store.get("manifest.json").body)


def expire(store):
    """Makes the store's lease one of another machine that stopped renewing it."""
    checkpoints, etag = read_checkpoints(store)
    stale = Writer(id="gone:1:2:3", token=checkpoints.writer.token, expires_at="2020-01-01T00:00:00Z")
    body = checkpoints.model_copy(update={"writer": stale}).to_json()
    store.put("checkpoints.json", body, cache=CachePolicy.NONE, if_match=etag)


def test_commits_add_up_over_segments(store):
    commit_log = opened(store)
    for start in (0, 3, 990, 1001, 2500):
        last = {0: 2, 3: 989, 990: 1000, 1001: 2499, 2500: 2500}[start]
        commit_log.commit_shards([entry(i) for i in range(start, last + 1)], "s", checkpoint(last))
    manifest = published(store)
    assert (manifest.total_shards, manifest.total_tokens) == (2501, 2501 * TOKENS)
    spans = [(segment.first_shard, segment.shards) for segment in manifest.index]
    assert spans == [(0, 1000), (1000, 1000), (2000, 501)]
    found = [shard.id for segment in manifest.index for shard in Segment.from_json(store.get(segment.key).body).shards]
    assert found == list(range(2501))
    assert read_tail(store, manifest)[-1] == entry(2500)
    assert manifest.sources["s"].last_shard_id == 2500
    commit_log.close()


def test_manifests_are_chained_and_signed_and_the_cdn_is_told_of_each(store):
    told, bodies, key = [], [], generate_private_key()
    commit_log = opened(store, sign_key=key, on_publish=lambda: told.append(published(store).sequence))
    for shard_id in range(3):
        commit_log.commit_shards([entry(shard_id)], "s", checkpoint(shard_id))
        bodies.append(store.get("manifest.json").body)
    commit_log.renew()
    commit_log.close()
    chain = [verify_manifest(body, key.public_key()) for body in bodies]
    assert told == [manifest.sequence for manifest in chain] == [1, 2, 3]
    assert [manifest.previous for manifest in chain[1:]] == [sha256_hex(body) for body in bodies[:-1]]


def test_the_second_populator_is_told_who_the_first_is_and_the_token_only_grows(store):
    first = opened(store, source="s")
    with pytest.raises(LeaseHeldError, match=r"process \d+ on .* \(populating s\)"):
        opened(store)
    first.close()
    tokens = [read_checkpoints(store)[0].writer.token]
    for _ in range(2):
        commit_log = opened(store)
        tokens.append(read_checkpoints(store)[0].writer.token)
        commit_log.close()
    assert tokens == [1, 2, 3]


def test_an_ousted_writer_changes_and_deletes_nothing(store):
    ousted = opened(store, superseded_keep_s=0.0)
    ousted.commit_shards([entry(0)], "s", checkpoint(0))
    expire(store)
    successor = opened(store)
    successor.commit_shards([entry(1, "t")], "t", checkpoint(1))
    before = {info.key: store.get(info.key).body for info in store.list("")}
    with pytest.raises(LeaseLostError, match="taken over by process"):
        ousted.commit_shards([entry(1)], "s", checkpoint(1))
    with pytest.raises(LeaseLostError):
        ousted.renew()
    with pytest.raises(LeaseLostError):
        ousted.close()
    after = {info.key: store.get(info.key).body for info in store.list("")}
    assert before.items() <= after.items()
    assert all(key.startswith("index/") for key in after.keys() - before.keys())
    successor.close()


@pytest.mark.parametrize("act", ["commit", "renew", "close"])
def test_a_store_that_is_removed_or_emptied_was_not_taken_over(store, tmp_path, act):
    folder = tmp_path / "store"
    acts = {
        "commit": lambda log: log.commit_shards([entry(1)], "s", checkpoint(1)),
        "renew": CommitLog.renew,
        "close": CommitLog.close,
    }
    commit_log = opened(store)
    commit_log.commit_shards([entry(0)], "s", checkpoint(0))
    (folder / "checkpoints.json").unlink()
    with pytest.raises(StoreRemovedError, match=r"checkpoints\.json is gone: the store was removed or emptied"):
        acts[act](commit_log)
    shutil.rmtree(folder)
    with pytest.raises(StoreRemovedError, match=r"the store.* was removed or (emptied|moved) while"):
        acts[act](commit_log)
    assert not folder.exists()
    committed(open_store(str(folder)), 0)


def test_a_manifest_that_something_else_removes_is_not_a_lease_lost(store, tmp_path):
    commit_log = opened(store)
    commit_log.commit_shards([entry(0)], "s", checkpoint(0))
    (tmp_path / "store" / "manifest.json").unlink()
    with pytest.raises(StoreError, match=r"manifest\.json was replaced or removed by something that holds no lease"):
        commit_log.commit_shards([entry(1)], "s", checkpoint(1))
    commit_log.close()
    opened(store).close()
    assert published(store).total_shards == 2


def test_how_far_the_input_is_read_stays_when_the_lease_is_given_back(store):
    commit_log = opened(store)
    assert read_checkpoints(store)[0].writer.input_read is None
    read = {"s": InputRead(read_bytes=5, total_bytes=9), "t": InputRead(read_bytes=3, total_bytes=3)}
    commit_log.commit_shards([entry(0)], "s", checkpoint(0), read["s"])
    commit_log.close()
    commit_log = opened(store)
    commit_log.commit_shards([entry(1)], "t", checkpoint(1), read["t"])
    commit_log.commit_shards([entry(2)], "t", checkpoint(2))
    assert read_checkpoints(store)[0].writer.input_read == read
    commit_log.close()
    assert read_checkpoints(store)[0].writer.input_read == opened(store).input_read == read


def test_a_manifest_lost_after_its_commit_is_published_at_the_next_start(store):
    committed(store, 0)
    older = store.get("manifest.json").body
    committed(store, 1)
    newer = store.get("manifest.json").body
    store.put("manifest.json", older, cache=CachePolicy.SHORT)
    opened(store).close()
    assert store.get("manifest.json").body == newer


def test_vocabularies_are_kept_and_the_newest_published(store):
    commit_log = opened(store)
    assert commit_log.read_tokenizer() is None
    tokenizer = learned()
    commit_log.commit_vocabulary(tokenizer)
    small = store.get("tokenizer.json").body
    tokenizer.learn_merges(["cabana cabaret " * 20], 4, source="t")
    commit_log.commit_vocabulary(tokenizer)
    commit_log.close()
    reference = published(store).tokenizer
    assert store.get("tokenizer.json").body == store.get(reference.key).body
    assert sha256_hex(store.get("tokenizer.json").body) == reference.sha256
    assert small in [store.get(info.key).body for info in store.list("vocabulary/")]
    assert opened(store).read_tokenizer().merges == tokenizer.merges


def test_a_contradicting_tokenizer_is_refused_until_it_is_restored(store):
    commit_log = opened(store)
    commit_log.commit_vocabulary(learned())
    commit_log.close()
    good = store.get("tokenizer.json").body
    for bad in (b"garbage", learned("zzz xxx ", 2).to_file().to_json(), good.replace(b'"107_', b'"9107_')):
        store.put("tokenizer.json", bad, cache=CachePolicy.SHORT)
        with pytest.raises(TokenizerError, match=r"copy vocabulary/.* over tokenizer\.json"):
            opened(store)
    store.put("tokenizer.json", good, cache=CachePolicy.SHORT)
    opened(store).close()


def test_checkpoints_keep_the_layout_of_the_specification_and_are_not_begun_anew(store):
    committed(store, 0)
    value = Checkpoints.from_json(store.get("checkpoints.json").body).to_object()
    assert value["s"]["leftover_tokens"] == [7, 8]
    assert set(value) == {"format", "manifest", "s", "writer"}
    assert "expires_at" not in value["writer"]
    with pytest.raises(UsageError, match=f"--shard-tokens {TOKENS}"):
        CommitLog(store, TOKENS + 1).open()
    store.put("checkpoints.json", b'{"s": {"last_shard_id"', cache=CachePolicy.NONE)
    with pytest.raises(ContractError, match=r"checkpoints\.json"):
        opened(store)
    store.delete("checkpoints.json")
    with pytest.raises(ContractError, match=r"restore checkpoints\.json"):
        opened(store)


def test_superseded_segments_go_once_nobody_reads_them(store):
    committed(store, 0, 1, 2)
    assert len(list(store.list("index/"))) == 3
    opened(store).close()
    assert len(list(store.list("index/"))) == 3
    opened(store, superseded_keep_s=0.0).close()
    assert [info.key for info in store.list("index/")] == [published(store).index[-1].key]


def test_a_segment_made_again_after_a_kill_is_not_taken_for_a_leftover(store):
    commit_log = opened(store, superseded_keep_s=0.0)
    commit_log.commit_shards([entry(0)], "s", checkpoint(0))
    commit_log._store_segments([entry(1)])  # Killed here: the segment is stored, its commit is not.
    expire(store)
    again = opened(store, superseded_keep_s=0.0)
    again.commit_shards([entry(1)], "s", checkpoint(1))
    again.close()
    assert [shard.id for shard in read_tail(store, published(store))] == [0, 1]
    assert len(list(store.list("index/"))) == 1


def test_a_renewal_whose_acknowledgement_was_lost_does_not_end_the_run(store):
    commit_log = opened(store)
    known = commit_log._etag
    commit_log.renew()
    commit_log._etag = known  # As if the answer had never come.
    commit_log.commit_shards([entry(0)], "s", checkpoint(0))
    commit_log.close()
    assert published(store).total_shards == 1


NOW = datetime(2026, 11, 20, 12, tzinfo=UTC)
ELSEWHERE = ProcessId("gpu-7", 1234, "99", "0123abcd-1")


def writer(process: ProcessId, seconds_left: float | None) -> Writer:
    expires = None if seconds_left is None else lease_end(NOW, seconds_left)
    return Writer(id=str(process), token=1, expires_at=expires, source="c4")


@pytest.mark.slow
@given(st.text(min_size=1), st.integers(0), st.text("0123456789"), st.text("0123456789abcdef-"))
def test_process_ids_round_trip(host, pid, started, boot):
    process = ProcessId(host, pid, started, boot)
    assert ProcessId.parse(str(process)) == process


def test_process_ids_writers_and_live_leases():
    assert ProcessId.parse("somebody") is None
    here = this_process()
    assert here.pid == os.getpid()
    assert ProcessId(here.host, here.pid, "1", here.boot).is_gone()
    assert not ELSEWHERE.is_gone()
    with pytest.raises(LeaseHeldError, match=r"process 1234 on gpu-7 \(populating c4\).*30 s"):
        check_free(writer(ELSEWHERE, 30), "./store", NOW)


@pytest.mark.parametrize("lease", [None, writer(ELSEWHERE, None), writer(ELSEWHERE, 0), writer(ELSEWHERE, -5)])
def test_no_returned_or_stale_lease_hinders(lease):
    check_free(lease, "./store", NOW)


def test_a_dead_process_of_this_machine_holds_nothing():
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    here = this_process()
    started = Path(f"/proc/{child.pid}/stat").read_text().rsplit(")", 1)[1].split()[19]
    process = ProcessId(here.host, child.pid, started, here.boot)
    assert not process.is_gone()
    with pytest.raises(LeaseHeldError):
        check_free(writer(process, 30), "./store", NOW)
    child.communicate(b"\n", timeout=10)
    assert process.is_gone()
    check_free(writer(process, 30), "./store", NOW)

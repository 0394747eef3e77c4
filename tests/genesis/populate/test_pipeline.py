"""Populate from the command line: nothing but the text decides the bytes, in a folder as through S3."""

import json
from contextlib import closing

import pytest

from genesis.errors import StoreRemovedError
from genesis.populate.commit_log import CommitLog
from genesis.store import CachePolicy, open_readable, open_store
from tests.support.documents import documents, write_json_lines, write_parquet
from tests.support.fault_proxy import FAST_FAULTS, FaultProxy
from tests.support.populating import decoded_documents, entries, genesis, populate_arguments, snapshot, stray_objects
from tests.support.s3_servers import moto_s3, s3_client, speaking_to


@pytest.fixture(scope="module")
def texts():
    return documents(seed=1, count=900)


@pytest.fixture(scope="module")
def inputs(texts, tmp_path_factory):
    """Three parquet files with a few rows that hold no text."""
    folder = tmp_path_factory.mktemp("input")
    rows: list[str | None] = list(texts)
    rows[100:100] = [None, ""]
    rows[700:700] = [None]
    return [write_parquet(folder / f"{i}.parquet", rows[i * 301 : (i + 1) * 301], 40) for i in range(3)]


@pytest.fixture(scope="module")
def reference(inputs, tmp_path_factory):
    """A store populated by one worker, and what the command printed."""
    store = tmp_path_factory.mktemp("one") / "store"
    done = genesis(*populate_arguments(store, *inputs), "--workers", "1", "--json")
    return store, json.loads(done.stdout), done.stderr


def test_the_shards_hold_the_documents_in_order(reference, texts):
    store, result, _ = reference
    found = decoded_documents(store)
    assert found == texts[: len(found)]
    assert result["ended"]
    assert result["rows_skipped"] == 3
    assert len(texts) - len(found) == result["unsharded_documents"]
    assert 0 < result["unsharded_tokens"] < 2000
    assert stray_objects(store) == []


@pytest.mark.slow
@pytest.mark.parametrize("workers", [2, 5])
def test_the_number_of_workers_does_not_matter(reference, inputs, tmp_path, workers):
    genesis(*populate_arguments(tmp_path / "store", *inputs), "--workers", workers)
    assert snapshot(tmp_path / "store") == snapshot(reference[0])


def test_the_bytes_are_pinned(reference, inputs, tmp_path):
    """If this fails, stores made by released versions can no longer be continued: do not update the digest lightly.

    Packed bytes, and so the digests that a segment gives of them, are zstd's to choose.
    """
    genesis(*populate_arguments(tmp_path / "store", *inputs), "--no-packed")
    facts = snapshot(tmp_path / "store")
    assert facts["shards"] == snapshot(reference[0])["shards"]
    assert len(facts["shards"]) == GOLDEN_SHARDS
    assert facts["shards"][0] == GOLDEN_FIRST
    assert facts["manifest"]["index"][-1]["sha256"] == GOLDEN_SEGMENT
    assert facts["tokenizer"] == GOLDEN_TOKENIZER


@pytest.mark.slow
def test_going_on_in_steps_gives_the_same_store(reference, inputs, tmp_path):
    arguments = populate_arguments(tmp_path / "store", *inputs)
    for limit in (1, 2, 7, 7):
        genesis(*arguments, "--max-shards", limit, "--workers", "2")
        assert len(entries(open_readable(str(tmp_path / "store")))) == limit
    genesis(*arguments, "--workers", "2")
    assert snapshot(tmp_path / "store") == snapshot(reference[0])
    again = json.loads(genesis(*arguments, "--json").stdout)
    assert (again["shards_added"], again["ended"]) == (0, True)
    assert snapshot(tmp_path / "store") == snapshot(reference[0])


@pytest.mark.slow
def test_a_second_source_adds_its_share_and_its_shards(reference, texts, tmp_path):
    store = tmp_path / "store"
    first = write_json_lines(tmp_path / "a.jsonl", texts[:300])
    other = write_json_lines(tmp_path / "b.jsonl", documents(seed=3, count=300))
    genesis(*populate_arguments(store, first), "--workers", "1")
    before = snapshot(store)
    arguments = ["populate", "--source", "c4", "--store", store, "--input", other, "--merges", "30"]
    genesis(*arguments, "--workers", "2")
    after = snapshot(store)
    assert {key: after["shards"][key] for key in before["shards"]} == before["shards"]
    tokenizer = json.loads((store / "tokenizer.json").read_bytes())
    assert tokenizer["sources_contributed"] == {"fineweb-edu": 200, "c4": 30}
    assert {entry.source for entry in entries(open_readable(str(store)))} == {"fineweb-edu", "c4"}
    assert after["manifest"]["sources"]["c4"]["last_shard_id"] == after["manifest"]["total_shards"] - 1
    genesis(*arguments, "--workers", "1")
    assert json.loads((store / "tokenizer.json").read_bytes()) == tokenizer


@pytest.mark.slow
def test_learning_from_all_gives_each_its_share(texts, tmp_path):
    sources = tmp_path / "sources.json"
    specs = [
        {"name": "a", "data_files": ["x"], "priority": 2, "merges": 20},
        {"name": "b", "data_files": ["x"], "priority": 1, "merges": 30},
    ]
    sources.write_text(json.dumps({"sources": specs}))
    files = {
        name: write_json_lines(tmp_path / f"{name}.jsonl", documents(seed, 100)) for name, seed in (("a", 4), ("b", 5))
    }
    inputs = [part for name, path in files.items() for part in ("--input", f"{name}={path}")]
    done = genesis("learn", "--all", "--store", tmp_path / "store", "--sources-file", sources, *inputs)
    assert "316 ids" in done.stdout
    tokenizer = json.loads((tmp_path / "store" / "tokenizer.json").read_bytes())
    assert tokenizer["sources_contributed"] == {"b": 30, "a": 20}


@pytest.mark.slow
def test_a_dry_run_and_a_store_inside_its_input_write_nothing(inputs, tmp_path):
    done = genesis(*populate_arguments(tmp_path / "store", *inputs), "--dry-run")
    assert "3 files" in done.stdout
    assert "200 merges" in done.stdout
    assert not (tmp_path / "store").exists()
    folder = inputs[0].parent
    done = genesis(*populate_arguments(folder / "store", folder), expect=2)
    assert "inside" in done.stderr
    assert not (folder / "store").exists()


GOLDEN_SHARDS = 95
GOLDEN_FIRST = "ae7c49279e4774be4d0d287e59a73a860ee442f96fb8d5d4fd756e10257fd262"
GOLDEN_SEGMENT = "9e3adfa5b6af96026c0b62c2d8d89a29e1a5f7ae18fdb408fd0e200ff7582d85"
GOLDEN_TOKENIZER = "ce59d49bd21fd7275c85d29f505d2dc6abfc9d426d1880872d9171ef9d93ae31"


URL = "s3://bucket/a/prefix"


@pytest.fixture(scope="module")
def moto():
    with moto_s3("bucket", "faulty") as server:
        yield server


@pytest.mark.slow
def test_a_bucket_that_is_emptied_was_not_taken_over(moto):
    with speaking_to(moto), closing(open_store("s3://bucket/emptied")) as store:
        commit_log = CommitLog(store, 1000)
        commit_log.open()
        for info in list(store.list("")):
            store.delete(info.key)
        with pytest.raises(StoreRemovedError, match=r"s3://bucket/emptied: checkpoints\.json is gone"):
            commit_log.renew()


@pytest.mark.slow
def test_a_bucket_holds_what_a_folder_would(moto, small_input, undisturbed):
    genesis(*populate_arguments(URL, small_input), "--workers", "2", **moto.environment())
    with speaking_to(moto):
        assert snapshot(URL) == undisturbed
    with closing(s3_client(moto)) as client:
        names = ("shard_0.pt", "manifest.json", "checkpoints.json")
        heads = [client.head_object(Bucket="bucket", Key=f"a/prefix/{name}")["CacheControl"] for name in names]
    assert heads == [policy.value for policy in (CachePolicy.IMMUTABLE, CachePolicy.SHORT, CachePolicy.NONE)]
    assert json.loads(genesis("status", "--store", URL, "--json", **moto.environment()).stdout)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_faults_and_kills_together_change_nothing(moto, small_input, undisturbed):
    arguments = [*populate_arguments("s3://faulty/killed", small_input), "--workers", "1"]
    points = ("vocabulary-stored:1", "shard-stored:2", "segment-stored:1", "checkpoint-stored:1")
    with FaultProxy(moto.port, seed=4, rate=0.15, faults=FAST_FAULTS) as proxy:
        environment = moto.environment(proxy.port)
        for point in points:
            genesis(*arguments, expect=-9, GENESIS_CRASH_AT=point, **environment)
        genesis(*arguments, **environment)
        assert sum(proxy.injected.values()) > 20
    with speaking_to(moto):
        assert snapshot("s3://faulty/killed") == undisturbed

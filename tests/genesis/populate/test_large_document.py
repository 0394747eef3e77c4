"""A document of many shards: a checkpoint says how far inside it stands, and a start anywhere gives the same store.

The long document here has some 60 times the ids that a checkpoint writes out, 20 shards' worth.
"""

import json
import random
import threading

import pytest

from genesis.errors import InputChangedError
from genesis.populate.commit_log import CommitLog, read_checkpoints
from genesis.populate.options import LearnOptions, PopulateOptions
from genesis.populate.pipeline import populate
from genesis.store import open_store
from genesis.verification import verify_store
from manifests import MAX_LEFTOVER_TOKENS, SourceSpec
from tests.support.documents import documents, write_json_lines, write_parquet
from tests.support.populating import (
    decoded_documents,
    genesis,
    populate_arguments,
    run_and_kill,
    snapshot,
    stray_objects,
)

SHARD_TOKENS = 50_000
BEFORE, AFTER = documents(seed=31, count=300), documents(seed=33, count=300)
LONG = " ".join(documents(seed=32, count=4000))
TEXTS = [*BEFORE, LONG, *AFTER]


def write_input(kind, folder):
    folder.mkdir()
    if kind == "parquet":
        write_parquet(folder / "a.parquet", [*BEFORE, None, LONG, *AFTER], 250)
    elif kind == "jsonl.gz":
        write_json_lines(folder / "a.jsonl.gz", TEXTS)
    else:
        for number, text in enumerate(TEXTS):
            (folder / f"{number}.txt").write_text(text, encoding="utf-8")
    return folder


def arguments_for(store, inputs):
    return [*populate_arguments(store, inputs, shard_tokens=SHARD_TOKENS), "--workers", "2"]


@pytest.fixture(scope="module", params=["parquet", "jsonl.gz", "txt"])
def inputs(request, tmp_path_factory):
    return write_input(request.param, tmp_path_factory.mktemp("input") / "files")


@pytest.fixture(scope="module")
def peace(inputs, tmp_path_factory):
    """What populating in one go gives."""
    store = tmp_path_factory.mktemp("peace") / "store"
    genesis(*arguments_for(store, inputs))
    assert decoded_documents(store) == TEXTS[: len(decoded_documents(store))]
    return snapshot(store)


def checkpoint_of(store):
    checkpoints, _ = read_checkpoints(open_store(str(store)))
    return checkpoints.sources["fineweb-edu"]


@pytest.mark.slow
def test_going_on_inside_the_document_gives_the_same_store(inputs, peace, tmp_path):
    store = tmp_path / "store"
    partial = []
    for limit in range(1, len(peace["shards"]) + 1, 3):
        genesis(*arguments_for(store, inputs), "--max-shards", str(limit))
        found = checkpoint_of(store)
        assert len(found.leftover_tokens) <= MAX_LEFTOVER_TOKENS
        assert (store / "checkpoints.json").stat().st_size < 200_000
        assert verify_store(open_store(str(store))).ok
        if found.partial_document is not None:
            partial.append(found.partial_document)
            assert json.loads((store / "checkpoints.json").read_bytes())["format"] == 2
            row = json.loads(genesis("status", "--store", store, "--json").stdout)["sources"][0]
            assert row["leftover_tokens"] == found.partial_document.tokens_left > MAX_LEFTOVER_TOKENS
    assert len(partial) > 4
    assert len({each.tokens for each in partial}) == 1
    genesis(*arguments_for(store, inputs))
    assert snapshot(store) == peace
    assert stray_objects(store) == []


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_killed_again_and_again_inside_the_document(inputs, peace, tmp_path):
    schedule = random.Random(20261123)
    arguments = arguments_for(tmp_path / "store", inputs)
    kills = 0
    for _ in range(8):
        point = schedule.choice(["shard-stored", "segment-stored", "checkpoint-stored", "manifest-published"])
        kills += run_and_kill(arguments, crash_at=f"{point}:{schedule.randint(1, 4)}")
    assert kills >= 5
    genesis(*arguments)
    assert snapshot(tmp_path / "store") == peace
    assert stray_objects(tmp_path / "store") == []


def options(store, name, *inputs, **changes):
    fields = {"learn": LearnOptions(documents=50, merges=50), "num_workers": 1, "shard_tokens": SHARD_TOKENS}
    return PopulateOptions(
        spec=SourceSpec(name=name), store_url=str(store), inputs=tuple(map(str, inputs)), **{**fields, **changes}
    )


@pytest.mark.slow
def test_a_vocabulary_that_grows_meanwhile_does_not_touch_a_document_that_was_begun(tmp_path):
    """Shards hold the document's beginning in the earlier vocabulary's ids: its rest goes on in them, twice stopped."""
    url = tmp_path / "store"
    store = open_store(str(url))
    path = write_parquet(tmp_path / "a.parquet", TEXTS, 400)
    other = write_parquet(tmp_path / "b.parquet", documents(seed=40, count=20), 10)
    populate(options(url, "a", path, max_shards=4), store)
    first = read_checkpoints(store)[0].sources["a"]
    assert first.partial_document is not None and first.partial_document.tokenizer_sha256 is None
    populate(options(url, "b", other, learn=LearnOptions(documents=20, merges=30)), store)
    populate(options(url, "a", path, max_shards=6), store)
    second = read_checkpoints(store)[0].sources["a"]
    assert second.tokenizer_sha256 != first.tokenizer_sha256
    assert second.partial_document is not None
    assert second.partial_document.tokenizer_sha256 == first.tokenizer_sha256
    assert second.partial_document.tokens == first.partial_document.tokens
    populate(options(url, "a", path), store)
    assert verify_store(store).ok
    found = decoded_documents(url)
    assert len(found) > len(BEFORE) + 1
    assert found == TEXTS[: len(found)]


@pytest.mark.slow
def test_a_document_that_is_another_at_the_next_start_is_refused(tmp_path):
    """Its length in ids tells, where size and edges of the file are what they were."""
    path = tmp_path / "a.jsonl"
    write_json_lines(path, TEXTS)
    store = open_store(str(tmp_path / "store"))
    populate(options(tmp_path / "store", "a", path, max_shards=4), store)
    data = path.read_bytes()
    middle = len(data) // 2
    path.write_bytes(data[:middle] + b"x" * 4000 + data[middle + 4000 :])
    with pytest.raises(InputChangedError, match="the last shard ends inside a document of"):
        populate(options(tmp_path / "store", "a", path), store)


@pytest.mark.slow
def test_a_stop_inside_the_document_commits_what_is_stored(tmp_path):
    path = write_parquet(tmp_path / "a.parquet", TEXTS, 400)
    store = open_store(str(tmp_path / "store"))
    stop = threading.Event()
    commit_log = CommitLog(store, SHARD_TOKENS)

    def stop_inside():
        if commit_log.checkpoints.sources.get("a") and commit_log.checkpoints.sources["a"].partial_document:
            stop.set()

    commit_log.on_publish = stop_inside
    result = populate(options(tmp_path / "store", "a", path), store, stop=stop, commit_log=commit_log)
    assert result.interrupted and not result.ended
    found = read_checkpoints(store)[0]
    assert found.sources["a"].partial_document is not None
    assert found.manifest.total_shards == result.total_shards < 20
    populate(options(tmp_path / "store", "a", path), store)
    found = decoded_documents(tmp_path / "store")
    assert found == TEXTS[: len(found)]
    assert len(found) > len(BEFORE)


@pytest.mark.slow
@pytest.mark.parametrize("later_limit", [len(BEFORE) + 1, len(BEFORE), 1])
def test_a_document_limit_at_or_before_the_document_lets_it_be_finished(later_limit, tmp_path):
    path = write_parquet(tmp_path / "a.parquet", TEXTS, 400)
    limit = len(BEFORE) + 1
    for store, steps in (("steps", (4, 7)), ("one", ())):
        url = tmp_path / store
        for shards in steps:
            populate(options(url, "a", path, max_documents=limit, max_shards=shards), open_store(str(url)))
        last = later_limit if steps else limit
        populate(options(url, "a", path, max_documents=last), open_store(str(url)))
    assert snapshot(tmp_path / "steps") == snapshot(tmp_path / "one")

"""`genesis import`: documents that are ids already go through the populate pipeline as they are."""

from __future__ import annotations

import json
import shutil
import signal
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from genesis.cli.app import run
from genesis.errors import CorruptInputError, InputChangedError, UsageError, VocabularyMismatchError
from genesis.export import ExportFormat, ExportOptions, export_shards
from genesis.populate.commit_log import read_checkpoints
from genesis.populate.crashpoint import CRASH_POINTS
from genesis.populate.options import PopulateOptions, TokenOptions
from genesis.populate.pipeline import populate
from genesis.store import FolderStore
from genesis.token_formats import TokenFormat
from genesis.verification import verify_store
from manifests import SourceSpec, VocabularyFile
from tests.support.exporting import (
    document_store,
    random_documents,
    read_export,
    same,
    split,
    whole_documents,
    write_datatrove,
    write_megatron,
)
from tests.support.populating import entries, genesis, snapshot, start, stray_objects
from tests.support.token_store import vocabulary_of

DOCUMENTS = random_documents(51, 300)
VOCABULARY = vocabulary_of()


def options_of(store, path, kind="megatron", **options):
    tokens = TokenOptions(
        token_format=TokenFormat(kind), vocabulary=options.pop("vocabulary", VOCABULARY),
        append_eos=options.pop("append_eos", False),
    )  # fmt: skip
    return PopulateOptions(
        spec=SourceSpec(name=options.pop("source", "ids")), store_url=str(store), inputs=(str(path),), num_workers=1,
        shard_tokens=500, tokens=tokens, **options,
    )  # fmt: skip


def imported(folder, path, kind="megatron", **options):
    store = FolderStore(folder)
    return store, populate(options_of(folder, path, kind, **options), store)


def stored_documents(store):
    from manifests import decode_shard, shard_key

    row = np.concatenate([decode_shard(store.get(shard_key(entry.id)).body) for entry in entries(store)])
    ends = np.flatnonzero(row == 2) + 1
    return split(row[: int(ends[-1])], ends)


def writers(folder):
    return {
        "megatron": write_megatron(folder / "x", DOCUMENTS),
        "datatrove": write_datatrove(folder / "x.ds", DOCUMENTS),
    }


@pytest.mark.parametrize("kind", ["megatron", "datatrove"])
def test_a_store_of_imported_ids_is_sound_and_holds_them_all(kind, tmp_path):
    store, result = imported(tmp_path / "store", writers(tmp_path)[kind], kind)
    found = stored_documents(store)
    assert same(found, DOCUMENTS[: len(found)])
    assert result.ended
    # The one that crosses the end of the last shard counts in both.
    assert result.documents + result.unsharded_documents - len(DOCUMENTS) in (0, 1)
    held = sum(entry.tokens for entry in entries(store))
    assert held + result.unsharded_tokens == sum(map(len, DOCUMENTS))
    report = verify_store(store)
    assert report.ok, report.problems
    checkpoint = read_checkpoints(store)[0].sources["ids"]
    assert checkpoint.input_fingerprint
    assert checkpoint.tokenizer_sha256 == store_vocabulary(store)


def store_vocabulary(store):
    return json.loads(store.get("manifest.json").body)["tokenizer"]["sha256"]


def test_both_forms_give_the_same_shards(tmp_path):
    forms = writers(tmp_path)
    shards = [[e.sha256 for e in entries(imported(tmp_path / kind, path, kind)[0])] for kind, path in forms.items()]
    assert shards[0] == shards[1]


@pytest.mark.slow
@settings(max_examples=8)
@given(
    lengths=st.lists(st.integers(0, 300), min_size=40, max_size=80),
    kind=st.sampled_from(["megatron", "datatrove"]),
    seed=st.integers(0, 99),
)
def test_export_and_import_give_the_same_ids(lengths, kind, seed):
    assume(sum(lengths) + len(lengths) >= 300)  # A shard, or there is nothing to export.
    generator = np.random.default_rng(seed)
    documents = {"alpha": [np.append(generator.integers(10, 1_000, length), 2) for length in lengths]}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        first = document_store(folder / "first", documents, shard_tokens=300)
        options = ExportOptions(target=ExportFormat(kind))
        export_shards(FolderStore(first.folder), folder / "out", options)
        second, _ = imported(folder / "second", folder / "out", kind)
        expected = whole_documents(first, documents)
        found = stored_documents(second)
        assert same(found, expected[: len(found)])
        export_shards(second, folder / "again", options)
        assert same(read_export(kind, folder / "again"), found)


def test_files_may_be_added_behind_and_not_changed(tmp_path):
    inputs = tmp_path / "in"
    inputs.mkdir()
    write_megatron(inputs / "a", DOCUMENTS[:150])
    imported(tmp_path / "store", inputs)
    write_megatron(inputs / "b", DOCUMENTS[150:])
    store, _ = imported(tmp_path / "store", inputs)
    whole, _ = imported(tmp_path / "whole", writers(tmp_path)["megatron"])
    assert [entry.sha256 for entry in entries(store)] == [entry.sha256 for entry in entries(whole)]
    write_megatron(inputs / "a", DOCUMENTS[1:150])
    with pytest.raises(InputChangedError):
        imported(tmp_path / "store", inputs)


def test_a_vocabulary_is_asked_for(tmp_path):
    path = writers(tmp_path)["megatron"]
    with pytest.raises(UsageError, match="expected a vocabulary that the ids are of, found none; give --tokenizer"):
        imported(tmp_path / "store", path, vocabulary=None)


def test_the_store_s_own_vocabulary_serves_and_an_older_state_of_it_too(tmp_path):
    store, _ = imported(tmp_path / "store", writers(tmp_path)["megatron"])
    imported(tmp_path / "store", tmp_path / "x.ds", "datatrove", vocabulary=None, source="more")
    imported(tmp_path / "store", tmp_path / "x.ds", "datatrove", vocabulary=vocabulary_of(900), source="older")
    assert VocabularyFile.from_json(store.get("tokenizer.json").body) == VOCABULARY


def test_a_later_state_of_the_vocabulary_extends_the_store_s(tmp_path):
    store, _ = imported(tmp_path / "store", writers(tmp_path)["megatron"])
    imported(tmp_path / "store", tmp_path / "x.ds", "datatrove", vocabulary=vocabulary_of(1_100), source="later")
    assert VocabularyFile.from_json(store.get("tokenizer.json").body).next_merge_id == 1_100


def test_another_vocabulary_is_refused(tmp_path):
    imported(tmp_path / "store", writers(tmp_path)["megatron"])
    other = VocabularyFile.from_pairs([(200, 201)], {"s": 1})
    with pytest.raises(VocabularyMismatchError, match="--tokenizer: expected the store's vocabulary"):
        imported(tmp_path / "store", tmp_path / "x.ds", "datatrove", vocabulary=other, source="more")


def test_an_export_of_another_vocabulary_is_refused_by_its_record(tmp_path):
    documents = {"alpha": DOCUMENTS}
    first = document_store(tmp_path / "first", documents)
    export_shards(FolderStore(first.folder), tmp_path / "out", ExportOptions(target=ExportFormat.MEGATRON))
    other = VocabularyFile.from_pairs([(pair + 11, pair + 10) for pair in range(200)], {"s": 200})
    imported_into = tmp_path / "second"
    with pytest.raises(VocabularyMismatchError, match=r"tokens\.bin was made with the vocabulary"):
        imported(imported_into, tmp_path / "out", vocabulary=other)
    assert not list(imported_into.glob("shard_*"))


def test_ids_that_do_not_fit_stop_the_import_after_what_is_good(tmp_path):
    documents = [*DOCUMENTS[:200], np.array([10, 5_000, 2]), *DOCUMENTS[200:]]
    path = write_megatron(tmp_path / "x", documents)
    with pytest.raises(CorruptInputError, match="document 200, id 1: expected ids of 0 to 999"):
        imported(tmp_path / "store", path)


def test_documents_without_eos(tmp_path):
    path = write_megatron(tmp_path / "x", [document[:-1] for document in DOCUMENTS])
    with pytest.raises(CorruptInputError, match="--append-eos"):
        imported(tmp_path / "store", path)
    store, result = imported(tmp_path / "store", path, append_eos=True)
    expected = [document for document in DOCUMENTS if len(document) > 1]
    assert same(stored_documents(store), expected[: len(stored_documents(store))])
    assert result.rows_skipped == len(DOCUMENTS) - len(expected)


@pytest.mark.slow
def test_a_document_larger_than_the_ring_arrives(tmp_path):
    big = np.append(np.full(5_000_000, 77), 2)
    path = write_megatron(tmp_path / "x", [DOCUMENTS[0], big, DOCUMENTS[1]])
    store = FolderStore(tmp_path / "store")
    options = PopulateOptions(
        spec=SourceSpec(name="ids"), store_url=store.url, inputs=(str(path),), num_workers=2, shard_tokens=2_400_000,
        tokens=TokenOptions(token_format=TokenFormat.MEGATRON, vocabulary=VOCABULARY),
    )  # fmt: skip
    result = populate(options, store)
    assert (result.documents, result.total_shards) == (2, 2)
    assert result.total_shards * 2_400_000 + result.unsharded_tokens == len(DOCUMENTS[0]) + len(big) + len(DOCUMENTS[1])


def import_arguments(store, path, tokenizer):
    return [
        "import", "--from", "megatron", str(path), "--source", "ids", "--store", str(store), "--shard-tokens", "500",
        "--tokenizer", str(tokenizer), "--workers", "1",
    ]  # fmt: skip


@pytest.fixture
def small(tmp_path):
    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.write_bytes(VOCABULARY.to_json())
    return writers(tmp_path)["megatron"], tokenizer


@pytest.mark.slow
def test_killed_between_any_two_writes(small, tmp_path):
    genesis(*import_arguments(tmp_path / "peace", *small))
    expected = snapshot(tmp_path / "peace")
    for point in CRASH_POINTS:
        count = 3 if point.startswith("shard") else 1
        arguments = import_arguments(tmp_path / point, *small)
        process = start(*arguments, GENESIS_CRASH_AT=f"{point}:{count}")
        process.communicate(timeout=60)
        assert process.returncode == -signal.SIGKILL, point
        genesis(*arguments)
        assert snapshot(tmp_path / point) == expected, point
        assert stray_objects(tmp_path / point) == []
        shutil.rmtree(tmp_path / point)


@pytest.mark.slow
def test_the_number_of_workers_changes_nothing(small, tmp_path):
    arguments = import_arguments(tmp_path / "one", *small)
    genesis(*arguments)
    genesis(*import_arguments(tmp_path / "three", *small)[:-1], "3")
    assert snapshot(tmp_path / "one") == snapshot(tmp_path / "three")


def test_the_command_line(small, tmp_path, capsys):
    path, tokenizer = small
    assert run(import_arguments(tmp_path / "store", path, tokenizer)) == 0
    out = capsys.readouterr().out
    assert "ids: read to its end" in out
    assert "documents in its shards" in out
    assert run(["export", "shards", "--to", "npy", "--store", str(tmp_path / "store"), str(tmp_path / "out")]) == 0
    out = capsys.readouterr().out
    assert "tokens.ends.npy, tokens.npy" in out
    found = read_export("npy", tmp_path / "out")
    assert same(found, DOCUMENTS[: len(found)])
    arguments = ["export", "shards", "--to", "npy", "--store", str(tmp_path / "store"), str(tmp_path / "out"), "--json"]
    assert run(arguments) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["was_complete"]
    assert report["documents"] == len(found)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("import x --from nonsense --source s", "--from"),
        ("import x --from megatron --source UPPER", "--source: expected a name"),
        ("import x --from megatron --source s --tokenizer /nowhere", "--tokenizer /nowhere"),
        ("export shards out", "--to"),
        ("export shards out --to npy --shards 1", "--shards"),
        ("export shards out --to npy --public-key /nowhere", "--public-key /nowhere"),
    ],
)
def test_wrong_usage_ends_with_two(line, said, tmp_path, capsys):
    assert run([*line.split(), "--store", str(tmp_path / "store")]) == 2
    captured = capsys.readouterr()
    assert said in captured.err + captured.out
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("name", ["manifest", "all", "no name"])
def test_a_name_that_means_something_else_is_refused_before_anything_is_written(name, tmp_path):
    store = tmp_path / "store"
    arguments = ["import", "--from", "megatron", str(writers(tmp_path)["megatron"]), "--source", name]
    assert run([*arguments, "--store", str(store)]) == 2
    assert not store.exists()

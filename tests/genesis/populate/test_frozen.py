"""Populate with a vocabulary made elsewhere: the store's shards, what it says of itself, and what it refuses."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from genesis.inspection import inspect_shard
from genesis.status import read_status
from genesis.store import FolderStore, open_readable
from genesis.tokenizer import import_vocabulary, read_tokenizer
from genesis.verification import verify_store
from manifests import (
    InvalidDocumentError,
    Manifest,
    UnsupportedFormatError,
    builtin_sources,
    decode_shard,
    packed_dtype,
    sha256_hex,
    shard_key,
    vocabulary_key,
)
from tests.genesis.populate.test_killed import run_and_kill
from tests.support.documents import documents, write_parquet
from tests.support.foreign_tokenizers import EOS, foreign_json, reference, write_foreign
from tests.support.populating import check_packed, entries, genesis, snapshot, stray_objects

pytestmark = pytest.mark.slow

TEXTS = [*documents(seed=21, count=250), "a document that spells <|endoftext|> and <|im_end|>", "e\u0301 nfc \u212b"]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_parquet(tmp_path_factory.mktemp("text") / "a.parquet", [*TEXTS, None], 30)


def arguments(store: Path, text: Path, tokenizer: Path | str | None = None, *more: str) -> list[str]:
    line = ["populate", "--source", "fineweb-edu", "--store", str(store), "--input", str(text), "--workers", "1"]
    line += ["--tokenizer", str(tokenizer)] if tokenizer is not None else []
    return [*line, "--shard-tokens", "2000", *more]


@pytest.fixture(scope="module")
def made(text: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, str]]:
    """A store for each of some forms, and what the command said; tests only read them."""
    folder = tmp_path_factory.mktemp("made")
    found = {}
    for name in ("gpt2", "olmo", "qwen", "digits"):
        path = write_foreign(folder / name, name)
        found[name] = folder / name / "store", genesis(*arguments(folder / name / "store", text, path)).stderr
    return found


def stream_of(store: Path) -> np.ndarray[Any, np.dtype[np.int64]]:
    readable = open_readable(str(store))
    shards = [decode_shard(readable.get(shard_key(entry.id)).body) for entry in entries(readable)]
    rest = json.loads((store / "checkpoints.json").read_bytes())["fineweb-edu"]["leftover_tokens"]
    return np.concatenate([*shards, np.array(rest, dtype=np.int64)])


@pytest.mark.parametrize("name", ["gpt2", "olmo", "qwen", "digits"])
def test_a_stores_ids_are_those_of_tokenizers_each_document_with_its_own_eos(made, name):
    store, _ = made[name]
    eos_id = json.loads((store / "manifest.json").read_bytes())["tokenizer"]["eos_id"]
    stream = stream_of(store)
    ends = np.flatnonzero(stream == eos_id)
    assert len(ends) > 200
    starts = [0, *(ends[:-1] + 1).tolist()]
    encode = reference(name)
    for order, (start, end) in enumerate(zip(starts, ends.tolist(), strict=True)):
        assert stream[start:end].tolist() == encode(TEXTS[order]), order
    tokenizer = read_tokenizer((store / "tokenizer.json").read_bytes())
    if name != "qwen":
        assert tokenizer.decode(stream[: ends[0]]) == TEXTS[0]


@pytest.mark.parametrize("name", ["gpt2", "olmo", "qwen", "digits"])
def test_the_store_is_sound_and_says_what_it_is(made, name):
    store, said = made[name]
    vocabulary = import_vocabulary(str(store.parent))
    manifest = Manifest.from_json((store / "manifest.json").read_bytes())
    assert (manifest.format, manifest.tokenizer_version, manifest.is_frozen) == (2, "hf_v1", True)
    assert manifest.eos_id == vocabulary.eos_id
    assert json.loads((store / "checkpoints.json").read_bytes())["format"] == 2
    body = (store / "tokenizer.json").read_bytes()
    assert body == vocabulary.to_json()
    assert (store / vocabulary_key(sha256_hex(body))).read_bytes() == body
    report = verify_store(FolderStore(store))
    assert report.ok, report.problems
    assert report.counts.vocabularies == 1
    assert stray_objects(store) == []
    for entry in entries(open_readable(str(store))):
        assert entry.next_merge_id == vocabulary.next_merge_id
        check_packed(open_readable(str(store)), entry)
    status = read_status(FolderStore(store), builtin_sources()).vocabulary
    assert status is not None
    assert (status.merges, status.origin, status.eos_token) == (None, "tokenizer.json", EOS[name])
    assert status.encoder == ("tokenizers" if name == "digits" else "gigatoken")
    assert f"encoded by {status.encoder}" in said
    assert "learning" not in said
    printed = genesis("status", "--store", store).stdout
    assert f"EOS {EOS[name]} ({vocabulary.eos_id}), encoded by {status.encoder}" in printed


def test_what_an_older_reader_sees_is_a_format_it_does_not_know(made):
    """The check of format 1 as released, on the files of format 2."""
    for name in ("manifest.json", "checkpoints.json", "tokenizer.json"):
        value = json.loads((made["gpt2"][0] / name).read_bytes())
        assert value["format"] == 2, name
    value = json.loads((made["gpt2"][0] / "manifest.json").read_bytes())
    with pytest.raises(UnsupportedFormatError, match=r"found 3; install a newer release"):
        Manifest.from_object({**value, "format": 3})


def test_a_shard_is_shown_by_its_own_eos_and_vocabulary(made):
    store, _ = made["olmo"]
    manifest = Manifest.from_json((store / "manifest.json").read_bytes())
    found = inspect_shard(FolderStore(store), manifest, 0, num_documents=3, with_tokens=True)
    assert [document.text for document in found.documents] == TEXTS[:3]
    assert found.documents[0].tokens is not None
    assert found.documents[0].tokens[-1].text == "<|endoftext|>"
    shown = genesis("inspect", "vocabulary", "--store", store).stdout
    assert "neither learns nor grows" in shown
    assert "eos <|endoftext|> (0); decoding gives the very text back" in shown
    assert "normalized text" in genesis("inspect", "vocabulary", "--store", made["qwen"][0]).stdout
    shown = genesis("inspect", "vocabulary", "--store", store, "--encode", "the eos <|endoftext|>", "--json").stdout
    assert [token["id"] for token in json.loads(shown)["tokens"]] == reference("olmo")("the eos <|endoftext|>")


def test_the_export_is_the_makers_file(made, tmp_path):
    store, _ = made["qwen"]
    genesis("export", "tokenizer", "--to", "hf", "--store", store, "--output", tmp_path)
    assert (tmp_path / "tokenizer.json").read_text(encoding="utf-8") == foreign_json("qwen")
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.eos_token == "<|endoftext|>"
    assert tokenizer("plain text").input_ids == reference("qwen")("plain text")
    assert tokenizer("a<|endoftext|>").input_ids[-1] == tokenizer.eos_token_id
    refused = genesis("export", "tokenizer", "--to", "tiktoken", "--store", store, expect=2).stderr
    assert "expected an export to hf" in refused


def test_without_the_option_and_with_it_again_the_store_is_followed(text, made, tmp_path):
    store = tmp_path / "store"
    first = arguments(store, text, made["gpt2"][0].parent, "--max-shards", "3")
    genesis(*first)
    genesis(*arguments(store, text, None, "--max-shards", "5"))
    genesis(*arguments(store, text, made["gpt2"][0].parent / "tokenizer.json"))
    assert snapshot(store) == snapshot(made["gpt2"][0])


def test_a_second_source_follows_the_store_and_learns_nothing(text, made, tmp_path):
    store = tmp_path / "store"
    shutil.copytree(made["olmo"][0], store)
    line = arguments(store, text)
    line[line.index("fineweb-edu")] = "c4"
    genesis(*line, "--max-shards", "2")
    assert verify_store(FolderStore(store)).ok
    assert (store / "tokenizer.json").read_bytes() == (made["olmo"][0] / "tokenizer.json").read_bytes()


def test_another_vocabulary_learning_and_growing_are_refused(text, made, tmp_path):
    store, own = tmp_path / "store", tmp_path / "own"
    shutil.copytree(made["qwen"][0], store)
    before = {
        path: path.read_bytes() for path in store.rglob("*") if path.is_file() and path.name != "checkpoints.json"
    }
    folder = made["qwen"][0].parent

    def refused(message: str, *line: str | Path, code: int = 2) -> None:
        stderr = genesis(*line, expect=code).stderr
        assert message in stderr
        assert len(stderr.splitlines()[-1]) < 500

    other = made["gpt2"][0].parent
    refused("leave --tokenizer and --eos out", *arguments(store, text, other))
    refused("with EOS <|endoftext|>, asked for", *arguments(store, text, folder, "--eos", "<|im_end|>"))
    refused("neither learns nor grows", *arguments(store, text, None, "--merges", "10"))
    refused("neither learns nor grows", "learn", "--store", store, "--source", "c4", "--input", f"c4={text}")
    refused("expected --tokenizer with it", *arguments(store, text, None, "--eos", "<|im_end|>"))
    refused("leave --tokenizer and --eos out", *arguments(store, text, other, "--dry-run"))
    assert before == {path: path.read_bytes() for path in before}
    genesis(*arguments(own, text, None, "--merges", "50", "--learn-documents", "50", "--max-shards", "1"))
    refused("has a vocabulary of its own (316 ids)", *arguments(own, text, folder))


def test_a_dry_run_says_what_would_encode_and_writes_nothing(text, made, tmp_path):
    planned = genesis(*arguments(tmp_path / "store", text, made["qwen"][0].parent, "--dry-run")).stdout
    vocabulary = import_vocabulary(str(made["qwen"][0].parent))
    ids, eos_id = f"{vocabulary.next_merge_id:,}", vocabulary.eos_id
    assert f"learn  nothing: {ids} ids of tokenizer.json, EOS <|endoftext|> ({eos_id})" in planned
    assert not (tmp_path / "store").exists()


def test_a_token_that_text_gives_ends_no_document(text, made, tmp_path):
    said = genesis(*arguments(tmp_path / "store", text, made["gpt2"][0].parent, "--eos", "Ġthe"), expect=1).stderr
    assert "expected an EOS that text never gives" in said
    assert not list((tmp_path / "store").glob("shard_*"))


def test_a_tokenizer_put_into_an_empty_store_as_it_is_is_named_as_such(text, tmp_path):
    store = tmp_path / "store"
    write_foreign(store, "gpt2")
    said = genesis(*arguments(store, text), expect=1).stderr
    assert "found Hugging Face's form of one; give it to 'genesis populate --tokenizer'" in said


@pytest.mark.parametrize("name", ["qwen", "digits"])
def test_the_number_of_workers_does_not_matter(text, made, tmp_path, name):
    line = arguments(tmp_path / "store", text, made[name][0].parent)
    line[line.index("--workers") + 1] = "3"
    genesis(*line)
    assert snapshot(tmp_path / "store") == snapshot(made[name][0])


@pytest.mark.parametrize(
    "point", ["vocabulary-stored:1", "checkpoint-stored:1", "tokenizer-published:1", "shard-stored:3"]
)
def test_killed_between_two_writes_the_store_ends_as_if_nothing_had_happened(text, made, tmp_path, point):
    line = arguments(tmp_path / "store", text, made["qwen"][0].parent)
    assert run_and_kill(line, crash_at=point)
    genesis(*line)
    assert snapshot(tmp_path / "store") == snapshot(made["qwen"][0])


def test_ids_above_65535_are_packed_in_four_bytes(text, tmp_path):
    """A vocabulary with many tokens that no merge reaches; the bytes stay where they were."""
    form = json.loads(foreign_json("gpt2"))
    vocab = form["model"]["vocab"]
    first = len(vocab)
    vocab.update({f"Ġunreachable{number}": first + number for number in range(66_000)})
    eos_id = first + 66_000
    form["added_tokens"][0]["id"] = eos_id
    (tmp_path / "tokenizer.json").write_text(json.dumps(form), encoding="utf-8")
    store = tmp_path / "store"
    said = genesis(*arguments(store, text, tmp_path, "--max-shards", "2")).stderr
    assert f"EOS <|endoftext|> ({eos_id})" in said
    readable = open_readable(str(store))
    for entry in entries(readable):
        assert packed_dtype(entry.next_merge_id).itemsize == 4
        check_packed(readable, entry)
        assert int(decode_shard(readable.get(shard_key(entry.id)).body).max()) == eos_id
    assert verify_store(FolderStore(store)).ok


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer_version": "bpe_v1"}, "go together"),
        ({"format": 1}, "go together"),
        ({"tokenizer": {"eos_id": 5000}}, "tokenizer.eos_id 5000 is not below"),
        ({"tokenizer": {"eos_id": None}}, "go together"),
    ],
)
def test_a_manifest_of_two_kinds_is_refused(made, change, message):
    value = json.loads((made["gpt2"][0] / "manifest.json").read_bytes())
    value |= {**change, "tokenizer": {**value["tokenizer"], **change.get("tokenizer", {})}}
    value["tokenizer"] = {name: each for name, each in value["tokenizer"].items() if each is not None}
    with pytest.raises(InvalidDocumentError, match=message):
        Manifest.from_object(value)


def test_verify_finds_an_eos_that_is_not_the_vocabularys_and_documents_that_do_not_end(made, tmp_path):
    store = tmp_path / "store"
    shutil.copytree(made["olmo"][0], store)
    for name in ("manifest.json", "checkpoints.json"):
        text = (store / name).read_text(encoding="utf-8")
        assert '"eos_id":0' in text
        (store / name).write_text(text.replace('"eos_id":0', '"eos_id":5'), encoding="utf-8")
    problems = [str(problem) for problem in verify_store(FolderStore(store)).problems]
    assert any("expected tokenizer.eos_id 0, found 5" in problem for problem in problems)
    assert any("EOS ids for documents" in problem for problem in problems)

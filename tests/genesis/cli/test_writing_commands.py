"""keygen and export: what they write, where, and what they refuse."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from genesis.cli.app import run
from genesis.snapshot import read_vocabulary
from genesis.store import FolderStore
from genesis.tokenizer import NeuroTokenizer
from manifests import key_id, load_private_key, load_public_key
from tests.support.small_store import copy_small_store, manifest_of


def test_keygen_makes_a_pair(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "keys" / "genesis.pem"
    assert run(["keygen", "--output", str(path)]) == 0
    private = load_private_key(path.read_bytes())
    public = load_public_key(path.with_name("genesis.pem.pub").read_bytes())
    assert key_id(private.public_key()) == key_id(public)
    assert key_id(public) in capsys.readouterr().out
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_keygen_is_private_from_the_start_whatever_the_umask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    modes: list[int] = []
    opened = os.open

    def spy(path: str | Path, flags: int, mode: int = 0o777) -> int:
        descriptor = opened(path, flags, mode)
        modes.append(stat.S_IMODE(os.fstat(descriptor).st_mode))
        return descriptor

    monkeypatch.setattr(os, "open", spy)
    before = os.umask(0)
    try:
        assert run(["keygen", "--output", str(tmp_path / "k")]) == 0
    finally:
        os.umask(before)
    assert modes == [0o600, 0o644]


@pytest.mark.parametrize("there", ["k", "k.pub"])
def test_keygen_overwrites_nothing(tmp_path: Path, there: str, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / there).write_text("precious")
    assert run(["keygen", "--output", str(tmp_path / "k")]) == 2
    assert [path.name for path in tmp_path.iterdir()] == [there]
    assert (tmp_path / there).read_text() == "precious"
    assert there in capsys.readouterr().err


def test_keygen_where_nothing_can_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert run(["keygen", "--output", str(tmp_path / "file" / "k")]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_export_for_hugging_face(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = copy_small_store(tmp_path / "store")
    target = tmp_path / "out"
    assert run(["export", "tokenizer", "--to", "hf", "--store", store.url, "--output", str(target)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        str(target / "tokenizer.json"),
        str(target / "tokenizer_config.json"),
    ]
    text = "the list of items, é漢 <|eos|>"
    expected = NeuroTokenizer.from_file(read_vocabulary(store, manifest_of(tmp_path / "store"))).encode(text)
    assert Tokenizer.from_file(str(target / "tokenizer.json")).encode(text).ids == expected.tolist()


def test_export_for_tiktoken_goes_to_a_folder_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    store = copy_small_store(tmp_path / "store")
    monkeypatch.chdir(tmp_path)
    assert run(["export", "tokenizer", "--to", "tiktoken", "--store", store.url]) == 0
    written = [Path(line) for line in capsys.readouterr().out.splitlines()]
    assert all(path.parent == Path("tokenizer-tiktoken") and path.is_file() for path in written)


def test_export_into_the_store(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = copy_small_store(tmp_path / "store")
    for target in ("hf", "tiktoken"):
        assert run(["export", "tokenizer", "--to", target, "--store", store.url, "--publish"]) == 0
    assert json.loads(FolderStore(tmp_path / "store").get("hf/tokenizer.json").body)["model"]["type"] == "BPE"
    assert [info.key for info in store.list("tiktoken/")] == ["tiktoken/genesis.json", "tiktoken/genesis.tiktoken"]
    capsys.readouterr()
    assert run(["verify", "--store", store.url]) == 0


def test_export_into_a_store_that_can_only_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["export", "tokenizer", "--to", "hf", "--store", str(tmp_path)]) == 1
    options = ["--publish", "--output", str(tmp_path)]
    assert run(["export", "tokenizer", "--to", "hf", "--store", str(tmp_path), *options]) == 2
    assert "--publish" in capsys.readouterr().err

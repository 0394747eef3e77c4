"""manifests/README.md: its example is what the code makes, its programs run, and no field is missing."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography.exceptions import InvalidSignature

from genesis.store import FolderStore
from genesis.tokenizer import NeuroTokenizer
from genesis.verification import verify_store
from manifests import (
    CHECKPOINTS_KEY,
    MANIFEST_KEY,
    TOKENIZER_KEY,
    Checkpoints,
    Cursor,
    Manifest,
    PackedEntry,
    Segment,
    SegmentRef,
    ShardEntry,
    Signature,
    SourceCheckpoint,
    SourcesFile,
    SourceSpec,
    SourceTotals,
    TokenizerRef,
    VocabularyFile,
    Writer,
    public_key_pem,
    sha256_hex,
    shard_key,
)
from tests.support.example_store import DOCUMENTS, EXAMPLE_KEY, IDS, LEFTOVER, example_files, example_text

PAGE = (Path(__file__).parents[2] / "manifests" / "README.md").read_text(encoding="utf-8")
PEM = public_key_pem(EXAMPLE_KEY.public_key())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for key, body in example_files().items():
        (tmp_path / key).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / key).write_bytes(body)
    return tmp_path


def test_the_example_is_what_the_code_makes() -> None:
    shown = dict(re.findall(r"^`([^`\n]+\.json)`\n\n```json\n(.*?)\n```$", PAGE, re.DOTALL | re.MULTILINE))
    expected = {key for key in example_files() if key.endswith(".json") and not key.startswith("vocabulary/")}
    assert shown.keys() == expected
    for key, text in shown.items():
        assert text == example_text(key), f"{key}: run python -m tests.support.example_store and update the page"
    shard = example_files()[shard_key(0)]
    assert f"{len(shard):,} bytes, sha256\n`{sha256_hex(shard)}`" in PAGE
    assert PEM.decode() in PAGE


def test_the_example_is_true() -> None:
    tokenizer = NeuroTokenizer.from_bytes(example_files()[TOKENIZER_KEY])
    ids = [number for text in DOCUMENTS for number in [*tokenizer.encode(text).tolist(), 2]]
    assert tuple(ids) == IDS + LEFTOVER


def test_the_example_is_a_sound_store(folder: Path) -> None:
    report = verify_store(FolderStore(folder), public_key=EXAMPLE_KEY.public_key())
    assert report.ok, report.problems
    assert report.notes == ()


def programs() -> dict[str, Callable[..., Any]]:
    namespace: dict[str, Any] = {}
    for program in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        exec(program, namespace)
    return namespace


def test_the_pages_reader_reads_a_shard(folder: Path) -> None:
    assert tuple(programs()["read_shard"](str(folder / shard_key(0)))) == IDS


def test_the_pages_verifier_verifies(folder: Path) -> None:
    verify = programs()["verify_store"]
    assert verify(folder, PEM) == 1
    path = folder / shard_key(0)
    path.write_bytes(path.read_bytes().replace(b"archive", b"Archive"))
    with pytest.raises(ValueError, match=r"shard_0\.pt"):
        verify(folder, PEM)


def test_the_pages_verifier_refuses_a_changed_manifest(folder: Path) -> None:
    path = folder / MANIFEST_KEY
    path.write_bytes(path.read_bytes().replace(b'"sequence":3', b'"sequence":4'))
    with pytest.raises(InvalidSignature):
        programs()["verify_store"](folder, PEM)


MANIFEST_PARTS = [Manifest, SourceTotals, TokenizerRef, SegmentRef, Signature]
INDEX_PARTS = [Segment, ShardEntry, PackedEntry]
OTHERS = [VocabularyFile, Cursor, SourceCheckpoint, Writer, SourcesFile, SourceSpec]


@pytest.mark.parametrize("model", [*MANIFEST_PARTS, *INDEX_PARTS, *OTHERS])
def test_every_field_is_described(model: type[Any]) -> None:
    for name in model.model_fields:
        assert re.search(rf"`[^`]*\b{name}`", PAGE), f"{model.__name__}.{name} is not on the format page"


def test_the_checkpoint_stands_for_the_manifest() -> None:
    files = example_files()
    manifest = Manifest.from_json(files[MANIFEST_KEY]).model_copy(update={"signature": None})
    assert Checkpoints.from_json(files[CHECKPOINTS_KEY]).manifest == manifest

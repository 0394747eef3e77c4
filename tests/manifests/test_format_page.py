"""manifests/README.md: its example is what the code makes, its programs run, and no field is missing."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
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
    FrozenVocabularyFile,
    InputRead,
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
    SpecialToken,
    TokenizerRef,
    VocabularyFile,
    Writer,
    max_packed_bytes,
    pack_ids,
    packed_key,
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


def test_the_example_is_what_the_code_makes():
    shown = dict(re.findall(r"^`([^`\n]+\.json)`\n\n```json\n(.*?)\n```$", PAGE, re.DOTALL | re.MULTILINE))
    expected = {key for key in example_files() if key.endswith(".json") and not key.startswith("vocabulary/")}
    assert shown.keys() == expected
    for key, text in shown.items():
        assert text == example_text(key), f"{key}: update the page"
    shard = example_files()[shard_key(0)]
    assert f"{len(shard):,} bytes, sha256\n`{sha256_hex(shard)}`" in PAGE
    packed = example_files()[packed_key(0)]
    assert f"in {len(packed)} bytes, sha256\n`{sha256_hex(packed)}`" in PAGE
    lines = re.findall(r"^((?:[0-9a-f]{2} )+) {2,}\S", PAGE, re.MULTILINE)
    assert bytes.fromhex("".join(lines)) == packed
    assert PEM.decode() in PAGE


def test_the_example_is_true_and_a_sound_store(folder):
    tokenizer = NeuroTokenizer.from_bytes(example_files()[TOKENIZER_KEY])
    ids = [number for text in DOCUMENTS for number in [*tokenizer.encode(text).tolist(), 2]]
    assert tuple(ids) == IDS + LEFTOVER
    report = verify_store(FolderStore(folder), public_key=EXAMPLE_KEY.public_key())
    assert report.ok, report.problems
    assert report.notes == ()
    files = example_files()
    manifest = Manifest.from_json(files[MANIFEST_KEY]).model_copy(update={"signature": None})
    assert Checkpoints.from_json(files[CHECKPOINTS_KEY]).manifest == manifest


def programs() -> dict[str, Callable[..., Any]]:
    namespace: dict[str, Any] = {}
    for program in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        exec(program, namespace)
    return namespace


def test_the_pages_readers_read_a_shard_and_a_packed_one(folder):
    assert tuple(programs()["read_shard"](str(folder / shard_key(0)))) == IDS
    read = programs()["read_packed"]
    assert tuple(read(example_files()[packed_key(0)], len(IDS), 270)) == IDS
    ids = np.random.default_rng(1).integers(0, 70_000, 5_000)
    assert read(pack_ids(ids, 70_000), 5_000, 70_000).tolist() == ids.tolist()
    for tokens, next_merge_id in ((4_999, 70_000), (5_000, 69_000), (5_000, 60_000)):
        with pytest.raises(ValueError, match="expected"):
            read(pack_ids(ids, 70_000), tokens, next_merge_id)


def test_the_pages_bound_is_the_codes():
    """As the page spells it: n + n/256, plus (131072 - n)/2048 while n is below 131,072."""
    for tokens in (1, 8, 255, 256, 65_535, 65_536, 65_537, 2_500_000):
        for next_merge_id, width in ((65_536, 2), (65_537, 4)):
            content = tokens * width
            bound = content + content // 256 + ((131_072 - content) // 2048 if content < 131_072 else 0)
            assert max_packed_bytes(tokens, next_merge_id) == bound


def test_the_pages_verifier_verifies(folder):
    verify = programs()["verify_store"]
    assert verify(folder, PEM) == 1
    (folder / packed_key(0)).write_bytes(b"another")
    with pytest.raises(ValueError, match=r"packed/shard_0\.zst"):
        verify(folder, PEM)
    path = folder / shard_key(0)
    path.write_bytes(path.read_bytes().replace(b"archive", b"Archive"))
    with pytest.raises(ValueError, match=r"shard_0\.pt"):
        verify(folder, PEM)
    path = folder / MANIFEST_KEY
    path.write_bytes(path.read_bytes().replace(b'"sequence":3', b'"sequence":4'))
    with pytest.raises(InvalidSignature):
        verify(folder, PEM)


MANIFEST_PARTS = [Manifest, SourceTotals, TokenizerRef, SegmentRef, Signature]
INDEX_PARTS = [Segment, ShardEntry, PackedEntry]
OTHERS = [
    *(VocabularyFile, FrozenVocabularyFile, SpecialToken, Cursor, InputRead, SourceCheckpoint, Writer),
    *(SourcesFile, SourceSpec),
]


@pytest.mark.parametrize("model", [*MANIFEST_PARTS, *INDEX_PARTS, *OTHERS])
def test_every_field_is_described(model):
    for name in model.model_fields:
        assert re.search(rf"`[^`]*\b{name}`", PAGE), f"{model.__name__}.{name} is not on the format page"


def test_every_field_of_the_packed_form_is_described_as_such():
    for name in PackedEntry.model_fields:
        assert f"| `shards[].packed.{name}` |" in PAGE

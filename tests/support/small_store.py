"""Stores made by the real populator, each once a process in some 3 s.

`copy_small_store` is for whatever reads stores: two sources, nine to thirteen shards each; a test may damage its copy.
`text_store` is for whole training runs, and read only: ten shards of the corpus beside the checkout, or of the manuals
of the standard library where that is not there, with a small vocabulary.
"""

from __future__ import annotations

import atexit
import json
import shutil
import sysconfig
import tempfile
from functools import cache, lru_cache
from pathlib import Path
from pydoc_data.topics import topics
from typing import Literal

from genesis.populate.options import LearnOptions, PopulateOptions
from genesis.populate.pipeline import populate
from genesis.store import FolderStore
from manifests import (
    CHECKPOINTS_KEY,
    MANIFEST_KEY,
    Checkpoints,
    Manifest,
    Segment,
    SourceSpec,
    generate_private_key,
    segment_key,
    sha256_hex,
    sign_manifest,
)

SHARD_TOKENS = 2_000
SOURCES = ("alpha", "beta")
PRIVATE_KEY = generate_private_key()
"""Signs `copy_small_store` when asked to."""

_MODULES = {"alpha": ("textwrap.py", "heapq.py"), "beta": ("bisect.py", "fnmatch.py", "statistics.py")}


def spec(name: str) -> SourceSpec:
    return SourceSpec(name=name, merges=40, target_shards=20)


def write_input(folder: Path, name: str) -> Path:
    """Paragraphs of the standard library as JSON lines; one in twenty rows is null."""
    library = Path(sysconfig.get_path("stdlib"))
    text = "\n\n".join((library / module).read_text(encoding="utf-8") for module in _MODULES[name])
    paragraphs = [paragraph for paragraph in text.split("\n\n") if paragraph.strip()]
    path = folder / f"{name}.jsonl"
    with path.open("w", encoding="utf-8") as file:
        for number, paragraph in enumerate(paragraphs):
            if number % 20 == 7:
                file.write('{"text": null}\n')
            file.write(json.dumps({"text": paragraph}) + "\n")
    return path


def populate_source(store: FolderStore, name: str, input_path: Path) -> None:
    options = PopulateOptions(
        spec=spec(name),
        store_url=store.url,
        inputs=(str(input_path),),
        num_workers=1,
        shard_tokens=SHARD_TOKENS,
        learn=LearnOptions(documents=200, merges=None if name != SOURCES[0] else 300),
    )
    populate(options, store)


@lru_cache(maxsize=1)
def _original() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="small-store-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    store = FolderStore(folder / "store")
    for name in SOURCES:
        populate_source(store, name, write_input(folder, name))
    return folder / "store"


def copy_small_store(folder: Path, *, signed: bool = False) -> FolderStore:
    shutil.copytree(_original(), folder)
    store = FolderStore(folder)
    if signed:
        manifest = Manifest.from_json((folder / MANIFEST_KEY).read_bytes())
        (folder / MANIFEST_KEY).write_bytes(sign_manifest(manifest, PRIVATE_KEY).to_json())
    return store


def manifest_of(folder: Path) -> Manifest:
    return Manifest.from_json((folder / MANIFEST_KEY).read_bytes())


def checkpoints_of(folder: Path) -> Checkpoints:
    return Checkpoints.from_json((folder / CHECKPOINTS_KEY).read_bytes())


def segment_of(folder: Path) -> Segment:
    return Segment.from_json((folder / manifest_of(folder).index[0].key).read_bytes())


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Puts a manifest in place, and into the checkpoint that stands for it."""
    checkpoints = checkpoints_of(folder).model_copy(update={"manifest": manifest})
    (folder / MANIFEST_KEY).write_bytes(manifest.to_json())
    (folder / CHECKPOINTS_KEY).write_bytes(checkpoints.to_json())


def write_segment(folder: Path, segment: Segment) -> None:
    """Puts another segment in place, with a manifest that vouches for it."""
    body = segment.to_json()
    manifest = manifest_of(folder)
    reference = manifest.index[0].model_copy(
        update={"key": segment_key(0, sha256_hex(body)), "sha256": sha256_hex(body)}
    )
    (folder / reference.key).write_bytes(body)
    write_manifest(folder, manifest.model_copy(update={"index": (reference,)}))


TEXT_SHARD_TOKENS = 40_000
NUM_SHARDS = 10
MERGES = 700
"""With bytes and special ids under 1,024: the least number of rows a model has."""

TextKind = Literal["english", "other"]
"""Texts far enough apart that their first merges differ."""

CORPUS = Path(__file__).resolve().parents[3] / "shared" / "corpus"
_FILES = {"english": "fineweb-edu/000_00000.parquet", "other": "multilingual/multi.parquet"}


@cache
def text_store(kind: TextKind = "english") -> Path:
    folder = Path(tempfile.mkdtemp(prefix=f"text-store-{kind}-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    store = FolderStore(folder / "store")
    options = PopulateOptions(
        spec=SourceSpec(name=kind, merges=MERGES),
        store_url=store.url,
        inputs=(str(_text(kind, folder)),),
        num_workers=1,
        shard_tokens=TEXT_SHARD_TOKENS,
        max_shards=NUM_SHARDS,
        learn=LearnOptions(documents=100, merges=MERGES),
    )
    populate(options, store)
    return folder / "store"


def _text(kind: TextKind, folder: Path) -> Path:
    path = CORPUS / _FILES[kind]
    if path.is_file():
        return path
    rows = [text if kind == "english" else text.upper() for _, text in sorted(topics.items())]
    path = folder / "manuals.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in 8 * rows), encoding="utf-8")
    return path

"""A store of real text with a small vocabulary, made by the real populator, for whole training runs.

The text is the corpus beside the checkout, or the manuals of the standard library where that is not there. A store of
ten shards is made in some 3 s, once a process; it is read only, so tests share it.
"""

from __future__ import annotations

import atexit
import json
import shutil
import tempfile
from functools import cache
from pathlib import Path
from pydoc_data.topics import topics
from typing import Literal

from genesis.populate.options import LearnOptions, PopulateOptions
from genesis.populate.pipeline import populate
from genesis.store import FolderStore
from manifests import SourceSpec

SHARD_TOKENS = 40_000
NUM_SHARDS = 10
MERGES = 700
"""With bytes and special ids under 1,024: the least number of rows a model has."""

TextKind = Literal["english", "other"]
"""Texts far enough apart that their first merges differ."""

_CORPUS = Path(__file__).resolve().parents[3] / "shared" / "corpus"
_FILES = {"english": "fineweb-edu/000_00000.parquet", "other": "multilingual/multi.parquet"}


@cache
def text_store(kind: TextKind = "english") -> Path:
    """The folder of the store."""
    folder = Path(tempfile.mkdtemp(prefix=f"text-store-{kind}-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    store = FolderStore(folder / "store")
    options = PopulateOptions(
        spec=SourceSpec(name=kind, merges=MERGES),
        store_url=store.url,
        inputs=(str(_text(kind, folder)),),
        num_workers=1,
        shard_tokens=SHARD_TOKENS,
        max_shards=NUM_SHARDS,
        learn=LearnOptions(documents=100, merges=MERGES),
    )
    populate(options, store)
    return folder / "store"


def _text(kind: TextKind, folder: Path) -> Path:
    path = _CORPUS / _FILES[kind]
    if path.is_file():
        return path
    rows = [text if kind == "english" else text.upper() for _, text in sorted(topics.items())]
    path = folder / "manuals.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in 8 * rows), encoding="utf-8")
    return path

"""A store of text that grows, as stores do: a second source adds shards, and merges to the vocabulary."""

from __future__ import annotations

import json
import shutil
import sysconfig
from pathlib import Path

from genesis.populate.options import LearnOptions, PopulateOptions
from genesis.populate.pipeline import populate
from genesis.store import FolderStore
from manifests import SourceSpec
from tests.support.text_store import SHARD_TOKENS, text_store

__all__ = ["GROWN_SHARDS", "copy_text_store", "grow_text_store"]

GROWN_SHARDS = 2
_MERGES = 300
"""Beyond the first source's: some 1,260 ids in all, where a model for the first alone has 1,024 rows."""


def copy_text_store(folder: Path) -> Path:
    """A copy of the store that tests share, to be changed."""
    return Path(shutil.copytree(text_store(), folder))


def grow_text_store(folder: Path) -> None:
    """Populates the second source: `GROWN_SHARDS` shards, ids that were not there before."""
    lines = folder.parent / "more.jsonl"
    if not lines.exists():
        lines.write_text("".join(_rows()), encoding="utf-8")
    options = PopulateOptions(
        spec=SourceSpec(name="more", merges=_MERGES),
        store_url=FolderStore(folder).url,
        inputs=(str(lines),),
        num_workers=1,
        shard_tokens=SHARD_TOKENS,
        max_shards=GROWN_SHARDS,
        learn=LearnOptions(documents=200, merges=_MERGES),
    )
    populate(options, FolderStore(folder))


def _rows() -> list[str]:
    """Source code: other text than the first source's, of which there is enough everywhere."""
    library = Path(sysconfig.get_path("stdlib"))
    texts = [path.read_text(encoding="utf-8") for path in sorted(library.glob("[a-f]*.py"))]
    return [json.dumps({"text": text}) + "\n" for text in texts]

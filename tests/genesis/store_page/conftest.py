"""Stores that the page shows: a sound small one, one with hostile documents, one of a foreign vocabulary."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from genesis.populate.options import LearnOptions, PopulateOptions
from genesis.populate.pipeline import populate
from genesis.store import FolderStore
from genesis.store_page.service import StoreView
from genesis.store_page.shard_reading import FolderShards
from genesis.store_page.shard_table import ShardTable
from genesis.tokenizer import import_vocabulary
from manifests import FrozenVocabularyFile, SourceSpec, builtin_sources
from tests.support.foreign_tokenizers import EOS, write_foreign
from tests.support.small_store import copy_small_store

HOSTILE = (
    "<script>document.title = 'owned'</script><img src=x onerror=alert(1)>",
    "</script><!-- ${alert(1)} {{7*7}} \u2028\u2029 -->",
    "left \u202eright to left\u202c and \u2067isolated\u2069 \u200b\ufeff end",
    "NUL \x00 bell \x07 escape \x1b[31mred\x1b[0m delete \x7f",
    "שלום עולם مرحبا بالعالم 👩\u200d👩\u200d👧 e\u0301 𝔘𝔫𝔦𝔠𝔬𝔡𝔢 \U0010ffff",
    "\r\n\t tabs\tand\r\nlines\n\n\n",
)


@pytest.fixture
def small_store(tmp_path: Path) -> FolderStore:
    """Two sources, nine to thirteen shards each; the test may damage it."""
    return copy_small_store(tmp_path / "store")


@pytest.fixture(scope="session")
def hostile_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents that try to be markup, that turn text around, and one that is longer than a shard."""
    folder = tmp_path_factory.mktemp("hostile")
    long = "long <b>" + "x\u202e<script>" * 60_000
    texts = [*HOSTILE, *[text * 3 for text in HOSTILE], long, *HOSTILE]
    _populate(folder, "hostile", texts, shard_tokens=20_000, merges=60)
    return folder / "store"


@pytest.fixture(scope="session")
def foreign_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of a vocabulary in Hugging Face's form."""
    folder = tmp_path_factory.mktemp("foreign")
    vocabulary = import_vocabulary(str(write_foreign(folder / "made", "llama3")), eos=EOS["llama3"])
    _populate(folder, "foreign", [f"{text} number {order}" for order in range(80) for text in HOSTILE[3:]], vocabulary)
    return folder / "store"


def _populate(
    folder: Path,
    name: str,
    texts: list[str],
    vocabulary: FrozenVocabularyFile | None = None,
    *,
    shard_tokens: int = 2_000,
    merges: int | None = None,
) -> None:
    path = folder / f"{name}.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    store = FolderStore(folder / "store")
    options = PopulateOptions(
        spec=SourceSpec(name=name, merges=merges or 40, target_shards=20),
        store_url=store.url,
        inputs=(str(path),),
        num_workers=1,
        shard_tokens=shard_tokens,
        learn=LearnOptions(documents=200, merges=merges),
        tokenizer=vocabulary,
    )
    populate(options, store)


def view_of(folder: Path) -> StoreView:
    """A view as ``genesis serve`` has it, with its index read."""
    table = ShardTable()
    view = StoreView(FolderStore(folder), folder.name, builtin_sources(), table, FolderShards(folder, table.note_check))
    view.overview()
    while view.read_index():
        """The next segment."""
    return view

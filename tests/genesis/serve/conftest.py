"""A small store with everything a store may hold, and what must not get out of it."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from genesis.store import CachePolicy, FolderStore
from tests.support.example_store import example_files
from tests.support.serve_process import ServeProcess, genesis_serve

LARGE_BYTES = 3_000_001
SECRET = b"the writer's lease token"
PRIVATE = (
    "checkpoints.json",
    ".genesis.lock",
    ".tmp-4711-0123456789abcdef",
    "shard_0.pt.part",
    "shard_0.pt.lock",
    "notes.txt",
    "index/.tmp-4711-0123456789abcdef",
    "vocabulary/readme.json",
    "packed/shard_0.zst.tmp",
    "hf/.secret.json",
    "private/shard_0.pt",
)
"""Files that lie in the store's folder and are nobody's business."""


@pytest.fixture(scope="session")
def contents() -> dict[str, bytes]:
    """The public objects by key."""
    rng = random.Random(41)
    public = {key: body for key, body in example_files().items() if key != "checkpoints.json"}
    public |= {
        "shard_7.pt": rng.randbytes(LARGE_BYTES),
        "packed/shard_7.zst": rng.randbytes(70_001),
        "hf/tokenizer.json": b"{}",
        "hf/tokenizer_config.json": b'{"x":1}',
        "tiktoken/genesis.tiktoken": b"AA== 10\n",
        "shard_1000.pt": b"",
    }
    return public


def make_store(folder: Path, contents: dict[str, bytes]) -> FolderStore:
    store = FolderStore(folder)
    for key, body in contents.items():
        store.put(key, body, cache=CachePolicy.IMMUTABLE)
    for name in PRIVATE:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(SECRET)
    outside = folder.parent / f"{folder.name}-outside"
    outside.mkdir()
    (outside / "shard_8.pt").write_bytes(SECRET)
    (folder / "shard_8.pt").symlink_to(outside / "shard_8.pt")
    (folder / "shard_9.pt").symlink_to("checkpoints.json")
    (folder / "tiktoken" / "escape.json").symlink_to(outside / "shard_8.pt")
    (folder / "shard_10.pt").mkdir()
    os.mkfifo(folder / "shard_11.pt")
    return store


@pytest.fixture(scope="module")
def store_folder(tmp_path_factory: pytest.TempPathFactory, contents: dict[str, bytes]) -> Path:
    """A store that the module's tests only read."""
    folder = tmp_path_factory.mktemp("serve") / "store"
    make_store(folder, contents)
    return folder


@pytest.fixture(scope="module")
def server(store_folder: Path) -> Iterator[ServeProcess]:
    """A server over it, with the default limits."""
    with genesis_serve(store_folder) as serving:
        yield serving

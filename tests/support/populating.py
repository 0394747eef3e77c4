"""Running ``genesis`` as its user does, and looking at the store it leaves."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from genesis.store import ReadableStore, open_readable
from genesis.tokenizer import NeuroTokenizer
from manifests import (
    Checkpoints,
    Manifest,
    Segment,
    ShardImage,
    decode_shard,
    packed_key,
    sha256_hex,
    shard_key,
    unpack_ids,
)

ROOT = Path(__file__).resolve().parents[2]
VOLATILE = {"sequence", "previous", "created_at", "updated_at", "signature"}


def command(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "genesis", *map(str, arguments)]


def start(*arguments: str | Path, **environment: str) -> subprocess.Popen[str]:
    """``genesis …`` in a process group of its own."""
    return subprocess.Popen(
        command(*arguments), cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env={**os.environ, **environment}, start_new_session=True,
    )  # fmt: skip


def genesis(
    *arguments: str | Path, expect: int = 0, module: str = "genesis", stdin: str = "", **environment: str
) -> subprocess.CompletedProcess[str]:
    """``genesis …`` (or another module) to its end, which must be ``expect``; never with a traceback."""
    done = subprocess.run(
        [sys.executable, "-m", module, *map(str, arguments)], cwd=ROOT, encoding="utf-8", input=stdin,
        capture_output=True, env={**os.environ, **environment}, timeout=110, check=False,
    )  # fmt: skip
    assert done.returncode == expect, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    assert "Traceback" not in done.stderr, done.stderr
    return done


def run_and_kill(arguments, after_s=None, crash_at=""):
    """One run that dies at a crash point, or has its process group killed after some seconds; True if it was killed."""
    process = start(*arguments, GENESIS_CRASH_AT=crash_at)
    try:
        process.communicate(timeout=60 if after_s is None else after_s)
    except subprocess.TimeoutExpired:
        pass
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=30)
    return process.returncode == -signal.SIGKILL


def populate_arguments(
    store: str | Path, *inputs: str | Path, shard_tokens: int = 2000, merges: int = 200
) -> list[str]:
    arguments = ["populate", "--source", "fineweb-edu", "--store", str(store), "--shard-tokens", str(shard_tokens)]
    arguments += ["--merges", str(merges), "--learn-documents", "200"]
    return arguments + [part for path in inputs for part in ("--input", str(path))]


def entries(store: ReadableStore) -> list[Any]:
    """Every shard's entry, by way of the manifest's chain of digests."""
    found = []
    for reference in Manifest.from_json(store.get("manifest.json").body).index:
        body = store.get(reference.key).body
        assert sha256_hex(body) == reference.sha256
        found.extend(Segment.from_json(body).shards)
    return found


def snapshot(url: str | Path) -> dict[str, Any]:
    """All that a store holds, without times and sequence: two stores of the same text have equal snapshots."""
    store = open_readable(str(url))
    manifest = Manifest.from_json(store.get("manifest.json").body)
    checkpoints = Checkpoints.from_json(store.get("checkpoints.json").body)
    found = entries(store)
    shards = {entry.id: sha256_hex(store.get(shard_key(entry.id)).body) for entry in found}
    assert shards == {entry.id: entry.sha256 for entry in found}
    packed = {entry.packed.key: entry.packed.sha256 for entry in found if entry.packed}
    assert packed == {key: sha256_hex(store.get(key).body) for key in packed}
    assert checkpoints.manifest is not None
    assert checkpoints.manifest.sequence == manifest.sequence
    return {
        "manifest": {key: value for key, value in manifest.to_object().items() if key not in VOLATILE},
        "sources": {
            name: {key: value for key, value in json.loads(entry.model_dump_json()).items() if key != "timestamp"}
            for name, entry in checkpoints.sources.items()
        },
        "shards": shards,
        "packed": packed,
        "tokenizer": sha256_hex(store.get("tokenizer.json").body),
    }


def stray_objects(url: str | Path) -> list[str]:
    """Objects that the manifest does not name: superseded segments aside, there should be none."""
    store = open_readable(str(url))
    manifest = Manifest.from_json(store.get("manifest.json").body)
    named = {"manifest.json", "checkpoints.json", "tokenizer.json", *(segment.key for segment in manifest.index)}
    named |= {shard_key(entry.id) for entry in entries(store)}
    named |= {entry.packed.key for entry in entries(store) if entry.packed}
    keys = [info.key for info in store.list("")]
    return [key for key in keys if key not in named and not re.match(r"(index/segment_|vocabulary/)", key)]


def check_packed(store: ReadableStore, entry: Any) -> None:
    """The entry's packed form is what it says and expands to the very bytes of the shard."""
    body = store.get(packed_key(entry.id)).body
    assert (entry.packed.key, entry.packed.sha256) == (packed_key(entry.id), sha256_hex(body))
    assert entry.packed.size_bytes == len(body)
    image = ShardImage.empty(entry.tokens)
    unpack_ids(body, image.ids, entry.next_merge_id)
    image.seal()
    assert sha256_hex(image.buffer) == entry.sha256


def decoded_documents(url: str | Path) -> list[str]:
    """The whole documents in a store's shards, decoded, in order; the one cut off at the end is left out."""
    store = open_readable(str(url))
    tokenizer = NeuroTokenizer.from_bytes(store.get("tokenizer.json").body)
    ids = [decode_shard(store.get(shard_key(entry.id)).body) for entry in entries(store)]
    stream = np.concatenate(ids).astype(np.uint32)
    ends = np.flatnonzero(stream == 2)
    starts = np.concatenate([[0], ends[:-1] + 1]) if len(ends) else np.empty(0, np.int64)
    return [tokenizer.decode(stream[start:end]) for start, end in zip(starts, ends, strict=True)]

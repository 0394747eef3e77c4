"""How soon a store's page is there, and what it costs `genesis serve`.

    python scripts/bench_store_page.py [--shards 600000] [--folder DIR]

Makes a store of which the manifest, the index (600 segments of 1,000 shards each, 210 MB) and the first shard are real,
serves it, and prints: the time from the request of the page to the last of what its first view needs (document, style,
modules, figures, grid); the same once the index is read, and how long that took; the time of an object's answer while
the index is being read, as a ratio to an idle server's; and the memory of a server with the page and without.
With `--folder` the store is made there, once. "cpu" is the server's processor time, which other work on the machine
changes least. Then, of the shard of 2,500,000 ids, a document's first answer (the shard is held against the index) as a
ratio to one sha256 of the same file, and a further answer.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import numpy as np
import psutil

from genesis.tokenizer import NeuroTokenizer
from manifests import (
    MANIFEST_KEY,
    SEGMENT_SHARDS,
    TOKENIZER_KEY,
    Manifest,
    PackedEntry,
    Segment,
    SegmentRef,
    ShardEntry,
    SourceTotals,
    TokenizerRef,
    encode_shard,
    packed_key,
    segment_key,
    sha256_hex,
    shard_file_bytes,
    shard_key,
    vocabulary_key,
)

_TOKENS = 2_500_000
_DOCUMENTS = 2_500
_SOURCES = ("fineweb-edu", "fineweb", "redpajama", "slimpajama", "c4")
_TIME = "2026-11-28T12:00:00Z"


def make_store(folder: Path, num_shards: int) -> None:
    """Writes a store whose index is whole and whose first shard is there."""
    for name in ("index", "vocabulary"):
        (folder / name).mkdir(parents=True)
    vocabulary = NeuroTokenizer.empty().to_file()
    body = vocabulary.to_json()
    key = vocabulary_key(sha256_hex(body))
    for name in (key, TOKENIZER_KEY):
        (folder / name).write_bytes(body)
    ids = np.random.default_rng(7).integers(10, 266, _TOKENS)
    ids[_TOKENS // _DOCUMENTS - 1 :: _TOKENS // _DOCUMENTS] = 2
    shard = bytes(encode_shard(ids))
    (folder / shard_key(0)).write_bytes(shard)
    references = []
    totals = dict.fromkeys(_SOURCES, 0)
    last = dict.fromkeys(_SOURCES, -1)
    for first in range(0, num_shards, SEGMENT_SHARDS):
        entries = []
        for number in range(first, min(first + SEGMENT_SHARDS, num_shards)):
            source = _SOURCES[number * len(_SOURCES) // num_shards]
            entries.append(_entry(number, source, totals[source], sha256_hex(shard) if number == 0 else None))
            totals[source] += 1
            last[source] = number
        body = Segment(shards=tuple(entries)).to_json()
        segment = segment_key(first // SEGMENT_SHARDS, sha256_hex(body))
        (folder / segment).write_bytes(body)
        references.append(SegmentRef(key=segment, sha256=sha256_hex(body), first_shard=first, shards=len(entries)))
    manifest = Manifest(
        sequence=num_shards,
        total_shards=num_shards,
        total_tokens=num_shards * _TOKENS,
        total_size_bytes=num_shards * shard_file_bytes(_TOKENS),
        tokenizer=TokenizerRef(
            key=key, sha256=sha256_hex(vocabulary.to_json()), next_merge_id=vocabulary.next_merge_id
        ),
        sources={
            name: SourceTotals(
                shards=count, tokens=count * _TOKENS, documents_processed=count * _DOCUMENTS, last_shard_id=last[name]
            )
            for name, count in totals.items()
        },
        index=tuple(references),
        created_at=_TIME,
        updated_at=_TIME,
    )
    (folder / MANIFEST_KEY).write_bytes(manifest.to_json())


def _entry(number: int, source: str, order: int, sha256: str | None) -> ShardEntry:
    digest = sha256 or hashlib.sha256(str(number).encode()).hexdigest()
    return ShardEntry(
        id=number,
        sha256=digest,
        size_bytes=shard_file_bytes(_TOKENS),
        tokens=_TOKENS,
        source=source,
        first_document=order * _DOCUMENTS,
        last_document=(order + 1) * _DOCUMENTS - 1,
        next_merge_id=266,
        packed=PackedEntry(key=packed_key(number), sha256=digest, size_bytes=3_000_000),
    )


@contextmanager
def serving(folder: Path, *options: str) -> Iterator[tuple[psutil.Process, httpx.Client]]:
    """A server of the folder, and a client of it."""
    command = [sys.executable, "-m", "genesis", "serve", "--store", str(folder), "--port", "0", "--json", *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None  # noqa: S101
        url = json.loads(process.stdout.readline())["url"]
        with httpx.Client(base_url=url, timeout=120, trust_env=False) as client:
            yield psutil.Process(process.pid), client
    finally:
        process.terminate()
        process.wait()


def first_view(client: httpx.Client) -> float:
    """Seconds for all that the page's first view asks for."""
    began_at = time.perf_counter()
    page = client.get("/").raise_for_status().text
    files = re.findall(r'(?:src|href)="(static/[^"]+)"', page)
    folder = files[0].rpartition("/")[0]
    modules = ("dom", "store_data", "store_overview", "store_shards", "store_documents", "store_vocabulary")
    for path in (*files, *(f"{folder}/{name}.js" for name in modules), "api/store", "api/shards"):
        client.get(f"/{path}").raise_for_status()
    return time.perf_counter() - began_at


def timed(call: Callable[[], object], times: int = 21) -> float:
    """Median seconds."""
    took = []
    for _ in range(times):
        began_at = time.perf_counter()
        call()
        took.append(time.perf_counter() - began_at)
    return statistics.median(took)


def cpu_s(process: psutil.Process) -> float:
    """Processor seconds so far."""
    times = process.cpu_times()
    return float(times.user + times.system)


def memory_mb(process: psutil.Process) -> float:
    """Resident memory."""
    return float(process.memory_info().rss / 1e6)


def main() -> None:
    """Prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shards", type=int, default=600_000)
    parser.add_argument("--folder", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-store-page-") as name:
        folder = (arguments.folder or Path(name)) / "store"
        if not (folder / MANIFEST_KEY).exists():
            make_store(folder, arguments.shards)
        with serving(folder, "--no-page") as (process, client):
            client.get("/manifest.json").raise_for_status()
            plain_mb = memory_mb(process)
        with serving(folder) as (process, client):
            idle_s = timed(lambda: client.get("/tokenizer.json").raise_for_status())
            began_at = time.perf_counter()
            cpu_before_s = cpu_s(process)
            cold_s = first_view(client)
            cold_cpu_s = cpu_s(process) - cpu_before_s
            busy_s = timed(lambda: client.get("/tokenizer.json").raise_for_status())
            while client.get("/api/store").json()["index"]["indexed_shards"] < arguments.shards:
                time.sleep(0.2)
            indexed_s = time.perf_counter() - began_at
            indexed_cpu_s = cpu_s(process) - cpu_before_s
            warm_s = timed(lambda: first_view(client), 5)
            grid_s = timed(lambda: client.get("/api/shards").raise_for_status(), 5)
            indexed_mb = memory_mb(process)
            body = (folder / shard_key(0)).read_bytes()
            sha256_s = timed(lambda: hashlib.sha256(body).digest(), 5)
            read = "/api/document?shard=0&document=7&tokens=1000"
            document_s = timed(lambda: client.get(read).raise_for_status(), 1)
            again_s = timed(lambda: client.get(read).raise_for_status())
            peak_mb = memory_mb(process)
    print(f"store of {arguments.shards:,} shards, {-(-arguments.shards // SEGMENT_SHARDS)} index segments")
    print(f"first view, nothing read yet: {1000 * cold_s:.0f} ms, cpu {1000 * cold_cpu_s:.0f} ms; asked: 2 s")
    print(f"first view, index read:       {1000 * warm_s:.0f} ms, of which the grid {1000 * grid_s:.0f} ms")
    print(f"the whole index read after:   {indexed_s:.1f} s, cpu {indexed_cpu_s:.1f} s")
    print(f"an object's answer meanwhile: {1000 * busy_s:.1f} ms, {busy_s / idle_s:.2f} of an idle server's")
    print(
        f"memory: {plain_mb:.0f} MB without the page, {indexed_mb:.0f} MB with the index, "
        f"{peak_mb:.0f} MB with a document"
    )
    print(f"first document of a shard:    {1000 * document_s:.0f} ms, {document_s / sha256_s:.2f} of its sha256 alone")
    print(f"a further document:           {1000 * again_s:.1f} ms")


if __name__ == "__main__":
    main()

"""How soon a node with an empty cache has its first batch over a slow link, and what a token costs on the wire."""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import httpx

from scripts.loader_bench.link import Link, served_over_link
from scripts.loader_bench.passes import load_average
from scripts.loader_bench.starts import run_to_first_batch
from scripts.loader_bench.workspace import CONTESTANTS, Workspace

NODE_ID = "bench"
ASKED_S, ASKED_BYTES = 0.5, 1.3


def bench_cold_cache(arguments: argparse.Namespace, workspace: Workspace) -> dict[str, Any]:
    """In turn: a plain download of the packed shard, and a process that begins with nothing."""
    load = [load_average()]
    with served_over_link(workspace.store, arguments.mbit) as link:
        key = first_packed_key(workspace)
        runs = []
        download(link, key)
        for _ in range(arguments.starts):
            transfer_s, size_bytes = download(link, key)
            runs.append({**start_with_nothing(link), "transfer_s": transfer_s, "size_bytes": size_bytes})
        wire = bytes_of_all(link, workspace)
    load.append(load_average())
    typical = {name: median(run[name] for run in runs) for name in runs[0]}
    typical["late_s"] = median(run["first_batch"] - run["transfer_s"] for run in runs)
    typical["late_after_imports_s"] = median(run["first_batch"] - run["imported"] - run["transfer_s"] for run in runs)
    report = {"load": load, "link": link.kind, "mbit": arguments.mbit, "starts": typical, "wire": wire}
    print(as_text(report, arguments.starts))
    return report


def first_packed_key(workspace: Workspace) -> str:
    """The packed shard that the node begins with."""
    from loader.stream.assignment import get_assigned_shards
    from manifests import packed_key

    return packed_key(get_assigned_shards(NODE_ID, workspace.manifest()["total_shards"])[0])


def download(link: Link, key: str) -> tuple[float, int]:
    """Seconds of a plain download, from the request to the last byte, and its size; the connection is new."""
    with httpx.Client(timeout=60.0) as client:
        started = time.monotonic()
        body = client.get(f"{link.url}/{key}").raise_for_status().content
        return time.monotonic() - started, len(body)


def start_with_nothing(link: Link) -> dict[str, float]:
    """A new process with a new cache; times since it was started."""
    with tempfile.TemporaryDirectory(prefix="genesis-bench-cache-") as cache:
        found = run_to_first_batch([str(CONTESTANTS / "first_batch.py"), link.url, cache, NODE_ID])
    return {name: found[name] for name in ("imported", "opened", "first_batch", "received_bytes")}


def bytes_of_all(link: Link, workspace: Workspace) -> dict[str, float]:
    """Bytes a token, of a node that reads the store once: of the link, and of the objects' bodies."""
    manifest = workspace.manifest()
    tokens = manifest["total_tokens"]
    batches = manifest["total_shards"] * ((manifest["shard_tokens"] - 1) // 1024) // 8
    before = link.received_bytes()
    with tempfile.TemporaryDirectory(prefix="genesis-bench-cache-") as cache:
        script = str(CONTESTANTS / "first_batch.py")
        run_to_first_batch([script, link.url, cache, NODE_ID, str(batches), str(manifest["total_shards"])])
    received = link.received_bytes() - before
    segment = json.loads((workspace.store / "manifest.json").read_bytes())["index"][0]["key"]
    shards = json.loads(Path(workspace.store / segment).read_bytes())["shards"]
    bodies = sum(shard["packed"]["size_bytes"] for shard in shards)
    return {"bytes_per_token": received / tokens, "packed_bytes_per_token": bodies / tokens}


def as_text(report: dict[str, Any], starts: int) -> str:
    """The report for people."""
    run, wire = report["starts"], report["wire"]
    lines = [
        f"first batch over {report['mbit']:g} Mbit/s ({report['link']}) with nothing cached, medians of {starts} in "
        f"turn   ({' to '.join(report['load'])})",
        f"  the packed shard alone ({run['size_bytes']:,.0f} bytes, plain httpx)  {run['transfer_s']:.3f} s, "
        f"{run['size_bytes'] * 8 / 1e6 / run['transfer_s']:.1f} Mbit/s",
        f"  first batch, from the start of the process   {run['first_batch']:.3f} s, "
        f"{run['late_s']:+.3f} s later than the transfer (asked at most {ASKED_S})",
        f"  first batch, from the end of the imports     {run['first_batch'] - run['imported']:.3f} s, "
        f"{run['late_after_imports_s']:+.3f} s",
        f"    imports done at {run['imported']:.3f} s, manifest and shards found at {run['opened']:.3f} s",
        f"  bytes a token on the wire {wire['bytes_per_token']:.3f} (asked at most {ASKED_BYTES}); "
        f"of the packed shards themselves {wire['packed_bytes_per_token']:.3f}",
    ]
    return "\n".join(lines)

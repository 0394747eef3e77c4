"""What a node's memory holds over 1,000 rotations: all shards cached, and a cache that holds only three."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from scripts.loader_bench.passes import load_average
from scripts.loader_bench.workspace import CONTESTANTS, ROOT, Workspace, child_environment

_TIMEOUT_S = 1800.0
_SHARDS_OF_SMALL_CACHE = 3


def bench_memory(arguments: argparse.Namespace, workspace: Workspace) -> dict[str, Any]:
    """Both in turn."""
    shard_bytes = (workspace.store / "shard_0.pt").stat().st_size
    report: dict[str, Any] = {"shard_bytes": shard_bytes, "load": [load_average()]}
    report["shards cached"] = rotate(workspace, workspace.cache, 10**12, arguments.rotations)
    with tempfile.TemporaryDirectory(prefix="genesis-bench-cache-") as cache:
        small = _SHARDS_OF_SMALL_CACHE * shard_bytes
        report["shards fetched anew"] = rotate(workspace, Path(cache), small, max(10, arguments.rotations // 5))
    report["load"].append(load_average())
    for name in ("shards cached", "shards fetched anew"):
        print(as_text(name, report))
    return report


def rotate(workspace: Workspace, cache: Path, cache_bytes: int, rotations: int) -> dict[str, Any]:
    """One process."""
    script = str(CONTESTANTS / "rotations.py")
    command = [sys.executable, script, str(workspace.store), str(cache), str(cache_bytes), str(rotations)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=ROOT, env=child_environment(), timeout=_TIMEOUT_S
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed with status {done.returncode}:\n{done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def as_text(name: str, report: dict[str, Any]) -> str:
    """One process's report for people."""
    run, shard_bytes = report[name], report["shard_bytes"]
    lines = [
        f"memory over rotations, {name}, MB   ({' to '.join(report['load'])}; a shard has {shard_bytes / 1e6:.1f})"
    ]
    lines.append(f"  {'rotation':>10} {'rss':>8} {'pss':>8} {'anonymous':>10} {'file':>8}")
    for rotation, memory in run["memory"].items():
        cells = " ".join(f"{memory[kind] / 1e6:>{width}.1f}" for kind, width in COLUMNS.items())
        lines.append(f"  {rotation:>10} {cells}")
    peak = run["peak_bytes"] - run["memory"]["0"]["rss"]
    lines.append(
        f"  peak {peak / 1e6:.1f} above the imports, {peak / shard_bytes:.2f} shards; shards mapped and in memory at "
        f"most {run['most_shard_bytes'] / shard_bytes:.2f} shards"
    )
    lines.append(f"  {run['shards_opened']} shards opened, {run['shards_from_cache']} of them from the cache")
    return "\n".join(lines)


COLUMNS = {"rss": 8, "pss": 8, "anonymous": 10, "file": 8}

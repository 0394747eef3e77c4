#!/usr/bin/env python
"""The loader against the limit and against its peers, in one run, on the same tokens.

    python scripts/bench_loader.py                   # everything; the first time it installs the peers
    python scripts/bench_loader.py batches           # tokens/s: ours, plain slicing, four peers
    python scripts/bench_loader.py workers           # ours through torch's DataLoader
    python scripts/bench_loader.py cold-start        # first batch of a new process, the cache warm
    python scripts/bench_loader.py cold-cache        # first batch over a link of 100 Mbit/s, the cache empty
    python scripts/bench_loader.py memory            # over 1,000 rotations

What is compared runs in processes of its own, in turn, so that a busy machine is as busy for all. The store, the peers'
virtual environments and their files are made once and kept in ``--folder``. Figures go to docs/performance.md.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.loader_bench.batches import bench_batches, bench_workers
from scripts.loader_bench.cold_cache import bench_cold_cache
from scripts.loader_bench.memory import bench_memory
from scripts.loader_bench.starts import bench_cold_start
from scripts.loader_bench.workspace import PEERS, ROOT, Workspace

BENCHES = {
    "batches": bench_batches,
    "workers": bench_workers,
    "cold-start": bench_cold_start,
    "cold-cache": bench_cold_cache,
    "memory": bench_memory,
}


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(BENCHES)}; all by default")
    parser.add_argument("--corpus", type=Path, default=ROOT.parent / "shared" / "corpus" / "fineweb-edu")
    folder = Path(tempfile.gettempdir()) / "genesis-bench-loader"
    parser.add_argument("--folder", type=Path, default=folder, help="where everything is made and kept")
    parser.add_argument("--venv", type=Path, help="where the peers are installed; default FOLDER/venvs")
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--peers", nargs="*", default=["nanogpt", *PEERS], choices=["nanogpt", *PEERS])
    parser.add_argument(
        "--rounds", type=int, default=3, help="of batches and workers: everyone is started anew in each"
    )
    parser.add_argument("--passes", type=int, default=4, help="later passes in a round")
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 1, 2, 4])
    parser.add_argument("--starts", type=int, default=9, help="of each kind, for cold-start and cold-cache")
    parser.add_argument("--mbit", type=float, default=100.0, help="of the link, for cold-cache")
    parser.add_argument("--rotations", type=int, default=1000, help="for memory")
    parser.add_argument("--json", action="store_true", help="print JSON; the tables go to standard error")
    arguments = parser.parse_args()
    unknown = set(arguments.parts) - set(BENCHES)
    if unknown:
        parser.error(f"unknown part {sorted(unknown)[0]!r}; known are {', '.join(BENCHES)}")
    return arguments


def main() -> None:
    """Runs the parts named, or all."""
    arguments = parse_arguments()
    folder = arguments.folder.resolve()
    venvs = (arguments.venv or folder / "venvs").resolve()
    workspace = Workspace(folder, venvs, arguments.corpus, arguments.seq_len)
    answers = sys.stdout
    if arguments.json:
        sys.stdout = sys.stderr
    workspace.make_store()
    report: dict[str, Any] = {"cpus": os.cpu_count()}
    for part in arguments.parts or BENCHES:
        report[part] = BENCHES[part](arguments, workspace)
    if arguments.json:
        print(json.dumps(report, indent=2), file=answers)


if __name__ == "__main__":
    main()

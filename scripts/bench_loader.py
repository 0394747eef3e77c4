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
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.bench_parts import parts_parser, run_parts
from scripts.loader_bench.batches import bench_batches, bench_workers
from scripts.loader_bench.cold_cache import bench_cold_cache
from scripts.loader_bench.memory import bench_memory
from scripts.loader_bench.starts import bench_cold_start
from scripts.loader_bench.workspace import PEERS, Workspace


def _with_store(bench: Callable[[argparse.Namespace, Workspace], Any]) -> Callable[[argparse.Namespace], Any]:
    """A part that is given the place where everything is made, with its store."""

    def run(arguments: argparse.Namespace) -> Any:
        folder = arguments.folder.resolve()
        venvs = (arguments.venv or folder / "venvs").resolve()
        workspace = Workspace(folder, venvs, arguments.corpus, arguments.seq_len)
        workspace.make_store()
        return bench(arguments, workspace)

    return run


BENCHES = {
    "batches": _with_store(bench_batches),
    "workers": _with_store(bench_workers),
    "cold-start": _with_store(bench_cold_start),
    "cold-cache": _with_store(bench_cold_cache),
    "memory": _with_store(bench_memory),
}


def main() -> None:
    """Runs the parts named, or all."""
    parser = parts_parser(__doc__, BENCHES, "genesis-bench-loader")
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
    run_parts(parser, BENCHES)


if __name__ == "__main__":
    main()

"""The tokens that the trainer's benchmarks train on: a store with a vocabulary of 1,024, made once and kept.

A small vocabulary, so that the model's blocks and not its embedding are what is computed and sent.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Any

from scripts.trainer_bench.crew import ROOT

VOCAB_ROWS = 1024
_MERGES = 758
"""With 256 bytes and 10 special ids: 1,024."""
_SHARDS = 6
_TIMEOUT_S = 600.0


def make_store(arguments: argparse.Namespace) -> Path:
    """The store given, or the one in the folder; populated from the corpus if it is not there."""
    if arguments.store is not None:
        return Path(arguments.store)
    store: Path = arguments.folder.resolve() / "store"
    if not (store / f"shard_{_SHARDS - 1}.pt").exists():
        print(f"populating {store} from {arguments.corpus}", file=sys.stderr, flush=True)
        command = [sys.executable, "-m", "genesis", "populate", "--source", "fineweb-edu", "--merges", str(_MERGES)]
        command += ["--max-shards", str(_SHARDS), "--input", str(arguments.corpus), "--store", str(store)]
        subprocess.run(command, check=True, timeout=_TIMEOUT_S, cwd=ROOT, stdout=sys.stderr)
    return store


def workload_of(store: Path, *, preset: str, batch_size: int, seq_len: int) -> dict[str, Any]:
    """What members of a benchmark are told to train (`baselines/trainer/workload.py`)."""
    return {
        "shard": str(store / "shard_0.pt"),
        "preset": preset,
        "vocab_rows": VOCAB_ROWS,
        "batch_size": batch_size,
        "seq_len": seq_len,
    }

#!/usr/bin/env python
"""The trainer against its peers and the limits, in one run, on the same model and data.

    python scripts/bench_trainer.py                # everything
    python scripts/bench_trainer.py bytes          # bytes on the wire for 500 steps: DiLoCo, DDP over gloo
    python scripts/bench_trainer.py round          # a round of 16 MB among 2 to 4: ours, hivemind, gloo

Every figure is a ratio to something measured in the same run. Members are processes of their own, in network namespaces
where links matter (that needs root); all of them end with this one. Figures go to docs/performance.md.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.trainer_bench.crew import ROOT
from scripts.trainer_bench.rounds import bench_round
from scripts.trainer_bench.wire_bytes import bench_bytes

BENCHES = {"bytes": bench_bytes, "round": bench_round}


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(BENCHES)}; all by default")
    parser.add_argument("--corpus", type=Path, default=ROOT.parent / "shared" / "corpus" / "fineweb-edu")
    folder = Path(tempfile.gettempdir()) / "genesis-bench-trainer"
    parser.add_argument("--folder", type=Path, default=folder, help="where the store is made and kept")
    parser.add_argument("--store", type=Path, help="a store with a vocabulary of 1,024 to use instead")
    parser.add_argument("--members", type=int, default=4, help="of bytes and links")
    parser.add_argument("--bytes-preset", default="15m", help="model of bytes")
    parser.add_argument("--round-mb", type=float, default=16.0, help="size of a vector, for round")
    parser.add_argument("--rounds", type=int, default=5, help="counted rounds of each contestant, for round")
    parser.add_argument("--json", action="store_true", help="print JSON; the tables go to standard error")
    arguments = parser.parse_args()
    unknown = set(arguments.parts) - set(BENCHES)
    if unknown:
        parser.error(f"unknown part {sorted(unknown)[0]!r}; known are {', '.join(BENCHES)}")
    return arguments


def main() -> None:
    """Runs the parts named, or all."""
    arguments = parse_arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # So that members and networks are removed.
    answers = sys.stdout
    if arguments.json:
        sys.stdout = sys.stderr
    report: dict[str, Any] = {"cpus": os.cpu_count()}
    for part in arguments.parts or BENCHES:
        report[part] = BENCHES[part](arguments)
    if arguments.json:
        print(json.dumps(report, indent=2), file=answers)


if __name__ == "__main__":
    main()

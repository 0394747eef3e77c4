#!/usr/bin/env python
"""The swarm pipeline against its peers and the limits, in one run, on the same model and data.

    python scripts/bench_swarm.py                # everything
    python scripts/bench_swarm.py call           # a stage call of 1, 4 and 16 MB: ours, hivemind's RemoteExpert

Every figure is a ratio to something measured in the same run. Members are processes of their own; all of them end with
this one. Figures go to docs/performance.md.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.swarm_bench.call import bench_call

BENCHES = {"call": bench_call}


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(BENCHES)}; all by default")
    parser.add_argument("--call-mb", type=int, nargs="+", default=[1, 4, 16], help="MiB of a tensor, for call")
    parser.add_argument("--call-turns", type=int, default=5, help="counted turns of each contestant, for call")
    parser.add_argument("--json", action="store_true", help="print JSON; the tables go to standard error")
    arguments = parser.parse_args()
    unknown = set(arguments.parts) - set(BENCHES)
    if unknown:
        parser.error(f"unknown part {sorted(unknown)[0]!r}; known are {', '.join(BENCHES)}")
    return arguments


def main() -> None:
    """Runs the parts named, or all."""
    arguments = parse_arguments()
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM)
    )  # So that members and networks are removed.
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

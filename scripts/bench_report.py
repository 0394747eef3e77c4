"""What a report on a run costs: processor time and memory by steps, beside only parsing the same lines as JSON.

    python scripts/bench_report.py [--steps 1000000]

The log is written before, by the same code that nodes write with; a round every 500 steps. Each reading is in a process
of its own, so that its greatest memory is its own.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from trainer.monitor.event_log import event_line
from trainer.monitor.report import run_report

_EVERY = 500


def write_log(folder: Path, num_steps: int) -> Path:
    """Writes a node's log of so many steps."""
    rng, path, at = random.Random(1), folder / "events-gpu-1.jsonl", 1.79e9
    with path.open("wb") as file:
        for step in range(num_steps):
            at += 0.3
            loss = 3 + 7 * math.exp(-5 * step / num_steps) + rng.gauss(0, 0.05)
            fields = {"step": step, "loss": loss, "grad_norm": 1 + rng.random(), "lr": 1e-3, "num_tokens": 4096}
            fields |= {"skipped": False, "seconds": 0.28, "loader_wait_s": 0.001}
            file.write(event_line(at, "gpu-1", "step", fields))
            if step % _EVERY == _EVERY - 1:
                round_ = {"round_index": step // _EVERY, "members": ["a" * 64, "b" * 64], "dropped": [], "seconds": 1.5}
                round_ |= {"completeness": 1.0, "sent_bytes": 10**6, "received_bytes": 10**6, "rule": "mean"}
                file.write(event_line(at, "gpu-1", "round", round_))
    return path


def measured(what: str, path: Path) -> tuple[float, float]:
    """Processor seconds and greatest memory, MB, of a process that reads."""
    done = subprocess.run([sys.executable, __file__, "--only", what, str(path)], capture_output=True, check=True)
    seconds, memory_mb = json.loads(done.stdout)
    return seconds, memory_mb


def read(what: str, path: Path) -> None:
    """Reads, and prints what `measured` returns."""
    began_s = time.process_time()
    if what == "report":
        run_report([path])
    else:
        with path.open("rb") as lines:
            for line in lines:
                json.loads(line)
    memory_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps([time.process_time() - began_s, memory_mb]))


def main() -> None:
    """Prints a line a size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--only", nargs=2, metavar=("WHAT", "PATH"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.only:
        read(options.only[0], Path(options.only[1]))
        return
    for num_steps in (options.steps // 10, options.steps):
        with tempfile.TemporaryDirectory() as name:
            path = write_log(Path(name), num_steps)
            size_mb = path.stat().st_size / 1e6
            parse_s, _ = measured("parse", path)
            report_s, memory_mb = measured("report", path)
        print(
            f"{num_steps:,} steps, {size_mb:.0f} MB: report {report_s:.1f} s, {memory_mb:.0f} MB of memory; "
            f"json.loads of its lines alone {parse_s:.1f} s: {report_s / parse_s:.1f} times that"
        )


if __name__ == "__main__":
    main()

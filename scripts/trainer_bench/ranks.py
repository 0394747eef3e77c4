"""What a step of a node of two ranks costs over that of a loop written by hand with the same DDP or FSDP2.

As `steps`, with two processes on each side: ours is all of `python -m trainer` at both ranks, loader, checkpoints, log
and HTTP interface at rank 0; the other has its batches in memory and does nothing else.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from scripts.trainer_bench.crew import MEMBERS, load_average
from scripts.trainer_bench.steps import as_text, keep_batches, looper, measured, our_command
from scripts.trainer_bench.workspace import VOCAB_ROWS, make_store

ASKED = 1.05
_KINDS = ("ddp", "fsdp")
_NUM_RANKS = 2


def bench_ranks(arguments: argparse.Namespace) -> dict[str, Any]:
    """Ours and the other in turn, with DDP and then with FSDP2."""
    store = make_store(arguments)
    reports = {}
    for kind in _KINDS:
        with tempfile.TemporaryDirectory(prefix="genesis-bench-ranks-") as folder, ExitStack() as stack:
            options = {"preset": arguments.step_preset, "vocab_rows": VOCAB_ROWS, "threads": arguments.threads}
            options |= {"parallel": kind, "batches": str(keep_batches(store, Path(folder), arguments))}
            launcher = [str(MEMBERS / "launch_ranks.py"), str(_NUM_RANKS)]
            command = {
                "genesis": [*launcher, *our_command(store, Path(folder), arguments), "--parallel", kind],
                "by hand": [*launcher, str(MEMBERS / "ranked_loop.py"), json.dumps(options)],
            }
            loops = {name: stack.enter_context(looper(name, words)) for name, words in command.items()}
            report = {"load": [load_average()], **measured(loops, arguments)}
        report["load"].append(load_average())
        reports[kind] = report
        print(f"{_NUM_RANKS} ranks, {kind}: " + as_text(report, arguments, ASKED), flush=True)
    return reports

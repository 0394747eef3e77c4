"""What the benchmarks with several parts have in common: a command line that names the parts, and how they are run."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

Benches = Mapping[str, Callable[[argparse.Namespace], Any]]
_CORPUS = Path(__file__).resolve().parents[2] / "shared" / "corpus" / "fineweb-edu"


def parts_parser(description: str, benches: Benches, folder: str) -> argparse.ArgumentParser:
    """A command line with the parts, where they find text and keep what they make, and the form of the output.

    Args:
        description: the script's docstring; its first line is shown.
        benches: by part; each is given all arguments and returns what goes into the report.
        folder: name of the default folder, among temporary files.
    """
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(benches)}; all by default")
    parser.add_argument("--corpus", type=Path, default=_CORPUS)
    kept = Path(tempfile.gettempdir()) / folder
    parser.add_argument("--folder", type=Path, default=kept, help="where everything is made and kept")
    parser.add_argument("--json", action="store_true", help="print JSON; the tables go to standard error")
    return parser


def run_parts(parser: argparse.ArgumentParser, benches: Benches) -> None:
    """Runs the parts that are named, or all; a part that is not known ends the command with its name."""
    arguments = parser.parse_args()
    unknown = set(arguments.parts) - set(benches)
    if unknown:
        parser.error(f"unknown part {sorted(unknown)[0]!r}; known are {', '.join(benches)}")
    # So that processes and networks that were made are removed.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    answers = sys.stdout
    if arguments.json:
        sys.stdout = sys.stderr
    report: dict[str, Any] = {"cpus": os.cpu_count()}
    for part in arguments.parts or benches:
        report[part] = benches[part](arguments)
    if arguments.json:
        print(json.dumps(report, indent=2), file=answers)

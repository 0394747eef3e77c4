"""The command line, ``genesis``: its commands, and in `common` what they share.

A command prints its result to standard output and everything else to standard error; it ends with 0, with 1 and one
line for what a user can mend, 2 for options that make no sense, 129, 130 or 143 when a signal stopped it cleanly.
A traceback is a bug.
"""

from __future__ import annotations

import os
import sys

__all__ = ["main"]


def main() -> None:
    """Entry point of the ``genesis`` command."""
    _open_missing_streams()
    try:
        from genesis.cli.app import run

        code = run(sys.argv[1:])
    except KeyboardInterrupt:
        code = 130
    sys.exit(code)


def _open_missing_streams() -> None:
    """Standard streams that a supervisor closed go to /dev/null; else the next file opened would be taken for them."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: PTH123, SIM115  open for as long as the process lives
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: PTH123, SIM115

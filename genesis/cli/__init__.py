"""The command line, ``genesis``: one module a command, and here what they share.

A command prints its result to standard output and everything else to standard error; it ends with 0, with 1 and one
line for what a user can mend, 2 for options that make no sense, 130 or 143 when a signal stopped it cleanly. A
traceback is a bug.
"""

from __future__ import annotations

import sys

__all__ = ["main"]


def main() -> None:
    """Entry point of the ``genesis`` command."""
    from genesis.cli.app import run

    sys.exit(run(sys.argv[1:]))

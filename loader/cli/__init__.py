"""The command line, ``python -m loader``: one module a command, and here what they share.

A command prints its result to standard output and everything else to standard error; it ends with 0, with 1 and one
line for what a user can mend, 2 for options that make no sense, 130 or 143 when a signal stopped it. A traceback is a
bug. `plan` and `fetch` never import torch, which alone would take longer (2 s) than they do.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType
from typing import NoReturn

__all__ = ["Terminated", "main"]


class Terminated(BaseException):
    """SIGTERM came; like `KeyboardInterrupt`, nothing but the entry point should catch it."""


def main() -> None:
    """Entry point of ``python -m loader``."""
    _open_missing_streams()
    signal.signal(signal.SIGTERM, _terminate)
    try:
        from loader.cli.app import run

        code = run(sys.argv[1:])
    except KeyboardInterrupt:
        code = 130
    except Terminated:
        code = 143
    sys.exit(code)


def _terminate(number: int, frame: FrameType | None) -> NoReturn:
    raise Terminated


def _open_missing_streams() -> None:
    """Standard streams that a supervisor closed go to /dev/null; else the next file opened would be taken for them."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: PTH123, SIM115  open for as long as the process lives
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: PTH123, SIM115

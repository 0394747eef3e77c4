"""The command line, ``python -m loader``: one module a command, and here what they share.

A command prints its result to standard output and everything else to standard error; it ends with 0, with 1 and one
line for what a user can mend, 2 for options that make no sense, 129, 130 or 143 when a signal stopped it. A traceback
is a bug. `plan` and `fetch` never import torch, which alone would take longer (2 s) than they do.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType
from typing import NoReturn

from genesis.extras import report_missing_extra
from genesis.hangup import drop_closed_terminals

__all__ = ["StoppedBySignal", "main"]


class StoppedBySignal(BaseException):
    """A signal asked to stop: like `KeyboardInterrupt`, but which is known and no library takes it for its own."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.exit_code = 128 + number


def main() -> None:
    """Entry point of ``python -m loader``."""
    _open_missing_streams()
    signal.signal(signal.SIGTERM, _stop)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:  # Else it is ignored, as under nohup.
        signal.signal(signal.SIGHUP, _stop)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # Else it is ignored, as under nohup.
        signal.signal(signal.SIGINT, _stop)
    try:
        from loader.cli.app import run

        code = run(sys.argv[1:])
    except StoppedBySignal as stopped:
        code = stopped.exit_code
    except ModuleNotFoundError as error:
        code = report_missing_extra(error, "loader")
    sys.exit(code)


def _stop(number: int, frame: FrameType | None) -> NoReturn:
    if number == signal.SIGHUP:
        drop_closed_terminals()
    raise StoppedBySignal(number)


def _open_missing_streams() -> None:
    """Standard streams that a supervisor closed go to /dev/null; else the next file opened would be taken for them."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: PTH123, SIM115  open for as long as the process lives
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: PTH123, SIM115

"""SIGHUP, which tells that a terminal was closed: who hears it, and what becomes of what would be printed there.

The kernel and the shell may both send it, to every process of the terminal's foreground, and each write to a closed
terminal is an error. `drop_closed_terminals` makes those writes go nowhere, so that a command can end in order.
"""

from __future__ import annotations

import os
import signal


def stop_signals() -> tuple[signal.Signals, ...]:
    """SIGINT and SIGTERM, and SIGHUP unless it is ignored, as under nohup: then the end of a terminal stops nothing."""
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        return (signal.SIGINT, signal.SIGTERM)
    return (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def drop_closed_terminals() -> None:
    """Sends standard output and error nowhere, each if it cannot be written to any more; safe in a signal handler."""
    for descriptor in (1, 2):
        try:
            os.write(descriptor, b"")
        except OSError:
            nowhere = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
            os.dup2(nowhere, descriptor)
            os.close(nowhere)

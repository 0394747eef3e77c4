"""How a node is asked to stop, by SIGINT, SIGTERM, SIGHUP or the API: it ends the current step and saves its state."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from genesis.hangup import drop_closed_terminals, stop_signals

logger = logging.getLogger(__name__)

_ONE_REQUEST_S = 1.0  # torchrun forwards a Ctrl+C to ranks that had it already, from the terminal.


class StopRequest:
    """Whether to stop, and why; set from any thread or from a signal."""

    def __init__(self, notice: str = "") -> None:
        """``notice`` is what a signal is answered with on standard error: what is done before the end."""
        self._notice = notice
        self._event = threading.Event()
        self._asked_at_s = 0.0
        self.signal: int | None = None  # The first that asked.

    def ask(self) -> None:
        """Asks to stop after the current step."""
        self._event.set()

    def __call__(self) -> bool:
        """Returns whether to stop."""
        return self._event.is_set()

    @contextmanager
    def on_signals(self) -> Iterator[None]:
        """Lets SIGINT, SIGTERM and SIGHUP ask, the last unless it is ignored, as under nohup.

        Another SIGINT, a second later or more, interrupts at once and saves nothing.
        """
        before = {number: signal.getsignal(number) for number in stop_signals()}
        for number in before:
            signal.signal(number, self._on_signal)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler if handler is not None else signal.SIG_DFL)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        del frame
        if number == signal.SIGHUP:
            drop_closed_terminals()
        if self.signal is None:
            self.signal, self._asked_at_s = number, time.monotonic()
            self.ask()
            self._tell(number)
        elif number == signal.SIGINT and time.monotonic() > self._asked_at_s + _ONE_REQUEST_S:
            raise KeyboardInterrupt

    def _tell(self, number: int) -> None:
        """Writes the notice past `logging`, whose streams must not be entered again from a signal's handler."""
        if not self._notice or not logger.isEnabledFor(logging.INFO):
            return
        line = f"{time.strftime('%H:%M:%S')} INFO {signal.Signals(number).name}: {self._notice}\n"
        with contextlib.suppress(OSError, ValueError):  # Closed with the terminal, or replaced by what has no number.
            os.write(sys.stderr.fileno(), line.encode())

"""How a node is asked to stop: SIGINT, SIGTERM, the API, a limit of steps. The step in hand is finished, state saved."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["StopRequest"]


class StopRequest:
    """Whether to stop, and why; set from any thread or from a signal."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self.signal: int | None = None

    def ask(self) -> None:
        """Stop after the step in hand."""
        self._event.set()

    def __call__(self) -> bool:
        return self._event.is_set()

    @contextmanager
    def on_signals(self) -> Iterator[None]:
        """SIGINT and SIGTERM ask; a second one of them ends the process as usual."""
        before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

        def handle(number: int, frame: FrameType | None) -> None:
            del frame
            self.signal = number
            self.ask()
            for each, handler in before.items():
                signal.signal(each, handler if handler is not None else signal.SIG_DFL)

        for number in before:
            signal.signal(number, handle)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler if handler is not None else signal.SIG_DFL)

"""The latest lines of a process's log, kept for its page: 200 of at most 300 characters.

A handler beside those that print: what the log's level lets through, and no more.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from dataclasses import dataclass
from typing import Final, Self

from trainer.monitor.pages.texts import harmless

_LINES: Final = 200
_LOGGERS: Final = ("trainer", "loader", "genesis")


@dataclass(frozen=True, slots=True)
class LoggedLine:
    """A line; ``at`` is in seconds since 1970."""

    at: float
    level: str
    text: str


class LogLines(logging.Handler):
    """Keeps lines from `attach` to `detach`, or within a ``with``."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._lines: deque[LoggedLine] = deque(maxlen=_LINES)
        self._adding = threading.Lock()

    def emit(self, record: logging.LogRecord) -> None:
        """Keeps a line; one that cannot be put together is passed over."""
        try:
            text = record.getMessage()
        except (TypeError, ValueError):
            return
        with self._adding:
            self._lines.append(LoggedLine(record.created, record.levelname, harmless(text)))

    def latest(self, count: int) -> list[LoggedLine]:
        """Returns the latest lines, the newest first."""
        with self._adding:
            return list(self._lines)[::-1][:count]

    def attach(self) -> Self:
        """Begins to keep lines of this project's packages."""
        for name in _LOGGERS:
            logging.getLogger(name).addHandler(self)
        return self

    def detach(self) -> None:
        """Keeps no more lines."""
        for name in _LOGGERS:
            logging.getLogger(name).removeHandler(self)

    def __enter__(self) -> Self:
        return self.attach()

    def __exit__(self, *_: object) -> None:
        self.detach()

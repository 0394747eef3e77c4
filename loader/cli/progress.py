"""How far along a command is, in bytes: a bar on a terminal, a plain line every ten seconds elsewhere."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import typer
from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from loader.cache.sizes import format_size

__all__ = ["Progress", "showing_progress"]

logger = logging.getLogger(__name__)

_LINE_EVERY_S = 10.0


class Progress:
    """Counts towards a total. Use `showing_progress`.

    Args:
        what: begins each line.
        total_bytes: what 100 % is.
        bar: shown instead of lines, if there is one.
    """

    def __init__(self, what: str, total_bytes: int, bar: tqdm[NoReturn] | None) -> None:
        self._what = what
        self._total_bytes = total_bytes
        self._bar = bar
        self._line_at = time.monotonic()

    def show(self, done_bytes: int, remark: str) -> None:
        """Says how far it is; more than the total, as when something came twice, is shown as the total."""
        done_bytes = min(done_bytes, self._total_bytes)
        if self._bar is not None:
            self._bar.set_postfix_str(remark, refresh=False)
            self._bar.update(max(0, done_bytes - self._bar.n))
        elif time.monotonic() - self._line_at >= _LINE_EVERY_S:
            self._line_at = time.monotonic()
            total = format_size(self._total_bytes)
            logger.info("%s: %s, %s of %s", self._what, remark, format_size(done_bytes), total)

    def complain(self, message: str) -> None:
        """Says at once what went wrong, without spoiling the bar."""
        with tqdm.external_write_mode(file=sys.stderr):
            typer.echo(f"loader: {message}", err=True)


@contextmanager
def showing_progress(what: str, total_bytes: int) -> Iterator[Progress]:
    """Shows progress while it lasts."""
    if not sys.stderr.isatty():
        yield Progress(what, total_bytes, None)
        return
    with (
        logging_redirect_tqdm(),
        tqdm(total=total_bytes, desc=what, unit="B", unit_scale=True, leave=False, mininterval=0.1) as bar,
    ):
        yield Progress(what, total_bytes, bar)

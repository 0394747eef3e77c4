"""How far a long command is, told to people: a bar on a terminal, a plain line now and then elsewhere.

One mechanism for every command, the loader's too. A command counts, and says where it stands when it is asked
(`ProgressState`); `showing_progress` asks it from a thread of its own, four times a second for a terminal and every ten
seconds for a log. So the work never waits for a terminal, there is a sign of life while nothing moves, and a terminal
that was closed ends nothing.

Guarantees: 100 % is shown when all is done and not before (percentages are rounded down); the time left is that of the
end which comes first, by the speed of the last minute; a line is never wider than the terminal, whose width is looked
up each time; standard output is not touched; nothing at all is shown where the logger is set above INFO (``--quiet``).
There are no colours, so there is nothing for ``NO_COLOR`` to turn off.
"""

from __future__ import annotations

import logging
import math
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import NoReturn

from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

_DRAW_EVERY_S = 0.25
_LINE_EVERY_S = 10.0
_LINE_EVERY_VARIABLE = "GENESIS_PROGRESS_INTERVAL_S"
_STOP_S = 2.0
"""How long the end of a command waits for a terminal that takes no output (Ctrl-S, a hung connection)."""
_WINDOW_S = 60.0
_SAMPLE_EVERY_S = 1.0
_DEFAULT_COLUMNS = 80
_MIN_BAR = 10


def counted(count: int, noun: str) -> str:
    """``1 shard``, ``1,187 shards``."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def format_size(size_bytes: float) -> str:
    """``20.0 MB``; powers of 1,000, as disks and networks count."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(size_bytes) < 1000:
            return f"{size_bytes:.0f} B" if unit == "B" else f"{size_bytes:.1f} {unit}"
        size_bytes /= 1000
    return f"{size_bytes:.2f} TB"


def format_duration(seconds: float) -> str:
    """``3 h 07 min``, ``4 min 05 s``, ``12 s``."""
    whole = round(seconds)
    if whole >= 86_400:
        return f"{whole // 86_400} d {whole % 86_400 // 3600:02d} h"
    if whole >= 3600:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    if whole >= 60:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole} s"


def format_percent(fraction: float) -> str:
    """``37.2 %``, rounded down, so that ``100 %`` is all of it; what is below 0 or above 1 counts as 0 and 1."""
    if fraction >= 1:
        return "100 %"
    return f"{math.floor(max(fraction, 0.0) * 1000) / 10:.1f} %"


class TimeLeft:
    """How long until the first of several counters reaches its end, by their speed over the last minute.

    A counter that has no end, or did not move, says nothing. Times are seconds of any one clock that does not go back.

    Args:
        ends: the value at which each counter is at its end; None for no end.
    """

    def __init__(self, *ends: float | None) -> None:
        self._ends = ends
        self._samples: deque[tuple[float, tuple[float, ...]]] = deque()
        self._latest: tuple[float, tuple[float, ...]] | None = None

    def observe(self, now_s: float, *counts: float) -> None:
        """Notes where the counters stand; the first call is where they start from."""
        self._latest = (now_s, counts)
        if not self._samples or now_s - self._samples[-1][0] >= _SAMPLE_EVERY_S:
            self._samples.append(self._latest)
        while len(self._samples) > 2 and self._samples[1][0] <= now_s - _WINDOW_S:
            self._samples.popleft()

    def nearest(self, now_s: float) -> tuple[int, float] | None:
        """The number of the counter that ends first, and the seconds until then; None while that cannot be told."""
        if self._latest is None:
            return None
        began_s, began = self._samples[0]
        span_s = max(now_s, self._latest[0]) - began_s
        if span_s < _SAMPLE_EVERY_S:
            return None
        found: list[tuple[float, int]] = []
        for number, (end, first, count) in enumerate(zip(self._ends, began, self._latest[1], strict=True)):
            if end is not None and count >= end:
                found.append((0.0, number))
            elif end is not None and count > first:
                found.append(((end - count) * span_s / (count - first), number))
        if not found:
            return None
        seconds, number = min(found)
        return number, seconds

    def seconds(self, now_s: float) -> float | None:
        """The seconds of `nearest`."""
        found = self.nearest(now_s)
        return found[1] if found else None


@dataclass(frozen=True, slots=True)
class ProgressState:
    """Where a command stands.

    Attributes:
        fraction: how much is done, 0 to 1; None if that cannot be known.
        facts: short texts, the most important first; a narrow terminal leaves out the last ones.
    """

    fraction: float | None
    facts: tuple[str, ...] = ()

    def text(self) -> str:
        """All of it, for a line of a log."""
        return ", ".join([*([] if self.fraction is None else [format_percent(self.fraction)]), *self.facts])


class CountProgress:
    """The progress of a command that counts one thing.

    Args:
        total: how much there is; None while that is unknown. It may be set later.
        describe: what to say of a count, such as ``3 of 12 shards``.
        clock: seconds that do not go back.
    """

    def __init__(
        self, total: int | None, describe: Callable[[int], str], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.total = total
        self._describe = describe
        self._clock = clock
        self._done = 0
        self._time_left: TimeLeft | None = None

    def update(self, done: int) -> None:
        """Notes how much is done; more than the total, as when something came twice, counts as the total."""
        self._done = done if self.total is None else min(done, self.total)
        if self._time_left is None:
            self._time_left = TimeLeft(self.total)
        self._time_left.observe(self._clock(), self._done)

    def state(self) -> ProgressState:
        """Where it stands."""
        fraction = self._done / self.total if self.total else None
        facts = [self._describe(self._done)]
        left_s = self._time_left.seconds(self._clock()) if self._time_left else None
        if left_s:
            facts.insert(0, f"{format_duration(left_s)} left")
        return ProgressState(fraction, tuple(facts))


def is_terminal() -> bool:
    """Whether standard error is a terminal on which a line can be drawn again."""
    try:
        return sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
    except ValueError:  # It was closed.
        return False


def terminal_columns() -> int:
    """Width of the terminal behind standard error, in characters; ``COLUMNS`` can make it smaller."""
    widths = []
    with suppress(OSError, ValueError):
        widths.append(os.get_terminal_size(sys.stderr.fileno()).columns)
    asked = os.environ.get("COLUMNS", "")
    if asked.isascii() and asked.isdecimal():
        widths.append(int(asked))
    return min((width for width in widths if width > 0), default=_DEFAULT_COLUMNS)


def bar_format(name: str, state: ProgressState, columns: int) -> str:
    """A line of at most ``columns`` characters, as tqdm's ``bar_format``.

    ``{bar}`` stands where there is room for ten characters of it or more. What does not fit is left out, the last fact
    first.
    """
    percent = f" {format_percent(state.fraction):>6}" if state.fraction is not None else ""
    head = f"{name}{percent}"
    room = columns - len(head) - 1
    has_bar = state.fraction is not None
    for number in range(len(state.facts), -1, -1):
        facts = ", ".join(state.facts[:number])
        needed = len(facts) + (1 if has_bar and number else 0) + (_MIN_BAR if has_bar else 0)
        if needed <= room:
            parts = [_escaped(head), *(["{bar}"] if has_bar else []), *([_escaped(facts)] if number else [])]
            return " ".join(parts)
    if state.facts and len(head) + 1 + len(state.facts[0]) <= columns:
        return _escaped(f"{head} {state.facts[0]}")
    return _escaped(head if len(head) <= columns else percent.strip()[:columns] or name[:columns])


def _escaped(text: str) -> str:
    return text.replace("{", "{{").replace("}", "}}")


@contextmanager
def showing_progress(name: str, state: Callable[[], ProgressState], log: logging.Logger) -> Iterator[None]:
    """Shows what ``state`` tells until the context is left.

    On a terminal the bar is taken away at the end, and what is logged meanwhile appears above it. Elsewhere, what took
    long enough for a line gets another one at its end.

    Args:
        name: what is going on: a source, ``verifying``.
        state: where it stands; called from another thread.
        log: gets the lines; nothing is shown unless it takes INFO.
    """
    if not log.isEnabledFor(logging.INFO):
        yield
        return
    stopped = threading.Event()
    on_terminal = is_terminal()
    show = _draw if on_terminal else _log
    thread = threading.Thread(target=show, args=(name, state, log, stopped), name="progress", daemon=True)
    with ExitStack() as stack:
        if on_terminal:
            stack.enter_context(logging_redirect_tqdm())
        thread.start()
        try:
            yield
        finally:
            stopped.set()
            thread.join(_STOP_S)


def _draw(name: str, state: Callable[[], ProgressState], log: logging.Logger, stopped: threading.Event) -> None:
    """Draws the bar until it is to stop; ends early if the terminal takes no output any more."""
    try:
        columns = terminal_columns() - 1  # The last column is left free: some terminals wrap as soon as it is written.
        now = state()
        bar: tqdm[NoReturn] = tqdm(
            total=1.0,
            initial=min(now.fraction or 0.0, 1.0),
            leave=False,
            ncols=columns,
            bar_format=bar_format(name, now, columns),
            mininterval=0,
        )
        try:
            while True:
                is_last = stopped.wait(_DRAW_EVERY_S)
                now, before, columns = state(), columns, terminal_columns() - 1
                if columns < before:
                    bar.sp = bar.status_printer(bar.fp)  # Else it pads to the old width, and the line wraps.
                bar.ncols, bar.bar_format = columns, bar_format(name, now, columns)
                bar.n = min(now.fraction or 0.0, 1.0)
                bar.refresh()
                if is_last:
                    break
        finally:
            bar.close()
    except (OSError, ValueError) as error:
        log.debug("the progress bar is gone: %s", error)


def _log(name: str, state: Callable[[], ProgressState], log: logging.Logger, stopped: threading.Event) -> None:
    every_s = line_interval_s()
    num_lines = 0
    while not stopped.wait(every_s):
        log.info("%s: %s", name, state().text())
        num_lines += 1
    if num_lines:
        log.info("%s: %s", name, state().text())


def line_interval_s() -> float:
    """Seconds between two plain lines: ``GENESIS_PROGRESS_INTERVAL_S``, else 10."""
    try:
        asked_s = float(os.environ.get(_LINE_EVERY_VARIABLE, ""))
    except ValueError:
        return _LINE_EVERY_S
    return asked_s if 0.1 <= asked_s <= 86_400 else _LINE_EVERY_S

"""`BackgroundWrite`: one write at a time in a thread of its own, waited for with a deadline."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from trainer.errors import CheckpointError

__all__ = ["TIMEOUT_S", "BackgroundWrite"]

TIMEOUT_S = 600.0
"""A disk that takes longer hangs."""


class BackgroundWrite:
    """Used by one thread.

    Args:
        place: what is written, as errors name it.
        thread_name: of the thread that writes.
    """

    def __init__(self, place: Path, thread_name: str) -> None:
        self._place = place
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=thread_name)
        self._writing: Future[None] | None = None

    @property
    def busy(self) -> bool:
        """Whether something is being written now."""
        return self._writing is not None and not self._writing.done()

    @property
    def is_settled(self) -> bool:
        """Whether nothing was begun since it was last waited for to its end."""
        return self._writing is None

    def begin(self, write: Callable[[], None]) -> None:
        """Has the thread call ``write``; what it raises, the next `flush` raises."""
        self._writing = self._thread.submit(write)

    def flush(self, timeout_s: float = TIMEOUT_S) -> None:
        """Waits until what was begun last has ended.

        Raises:
            CheckpointError: it has not, in time; or whatever it raised.
        """
        if self._writing is None:
            return
        try:
            self._writing.result(timeout_s)
        except TimeoutError:
            raise CheckpointError(
                f"{self._place}: expected the checkpoint to be on the disk within {timeout_s:g} s, found it still "
                "being written; is the disk hanging?"
            ) from None
        finally:
            if self._writing.done():  # An interrupted wait leaves it running, and its buffers in use.
                self._writing = None

    def end(self) -> None:
        """Ends the thread once it has nothing to write."""
        self._thread.shutdown(wait=False)

"""A round that runs while training goes on (Streaming DiLoCo's overlap), in a thread of its own.

The thread works on the round's own tensors only; parameters and state are touched by the training thread alone, when it
takes the result. A round that is given up is left to end by itself: its result goes nowhere.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Generic, TypeVar

from trainer.errors import RoundFailedError
from trainer.outer.diloco.saved import SavedFlight
from trainer.outer.engine.collective import Contribution, RoundResult
from trainer.outer.engine.daemon_call import start_daemon

__all__ = ["AsyncRound", "BackgroundCall"]

T = TypeVar("T")


class BackgroundCall(Generic[T]):
    """One call in a daemon thread, which never holds up the end of the process.

    Args:
        future: what the thread fills in.
    """

    def __init__(self, future: Future[T]) -> None:
        self._future = future

    @classmethod
    def start(cls, function: Callable[[], T], name: str) -> BackgroundCall[T]:
        """Begin the call.

        Args:
            function: what to call.
            name: of the thread.
        """
        return cls(start_daemon(function, name))

    def done(self) -> bool:
        """Whether there is a result, or an error."""
        return self._future.done()

    def result(self, timeout_s: float) -> T:
        """Wait for the result.

        Raises:
            TimeoutError: there is none in time.
            BaseException: whatever the call raised.
        """
        return self._future.result(timeout_s)


@dataclass(slots=True)
class AsyncRound:
    """A round under way.

    Args:
        contribution: what went into it.
        call: the collective at work.
        steps_left: inner steps until its result is merged.
    """

    contribution: Contribution
    call: BackgroundCall[RoundResult]
    steps_left: int

    def result(self, timeout_s: float) -> RoundResult:
        """The round's result.

        Raises:
            RoundFailedError: the round failed, or is not back in time.
        """
        try:
            return self.call.result(timeout_s)
        except TimeoutError as error:
            raise RoundFailedError(f"the round in the background is not back after {timeout_s:.0f} s") from error

    def saved(self) -> SavedFlight:
        """What a checkpoint needs, to begin this round again."""
        contribution = self.contribution
        return SavedFlight(
            contribution.vector, contribution.num_batches, contribution.age_s, self.steps_left, contribution.progress
        )

"""Graceful shutdown of a worker: answer what is under way, step with what was counted, save, share.

    no new micro-batches → what is under way is answered → nothing is counted any more → step and save → a last round

Once nothing is counted any more, drivers send to others; so whatever is acknowledged is in the state that is saved, and
in the round where one can be had. Saving comes before sharing, because the worker can do it alone. The last round is
for those that stay: it comes before its time, so its outer step weighs as little as the work in it
(`trainer.outer.diloco.outer`), and what is saved is the state from before it, which has all of this worker's steps. All
of it has one deadline, half of which is for answers. As in `trainer.run.swarm.catch_up`, threads and network are passed
in as functions.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from trainer.errors import CheckpointError, TrainerError

__all__ = ["GracefulShutdown"]

logger = logging.getLogger(__name__)

_LOOK_S = 0.1
_LEAST_S = 5.0
"""For saving, however long the rest has taken."""


@dataclass(slots=True, kw_only=True)
class GracefulShutdown:
    """One worker's."""

    leave_s: float
    """For all of it."""
    num_unanswered: Callable[[], int]
    """Requests that were let in and whose answer has not been sent."""
    refuse: Callable[[], None]
    """From then on nothing is counted."""
    save: Callable[[float], None]
    """Steps with what was counted, and saves what is not on disk yet; at most so many seconds. May raise what ends the
    worker."""
    share: Callable[[float], None]
    """Shares it with the others in a round, if there are any; at most so many seconds."""
    clock: Callable[[], float]
    sleep: Callable[[float], None]

    def run(self) -> None:
        """Leaves.

        Raises:
            CheckpointError: the state could not be saved; it was shared all the same, where that was possible.
        """
        leave_by_s = self.clock() + self.leave_s
        self._wait_for_answers(leave_by_s - self.leave_s / 2)
        self.refuse()
        unsaved: CheckpointError | None = None
        try:
            self.save(max(_LEAST_S, leave_by_s - self.clock()))
        except CheckpointError as error:
            unsaved = error
        try:
            self.share(max(0.0, leave_by_s - self.clock()))
        except TrainerError as error:
            logger.warning("leaving without a last round: %s", error)
        self._wait_for_answers(leave_by_s)
        if unsaved is not None:
            raise unsaved

    def _wait_for_answers(self, until_s: float) -> None:
        while self.num_unanswered() and self.clock() < until_s:
            self.sleep(_LOOK_S)

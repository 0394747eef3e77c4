"""When a worker withdraws from its stage: it has lost touch with the others, or what it computes is of no use.

    rounds and steps, as they end (compute thread) → why to take up the others' state (main thread, four times a second)
    → `trainer.run.node.health.Health`, which ends the process at the third time in a row

Guarantees: a worker goes on as it is while nobody else has the stage's state, for there would be none to take up; and
what it withdraws for is rounds and steps of its own, beside what most of the others announce: no single one of them
sends it away. The trade-off: what it has counted since the last round is lost, so one failed round is borne, and the
second in a row is not (`swarm.join.max_failed_rounds`), unless the others hold another state.
"""

from __future__ import annotations

from collections.abc import Callable

from trainer.outer.engine.strategy import OuterResult
from trainer.pipeline.worker import StageStepper
from trainer.run.node.health import Health
from trainer.run.swarm.synchroniser import ReplicaSynchroniser, StagePeers


class Withdrawals:
    """Finds the reasons of one worker, and counts how often it has withdrawn.

    Args:
        health: counts, and ends a worker that withdraws again and again.
        synchroniser: knows what a round that failed means under the run's strategy.
        stepper: knows how far the stage has stepped.
        others: the stage's other workers.
        is_on_its_own: whether most of the others hold a state that this worker has never had, given the number of
            members of the last round that it shared.
    """

    def __init__(
        self,
        health: Health,
        synchroniser: ReplicaSynchroniser,
        stepper: StageStepper,
        others: StagePeers,
        is_on_its_own: Callable[[int], bool],
    ) -> None:
        self.has_lost_touch = False
        """Whether rounds failed while the others went on, or they hold another state; until it has joined them anew."""
        self._health = health
        self._synchroniser = synchroniser
        self._stepper = stepper
        self._others = others
        self._is_on_its_own = is_on_its_own
        self._last_round_size = 0  # Members of the last committed round, until that has been looked at.
        self._has_shared = False  # Whether it was in a committed round with others since it joined last.
        self._nonsense = ""  # Why what it computes is of no use.

    # -- in the compute thread -----------------------------------------------------------------------------------------

    def stepped(self, *, is_skipped: bool) -> None:
        """Notes a step; one is skipped if its loss or gradient was not finite."""
        self._nonsense = self._health.step(is_skipped=is_skipped) or self._nonsense

    def shared(self) -> None:
        """Notes a committed round with others' work in it."""
        self._has_shared = True
        self._health.shared()

    def note_round(self, result: OuterResult) -> bool:
        """Notes how a round ended; returns whether the worker has lost touch with the others by it."""
        is_lost = self._synchroniser.has_lost_touch(result)
        if is_lost:
            self.has_lost_touch = True
        return is_lost

    def handed_out(self, num_members: int) -> None:
        """Notes that the state which a round of so many members made is what the others are told of."""
        self._last_round_size = num_members

    # -- in the main thread --------------------------------------------------------------------------------------------

    def due_because(self) -> str:
        """Returns why the worker has to take up the others' state; empty: it has not, or there are no others."""
        num_members, self._last_round_size = self._last_round_size, 0
        is_on_its_own = num_members > 0 and self._is_on_its_own(num_members)
        reasons = (
            (self.has_lost_touch, "its rounds failed while the others went on, or they hold another state"),
            (self._synchroniser.is_lost(), "too many rounds behind the others, or its rounds failed without them"),
            (self._stepper.is_left_behind, "too many steps behind the others"),
            (is_on_its_own, "most of the others hold a state that it has never had"),
            (bool(self._nonsense), self._nonsense),
        )
        found = next((reason for holds, reason in reasons if holds), "")
        return found if found and (is_on_its_own or self._others.serving()) else ""

    def note(self, reason: str) -> None:
        """Counts that the worker withdraws; raises `UnfitNodeError` if it has done so too often in a row."""
        if self.has_lost_touch and not self._has_shared and not self._nonsense:
            self._health.missed_first_round(reason)
        else:
            self._health.withdraw(reason)

    def begins_again(self) -> None:
        """Notes that the worker leaves its state behind, and joins the others anew."""
        self._has_shared = False
        self._nonsense = ""

    def regained_touch(self) -> None:
        """Notes that the worker has taken up the others' state, or that they have none which it lacks."""
        self.has_lost_touch = False

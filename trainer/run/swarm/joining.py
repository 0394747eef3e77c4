"""How a worker comes to serve its stage: it waits for the others, catches up with them, and rejoins if it loses touch.

    hears of others, or has waited for them → takes up their state when their round begins (→ follows their rounds,
    until one begins that it is in) → serves → (withdraws: a delay, then all of it again)

`lifecycle` decides from what others report; here is who asks it, and what a worker is to the others meanwhile. While it
joins nobody waits in a round for it. From the moment that it serves they do, and so it serves nothing but the stage's
state. The trade-off: a newcomer takes no work for up to a round, and one that loses touch again within 30 s waits up to
16 s before it asks for a state once more, since each costs the others 12 bytes a parameter.
"""

from __future__ import annotations

import math
import time
from typing import Final, Protocol

from trainer.network.discovery.stage_report import StageReport
from trainer.pipeline.worker import StageStepper
from trainer.pipeline.worker.service import ServiceStatus
from trainer.run.config.run import JoinConfig
from trainer.run.swarm.lifecycle import StartupVersionCheck, catch_up, confirm_current, rejoin_delay_s
from trainer.run.swarm.state_exchange import StateExchange
from trainer.run.swarm.synchroniser import ReplicaSynchroniser, StagePeers
from trainer.run.swarm.withdrawals import Withdrawals

_LOOK_S: Final = 0.25


class Joiner(Protocol):
    """The worker that joins, as far as joining has to do with it; asked in its main thread."""

    def expects_others(self) -> bool:
        """Whether there is anybody to wait for."""
        ...

    def check_and_name(self) -> None:
        """Called once those that are there have been heard of; raises what keeps the worker from joining them."""
        ...

    def set_status(self, status: ServiceStatus, /) -> None:
        """Lets the worker's service do what goes with it, and announces it."""
        ...

    def is_stopping(self) -> bool:
        """Whether it is asked to stop."""
        ...

    def is_over(self) -> bool:
        """The same; raises what ends one of its tasks."""
        ...


class Joining:
    """One worker's way into its stage; for its main thread.

    Args:
        config: how long to wait, and where in a round.
        worker: who joins.
        others: the stage's other workers.
        states: takes up their state.
        synchroniser: says in which round the worker is.
        stepper: what follows the others' rounds until the worker serves.
        startup_check: decides whether it may serve where nobody else does.
        withdrawals: whether it has lost touch with the others.
        has_common_state: whether all hold one state after a round, so that nobody who is a round behind is in theirs.
        follows_rounds: whether the others' state is behind with each step, as with averaged gradients: then the worker
            follows their rounds before it serves.
    """

    def __init__(
        self,
        config: JoinConfig,
        worker: Joiner,
        others: StagePeers,
        states: StateExchange,
        synchroniser: ReplicaSynchroniser,
        stepper: StageStepper,
        startup_check: StartupVersionCheck,
        withdrawals: Withdrawals,
        *,
        has_common_state: bool,
        follows_rounds: bool,
    ) -> None:
        self.is_current = False
        """Whether the worker has the stage's state, which is worth saving and sharing."""
        self.joined_s = -math.inf
        """When it joined last, by `time.monotonic`."""
        self._rejoin_delay_s = 0.0
        self._config = config
        self._worker = worker
        self._others = others
        self._states = states
        self._synchroniser = synchroniser
        self._stepper = stepper
        self._startup_check = startup_check
        self._withdrawals = withdrawals
        self._has_common_state = has_common_state
        self._follows_rounds = follows_rounds

    def join(self) -> bool:
        """Takes up the others' state when their round begins, and serves from then on; False: it is asked to stop."""
        self._wait_for_others()
        if not self._catch_up():
            return False
        self.is_current = True
        self.joined_s = time.monotonic()
        if not self._follows_rounds:  # Or else it has followed their rounds.
            # From now on the others wait for it in a round.
            self._others.move_to(self._round_index())
        self._worker.set_status("serving")
        self._stepper.follows = False  # It takes part with what it counts from now on.
        return True

    def rejoin(self) -> bool:
        """Serves no longer, and joins again after a delay; returns as `join`."""
        self._worker.set_status("joining")
        self.is_current = False
        self._withdrawals.begins_again()
        self._others.move_to(-1)  # Nobody waits in a round for a worker without a state to contribute.
        self._states.let_go()
        self._rejoin_delay_s = rejoin_delay_s(self._rejoin_delay_s, time.monotonic() - self.joined_s)
        ends_s = time.monotonic() + self._rejoin_delay_s
        while time.monotonic() < ends_s and not self._worker.is_over():
            time.sleep(_LOOK_S)
        return self.join()

    def _wait_for_others(self) -> None:
        deadline_s = time.monotonic() + self._config.first_peers_s
        looks = self._worker.expects_others()
        while looks and time.monotonic() < deadline_s and not self._worker.is_stopping() and not self._others.serving():
            time.sleep(_LOOK_S)
        self._worker.check_and_name()

    def _catch_up(self) -> bool:
        """Waits until the worker may serve; False: it is asked to stop."""
        while True:
            may_serve = catch_up(
                self._config,
                others=self._serving_others,
                take_up=self._states.take_up,
                may_be_first=self._startup_check.may_serve,
                round_index=self._round_index,
                is_current=self._states.is_current,
                is_over=self._worker.is_over,
                clock=time.monotonic,
                sleep=time.sleep,
                max_behind=0 if self._has_common_state else None,
            )
            if not may_serve:
                return False
            self._withdrawals.regained_touch()
            if not self._follows_rounds or self._follows_until_current():
                return True
            if self._worker.is_over():
                return False

    def _follows_until_current(self) -> bool:
        """Takes part in rounds with nothing of its own until one begins that it is in; False: it has lost touch."""
        self._others.move_to(self._round_index())
        self._stepper.follows = True
        is_current = confirm_current(
            self._config,
            others=self._serving_others,
            round_index=self._round_index,
            is_lost=lambda: self._withdrawals.has_lost_touch,
            is_over=self._worker.is_over,
            clock=time.monotonic,
            sleep=time.sleep,
        )
        if not is_current:
            self._stepper.follows = False
            self._others.move_to(-1)
        return is_current

    def _serving_others(self) -> list[StageReport]:
        """Reports of those that serve; with averaged gradients how far their round is by what they last exchanged.

        A step may be over before it is announced that it has begun.
        """
        reports = self._others.serving()
        share = self._stepper.place_of_others if self._follows_rounds else None
        return reports if share is None else [it.model_copy(update={"round_position": share}) for it in reports]

    def _round_index(self) -> int:
        return self._synchroniser.place()[0]

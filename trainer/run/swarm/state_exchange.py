"""The stage's state between its workers: taken up by one that joins, handed out by those that serve.

    from a checkpoint → handed out if there have been rounds → (behind the others: theirs is fetched and adopted) →
    handed out: under DiLoCo after each round, else while somebody joins

Guarantees: a worker whose state is the others' already, or is newer than theirs, fetches nothing; a fetched state that
does not fit changes nothing and is passed over; a state is adopted between two jobs of the compute thread, and all
that was counted before it is dropped. The trade-off: a worker says that it joins, and the others then write a state for
it, 12 bytes a parameter under SPARTA. So that one that claims to join for ever costs them little, they write it every
few rounds only, and a newcomer gets one that is half as old as `swarm.sparta.max_staleness_rounds` allows.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Final, Protocol, TypeVar

from trainer.errors import IncompatiblePeerError, RefusedError
from trainer.pipeline.worker import StageStepper
from trainer.run.config import RunConfig
from trainer.run.node.network import Network
from trainer.run.swarm.building import BuiltStage
from trainer.run.swarm.lifecycle import is_ahead, version_of_state
from trainer.run.swarm.synchroniser import ReplicaSynchroniser, StagePeers

logger = logging.getLogger(__name__)

_STATE_WRITE_S: Final = 10.0
"""How long the others may take to write a state, once they have heard that somebody is here to take it up."""
_NEVER: Final = -1_000_000
T = TypeVar("T")


class InComputeThread(Protocol):
    """Calls a function in the compute thread, before anything that waits there."""

    def __call__(self, function: Callable[[], T], /) -> T:
        """Returns what the function does; raises what it raises, `TrainerError` if the thread does not answer."""
        ...


class StateExchange:
    """One worker's side of it; for the main thread, except `adopt` and `publish`.

    Args:
        config: the run's options.
        network: what fetches states and hands them out.
        others: the stage's other workers.
        built: the stage, whose replica a state is adopted by.
        synchroniser: the replica's rounds, which the state belongs to.
        stepper: counts anew from a state that was adopted.
        compute: runs what changes weights.
        adopted: called in the compute thread once another worker's state is the replica's.
        stop: whether the worker is asked to stop, so that no state is waited for.
    """

    def __init__(
        self,
        config: RunConfig,
        network: Network[Any],
        others: StagePeers,
        built: BuiltStage,
        synchroniser: ReplicaSynchroniser,
        stepper: StageStepper,
        *,
        compute: InComputeThread,
        adopted: Callable[[], None],
        stop: Callable[[], bool],
    ) -> None:
        self.is_resumed = False
        """Whether the worker goes on from a checkpoint, and has not lost touch since."""
        self._network = network
        self._others = others
        self._stage, self._replica = built.name, built.replica
        self._synchroniser = synchroniser
        self._stepper = stepper
        self._compute = compute
        self._adopted = adopted
        self._stop = stop
        self._is_diloco = config.moves_anchor
        self._averages_gradients = config.strategy == "grad"
        self._has_common_state = config.has_common_state
        self._wait_s = config.discovery.announce_interval_s + _STATE_WRITE_S
        self._every_rounds = max(1, config.swarm.sparta.max_staleness_rounds // 2)
        self._published_round = _NEVER

    # -- taking up -----------------------------------------------------------------------------------------------------

    def is_current(self) -> bool:
        """Whether the checkpoint this worker resumed from has the anchor that the others train from, bit for bit.

        Announced digests cost nothing, so the round that the others are in must be its own as well.
        """
        if not self.is_resumed or not self._is_diloco:
            return False
        return self._network.shares_common_state and self._round_index() >= self._others.frontier()

    def take_up(self) -> bool:
        """Fetches the others' state and puts it in place of this worker's; False: there was none to be had."""
        if self._has_common_state and not self._others.frontier() and not self._round_index():
            return True  # Before the first outer step all have the first weights as their anchor.
        if not self._replica.version and not any(report.version for report in self._others.serving()):
            return True  # Nobody has trained: all have the first weights.
        if self.is_resumed and is_ahead(self._replica.version, self._others.serving_workers()):
            logger.info("the others of %s are behind this worker's checkpoint, and will follow", self._stage)
            return True
        if self._averages_gradients:
            self._network.let_go()  # One step behind is no better than none.
        shared = self._network.catch_up(wait_s=self._wait_s, stop=self._stop)
        if shared is None:
            return self._network.holds_common_state
        try:
            self._compute(lambda: self.adopt(shared))
        except (IncompatiblePeerError, RefusedError) as error:
            if isinstance(error, RefusedError) and error.reason != "internal":
                raise
            logger.warning("a state the others hand out does not fit, and is passed over: %s", error)
            self._network.pass_over_fetched()
            return False
        logger.info("took up the others' state of round %d", self._round_index())
        return True

    def adopt(self, shared: Any) -> None:
        """In the compute thread: weights, schedule and version are the others' from now on."""
        self._synchroniser.adopt(shared)
        self._adopted()
        versions = [said.stage.version for said in self._network.donors if said.stage is not None and not said.parts]
        if self._averages_gradients:  # The version is part of the state, which the others have left soon.
            self._stepper.start_over(shared.num_inner_steps)
            return
        self._stepper.start_over(version_of_state(shared.num_inner_steps, versions))
        self._network.publish(shared)

    def let_go(self) -> None:
        """Holds nothing for the stage's state any more: neither what was resumed from nor what was fetched."""
        self.is_resumed = False
        self._network.let_go()

    # -- handing out ---------------------------------------------------------------------------------------------------

    def publish_resumed(self) -> None:
        """Hands out what a checkpoint brought back: to the others it is worth as much as the result of a round."""
        if self._has_common_state and self._round_index():
            self._network.publish(self._synchroniser.trainer.shared_state())

    def publish(self, members: tuple[str, ...]) -> None:
        """In the compute thread, under DiLoCo: hands out the state that a committed round of these members made."""
        self._network.publish(self._synchroniser.trainer.shared_state(), members)

    def publish_for_newcomers(self) -> None:
        """Hands out a state that changes with each step, if somebody is there to take it up.

        Of SPARTA not in each round, since somebody may claim to join for ever, and 12 bytes a parameter are copied each
        time. A state half as old as may be missed is good enough. With averaged gradients nothing but the newest is of
        use, and nothing is copied.
        """
        if self._is_diloco or not any(report.status == "joining" for report in self._others.reports()):
            return
        round_index = self._round_index()
        if self._averages_gradients and round_index > self._published_round:
            self._published_round = round_index
            self._network.publish(self._synchroniser.trainer.shared_state())
        elif not self._averages_gradients and round_index >= self._published_round + self._every_rounds:
            self._published_round = round_index
            self._network.publish(self._compute(self._synchroniser.trainer.shared_state))

    def _round_index(self) -> int:
        return self._synchroniser.place()[0]

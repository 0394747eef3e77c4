"""Replica synchronisers: one interface over DiLoCo and SPARTA for the worker that holds a stage's replica.

A worker asks the same of both: take part in rounds, say how far the round is, hand out a state, take one up, and say
when it has lost touch. They differ in what a state is (DiLoCo's anchor, which all members hold bit for bit; SPARTA's
parameters and moments, each replica's own) and in when a newcomer counts.

Everything here runs in the worker's compute thread, except `place` and `is_lost`, which read numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol, TypeVar

from torch import nn
from torch.optim import Optimizer

from trainer.network.transfer import choose_state
from trainer.outer.diloco import DiLoCoTrainer, FragmentPlan, SharedState, synchronised_parameters
from trainer.outer.diloco.flat import FlatLayout
from trainer.outer.engine.collective import Collective
from trainer.outer.engine.strategy import OuterResult
from trainer.outer.sparta import NOBODY, OtherRounds, SpartaFit, SpartaState, SpartaTrainer, choose_recent_state
from trainer.run.config import RunConfig
from trainer.run.node.peer_book import StateChoice
from trainer.run.node.state_form import StateForm
from trainer.run.swarm.compatibility import StageFit

__all__ = [
    "DilocoSynchroniser",
    "ReplicaSynchroniser",
    "RoundPlace",
    "SpartaSynchroniser",
    "state_choice",
    "state_form",
]

S = TypeVar("S")

RoundPlace = tuple[int, float]
"""The round that is next, and how much of the way there is behind."""


class ReplicaSynchroniser(Protocol[S]):
    """One replica among those of its stage."""

    def after_inner_step(self, num_batches: int = 1) -> OuterResult | None:
        """Counts an optimizer step; see `trainer.outer.engine.strategy.OuterStrategy`."""
        ...

    def answer_others(self) -> OuterResult | None:
        """Takes part in a round that others wait for, between two steps."""
        ...

    def drain(self) -> OuterResult | None:
        """Ends the round in the background, if there is one."""
        ...

    def place(self) -> RoundPlace:
        """Where the stage's round stands, as this replica knows."""
        ...

    def share(self) -> OuterResult | None:
        """Has a round now, whatever is due, and waits for it: before leaving, so that little work is lost."""
        ...

    def is_lost(self) -> bool:
        """Whether this replica knows by itself that it has to take up the others' state."""
        ...

    def shared_state(self) -> S:
        """What a newcomer takes up."""
        ...

    def adopt(self, shared: S) -> None:
        """Takes up the others' state in place of one's own.

        Raises:
            IncompatiblePeerError: it does not fit; nothing was changed.
        """
        ...

    def has_lost_touch(self, outcome: OuterResult) -> bool:
        """Whether this replica has to take up the others' state, after a round that ended so."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint; parameters and optimizer are the stage's."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from a checkpoint.

        Raises:
            CheckpointMismatchError: it is of another model or strategy.
        """
        ...


class DilocoSynchroniser:
    """A replica under DiLoCo: rounds move a common anchor.

    A round that fails for everybody costs nobody anything: its work is part of the next. So rounds that fail send this
    replica to the others for their state only where these have made some without it.

    Args:
        config: of the run.
        module: the stage.
        collective: the workers of the stage.
        behind: whether the last round failed because the others hold another state.
        move_to: tells the collective which round this replica trains towards.
        vocab_rows: of the model.
        frontier: the round the stage's other workers are at (`frontier_of`); 0 if nothing is known.
    """

    def __init__(
        self,
        config: RunConfig,
        module: nn.Module,
        collective: Collective,
        behind: Callable[[], bool],
        move_to: Callable[[int], None],
        vocab_rows: int,
        frontier: Callable[[], int] = NOBODY.frontier,
    ) -> None:
        self._trainer = DiLoCoTrainer(module, config.diloco, collective, vocab_rows=vocab_rows)
        self._inner_steps = config.diloco.inner_steps / config.diloco.num_fragments
        self._max_failed_rounds = config.swarm.join.max_failed_rounds
        self._failed_in_a_row = 0
        self._behind = behind
        self._move_to = move_to
        self._frontier = frontier

    def after_inner_step(self, num_batches: int = 1) -> OuterResult | None:
        """See `ReplicaSynchroniser`."""
        return self._trainer.after_inner_step(num_batches)

    def answer_others(self) -> OuterResult | None:
        """See `ReplicaSynchroniser`."""
        return self._trainer.answer_others()

    def drain(self) -> OuterResult | None:
        """See `ReplicaSynchroniser`."""
        return self._trainer.drain()

    def place(self) -> RoundPlace:
        """See `ReplicaSynchroniser`."""
        return self._trainer.round_index, min(1.0, self._trainer.inner_step / self._inner_steps)

    def share(self) -> OuterResult | None:
        """See `ReplicaSynchroniser`."""
        return self._trainer.share()

    def is_lost(self) -> bool:
        """Never by itself: a round says so."""
        return False

    def shared_state(self) -> SharedState:
        """See `ReplicaSynchroniser`."""
        return self._trainer.shared_state()

    def adopt(self, shared: SharedState) -> None:
        """See `ReplicaSynchroniser`."""
        self._trainer.adopt(shared)
        self._failed_in_a_row = 0
        self._move_to(self._trainer.round_index)

    def has_lost_touch(self, outcome: OuterResult) -> bool:
        """At once where the others hold another state; else after rounds failed in a row that they made without it."""
        self._failed_in_a_row = 0 if outcome.committed else self._failed_in_a_row + 1
        if outcome.committed:
            return False
        failed_alone = self._frontier() > self._trainer.round_index
        return self._behind() or (failed_alone and self._failed_in_a_row >= self._max_failed_rounds)

    def state_dict(self) -> dict[str, Any]:
        """See `ReplicaSynchroniser`."""
        return self._trainer.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `ReplicaSynchroniser`."""
        self._trainer.load_state_dict(state)
        self._move_to(self._trainer.round_index)


class SpartaSynchroniser:
    """A replica under async SPARTA: rounds average slices of the parameters in the background.

    Args:
        config: of the run.
        module: the stage.
        optimizer: of its parameters.
        collective: the workers of the stage.
        others: what is known of their rounds.
        after_average: projects, in a subspace.
        kept_axes: by name of a matrix, the axis along which values are averaged together; for a subspace too.
        vocab_rows: of the model.
    """

    def __init__(
        self,
        config: RunConfig,
        module: nn.Module,
        optimizer: Optimizer,
        collective: Collective,
        others: OtherRounds,
        after_average: Callable[[nn.Module], None] | None,
        kept_axes: Mapping[str, int],
        vocab_rows: int,
    ) -> None:
        self._trainer = SpartaTrainer(
            module,
            config.swarm.sparta,
            collective,
            optimizer=optimizer,
            others=others,
            after_average=after_average,
            kept_axes=kept_axes,
            vocab_rows=vocab_rows,
        )
        self._options = config.swarm.sparta

    def after_inner_step(self, num_batches: int = 1) -> OuterResult | None:
        """See `ReplicaSynchroniser`."""
        return self._trainer.after_inner_step(num_batches)

    def answer_others(self) -> OuterResult | None:
        """Nobody stands still for a round in the background: it has time until the next step."""
        return None

    def drain(self) -> OuterResult | None:
        """See `ReplicaSynchroniser`."""
        return self._trainer.drain()

    def place(self) -> RoundPlace:
        """See `ReplicaSynchroniser`."""
        return self._trainer.round_index, min(1.0, self._trainer.inner_step / self._options.every_steps)

    def share(self) -> OuterResult | None:
        """Ends the round in the background: a slice of the parameters; all of them would take a whole cycle."""
        return self._trainer.drain()

    def is_lost(self) -> bool:
        """Too far behind, or with parameters that are not finite."""
        return self._trainer.must_rejoin

    def shared_state(self) -> SpartaState:
        """See `ReplicaSynchroniser`."""
        return self._trainer.shared_state()

    def adopt(self, shared: SpartaState) -> None:
        """See `ReplicaSynchroniser`."""
        self._trainer.adopt(shared)

    def has_lost_touch(self, outcome: OuterResult) -> bool:
        """After some rounds that failed in a row while the others went on, or when too many were missed."""
        del outcome
        return self._trainer.must_rejoin

    def state_dict(self) -> dict[str, Any]:
        """See `ReplicaSynchroniser`."""
        return self._trainer.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `ReplicaSynchroniser`."""
        self._trainer.load_state_dict(state)


def state_form(config: RunConfig, module: nn.Module, vocab_rows: int) -> StateForm[Any]:
    """The form of the states that workers of a stage hand each other."""
    parameters = synchronised_parameters(module)
    if config.strategy == "async_sparta":
        return SpartaFit(FlatLayout.of(parameters), vocab_rows)
    return StageFit(FragmentPlan.of(parameters, config.diloco.num_fragments), vocab_rows)


def state_choice(config: RunConfig) -> StateChoice:
    """Which of the others' states a worker takes up."""
    if config.strategy == "async_sparta":
        return partial(choose_recent_state, max_staleness_rounds=config.swarm.sparta.max_staleness_rounds)
    return choose_state

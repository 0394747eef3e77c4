"""Replica synchronisers: one interface over DiLoCo and SPARTA for the worker that holds a stage's replica.

They differ in what a state is (DiLoCo's anchor, which all members hold bit for bit; SPARTA's parameters and moments,
each replica's own) and in when a newcomer counts. Everything here runs in the worker's compute thread, except `place`
and `is_lost`, which read numbers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Generic, TypeVar

from torch import nn

from trainer.network.transfer import choose_state
from trainer.outer.diloco import DiLoCoTrainer, FragmentPlan, synchronised_parameters
from trainer.outer.diloco.flat import FlatLayout
from trainer.outer.engine.collective import Collective
from trainer.outer.engine.strategy import OuterResult
from trainer.outer.sparta import OtherRounds, SpartaFit, SpartaTrainer, choose_recent_state
from trainer.run.config import RunConfig
from trainer.run.node.network import StateChoice
from trainer.run.node.state_form import StateForm
from trainer.run.swarm.building import BuiltStage
from trainer.run.swarm.compatibility import StageFit

__all__ = [
    "DilocoSynchroniser",
    "ReplicaSynchroniser",
    "RoundPlace",
    "SpartaSynchroniser",
    "state_choice",
    "state_form",
]

TrainerT = TypeVar("TrainerT", DiLoCoTrainer, SpartaTrainer)

RoundPlace = tuple[int, float]
"""The next round, and how much of the way there is done, 0 to 1."""


class ReplicaSynchroniser(ABC, Generic[TrainerT]):
    """One replica among those of its stage.

    Args:
        trainer: the strategy.
        steps_per_round: optimizer steps from one round to the next.
    """

    def __init__(self, trainer: TrainerT, steps_per_round: float) -> None:
        self._trainer: TrainerT = trainer
        self._steps_per_round = steps_per_round

    def after_inner_step(self, num_batches: int = 1) -> OuterResult | None:
        """Counts an optimizer step; see `trainer.outer.engine.strategy.OuterStrategy`."""
        return self._trainer.after_inner_step(num_batches)

    def answer_others(self) -> OuterResult | None:
        """Takes part, between two steps, in a round that others wait for."""
        return None

    def drain(self) -> OuterResult | None:
        """Ends the round in the background, if there is one."""
        return self._trainer.drain()

    def place(self) -> RoundPlace:
        """Where the stage's round stands, as far as this replica knows."""
        return self._trainer.round_index, min(1.0, self._trainer.inner_step / self._steps_per_round)

    @abstractmethod
    def share(self) -> OuterResult | None:
        """Has a round now and waits for it: before the worker leaves, so that little work is lost."""

    @abstractmethod
    def is_lost(self) -> bool:
        """Whether this replica knows by itself that it has to take up the others' state."""

    @abstractmethod
    def has_lost_touch(self, result: OuterResult) -> bool:
        """Whether this replica has to take up the others' state after a round that ended so."""

    def shared_state(self) -> Any:
        """What a newcomer takes up."""
        return self._trainer.shared_state()

    def adopt(self, shared: Any) -> None:
        """Takes up the others' state in place of its own.

        Raises:
            IncompatiblePeerError: it does not fit; nothing was changed.
        """
        self._trainer.adopt(shared)

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint; parameters and optimizer are the stage's."""
        return self._trainer.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from a checkpoint.

        Raises:
            CheckpointMismatchError: it is of another model or strategy.
        """
        self._trainer.load_state_dict(state)


class DilocoSynchroniser(ReplicaSynchroniser[DiLoCoTrainer]):
    """A replica under DiLoCo: rounds move a common anchor.

    A round that fails for everybody costs nobody anything: its work is part of the next. So failed rounds send this
    replica to the others for their state only if the others have made some without it.

    Args:
        config: of the run.
        module: the stage.
        collective: the workers of the stage.
        others: what is known of their rounds.
        behind: whether the last round failed because the others hold another state.
        vocab_rows: of the model.
    """

    def __init__(
        self,
        config: RunConfig,
        module: nn.Module,
        collective: Collective,
        others: OtherRounds,
        behind: Callable[[], bool],
        vocab_rows: int,
    ) -> None:
        trainer = DiLoCoTrainer(module, config.diloco, collective, vocab_rows=vocab_rows)
        super().__init__(trainer, config.diloco.inner_steps / config.diloco.num_fragments)
        self._max_failed_rounds = config.swarm.join.max_failed_rounds
        self._failed_in_a_row = 0
        self._others = others
        self._behind = behind

    def answer_others(self) -> OuterResult | None:
        """See `ReplicaSynchroniser`."""
        return self._trainer.answer_others()

    def share(self) -> OuterResult | None:
        """See `ReplicaSynchroniser`."""
        return self._trainer.share()

    def is_lost(self) -> bool:
        """Never by itself: a round shows it."""
        return False

    def has_lost_touch(self, result: OuterResult) -> bool:
        """At once if the others hold another state; else after failed rounds in a row that they made without it."""
        self._failed_in_a_row = 0 if result.committed else self._failed_in_a_row + 1
        if result.committed:
            return False
        failed_alone = self._others.frontier() > self._trainer.round_index
        return self._behind() or (failed_alone and self._failed_in_a_row >= self._max_failed_rounds)

    def adopt(self, shared: Any) -> None:
        """See `ReplicaSynchroniser`."""
        super().adopt(shared)
        self._failed_in_a_row = 0
        self._others.move_to(self._trainer.round_index)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `ReplicaSynchroniser`."""
        super().load_state_dict(state)
        self._others.move_to(self._trainer.round_index)


class SpartaSynchroniser(ReplicaSynchroniser[SpartaTrainer]):
    """A replica under async SPARTA: rounds average slices of the parameters in the background.

    Training does not stand still for such a round, which has time until the next step: so there is none to answer.

    Args:
        config: of the run.
        built: the stage.
        collective: the workers of the stage.
        others: what is known of their rounds.
        vocab_rows: of the model.
    """

    def __init__(
        self, config: RunConfig, built: BuiltStage, collective: Collective, others: OtherRounds, vocab_rows: int
    ) -> None:
        options = config.swarm.sparta
        trainer = SpartaTrainer(
            built.module,
            options,
            collective,
            optimizer=built.optimizer,
            others=others,
            after_average=built.after_average,
            kept_axes=built.kept_axes,
            vocab_rows=vocab_rows,
        )
        super().__init__(trainer, options.every_steps)

    def share(self) -> OuterResult | None:
        """Ends the round in the background: a slice of the parameters; all of them would take a whole cycle."""
        return self.drain()

    def is_lost(self) -> bool:
        """Too far behind, or with parameters that are not finite."""
        return self._trainer.must_rejoin

    def has_lost_touch(self, result: OuterResult) -> bool:
        """After failed rounds in a row while the others went on, or when too many were missed."""
        del result
        return self.is_lost()


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

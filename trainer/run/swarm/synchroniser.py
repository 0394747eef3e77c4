"""The rounds of one stage's replica: DiLoCo, SPARTA or averaged gradients behind one interface, and rounds of two.

The strategies differ in what a state is (DiLoCo's anchor, which all members hold bit for bit; SPARTA's parameters and
moments, each replica's own; with averaged gradients weights and moments that all hold) and in when a newcomer counts.
All of it is for the worker's compute thread, except `StagePeers` and what only reads numbers.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from trainer.errors import IncompatiblePeerError, RoundFailedError
from trainer.inner import lr_at
from trainer.network.discovery import Announcement
from trainer.network.discovery.stage_report import StageReport
from trainer.network.rpc import Peer
from trainer.network.transfer import Descriptor, Expectation, choose_state
from trainer.outer.diloco import DiLoCoTrainer, FragmentPlan, synchronised_parameters
from trainer.outer.diloco.flat import FlatLayout
from trainer.outer.engine.collective import (
    Collective,
    Contribution,
    FollowingPhase,
    PhasedCollective,
    RoundReport,
    RoundResult,
)
from trainer.outer.engine.strategy import OuterResult
from trainer.outer.grad import GradFit, GradTrainer
from trainer.outer.sparta import OtherRounds, SpartaFit, SpartaTrainer, choose_recent_state, frontier_of
from trainer.run.config import RunConfig
from trainer.run.node.network import Network
from trainer.run.node.peer_book import StateChoice
from trainer.run.node.state_form import DilocoStates, StateForm, check_meta, check_vectors
from trainer.run.swarm.building import BuiltStage
from trainer.run.swarm.shape import target_tokens_of

logger = logging.getLogger(__name__)

_MIN_COSINE = -0.5
_MAX_RATIO = 10.0
_MIN_OWN_SHARE = 1 / 3  # Of the weight: a replica that has done much less than the other cannot tell what is usual.
_DISTRUST_S = 3600.0


class StagePeers:
    """The others in a stage's rounds (`trainer.outer.sparta.OtherRounds`), for any thread: workers, and whole nodes."""

    def __init__(self, network: Network[Any]) -> None:
        self._network = network

    def reports(self) -> list[StageReport]:
        """What each reports of itself."""
        return [said.stage for said in self._network.alike() if said.stage is not None]

    def serving(self) -> list[StageReport]:
        """Reports of those that serve."""
        return [report for report in self.reports() if report.status == "serving"]

    def serving_workers(self) -> list[StageReport]:
        """Reports of the workers among them, whose versions are the stage's."""
        return [said.stage for said in self._workers() if said.stage is not None and said.stage.status == "serving"]

    def peers(self) -> tuple[Peer, ...]:
        """Where the workers are, who count micro-batches of one pipeline."""
        return tuple(said.peer() for said in self._workers())

    def frontier(self) -> int:
        """The round of those that serve."""
        return frontier_of([report.round_index for report in self.serving()])

    def move_to(self, round_index: int) -> None:
        """See `trainer.outer.sparta.OtherRounds`."""
        self._network.collective.move_to(round_index)

    def _workers(self) -> list[Announcement]:
        return [said for said in self._network.alike() if said.stage is not None and not said.parts]


class ReplicaSynchroniser:
    """One replica among those of its stage.

    Under DiLoCo a round that fails for everybody costs nobody anything: its work is part of the next. So failed rounds
    send this replica to the others for their state only if the others have made some without it. Under SPARTA training
    does not stand still for a round, which has time until the next step: so there is none to answer. Averaged gradients
    are stepped with by `trainer.pipeline.worker.grad_stepping.GradStepper`, which asks `GradTrainer` itself.

    ``behind`` tells whether the last round failed because the others hold another state (not SPARTA). ``averager``
    averages gradients in place of ``collective``, which then averages slices alone.
    """

    def __init__(
        self,
        config: RunConfig,
        built: BuiltStage,
        collective: Collective,
        others: OtherRounds,
        behind: Callable[[], bool],
        vocab_rows: int,
        averager: Collective | None = None,
    ) -> None:
        self._replica = built.replica
        self._others = others
        self._behind = behind
        self._max_failed_rounds = config.swarm.join.max_failed_rounds
        self._failed_in_a_row = 0
        self.trainer: DiLoCoTrainer | SpartaTrainer | GradTrainer
        if config.strategy == "grad":
            self.trainer = GradTrainer(
                built.module,
                config.grad,
                collective,
                optimizer=built.optimizer,
                lr_of=lambda num_steps, num_tokens: lr_at(num_steps, config.inner, num_tokens),
                source=built.replica,
                max_norm=built.replica.clip_norm,
                target_tokens=target_tokens_of(config),
                averager=averager,
                powersgd_rank=config.powersgd_rank,
                auto_step_s=config.swarm.worker.auto_step_s,
                after_update=built.after_average,
                kept_axes=built.kept_axes,
                vocab_rows=vocab_rows,
            )
        elif config.strategy == "async_sparta":
            self.trainer = SpartaTrainer(
                built.module,
                config.swarm.sparta,
                collective,
                optimizer=built.optimizer,
                others=others,
                after_average=built.after_average,
                kept_axes=built.kept_axes,
                vocab_rows=vocab_rows,
            )
        else:
            self.trainer = DiLoCoTrainer(
                built.module,
                config.outer,
                collective,
                vocab_rows=vocab_rows,
                powersgd_rank=config.powersgd_rank,
                residual_decay=config.residual_decay,
            )
        self._steps_per_round: float = _steps_per_round(config)

    def configure(self, config: RunConfig) -> None:
        """Goes on by what a change of the run has put in force: cadence, and under DiLoCo the outer step."""
        if isinstance(self.trainer, SpartaTrainer):
            self.trainer.configure(config.swarm.sparta)
        elif isinstance(self.trainer, DiLoCoTrainer):
            self.trainer.configure(config.outer)
        else:
            self.trainer.configure(
                lr_of=lambda num_steps, num_tokens: lr_at(num_steps, config.inner, num_tokens),
                max_norm=self._replica.clip_norm,
                target_tokens=target_tokens_of(config),
                auto_step_s=config.swarm.worker.auto_step_s,
            )
        self._steps_per_round = _steps_per_round(config)

    @property
    def gradients(self) -> GradTrainer | None:
        """What steps by averaged gradients; None under other strategies."""
        return self.trainer if isinstance(self.trainer, GradTrainer) else None

    @property
    def diloco(self) -> DiLoCoTrainer | None:
        """What moves the common anchor; None under other strategies."""
        return self.trainer if isinstance(self.trainer, DiLoCoTrainer) else None

    def after_inner_step(self, num_batches: int = 1) -> OuterResult | None:
        """Counts an optimizer step; see `trainer.outer.engine.strategy.OuterStrategy`."""
        return None if isinstance(self.trainer, GradTrainer) else self.trainer.after_inner_step(num_batches)

    def answer_others(self) -> OuterResult | None:
        """Takes part, between two steps, in a round that others wait for."""
        return self.trainer.answer_others() if isinstance(self.trainer, DiLoCoTrainer) else None

    def share(self) -> OuterResult | None:
        """Has a round before the worker leaves; of SPARTA that under way: all slices would take a whole cycle."""
        return self.trainer.share() if isinstance(self.trainer, DiLoCoTrainer) else self.drain()

    def drain(self) -> OuterResult | None:
        """Waits for a round under way; of gradients there is none where a worker leaves (`GradStepper.flush`)."""
        return None if isinstance(self.trainer, GradTrainer) else self.trainer.drain()

    def place(self) -> tuple[int, float]:
        """The stage's next round as far as this replica knows, and how much of the way there is done, 0 to 1."""
        if isinstance(self.trainer, GradTrainer):
            return self.trainer.round_index, self.trainer.round_share
        return self.trainer.round_index, min(1.0, self.trainer.inner_step / self._steps_per_round)

    def is_lost(self) -> bool:
        """Whether it knows by itself that it is too far behind or not finite; under DiLoCo a round tells."""
        return isinstance(self.trainer, SpartaTrainer) and self.trainer.must_rejoin

    def has_lost_touch(self, result: OuterResult) -> bool:
        """Whether this replica has to take up the others' state after a round that ended so.

        At once if the others hold another state; else after failed rounds in a row that they made alone.
        """
        if isinstance(self.trainer, SpartaTrainer):
            return self.is_lost()
        self._failed_in_a_row = 0 if result.committed else self._failed_in_a_row + 1
        if result.committed:
            return False
        failed_alone = self._others.frontier() > self.trainer.round_index
        return self._behind() or (failed_alone and self._failed_in_a_row >= self._max_failed_rounds)

    def adopt(self, shared: Any) -> None:
        """Takes up the others' state, or changes nothing and raises `IncompatiblePeerError`."""
        self.trainer.adopt(shared)
        self._failed_in_a_row = 0
        self._others.move_to(self.trainer.round_index)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from a checkpoint; raises `CheckpointMismatchError` if it is of another model or strategy."""
        self.trainer.load_state_dict(state)
        if not isinstance(self.trainer, SpartaTrainer):
            self._others.move_to(self.trainer.round_index)


def _steps_per_round(config: RunConfig) -> float:
    if config.strategy == "grad":
        return 1.0
    if config.strategy == "async_sparta":
        return config.swarm.sparta.every_steps
    return config.outer.inner_steps / config.outer.num_fragments


class JudgedCollective:
    """A `Collective` that refuses the average of two if the other's part contradicts this replica's own.

    Among three replicas or more the collective's rule leaves out the one that differs most. Of two, neither is in the
    minority. But what two honest replicas learn in the same rounds points the same way, or in no particular direction,
    and is of similar size. So each takes its own contribution out of the result; if the rest points against its own
    work, or is many times as large, both go on alone for an hour, and audits may show which of them is wrong.

    ``distrust`` is told a key to have nothing to do with, and for how many seconds. With ``num_slices`` (SPARTA) values
    are contributed, from which the last average of the same slice is subtracted (4 bytes a parameter); 0: changes.

    Of sparse contributions (``is_sparse``) the average is the other's wherever this replica sent nothing, and is there
    compared with what this replica has not sent: in direction alone, since both are clipped to one norm.
    """

    def __init__(
        self,
        collective: PhasedCollective,
        own_id: str,
        distrust: Callable[[str, float], None],
        *,
        num_slices: int = 0,
        is_sparse: bool = False,
    ) -> None:
        self._collective = collective
        self._own_id = own_id
        self._distrust = distrust
        self._num_slices = num_slices
        self._is_sparse = is_sparse
        self._averages: dict[int, Tensor] = {}  # The last of each slice.
        self.requested = collective.requested
        self.close = collective.close

    def reduce(self, contribution: Contribution) -> RoundResult:
        """See `Collective`; raises `RoundFailedError` also if the other's part contradicts this replica's own."""
        result = self._collective.reduce(contribution)
        if self._is_sparse:
            self._judge_sparse(contribution, result)
            return result
        if not self._num_slices:
            self._judge(result.report, contribution.vector, result.vector)
            return result
        slice_index = contribution.round_index % self._num_slices
        base = self._averages.get(slice_index)
        if base is not None and base.shape == result.vector.shape:
            self._judge(result.report, contribution.vector - base, result.vector - base)
        self._averages[slice_index] = result.vector.clone()
        return result

    def reduce_in_phases(self, contribution: Contribution, following: FollowingPhase) -> RoundResult:
        """See `PhasedCollective`; the second phase is judged, since the first only chooses directions."""
        own: list[Tensor] = []

        def remembered(first: RoundResult) -> Contribution:
            second = following(first)
            own.append(second.vector)
            return second

        result = self._collective.reduce_in_phases(contribution, remembered)
        self._judge(result.report, own[-1], result.vector)
        return result

    def _judge_sparse(self, contribution: Contribution, result: RoundResult) -> None:
        """The same for a contribution of which the greatest values were sent, and the rest is in the residual."""
        if result.residual is None or self._share(result.report) is None:
            return
        own = contribution.vector if contribution.residual is None else contribution.vector + contribution.residual
        is_other_s = (own == result.residual) & (result.vector != 0)
        self._refuse_if(contradiction_of(own[is_other_s], result.vector[is_other_s], math.inf), result.report)

    def _judge(self, report: RoundReport, own: Tensor, average: Tensor) -> None:
        """Raises `RoundFailedError` if the average is refused."""
        share = self._share(report)
        if share is not None:
            self._refuse_if(contradiction_of(own, (average - share * own) / (1 - share)), report)

    def _share(self, report: RoundReport) -> float | None:
        """This replica's share of an average of two; None: it is none, or the replica has done too little to judge."""
        if len(report.members) != 2 or self._own_id not in report.members or report.completeness < 1:
            return None
        place = report.members.index(self._own_id)
        weights = report.weights or (1.0, 1.0)
        share = weights[place] / sum(weights) if sum(weights) else 0.0
        return share if _MIN_OWN_SHARE <= share < 1 else None

    def _refuse_if(self, contradiction: str | None, report: RoundReport) -> None:
        if contradiction is None:
            return
        other = report.members[1 - report.members.index(self._own_id)]
        logger.error(
            "round %d: the contribution of %s contradicts this worker's own work (%s): the average is not taken, and "
            "there are no more rounds with it for %.0f s; one of the two is wrong, a third worker would show which",
            report.round_index,
            other[:12],
            contradiction,
            _DISTRUST_S,
        )
        self._distrust(other, _DISTRUST_S)
        raise RoundFailedError(
            f"round {report.round_index}: {other[:12]} contradicts this worker's own work: {contradiction}"
        )


def contradiction_of(own: Tensor, other: Tensor, max_ratio: float = _MAX_RATIO) -> str | None:
    """Why another's contribution cannot be that of an honest replica; None: it can."""
    own, other = own.double(), other.double()
    own_norm, other_norm = float(own.norm()), float(other.norm())
    if not own_norm or not other_norm:
        return None
    cosine = float(torch.dot(own, other)) / (own_norm * other_norm)
    if cosine < _MIN_COSINE:
        return f"cosine {cosine:.2f}, {_MIN_COSINE:g} or more expected"
    if other_norm > max_ratio * own_norm:
        return f"{other_norm / own_norm:.0f} times as large, at most {max_ratio:g} times expected"
    return None


@dataclass(frozen=True, slots=True)
class _StageFit(DilocoStates):
    """The form of a stage's state under DiLoCo (a `StateForm`); its vocabulary does not grow."""

    plan: FragmentPlan
    vocab_rows: int

    def expectation(self, descriptor: Descriptor) -> Expectation:
        """See `StateForm.expectation`."""
        meta, layout = check_meta(descriptor.meta), self.plan.whole()
        layout.require_same(meta.layout_digest, "the state to adopt")
        if meta.vocab_rows != self.vocab_rows or meta.fragment >= len(self.plan.layouts):
            raise IncompatiblePeerError(
                f"expected a state of {self.vocab_rows} rows of vocabulary and {len(self.plan.layouts)} fragments, "
                f"found one of {meta.vocab_rows} rows whose next fragment is {meta.fragment}"
            )
        return check_vectors(descriptor, layout.num_values, max_bytes=14 * layout.num_values)


def state_form(config: RunConfig, module: nn.Module, vocab_rows: int) -> StateForm[Any]:
    """The form of the states that workers of a stage hand each other."""
    parameters = synchronised_parameters(module)
    if config.strategy == "grad":
        return GradFit.of(FlatLayout.of(parameters), vocab_rows, config.powersgd_rank)
    if config.strategy == "async_sparta":
        return SpartaFit(FlatLayout.of(parameters), vocab_rows)
    return _StageFit(FragmentPlan.of(parameters, config.outer.num_fragments), vocab_rows)


def state_choice(config: RunConfig) -> StateChoice:
    """Which of the others' states a worker takes up."""
    if config.strategy == "async_sparta":
        return partial(choose_recent_state, max_staleness_rounds=config.swarm.sparta.max_staleness_rounds)
    return choose_state

"""DiLoCo: nodes train alone for many steps, then move a common anchor by what they agree on.

An outer step is a transaction: prepare (pseudo-gradient = anchor − parameters), collective, commit (outer step on a
copy of the anchor, installed by one assignment). If it fails, nothing has changed, and the next pseudo-gradient,
measured from the old anchor, contains its work. Fragments and overlap are those of Streaming DiLoCo (arXiv 2501.18512,
algorithm 2): ``parameters ← α·parameters + (1 − α)·new anchor``, the anchor without a share of the steps done
meanwhile; but at most one round is under way, which simplifies restarts.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from trainer.errors import RoundFailedError, RoundLeftError, StateBehindError, TrainerUsageError
from trainer.outer.diloco.config import DiLoCoConfig
from trainer.outer.diloco.flat import (
    FragmentPlan,
    ModelParameters,
    ParameterAccess,
    is_finite,
    synchronised_parameters,
)
from trainer.outer.diloco.outer import OuterOptimizer
from trainer.outer.diloco.state import FragmentState, ReplicaState, SavedDiLoCo, SavedRound, SharedState, grown_state
from trainer.outer.engine.collective import Collective, Contribution, RoundResult
from trainer.outer.engine.daemon_call import start_daemon
from trainer.outer.engine.powersgd import with_powersgd
from trainer.outer.engine.strategy import OuterResult, PendingWork, StateValue

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _BackgroundRound:
    """A round under way in a thread, which works on the round's own tensors only."""

    contribution: Contribution
    result: Future[RoundResult]
    steps_left: int  # Inner steps until its result is merged.


class DiLoCoTrainer:
    """Keeps one node's model in step with the others'. For the training thread alone.

    The anchor begins as the model's trainable parameters, which must be equal at all members that begin together, as
    frozen ones must be. The caller closes the collective; ``vocab_rows`` is for late joiners, and ``parameters`` is for
    a model that does not lie in this process alone. With a ``powersgd_rank`` pseudo-gradients travel as factors.

    Raises:
        TrainerUsageError: the model cannot be cut into so many fragments, or the collective cannot factor.
    """

    def __init__(
        self,
        model: nn.Module,
        config: DiLoCoConfig,
        collective: Collective,
        *,
        vocab_rows: int = 0,
        parameters: ParameterAccess | None = None,
        powersgd_rank: int = 0,
    ) -> None:
        self._config = config
        self._collective = with_powersgd(collective, self._shapes_of, powersgd_rank)
        self._optimizer = OuterOptimizer(config.outer_lr, config.outer_momentum)
        tensors = synchronised_parameters(model)
        self._parameters: ParameterAccess = ModelParameters(tensors) if parameters is None else parameters
        self.plan = FragmentPlan.of(tensors, config.num_fragments)
        """Which parameters are synchronised together, and their places in the flat vectors."""
        self._layout_digest = self.plan.digest()
        self.on_result: Callable[[RoundResult], None] | None = None
        """Called with a round's result before it is committed: to `configure` for what its members have agreed."""
        self.inner_step = 0  # Inner steps since the last round was tried.
        self._pending = [PendingWork() for _ in self.plan.layouts]
        self._saved_round: SavedRound | None = None
        self._background: _BackgroundRound | None = None
        self._last_call: Future[RoundResult] | None = None
        fragments = tuple(FragmentState.start(self._parameters.gather(layout)) for layout in self.plan.layouts)
        self._install(ReplicaState(0, 0, vocab_rows, fragments))

    def configure(self, config: DiLoCoConfig) -> None:
        """Goes on by another cadence and outer step; all members have to, from one round on.

        Raises:
            TrainerUsageError: the model would be cut into other fragments.
        """
        if config.num_fragments != self._config.num_fragments:
            raise TrainerUsageError(
                f"diloco.num_fragments: expected {self._config.num_fragments} as before, found {config.num_fragments}"
            )
        self._config = config
        self._optimizer = OuterOptimizer(config.outer_lr, config.outer_momentum)

    @property
    def round_index(self) -> int:
        """Rounds committed so far, over all fragments."""
        return self._state.round_index

    @property
    def outer_step(self) -> int:
        """Outer steps in which every fragment was synchronised."""
        return self._state.outer_step

    @property
    def unshared(self) -> tuple[int, int]:
        """Inner steps since the last committed round, and their batches; of the fragment that has most."""
        return max((work.num_steps, work.num_batches) for work in self._pending)

    def state_digest(self) -> str:
        """Returns :meth:`SharedState.digest` of the current state; computed in the background after each commit."""
        return self._digest.result(self._config.round_timeout_s)

    def after_inner_step(self, num_batches: int = 1) -> OuterResult | None:
        """Counts an inner step; begins, finishes or tries a round when it is time, and returns the one that ended.

        A round is due every ``inner_steps / num_fragments`` steps, and at once if others wait for this node.

        Raises:
            TrainerError: the collective raised anything but a failed round; the state is as before the round.
        """
        self.inner_step += 1
        for work in self._pending:
            work.add(num_batches)
        self._relaunch()
        if self._background is not None:
            self._background.steps_left -= 1
            # Merged when it is time, or when others wait for the next round already.
            early = self._background.result.done() and self._collective.requested()
            return self.drain() if self._background.steps_left <= 0 or early else None
        due = self.inner_step >= self._config.steps_before(self._state.fragment)
        if not due and not self._collective.requested():
            return None
        return self._begin()

    def drain(self) -> OuterResult | None:
        """Waits for the round under way, if there is one, and merges it now instead of some steps later."""
        self._relaunch()
        background = self._background
        return None if background is None else self._conclude(background.contribution, background.result)

    def answer_others(self) -> OuterResult | None:
        """Takes part in a round that others wait for: for a node whose inner steps depend on others in that round."""
        return None if self._is_under_way() or not self._collective.requested() else self._begin()

    def share(self) -> OuterResult | None:
        """Tries a round now and waits for it: for a node that leaves with work that the others do not have."""
        drained = self.drain()
        if not self.inner_step:
            return drained
        result = self._begin()
        return result if result is not None else self.drain()

    def shared_state(self) -> SharedState:
        """Returns what a late joiner adopts. The tensors never change; any thread may read them, none may write."""
        return self._state.shared(self._layout_digest)

    def adopt(self, shared: SharedState) -> None:
        """Replaces the state by a copy of another member's; local work and a round under way are dropped.

        Raises:
            IncompatiblePeerError: it does not belong to this model. Nothing was changed.
        """
        adopted = ReplicaState.adopted(shared, self.plan)
        self._background = self._saved_round = None
        self._install(adopted)
        self.inner_step = 0
        self._pending = [PendingWork() for _ in self.plan.layouts]
        for layout, fragment in zip(self.plan.layouts, adopted.fragments, strict=True):
            self._parameters.scatter(layout, fragment.anchor)

    def grow(self, model: nn.Module, vocab_rows: int, access: ParameterAccess | None = None) -> None:
        """Continues with a model just grown to ``vocab_rows`` (`state`), and keeps the work since the last round.

        ``access`` is for a model that does not lie in this process alone, of which ``model`` is a copy.

        Raises:
            TrainerUsageError: a round is under way (:meth:`drain` first), names differ, or a tensor shrank or changed
                in another dimension than the first. Nothing was changed.
        """
        if self._is_under_way():
            raise TrainerUsageError("expected no round under way while the vocabulary grows, found one; drain() first")
        parameters = synchronised_parameters(model)
        plan = FragmentPlan.of(parameters, self._config.num_fragments)
        state = grown_state(self._state, self.plan, plan, parameters, vocab_rows)
        self._parameters = ModelParameters(parameters) if access is None else access
        self.plan, self._layout_digest = plan, plan.digest()
        self._install(state)

    def state_dict(self) -> dict[str, StateValue]:
        """Returns everything to go on from here; a round under way is stored as its contribution, and begins again.

        The tensors never change afterwards: a checkpoint may be written from another thread without a copy.
        """
        saved_round = self._saved_round
        if self._background is not None:
            saved_round = SavedRound.of(self._background.contribution, self._background.steps_left)
        return SavedDiLoCo.of(self._state, self._layout_digest, self.inner_step, self._pending, saved_round)

    def load_state_dict(self, state: Mapping[str, StateValue]) -> None:
        """Goes on from a saved state, without contacting anybody; the caller restores the model's parameters.

        Raises:
            CheckpointMismatchError: another version or another model. Nothing was changed.
        """
        saved = SavedDiLoCo.from_dict(state, self.plan)
        self._background, self._saved_round = None, saved.flight
        self._install(saved.state())
        self.inner_step = saved.inner_step
        self._pending = saved.pending()

    def _shapes_of(self, round_index: int) -> tuple[tuple[int, ...], ...]:
        return self.plan.layouts[round_index % len(self.plan.layouts)].shapes

    def _is_under_way(self) -> bool:
        return self._background is not None or self._saved_round is not None

    def _install(self, state: ReplicaState) -> None:
        """Replaces the state; all or nothing."""
        layout_digest = self._layout_digest
        self._state = state
        self._digest = start_daemon(lambda: state.digest(layout_digest), "diloco-digest")

    def _begin(self) -> OuterResult | None:
        """Tries a round, or starts one in the background."""
        contribution = self._prepare()
        self.inner_step = 0
        if self._last_call is not None and not self._last_call.done():
            return self._failed(contribution, "the round that was given up before has not ended yet")
        if self._config.overlap_steps:
            self._launch(contribution, self._config.overlap_steps)
            return None
        return self._conclude(contribution)

    def _prepare(self) -> Contribution:
        """Measures the pseudo-gradient of the next fragment.

        Parameters that are not finite would never recover: they become the anchor again, and nothing is contributed.
        """
        fragment = self._state.fragment
        layout, anchor = self.plan.layouts[fragment], self._state.fragments[fragment].anchor
        vector = self._parameters.gather(layout)
        torch.sub(anchor, vector, out=vector)
        if not is_finite(vector):
            logger.warning("round %d: parameters are not finite; they restart from the anchor", self._state.round_index)
            vector.zero_()
            self._parameters.scatter(layout, anchor)
            self._pending[fragment] = PendingWork()
        work = self._pending[fragment]
        progress = min(1.0, work.num_steps / self._config.planned_steps(self._state.round_index))
        return self._contribution(vector, work.num_batches, work.age_s(), progress)

    def _contribution(self, vector: Tensor, num_batches: int, age_s: float, progress: float) -> Contribution:
        current = self._state.fragments[self._state.fragment]
        return Contribution(
            round_index=self._state.round_index,
            vector=vector,
            num_batches=num_batches,
            age_s=age_s,
            progress=progress,
            reference=current.reference,
            state_digest=self.state_digest(),
            residual=current.residual,
            basis=current.basis,
        )

    def _launch(self, contribution: Contribution, steps_left: int) -> None:
        self._last_call = start_daemon(lambda: self._collective.reduce(contribution), "diloco-round")
        self._background = _BackgroundRound(contribution, self._last_call, steps_left)

    def _relaunch(self) -> None:
        """Begins again the round that was under way when the state was saved."""
        saved, self._saved_round = self._saved_round, None
        if saved is not None:
            contribution = self._contribution(saved.vector, saved.num_batches, saved.age_s, saved.progress)
            self._launch(contribution, saved.steps_left)

    def _conclude(self, contribution: Contribution, call: Future[RoundResult] | None = None) -> OuterResult:
        """Commits the result of a round, of one in the background with a share of the own parameters."""
        self._background = None
        started_s, fragment = time.monotonic(), self._state.fragment
        try:
            result = self._collective.reduce(contribution) if call is None else self._awaited(call)
            if self.on_result is not None:
                self.on_result(result)
            self._commit(contribution, result, 0.0 if call is None else self._config.merge_alpha)
        except RoundFailedError as error:
            return self._failed(contribution, error, waited_s=time.monotonic() - started_s)
        return OuterResult(
            round_index=contribution.round_index,
            fragment=fragment,
            outer_step=self._state.outer_step,
            committed=True,
            num_batches=contribution.num_batches,
            waited_s=time.monotonic() - started_s,
            report=result.report,
            contributed_steps_ago=self.inner_step if contribution.num_batches else None,
        )

    def _awaited(self, call: Future[RoundResult]) -> RoundResult:
        timeout_s = self._config.round_timeout_s
        try:
            return call.result(timeout_s)
        except TimeoutError as error:
            raise RoundFailedError(f"the round in the background is not back after {timeout_s:.0f} s") from error

    def _failed(
        self, contribution: Contribution, error: RoundFailedError | str, *, waited_s: float = 0.0
    ) -> OuterResult:
        fate = "its work goes into the next"
        if isinstance(error, StateBehindError):
            num_batches = max(work.num_batches for work in self._pending)
            fate = f"the work of {num_batches} batches is dropped when the others' state is taken up"
        level = logging.INFO if isinstance(error, RoundLeftError) else logging.WARNING
        logger.log(level, "round %d failed, %s: %s", contribution.round_index, fate, error)
        return OuterResult(
            round_index=contribution.round_index,
            fragment=self._state.fragment,
            outer_step=self._state.outer_step,
            committed=False,
            num_batches=contribution.num_batches,
            waited_s=waited_s,
            error=str(error),
        )

    def _commit(self, contribution: Contribution, result: RoundResult, keep: float) -> None:
        """Applies an agreed pseudo-gradient. Every check comes before the first change."""
        fragment = self._state.fragment
        layout, current = self.plan.layouts[fragment], self._state.fragments[fragment]
        if result.vector.shape != current.anchor.shape or not is_finite(result.vector):
            raise RoundFailedError(
                f"expected {current.anchor.numel()} finite values as the round's result, "
                f"found {list(result.vector.shape)}, not all finite or not as many"
            )
        anchor, momentum = current.anchor.clone(), current.momentum.clone()
        progress = contribution.progress if result.progress is None else result.progress
        self._optimizer.step(anchor, momentum, result.vector, progress)
        if not is_finite(anchor):
            raise RoundFailedError(
                "the round's result is so large that the outer step overflows; check diloco.outer_lr"
            )
        parameters = anchor
        if keep:
            parameters = self._parameters.gather(layout).mul_(keep).add_(anchor, alpha=1.0 - keep)
        num_inner_steps = round(progress * self._config.steps_before(fragment))
        new = FragmentState(anchor, momentum, result.vector, result.residual, result.basis)
        self._install(self._state.committed(new, num_inner_steps))
        self._parameters.scatter(layout, parameters)
        self._pending[fragment].settle(contribution.num_batches, self.inner_step)
        if progress < 1.0:
            logger.info("round %d: requested with %.0f %% of its work", contribution.round_index, 100 * progress)

"""DiLoCo: nodes train alone for many steps, then move a common anchor by what they agree on.

Every outer step is a transaction in three parts. *Prepare*: pseudo-gradient = anchor − parameters. *Collective*: the
members agree on one aggregate. *Commit*: outer step on a copy of the anchor, new state put in place by one assignment,
parameters set. If the collective fails, nothing was changed: training goes on from the drifted parameters, and since
the next pseudo-gradient is again measured from the old anchor, it contains the work of the failed round. Only a node
that missed a round, and so has to :meth:`~DiLoCoTrainer.adopt` the others' state, loses what it did since the last one.
A round that others ask for early has the work of so many inner steps as were done; its outer step weighs no more than
that (``outer.py``).

After a commit all members have bit-identical anchors, momenta and references; without overlap also bit-identical
parameters. Host memory: 12 bytes a parameter for good, 12 to 16 more during a round.

**Fragments and overlap** follow Streaming DiLoCo (arXiv 2501.18512, algorithm 2). Fragment ``f`` takes its turn at its
offset in every ``inner_steps``. With ``overlap_steps`` τ > 0 the round runs in a thread while τ more inner steps are
done; then ``parameters ← α·parameters + (1 − α)·new anchor`` with α = ``merge_alpha`` (the paper's α, and its 0.5 as
default). As in the paper the anchor itself gets no share of the local steps, so what α keeps of them is part of the
next pseudo-gradient, and what 1 − α throws away is lost. τ = 0 sets parameters to the anchor, the paper's α = 0. One
round at most is in flight (τ < inner_steps / num_fragments), which the paper does not need: it simplifies restarts.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from trainer.errors import RoundFailedError, RoundLeftError, StateBehindError, TrainerUsageError
from trainer.outer.diloco.config import DiLoCoConfig
from trainer.outer.diloco.flight import AsyncRound, BackgroundCall
from trainer.outer.diloco.fragments import FragmentPlan, synchronised_parameters
from trainer.outer.diloco.growth import grown_state
from trainer.outer.diloco.outer import OuterOptimizer
from trainer.outer.diloco.progress import FragmentProgress
from trainer.outer.diloco.saved import SavedDiLoCo, SavedFlight
from trainer.outer.diloco.state import FragmentState, ReplicaState, SharedState
from trainer.outer.engine.collective import Collective, Contribution, RoundResult
from trainer.outer.engine.strategy import OuterResult, StateValue

__all__ = ["DiLoCoTrainer"]

logger = logging.getLogger(__name__)


class DiLoCoTrainer:
    """Keeps one node's model in step with the others'. For the training thread alone.

    The anchor begins as the model's parameters, which must be equal at all members that begin together.

    Args:
        model: its trainable parameters are synchronised; frozen ones are taken to be equal everywhere.
        config: when, how far, in how many parts.
        collective: whom with; the caller closes it.
        vocab_rows: rows of embedding and output, told to late joiners.

    Raises:
        TrainerUsageError: the model cannot be cut into so many fragments.
    """

    def __init__(self, model: nn.Module, config: DiLoCoConfig, collective: Collective, *, vocab_rows: int = 0) -> None:
        self._config = config
        self._collective = collective
        self._optimizer = OuterOptimizer(config.outer_lr, config.outer_momentum)
        self._parameters = synchronised_parameters(model)
        self._plan = FragmentPlan.of(self._parameters, config.num_fragments)
        self._layout_digest = self._plan.digest()
        self._steps_since_round = 0
        self._progress = [FragmentProgress() for _ in self._plan.layouts]
        self._saved_flight: SavedFlight | None = None
        self._flight: AsyncRound | None = None
        self._call: BackgroundCall[RoundResult] | None = None
        fragments = tuple(FragmentState.start(layout.gather(self._parameters)) for layout in self._plan.layouts)
        self._install(ReplicaState(0, 0, vocab_rows, fragments))

    @property
    def plan(self) -> FragmentPlan:
        """Which parameters are synchronised together, and where they lie in the flat vectors."""
        return self._plan

    @property
    def round_index(self) -> int:
        """Rounds committed so far, over all fragments."""
        return self._state.round_index

    @property
    def outer_step(self) -> int:
        """Outer steps in which every fragment was synchronised."""
        return self._state.outer_step

    @property
    def inner_step(self) -> int:
        """Inner steps since the last round was tried."""
        return self._steps_since_round

    @property
    def unshared(self) -> tuple[int, int]:
        """Inner steps since the last committed round, and batches of them; of the fragment that has most."""
        return max((it.num_steps, it.num_batches) for it in self._progress)

    def state_digest(self) -> str:
        """:meth:`SharedState.digest` of what is shared now; computed in the background after each commit."""
        return self._digest.result(self._config.round_timeout_s)

    def after_inner_step(self, num_batches: int = 1) -> OuterResult | None:
        """Count an inner step; begin, finish or try a round when it is time.

        A round is due every ``inner_steps / num_fragments`` steps, and at once when others wait for this node.

        Args:
            num_batches: batches that changed the parameters in this step; 0 for a skipped step.

        Returns:
            The round that ended now, if one did; a failed one says why.

        Raises:
            TrainerError: anything but a failed round that the collective raises; the state is as before the round.
        """
        self._steps_since_round += 1
        for progress in self._progress:
            progress.add(num_batches)
        self._relaunch()
        if self._flight is not None:
            return self._advance(self._flight)
        due = self._steps_since_round >= self._config.steps_before(self._state.fragment)
        if not due and not self._collective.requested():
            return None
        return self._begin()

    def drain(self) -> OuterResult | None:
        """Wait for the round in flight, if there is one, and merge it now instead of some steps later."""
        self._relaunch()
        if self._flight is None:
            return None
        return self._land(self._flight)

    def answer_others(self) -> OuterResult | None:
        """Take part in a round that others wait for, if any do and none is in flight here; between two inner steps.

        For a node whose inner steps need others that stand still in that round.
        """
        if self._flight is not None or self._saved_flight is not None or not self._collective.requested():
            return None
        return self._begin()

    def share(self) -> OuterResult | None:
        """Try a round now, whatever is due, and wait for it: for a node that leaves, and has work the others have not.

        The round comes early, and its outer step weighs as little as the work in it.

        Returns:
            The round that ended last; None: there was nothing to share.
        """
        landed = self.drain()
        if not self._steps_since_round:
            return landed
        result = self._begin()
        return result if result is not None else self.drain()

    def shared_state(self) -> SharedState:
        """What a late joiner adopts. The tensors never change afterwards; read them from any thread, write never."""
        return self._state.shared(self._layout_digest)

    def adopt(self, shared: SharedState) -> None:
        """Take another member's state in place of one's own: parameters become the anchor.

        Local work since the last round is dropped, and so is a round in flight.

        Args:
            shared: the state; its tensors are copied.

        Raises:
            IncompatiblePeerError: it is not of this model. Nothing was changed.
        """
        adopted = ReplicaState.adopted(shared, self._plan)
        self._flight = self._saved_flight = None
        self._install(adopted)
        self._steps_since_round = 0
        self._progress = [FragmentProgress() for _ in self._plan.layouts]
        for layout, fragment in zip(self._plan.layouts, adopted.fragments, strict=True):
            layout.scatter(fragment.anchor, self._parameters)

    def grow(self, model: nn.Module, vocab_rows: int) -> None:
        """Take over a model that has got more rows in some of its tensors, just grown and not yet trained.

        Old rows of anchor, momentum, reference and residual stay bit for bit; new rows of the anchor are the model's,
        the others' are zeros. Work since the last round is kept: it is in the model's old rows.

        Args:
            model: the grown model; the same as before or another, with the same names.
            vocab_rows: rows it has now.

        Raises:
            TrainerUsageError: a round is in flight (:meth:`drain` first), names differ, or a tensor shrank or changed
                in another dimension than the first. Nothing was changed.
        """
        if self._flight is not None or self._saved_flight is not None:
            raise TrainerUsageError("expected no round in flight while the vocabulary grows, found one; drain() first")
        parameters = synchronised_parameters(model)
        plan = FragmentPlan.of(parameters, self._config.num_fragments)
        state = grown_state(self._state, self._plan, plan, parameters, vocab_rows)
        self._parameters, self._plan, self._layout_digest = parameters, plan, plan.digest()
        self._install(state)

    def state_dict(self) -> dict[str, StateValue]:
        """Everything to go on from here, in the middle of an inner loop and with a round in flight.

        The tensors never change afterwards: a checkpoint may be written from another thread without a copy. A round in
        flight is stored as its contribution; whoever loads it begins that round again, with the next inner step. If the
        others have committed it meanwhile, the round fails and the node catches up as one that missed a round.
        """
        flight = self._saved_flight if self._flight is None else self._flight.saved()
        return SavedDiLoCo(
            layout_digest=self._layout_digest,
            state=self._state,
            steps_since_round=self._steps_since_round,
            progress=tuple((it.num_batches, it.since_s, it.num_steps) for it in self._progress),
            flight=flight,
        ).to_dict()

    def load_state_dict(self, state: Mapping[str, StateValue]) -> None:
        """Go on from a saved state; the model's parameters are the caller's to restore.

        Nobody is talked to: a round that was in flight begins again with the next inner step, or :meth:`drain`.

        Raises:
            CheckpointMismatchError: another version or another model. Nothing was changed.
        """
        saved = SavedDiLoCo.from_dict(state, self._plan)
        self._flight, self._saved_flight = None, saved.flight
        self._install(saved.state)
        self._steps_since_round = saved.steps_since_round
        self._progress = [FragmentProgress(*progress) for progress in saved.progress]

    def _install(self, state: ReplicaState) -> None:
        """Put a state in place of the old one; all or nothing."""
        layout_digest = self._layout_digest
        self._state = state
        self._digest = BackgroundCall.start(lambda: state.digest(layout_digest), "diloco-digest")

    def _begin(self) -> OuterResult | None:
        """Try a round, or start one in the background."""
        contribution = self._prepare()
        self._steps_since_round = 0
        if self._call is not None and not self._call.done():
            return self._failed(contribution, "the round that was given up before has not ended yet", waited_s=0.0)
        if self._config.overlap_steps:
            self._launch(contribution, self._config.overlap_steps)
            return None
        return self._conclude(contribution, lambda: self._collective.reduce(contribution), keep=0.0)

    def _prepare(self) -> Contribution:
        """The pseudo-gradient of the fragment whose turn it is.

        Parameters that are not finite are not worth sending and would never heal: they become the anchor again, and
        the node takes part without a contribution.
        """
        fragment = self._state.fragment
        layout, anchor = self._plan.layouts[fragment], self._state.fragments[fragment].anchor
        vector = layout.gather(self._parameters)
        torch.sub(anchor, vector, out=vector)
        if not _is_finite(vector):
            logger.warning("round %d: parameters are not finite; they restart from the anchor", self._state.round_index)
            vector.zero_()
            layout.scatter(anchor, self._parameters)
            self._progress[fragment] = FragmentProgress()
        done = self._progress[fragment]
        progress = done.share_of(self._config.planned_steps(self._state.round_index))
        return self._contribution(vector, done.num_batches, done.age_s(), progress)

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
        )

    def _launch(self, contribution: Contribution, steps_left: int) -> None:
        self._call = BackgroundCall.start(lambda: self._collective.reduce(contribution), "diloco-round")
        self._flight = AsyncRound(contribution, self._call, steps_left)

    def _relaunch(self) -> None:
        """Begin again the round that was in flight when the state was saved."""
        saved, self._saved_flight = self._saved_flight, None
        if saved is not None:
            contribution = self._contribution(saved.vector, saved.num_batches, saved.age_s, saved.progress)
            self._launch(contribution, saved.steps_left)

    def _advance(self, flight: AsyncRound) -> OuterResult | None:
        """One inner step later: merge when it is time, or when others wait for the next round already."""
        flight.steps_left -= 1
        if flight.steps_left > 0 and not (flight.call.done() and self._collective.requested()):
            return None
        return self._land(flight)

    def _land(self, flight: AsyncRound) -> OuterResult:
        self._flight = None
        return self._conclude(
            flight.contribution,
            lambda: flight.result(self._config.round_timeout_s),
            keep=self._config.merge_alpha,
        )

    def _conclude(self, contribution: Contribution, obtain: Callable[[], RoundResult], *, keep: float) -> OuterResult:
        """Commit what ``obtain`` returns, or say why there is nothing to commit."""
        started_s, fragment = time.monotonic(), self._state.fragment
        try:
            result = obtain()
            self._commit(contribution, result, keep)
        except RoundFailedError as error:
            behind = isinstance(error, StateBehindError)
            level = logging.INFO if isinstance(error, RoundLeftError) else logging.WARNING
            waited_s = time.monotonic() - started_s
            return self._failed(contribution, str(error), waited_s=waited_s, behind=behind, level=level)
        return OuterResult(
            round_index=contribution.round_index,
            fragment=fragment,
            outer_step=self._state.outer_step,
            committed=True,
            num_batches=contribution.num_batches,
            waited_s=time.monotonic() - started_s,
            report=result.report,
            contributed_steps_ago=self._steps_since_round if contribution.num_batches else None,
        )

    def _failed(
        self,
        contribution: Contribution,
        error: str,
        *,
        waited_s: float,
        behind: bool = False,
        level: int = logging.WARNING,
    ) -> OuterResult:
        fate = "its work goes into the next"
        if behind:
            num_batches = max(progress.num_batches for progress in self._progress)
            fate = f"the work of {num_batches} batches is dropped when the others' state is taken up"
        logger.log(level, "round %d failed, %s: %s", contribution.round_index, fate, error)
        return OuterResult(
            round_index=contribution.round_index,
            fragment=self._state.fragment,
            outer_step=self._state.outer_step,
            committed=False,
            num_batches=contribution.num_batches,
            waited_s=waited_s,
            error=error,
        )

    def _commit(self, contribution: Contribution, result: RoundResult, keep: float) -> None:
        """Apply an agreed pseudo-gradient. Every check comes before the first change."""
        fragment = self._state.fragment
        layout, current = self._plan.layouts[fragment], self._state.fragments[fragment]
        if result.vector.shape != current.anchor.shape or not _is_finite(result.vector):
            raise RoundFailedError(
                f"expected {current.anchor.numel()} finite values as the round's result, "
                f"found {list(result.vector.shape)}, not all finite or not as many"
            )
        anchor, momentum = current.anchor.clone(), current.momentum.clone()
        progress = contribution.progress if result.progress is None else result.progress
        self._optimizer.step(anchor, momentum, result.vector, progress)
        if not _is_finite(anchor):
            raise RoundFailedError(
                "the round's result is so large that the outer step overflows; check diloco.outer_lr"
            )
        parameters = anchor
        if keep:
            parameters = layout.gather(self._parameters).mul_(keep).add_(anchor, alpha=1.0 - keep)
        num_inner_steps = round(progress * self._config.steps_before(fragment))
        new = FragmentState(anchor, momentum, result.vector, result.residual)
        self._install(self._state.committed(new, num_inner_steps))
        layout.scatter(parameters, self._parameters)
        self._progress[fragment].settle(contribution.num_batches, self._steps_since_round)
        if progress < 1.0:
            logger.info("round %d: asked for with %.0f %% of its work", contribution.round_index, 100 * progress)


def _is_finite(vector: Tensor) -> bool:
    """Whether all values are, in one pass and without a mask of its size."""
    if not vector.numel():
        return True
    smallest, largest = torch.aminmax(vector)
    return bool(torch.isfinite(smallest)) and bool(torch.isfinite(largest))

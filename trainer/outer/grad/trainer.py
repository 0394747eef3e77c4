"""`GradTrainer`: gradients add up at every replica until all have the target together; then one step, the same at all.

    trainer = GradTrainer(model, GradConfig(), collective, optimizer=adamw, lr_of=lambda steps, tokens: 3e-4,
                          source=replica, max_norm=1.0, target_tokens=8192)
    replica counts micro-batches …; outcome = trainer.look()      # between two of them, again and again

A round goes: agree on the members (`timing`) → hand over what has been added up → wait for the mean over all tokens
(`averaging`) → clip, AdamW (`optimizer`), new state → the weights of the model. Every ``average_state_every`` steps a
round in the background averages a slice of the parameters, as SPARTA does: replicas that are alike stay as they are,
and what a projection on other hardware or a fault has moved is put right.

Guarantees: a round changes the state whole or not at all; after one, all its members have the same bits; gradients of a
round that failed go into the next; nothing is counted that was not computed. The trade-off: everybody waits for a
member that is lost, as long as the engine allows; with ``delayed`` computing goes on meanwhile, at weights one step
old.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainer.errors import RoundFailedError, RoundLeftError, StateBehindError
from trainer.outer.diloco.flat import FlatLayout, is_finite, synchronised_parameters
from trainer.outer.engine.collective import Collective, Contribution, RoundResult
from trainer.outer.engine.daemon_call import start_daemon
from trainer.outer.engine.powersgd import with_powersgd
from trainer.outer.engine.strategy import OuterResult, StateValue
from trainer.outer.grad.averaging import GradientSource, GradientSum, Packing
from trainer.outer.grad.config import GradConfig
from trainer.outer.grad.optimizer import ExactAdamW, clip_coefficient, exact_norm
from trainer.outer.grad.state import GradState, SavedFlight, SavedGrad, num_basis_of
from trainer.outer.grad.timing import Progress, RoundTimer
from trainer.outer.sparta.slices import ParameterSlice, check_slices, merged, slice_of

logger = logging.getLogger(__name__)

_ROUND_TIMEOUT_S = 3600.0  # A round that is not back by then is given up (engines have deadlines of their own).


@dataclass(frozen=True, slots=True, kw_only=True)
class GradStep:
    """Facts about one step, of which those of the gradient and the rate are the same at all members."""

    version: int  # Steps taken, this one included.
    lr: float
    grad_norm: float  # Of the mean over all tokens, before clipping; 0 where there was none.
    clip_coefficient: float
    applied: bool  # False: there was no token, or the step would not have been finite; the weights are unchanged.
    own: GradientSum | None  # What this replica had in it; None: nothing.


@dataclass(frozen=True, slots=True)
class GradOutcome:
    """A round that ended: of gradients, with the step, if it had a result; or of a slice."""

    result: OuterResult
    is_slice: bool = False
    step: GradStep | None = None


@dataclass(slots=True, eq=False)
class _Round:
    """A round under way in a thread."""

    contribution: Contribution
    values: ParameterSlice | None = None  # None: of gradients.
    taken: GradientSum | None = None
    call: Future[RoundResult] | None = None
    deadline_s: float = math.inf

    @property
    def is_filled(self) -> bool:
        return self.contribution.filled is None or self.contribution.filled.done()

    @property
    def is_over(self) -> bool:
        return self.call is None or self.call.done() or time.monotonic() >= self.deadline_s


class GradTrainer:
    """Keeps one replica equal to the others. For the thread that computes, alone.

    Args:
        model: its trainable parameters; frozen ones are assumed to be equal everywhere.
        config: options.
        collective: averages slices, and gradients where ``averager`` is None; the caller closes it. Its engine has to
            weigh by tokens (``linear``).
        optimizer: the model's AdamW, for its options; it takes no step itself.
        lr_of: returns the learning rate of a step, from the run's steps and tokens before it; alike at all members.
        source: where the replica's gradients add up.
        max_norm: the mean gradient is scaled down to it.
        target_tokens: of a step, over all replicas.
        averager: averages gradients.
        powersgd_rank: columns of the factors that matrices of gradients travel as; 0: they travel whole.
        auto_step_s: after so long without anything new a step is taken with what there is.
        after_update: called with the model after each change (a subspace projects there).
        kept_axes: by name of a matrix, the axis along which values are averaged together.
        vocab_rows: handed to joiners with the state.
        clock: monotonic, in seconds.

    Raises:
        TrainerUsageError: the optimizer is not AdamW, or the model has fewer values than slices.
    """

    def __init__(
        self,
        model: nn.Module,
        config: GradConfig,
        collective: Collective,
        *,
        optimizer: Optimizer,
        lr_of: Callable[[int, int], float],
        source: GradientSource,
        max_norm: float,
        target_tokens: int,
        averager: Collective | None = None,
        powersgd_rank: int = 0,
        auto_step_s: float = math.inf,
        after_update: Callable[[nn.Module], None] | None = None,
        kept_axes: Mapping[str, int] | None = None,
        vocab_rows: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.progress: Callable[[], Progress] = lambda: Progress(0, 0)
        """Returns the progress of now; to be set by whoever hears of the others'."""
        self.on_done: Callable[[], None] = lambda: None
        """Called, by another thread, when a round under way is over: it is time to look."""
        self.go_by: Callable[[int | None], None] = lambda _change: None
        """Called before a round begins (None), and before its result is taken, with the number of the newest change of
        the run that its members have agreed to go by; it has to `configure` by that, so that all step alike."""
        self._model = model
        self._config = config
        self._lr_of = lr_of
        self._collective = collective
        self.source = source
        """Where the replica's gradients add up."""
        self._max_norm = max_norm
        self._after_update = after_update
        self._kept_axes = dict(kept_axes or {})
        self._parameters = synchronised_parameters(model)
        self.layout = FlatLayout.of(self._parameters)
        """Places of the parameters in the state's vectors."""
        self.packing = Packing.of(self.layout)
        """The form of the vectors that gradients are averaged in."""
        shapes = self.packing.layout.shapes
        self._averager = with_powersgd(collective if averager is None else averager, lambda _: shapes, powersgd_rank)
        self._num_basis = num_basis_of(self.layout, powersgd_rank)
        self._adamw = ExactAdamW.of(optimizer, self._parameters, self.layout)
        if config.average_state_every:
            check_slices(self._parameters, self.layout, config.num_slices, self._kept_axes)
        self._zeros = torch.zeros(self.packing.num_values)
        self.timer = RoundTimer(target_tokens, config.ahead_s, auto_step_s, clock)
        self._residual: Tensor | None = None
        self._round: _Round | None = None
        self._last_call: Future[RoundResult] | None = None
        self._slice_failed = False
        first = self.layout.gather(self._parameters)
        self._state = GradState.start(first, self.layout, vocab_rows, self._num_basis)

    def configure(
        self, *, lr_of: Callable[[int, int], float], max_norm: float, target_tokens: int, auto_step_s: float = math.inf
    ) -> None:
        """Goes on by what a change of the run has put in force; arguments as those of the constructor."""
        self._lr_of, self._max_norm = lr_of, max_norm
        self.timer.configure(target_tokens, auto_step_s)

    @property
    def round_index(self) -> int:
        """Rounds committed so far, those of slices included."""
        return self._state.round_index

    @property
    def num_steps(self) -> int:
        """Steps taken."""
        return self._state.num_steps

    @property
    def outer_step(self) -> int:
        """The same, by its name in other strategies."""
        return self._state.num_steps

    @property
    def inner_step(self) -> int:
        """Steps since the last round: no replica takes any by itself."""
        return 0

    @property
    def unshared(self) -> tuple[int, int]:
        """Steps since the last committed round, and their batches: none; what is added up is in no step yet."""
        return 0, 0

    @property
    def num_tokens(self) -> int:
        """Tokens of all steps, of all members."""
        return self._state.num_tokens

    @property
    def lr(self) -> float:
        """The learning rate of the step to come."""
        return self._lr_of(self._state.num_steps, self._state.num_tokens)

    @property
    def round_share(self) -> float:
        """How much of the next step's target is done, 0 to 1."""
        return self.timer.share

    def state_digest(self) -> str:
        """Returns the lineage, by which members of a round know that their states are equal."""
        return self._state.lineage

    def look(self) -> GradOutcome | None:
        """Begins, fills or ends a round when it is time; returns the one that ended now, if one did.

        Without ``delayed`` it waits for the result once the gradients are handed over.

        Raises:
            TrainerError: the collective raised anything but a failed round; the state is as before the round.
        """
        self.timer.note(self.progress())
        if self._round is None and not self._begin_if_due():
            return None
        current = self._round
        if current is None:
            return None
        if current.values is not None:
            waits = self.timer.is_reached and not self._config.delayed
            return self._conclude(current) if current.is_over or waits else None
        if not current.is_filled and not current.is_over:
            # The others would wait for one that brings nothing.
            if current.contribution.num_batches and not self.timer.is_time_to_fill():
                return None
            self._fill(current)
        if self._config.delayed and not current.is_over:
            return None
        return self._conclude(current)

    def take_part(self, timeout_s: float = _ROUND_TIMEOUT_S) -> GradOutcome | None:
        """Has the next round now, of gradients with what there is, and waits for it; None: one before is not over."""
        if not self._call_is_over():
            return None
        self.timer.note(self.progress())
        if self._config.averages_state(self._state.round_index):
            self._begin_slice()
        else:
            self._begin_gradients()
        return self.drain(timeout_s)

    def drain(self, timeout_s: float = _ROUND_TIMEOUT_S) -> GradOutcome | None:
        """Waits for the round under way, if there is one, with what has been added up, and applies it."""
        current = self._round
        if current is None:
            return None
        current.deadline_s = min(current.deadline_s, time.monotonic() + timeout_s)
        if not current.is_filled:
            self._fill(current)
        return self._conclude(current)

    def leave(self) -> None:
        """Leaves the round under way, if there is one, and keeps what was handed over to it."""
        current = self._round
        if current is not None and current.taken is not None:
            self.source.give_back(self.layout, current.taken)
        self._leave_round()

    def shared_state(self) -> GradState:
        """Returns what a joiner adopts. The tensors never change; any thread may read them, none may write."""
        return self._state

    def adopt(self, shared: GradState) -> None:
        """Replaces the state by another member's; a round under way is dropped, with what was handed over to it.

        The caller drops what has been added up since, which belongs to other weights.

        Raises:
            IncompatiblePeerError: it does not belong to this model, or is not sound. Nothing was changed.
        """
        shared.check(self.layout, self._state.vocab_rows, self._num_basis)
        self._leave_round()
        self._residual, self._slice_failed = None, False
        self._install(shared)

    @property
    def handed_over(self) -> GradientSum | None:
        """What the round under way has of this replica, if there is one."""
        return None if self._round is None else self._round.taken

    def state_dict(self, flight_of_all: GradientSum | None = None) -> dict[str, StateValue]:
        """Returns everything to go on from here, except the parameters; of a round under way, what was handed over.

        Where the source does not save what it has added up, ``flight_of_all`` is that and `handed_over` together. The
        tensors never change afterwards: a checkpoint may be written from another thread without a copy.
        """
        taken = self.handed_over if flight_of_all is None else flight_of_all
        flight: dict[str, StateValue] | None = None
        if taken is not None:
            flight = {
                "vector": taken.vector,
                "num_tokens": taken.num_tokens,
                "num_micro_batches": taken.num_micro_batches,
                "loss_sum": taken.loss_sum,
            }
        return SavedGrad.values(self._state, residual=self._residual, flight=flight)

    def load_state_dict(self, state: Mapping[str, StateValue]) -> None:
        """Goes on from a saved state, without contacting anybody; the caller restores the model's parameters first.

        Raises:
            CheckpointMismatchError: another version or another model. Nothing was changed.
        """
        saved = SavedGrad.from_dict(state, self.layout, self._num_basis)
        self._leave_round()
        self._state = saved.state(self.layout.gather(self._parameters))
        self._residual = saved.residual
        if saved.flight is not None:
            self.source.give_back(self.layout, _gradient_of(saved.flight))

    # -- beginning -----------------------------------------------------------------------------------------------------

    def _call_is_over(self) -> bool:
        return self._last_call is None or self._last_call.done()

    def _begin_if_due(self) -> bool:
        if not self._call_is_over():
            return False  # A round that was left still runs, and the collective allows one at a time.
        others_wait = self._collective.requested()
        if self._config.averages_state(self._state.round_index):
            if self._slice_failed and not self.timer.is_time_to_begin(others_wait=others_wait):
                return False
            self._begin_slice()
            return True
        if not self.timer.is_time_to_begin(others_wait=others_wait):
            return False
        self._begin_gradients()
        return True

    def _begin_gradients(self) -> None:
        self.go_by(None)
        contribution = Contribution(
            round_index=self._state.round_index,
            vector=torch.zeros(self.packing.num_values),
            num_batches=self.timer.begin(),
            age_s=0.0,
            reference=self._zeros,
            state_digest=self._state.lineage,
            residual=self._residual,
            basis=self._state.basis if self._num_basis else None,
            filled=Future(),
        )
        self._launch(_Round(contribution), self._averager)

    def _begin_slice(self) -> None:
        self.go_by(None)
        index = self._config.slice_number(self._state.round_index)
        values = slice_of(index, self.layout, self._config.num_slices, self._kept_axes)
        vector = values.gather(self._views(self._state.parameters))
        contribution = Contribution(
            round_index=self._state.round_index,
            vector=vector,
            num_batches=1,
            age_s=0.0,
            reference=torch.zeros_like(vector),
            state_digest=self._state.lineage,
        )
        self._launch(_Round(contribution, values), self._collective)

    def _launch(self, begun: _Round, collective: Collective) -> None:
        begun.deadline_s = time.monotonic() + _ROUND_TIMEOUT_S
        begun.call = self._last_call = start_daemon(lambda: collective.reduce(begun.contribution), "grad-round")
        begun.call.add_done_callback(lambda _: self.on_done())
        self._round = begun

    def _fill(self, current: _Round) -> None:
        """Hands over what has been added up. What is not finite counts for nothing, and is dropped."""
        contribution = current.contribution
        if contribution.filled is None:
            return
        if contribution.num_batches:
            taken = self.source.take_gradient(self.layout)
            if is_finite(taken.vector):
                current.taken = taken
                self.packing.fill(contribution.vector, taken, contribution.num_batches)
            else:
                logger.warning(
                    "round %d: a gradient of %d tokens is not finite and is dropped",
                    contribution.round_index,
                    taken.num_tokens,
                )
        self.timer.filled()
        contribution.filled.set_result(None)

    def _leave_round(self) -> None:
        """Forgets the round under way; its thread ends by itself."""
        current, self._round = self._round, None
        if current is not None and current.contribution.filled is not None and not current.is_filled:
            current.contribution.filled.set_result(None)

    # -- ending --------------------------------------------------------------------------------------------------------

    def _conclude(self, current: _Round) -> GradOutcome:
        """Applies the result of a round, or gives back what was handed over."""
        started_s = time.monotonic()
        step: GradStep | None = None
        is_slice = current.values is not None
        try:
            result = self._awaited(current)
            if result.change is not None:
                self.go_by(result.change)
            if current.values is not None:
                self._install(self._with_slice(current.contribution, current.values, result))
            else:
                new, step = self._stepped(current, result)
                if current.contribution.num_batches:  # What weighs nothing has brought nothing of it, either.
                    self._residual = result.residual
                self._install(new)
        except RoundFailedError as error:
            return self._failed(current, error, time.monotonic() - started_s)
        finally:
            self._leave_round()
        self._slice_failed = False
        weighs = current.taken is not None and current.taken.num_tokens > 0
        outer = OuterResult(
            round_index=current.contribution.round_index,
            fragment=0,
            outer_step=self._state.num_steps,
            committed=True,
            num_batches=0 if current.taken is None else current.taken.num_micro_batches,
            waited_s=time.monotonic() - started_s,
            report=result.report,
            contributed_steps_ago=0 if weighs else None,
        )
        return GradOutcome(outer, is_slice, step)

    def _awaited(self, current: _Round) -> RoundResult:
        if current.call is None:
            raise RoundFailedError("the round was never begun")
        try:
            return current.call.result(max(0.0, current.deadline_s - time.monotonic()))
        except TimeoutError as error:
            raise RoundFailedError("the round is not back in time, and given up") from error

    def _stepped(self, current: _Round, result: RoundResult) -> tuple[GradState, GradStep]:
        """Returns the state after a step with an agreed result; pure, and the same at all members."""
        is_whole = result.vector.shape == (self.packing.num_values,)
        gradient = self.packing.gradient(result.vector)
        length = exact_norm(gradient) if is_whole else math.inf  # Infinite also where a value is not finite.
        if not is_whole or not math.isfinite(length) or not bool(torch.isfinite(result.vector[-1])):
            raise RoundFailedError(
                f"expected {self.packing.num_values} finite values as the round's result, found "
                f"{list(result.vector.shape)}, not all finite or not as many"
            )
        state, lr, share = self._state, self.lr, self.packing.token_share(result.vector)
        norm = length / share if share > 0 else 0.0
        coefficient = clip_coefficient(norm, self._max_norm) if math.isfinite(norm) else 0.0
        changes: dict[str, object] = {
            "num_steps": state.num_steps + 1,
            "num_tokens": state.num_tokens + self._tokens_of(current, result, share),
            "basis": state.basis if result.basis is None else result.basis,
        }
        updated = self._updated(gradient, coefficient / share, lr) if share > 0 and coefficient > 0 else None
        if updated is not None:
            changes |= {"num_updates": state.num_updates + 1, **updated}
        elif share > 0:
            logger.warning("step %d is dropped: its gradient, of norm %.3g, is too large", state.num_steps, norm)
        step = GradStep(
            version=state.num_steps + 1,
            lr=lr,
            grad_norm=norm,
            clip_coefficient=coefficient,
            applied=updated is not None,
            own=current.taken,
        )
        return state.following(result.vector, result.report.result_digest, **changes), step

    def _updated(self, gradient: Tensor, scale: float, lr: float) -> dict[str, Tensor] | None:
        """New weights and moments; None where they are not finite."""
        state = self._state
        new = {name: getattr(state, name).clone() for name in ("parameters", "exp_avg", "exp_avg_sq")}
        self._adamw.step(**new, gradient=gradient, scale=scale, lr=lr, update=state.num_updates + 1)
        return new if all(map(is_finite, new.values())) else None

    def _tokens_of(self, current: _Round, result: RoundResult, share: float) -> int:
        """Tokens of all members, from the weights they agreed on; where the engine tells none, this replica's."""
        weights = result.report.weights
        if len(result.report.members) > 1 and weights:
            return round(share * math.fsum(weights))
        return 0 if current.taken is None else current.taken.num_tokens

    def _with_slice(self, contribution: Contribution, values: ParameterSlice, result: RoundResult) -> GradState:
        """The state with a slice averaged. Where the members were alike, it keeps its bits."""
        average = merged(contribution.vector, contribution.vector, result)
        parameters, num_moved = self._state.parameters, int((average != contribution.vector).sum())
        if num_moved:
            parameters = parameters.clone()
            values.scatter(average, self._views(parameters))
            logger.info(
                "round %d: %d of %d values had drifted from the other replicas', and are put right",
                *(contribution.round_index, num_moved, contribution.vector.numel()),
            )
        return self._state.following(result.vector, result.report.result_digest, parameters=parameters)

    def _install(self, state: GradState) -> None:
        """Takes up a state, and gives the model its weights; what a projection makes of them is the state's."""
        if state.parameters is not self._state.parameters:
            self.layout.scatter(state.parameters, self._parameters)
            if self._after_update is not None:
                with torch.no_grad():
                    self._after_update(self._model)
                state = replace(state, parameters=self.layout.gather(self._parameters))
        self._state = state

    def _failed(self, current: _Round, error: RoundFailedError, waited_s: float) -> GradOutcome:
        if current.taken is not None:
            self.source.give_back(self.layout, current.taken)
        self.timer.failed()
        is_slice = current.values is not None
        self._slice_failed = is_slice
        fate = "the parameters stay as they are" if is_slice else "its gradients go into the next"
        if isinstance(error, StateBehindError):
            fate = "its gradients are dropped when the others' state is taken up"
        level = logging.INFO if isinstance(error, RoundLeftError) else logging.WARNING
        logger.log(level, "round %d failed, %s: %s", current.contribution.round_index, fate, error)
        outer = OuterResult(
            round_index=current.contribution.round_index,
            fragment=0,
            outer_step=self._state.num_steps,
            committed=False,
            num_batches=0 if current.taken is None else current.taken.num_micro_batches,
            waited_s=waited_s,
            error=str(error),
        )
        return GradOutcome(outer, is_slice)

    def _views(self, vector: Tensor) -> dict[str, Tensor]:
        return {name: vector[place].view(shape) for name, shape, place in self.layout.slices()}


def _gradient_of(saved: SavedFlight) -> GradientSum:
    return GradientSum(saved.vector.clone(), saved.num_tokens, saved.num_micro_batches, saved.loss_sum)

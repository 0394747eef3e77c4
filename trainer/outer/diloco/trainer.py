"""DiLoCo: nodes train alone for many steps, then move a common anchor by what they agree on.

An outer step is a transaction: prepare (pseudo-gradient = anchor − parameters), collective, commit (outer step on a
copy of the anchor, installed by one assignment). If it fails, nothing has changed, and the next pseudo-gradient,
measured from the old anchor, contains its work. Fragments and overlap are those of Streaming DiLoCo (arXiv 2501.18512,
algorithm 2): ``parameters ← α·parameters + (1 − α)·new anchor``, the anchor without a share of the steps done
meanwhile; but at most one round is under way, which simplifies restarts.

With overlap the training thread takes a snapshot of the parameters (`access`) and merges; all else is in the round's
thread (`rounds`), for which it waits at the merge only. Whether the snapshot was finite it asks one step later: by then
that is known, and a restart from the anchor does not depend on how fast a thread was.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import replace

import torch
from torch import nn

from trainer.errors import RoundFailedError, RoundLeftError, StateBehindError, TrainerUsageError
from trainer.outer.diloco.access import ParameterAccess, access_to
from trainer.outer.diloco.attending import MOST_MISSED, Attendance, Attended, AttendingCollective, rounds_between
from trainer.outer.diloco.config import DiLoCoConfig
from trainer.outer.diloco.flat import FragmentPlan, synchronised_parameters
from trainer.outer.diloco.rounds import (
    AgreedChanges,
    BackgroundRound,
    Measured,
    Outcome,
    RoundWork,
    arithmetic_threads,
    digest_of,
    work_of,
)
from trainer.outer.diloco.state import FragmentState, ReplicaState, SavedDiLoCo, SavedRound, SharedState, grown_state
from trainer.outer.engine.chunk_order import with_chunk_order
from trainer.outer.engine.collective import AttendedCollective, Collective
from trainer.outer.engine.daemon_call import release_in_background, start_daemon
from trainer.outer.engine.powersgd import with_powersgd
from trainer.outer.engine.strategy import OuterResult, PendingWork, StateValue

logger = logging.getLogger(__name__)


class DiLoCoTrainer:
    """Keeps one node's model in step with the others'. For the training thread alone.

    The anchor begins as the model's trainable parameters, which must be equal at all members that begin together, as
    frozen ones must be. The caller closes the collective; ``vocab_rows`` is for late joiners, and ``parameters`` is for
    a model that does not lie in this process alone. With a ``powersgd_rank`` pseudo-gradients travel as factors; with a
    ``residual_decay`` they travel in chunk order, for a collective of sparse vectors (`trainer.outer.sparseloco`).
    ``num_threads`` are torch's for the arithmetic of a round that training waits for, and beside a GPU of any round; 0:
    as many as it has.

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
        residual_decay: float | None = None,
        num_threads: int = 0,
    ) -> None:
        self._config = config
        ordered = with_chunk_order(collective, self._shapes_of, residual_decay)
        self._collective = with_powersgd(ordered, self._shapes_of, powersgd_rank)
        tensors = synchronised_parameters(model)
        self._attendance: Attendance | None = None
        if isinstance(collective, AttendedCollective) and collective.closes_early:
            attending = with_chunk_order(AttendingCollective(collective), self._shapes_of, residual_decay)
            self._attendance = Attendance(collective, attending)
        self._parameters: ParameterAccess = access_to(tensors) if parameters is None else parameters
        self._num_threads = num_threads
        on_cpu = any(tensor.device.type == "cpu" for tensor in tensors.values())
        self._num_threads_beside = 0 if on_cpu else num_threads  # A CPU's cores are training.
        self.plan = FragmentPlan.of(tensors, config.num_fragments)
        """Which parameters are synchronised together, and their places in the flat vectors."""
        self._layout_digest = self.plan.digest()
        self.changes: AgreedChanges | None = None
        """How the run changes while it goes on; None: it does not."""
        self.inner_step = 0  # Inner steps since the last round was tried.
        self._pending = [PendingWork() for _ in self.plan.layouts]
        self._saved_round: SavedRound | None = None
        self._background: BackgroundRound | None = None
        self._last_call: Future[tuple[Outcome, Callable[[float], None]]] | None = None
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

    @property
    def round_index(self) -> int:
        """Rounds committed so far, over all fragments."""
        return self._state.round_index

    @property
    def outer_step(self) -> int:
        """Outer steps in which every fragment was synchronised."""
        return self._state.outer_step

    @property
    def awaits_result(self) -> bool:
        """Whether a round goes on in the background: its members decide by which change of the run it is."""
        return self._background is not None

    @property
    def num_inner_steps(self) -> int:
        """Inner steps of the rounds committed so far: where a late joiner's schedule begins."""
        return self._state.num_inner_steps

    @property
    def unshared(self) -> tuple[int, int]:
        """Inner steps since the last committed round, and their batches; of the fragment that has most."""
        return max((work.num_steps, work.num_batches) for work in self._pending)

    def state_digest(self) -> str:
        """Returns :meth:`SharedState.digest` of the current state; computed in the background after each commit."""
        return self._digest.result(self._config.round_timeout_s)

    def when_digested(self, tell: Callable[[str], object]) -> None:
        """Has the current state's digest told as soon as it is known, possibly in another thread; returns at once."""
        self._digest.add_done_callback(lambda digest: tell(digest.result()))

    def after_inner_step(self, num_batches: int = 1) -> OuterResult | None:
        """Counts an inner step; begins, finishes or tries a round when it is time, and returns the one that ended.

        A round is due every ``inner_steps / num_fragments`` steps, and at once if others wait for this node.

        Raises:
            TrainerError: the collective raised anything but a failed round; the state is as before the round.
        """
        self.count_step(num_batches)
        return self.go_on()

    def count_step(self, num_batches: int = 1) -> None:
        """Counts an inner step; `go_on` has to follow before the next."""
        self.inner_step += 1
        for work in self._pending:
            work.add(num_batches)
        self._relaunch()
        if self._background is not None:
            self._background.steps_left -= 1

    @property
    def is_due(self) -> bool:
        """Whether `go_on` has anything to do: a round is under way, or due, or others wait for this node."""
        is_time = self.inner_step >= self._config.steps_before(self._state.fragment)
        return self._is_under_way() or is_time or self._collective.requested()

    @property
    def round_share(self) -> float:
        """How many of the steps before the next round are done, 0 to 1."""
        return min(1.0, self.inner_step / self._config.steps_before(self._state.fragment))

    @property
    def is_awaited(self) -> bool:
        """Whether others wait for this node in a round that it could begin now."""
        return not self._is_under_way() and self._collective.requested()

    def go_on(self) -> OuterResult | None:
        """Begins, finishes or tries a round behind a step that was counted; see `after_inner_step`."""
        background = self._background
        if background is not None:
            self._check(background)
            # Merged when it is time, or when others wait for the next round already.
            is_time = background.steps_left <= 0 or (background.outcome.done() and self._collective.requested())
            del background  # What this thread holds it would have to give back (`drain`).
            return self.drain() if is_time else None
        due = self.inner_step >= self._config.steps_before(self._state.fragment)
        if not due and not self._collective.requested():
            return self._attend()
        attended = self._follow(self._end_attendance())
        if attended is not None and (not attended.committed or self._may_grow()):
            return attended  # Then the next step begins the round, from there.
        return self._begin()

    def drain(self) -> OuterResult | None:
        """Waits for the round under way, if there is one, and merges it now instead of some steps later."""
        self._relaunch()
        attended = self._end_attendance()
        background = self._background
        if background is None:
            return self._follow(attended)
        retired = [background, self._state]
        result = self._merge(background)
        del background
        release_in_background(retired)
        return result

    def answer_others(self) -> OuterResult | None:
        """Takes part in a round that others wait for: for a node whose inner steps depend on others in that round."""
        return self._begin() if self.is_awaited else None

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

    def adopt(self, shared: SharedState, *, keep_work: bool = False) -> None:
        """Replaces the state by a copy of another member's; local work and a round under way are dropped.

        With ``keep_work`` the work stays, on the new anchor, if it missed `MOST_MISSED` rounds at most: for a node
        whose work is in no round that the others went on with.

        Raises:
            IncompatiblePeerError: it does not belong to this model. Nothing was changed.
        """
        adopted = ReplicaState.adopted(shared, self.plan)
        self._end_attendance()
        was_under_way = self._is_under_way()
        self._background = self._saved_round = None
        before = self._state
        missed = rounds_between(before, adopted)
        if keep_work and not was_under_way and max(missed.values(), default=0) <= MOST_MISSED:
            residuals = [it.residual for it in before.fragments]
            kept = zip(adopted.fragments, residuals, strict=True)
            self._install(replace(adopted, fragments=tuple(replace(it, residual=own) for it, own in kept)))
            self._shift_from(before, missed)
            return
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
        self._follow(self._end_attendance())
        if self._is_under_way():
            raise TrainerUsageError("expected no round under way while the vocabulary grows, found one; drain() first")
        parameters = synchronised_parameters(model)
        plan = FragmentPlan.of(parameters, self._config.num_fragments)
        state = grown_state(self._state, self.plan, plan, parameters, vocab_rows)
        self._parameters = access_to(parameters) if access is None else access
        self.plan, self._layout_digest = plan, plan.digest()
        self._install(state)

    def state_dict(self) -> dict[str, StateValue]:
        """Returns everything to go on from here; a round under way is stored as its contribution, and begins again.

        The tensors never change afterwards: a checkpoint may be written from another thread without a copy.
        """
        saved = self._saved()
        if self._background is not None:
            saved["flight"] = self._background.saved().result(self._config.round_timeout_s)
        return saved

    def state_to_write(self) -> dict[str, StateValue | Future[StateValue]]:
        """Returns what `state_dict` does, without a wait: the round under way is a future of its values."""
        flight = {} if self._background is None else {"flight": self._background.saved()}
        return {**self._saved(), **flight}

    def load_state_dict(self, state: Mapping[str, StateValue]) -> None:
        """Goes on from a saved state, without contacting anybody; the caller restores the model's parameters.

        Raises:
            CheckpointMismatchError: another version or another model. Nothing was changed.
        """
        saved = SavedDiLoCo.from_dict(state, self.plan)
        self._end_attendance()
        self._background, self._saved_round = None, saved.flight
        self._install(saved.state())
        self.inner_step = saved.inner_step
        self._pending = saved.pending()

    def _shapes_of(self, round_index: int) -> tuple[tuple[int, ...], ...]:
        return self.plan.layouts[round_index % len(self.plan.layouts)].shapes

    def _saved(self) -> dict[str, StateValue]:
        return SavedDiLoCo.of(self._state, self._layout_digest, self.inner_step, self._pending, self._saved_round)

    def _is_under_way(self) -> bool:
        return self._background is not None or self._saved_round is not None

    def _install(self, state: ReplicaState, digest: Future[str] | None = None) -> None:
        """Replaces the state; all or nothing."""
        self._state = state
        self._digest = digest_of(state, self._layout_digest) if digest is None else digest

    def _install_outcome(self, outcome: Outcome) -> None:
        """Replaces the state by a round's, and goes on by the change of the run that the round went by."""
        if self.changes is not None and outcome.change is not None:
            self.changes.begin_by(outcome.change)
        self._install(outcome.state, outcome.digest)

    def _attend(self) -> OuterResult | None:
        """Takes up the rounds that closed without this node's work, and attends those to come."""
        attendance = self._attendance
        if attendance is None:
            return None
        goes_on = attendance.is_under_way  # Asked first: one that ends now may have found something.
        followed = self._follow(attendance.take())
        if not goes_on and (followed is None or (followed.committed and not self._may_grow())):
            # After a failure the caller decides first from which state the node goes on.
            attendance.begin(self._work_of(PendingWork()), self.changes)
        return followed

    def _may_grow(self) -> bool:
        """Whether the caller may have the model grow before it goes on."""
        return self._attendance is not None and self._attendance.vocabulary_changed()

    def _end_attendance(self) -> Attended | None:
        return None if self._attendance is None else self._attendance.end()

    def _follow(self, attended: Attended | None) -> OuterResult | None:
        """Goes on from what attended rounds led to, with all of the node's own work."""
        if attended is None:
            return None
        outcome, before = attended.outcome, self._state
        if outcome is not None:
            self._install_outcome(outcome)
            self._shift_from(before, attended.num_rounds)
        if outcome is None or attended.error is not None:
            return self._failed(0, attended.error or "it cannot be attended")
        return OuterResult(
            round_index=self.round_index - 1,
            fragment=(self.round_index - 1) % len(self.plan.layouts),
            outer_step=self.outer_step,
            committed=True,
            num_batches=0,
            waited_s=0.0,
            report=outcome.report,
        )

    def _shift_from(self, before: ReplicaState, num_rounds: Mapping[int, int]) -> None:
        """Moves parameters by what their anchors moved in so many rounds, by fragment."""
        for fragment, count in num_rounds.items():
            layout, pending = self.plan.layouts[fragment], self._pending[fragment]
            anchor = self._state.fragments[fragment].anchor
            if pending.num_steps:
                shift = self._parameters.prepare_merge(layout, anchor - before.fragments[fragment].anchor)
                shift(1.0)
            else:
                self._parameters.scatter(layout, anchor)
            pending.lag += count

    def _begin(self) -> OuterResult | None:
        """Tries a round, or starts one in the background."""
        work, layout = self._work(), self.plan.layouts[self._state.fragment]
        self.inner_step = 0
        if self._last_call is not None and not self._last_call.done():
            return self._failed(work.num_batches, "the round that was given up before has not ended yet")
        if not self._config.overlap_steps:
            with arithmetic_threads(self._num_threads):
                return self._carry_out(work)
        snapshot = self._parameters.snapshot(layout)
        self._launch(work, lambda: work.measured(snapshot.subtracted_from(work.anchor)), self._config.overlap_steps)
        return None

    def _work(self) -> RoundWork:
        return self._work_of(self._pending[self._state.fragment])

    def _work_of(self, pending: PendingWork) -> RoundWork:
        return work_of(self._state, self._digest, self._layout_digest, self._config, pending)

    def _carry_out(self, work: RoundWork) -> OuterResult:
        """Goes through a round that training waits for."""
        layout = self.plan.layouts[self._state.fragment]
        vector = self._parameters.gather(layout)
        measured = work.measured(torch.sub(work.anchor, vector, out=vector))
        if not measured.is_finite:
            self._restart_from_anchor()
        started_s = time.monotonic()
        try:
            outcome = work.carried_out(measured, self._collective, self.changes)
        except RoundFailedError as error:
            return self._failed(measured.contribution.num_batches, error, waited_s=time.monotonic() - started_s)
        self._install_outcome(outcome)
        self._parameters.scatter(layout, outcome.anchor)
        return self._committed(outcome, measured.contribution.num_batches, started_s)

    def _launch(self, work: RoundWork, measure: Callable[[], Measured], steps_left: int) -> None:
        """Starts the round's thread."""
        found: Future[Measured] = Future()
        layout, parameters = self.plan.layouts[self._state.fragment], self._parameters
        collective, changes = self._collective, self.changes
        num_threads = self._num_threads_beside

        def run() -> tuple[Outcome, Callable[[float], None]]:
            with arithmetic_threads(num_threads):
                try:
                    found.set_result(measure())
                except BaseException as error:
                    found.set_exception(error)
                    raise
                outcome = work.carried_out(found.result(), collective, changes)
                anchor_share = 1.0 - outcome.config.merge_alpha
                values = outcome.anchor if anchor_share == 1.0 else outcome.anchor * anchor_share
                return outcome, parameters.prepare_merge(layout, values)

        self._last_call = start_daemon(run, "diloco-round")
        self._background = BackgroundRound(work, found, self._last_call, steps_left)

    def _relaunch(self) -> None:
        """Begins again the round that was under way when the state was saved."""
        saved, self._saved_round = self._saved_round, None
        if saved is not None:
            work = self._work()
            self._launch(work, lambda: work.resumed(saved), saved.steps_left)

    def _check(self, background: BackgroundRound) -> Measured | None:
        """Restarts parameters that were not finite from the anchor; returns the contribution, None without one."""
        try:
            if background.measured.exception(self._config.round_timeout_s) is not None:
                return None  # It comes out where the round's result is waited for.
        except TimeoutError:
            return None
        measured = background.measured.result()
        if not background.is_checked and not measured.is_finite:
            self._restart_from_anchor()
        background.is_checked = True
        return measured

    def _restart_from_anchor(self) -> None:
        """Gives up parameters that are not finite, and the work in them."""
        fragment = self._state.fragment
        logger.warning("round %d: parameters are not finite; they restart from the anchor", self._state.round_index)
        self._parameters.scatter(self.plan.layouts[fragment], self._state.fragments[fragment].anchor)
        self._pending[fragment] = PendingWork()

    def _merge(self, background: BackgroundRound) -> OuterResult:
        """Waits for a round in the background, and merges its result with a share of the own parameters."""
        self._background = None
        started_s, num_batches = time.monotonic(), background.work.num_batches
        measured = self._check(background)
        if measured is not None:
            num_batches = measured.contribution.num_batches
        try:
            outcome, merge = self._awaited(background.outcome)
        except RoundFailedError as error:
            return self._failed(num_batches, error, waited_s=time.monotonic() - started_s)
        if self._last_call is background.outcome:
            self._last_call = None  # It has tensors that nobody needs any more, on a GPU of the device's memory.
        self._install_outcome(outcome)
        merge(outcome.config.merge_alpha)
        return self._committed(outcome, num_batches, started_s)

    def _awaited(
        self, call: Future[tuple[Outcome, Callable[[float], None]]]
    ) -> tuple[Outcome, Callable[[float], None]]:
        timeout_s = self._config.round_timeout_s
        try:
            return call.result(timeout_s)
        except TimeoutError as error:
            raise RoundFailedError(f"the round in the background is not back after {timeout_s:.0f} s") from error

    def _committed(self, outcome: Outcome, num_batches: int, started_s: float) -> OuterResult:
        """Settles the work of a round whose outcome is installed."""
        fragment = (self.round_index - 1) % len(self.plan.layouts)
        self._pending[fragment].settle(num_batches, self.inner_step)
        if self._attendance is not None and not self._may_grow():
            self._attendance.begin(self._work_of(PendingWork()), self.changes)
        if outcome.progress < 1.0:
            logger.info("round %d: requested with %.0f %% of its work", self.round_index - 1, 100 * outcome.progress)
        return OuterResult(
            round_index=self.round_index - 1,
            fragment=fragment,
            outer_step=self.outer_step,
            committed=True,
            num_batches=num_batches,
            waited_s=time.monotonic() - started_s,
            report=outcome.report,
            contributed_steps_ago=self.inner_step if num_batches else None,
        )

    def _failed(self, num_batches: int, error: RoundFailedError | str, *, waited_s: float = 0.0) -> OuterResult:
        fate = "its work goes into the next"
        if isinstance(error, StateBehindError):
            most = max(work.num_batches for work in self._pending)
            fate = f"the work of {most} batches is dropped when the others' state is taken up"
            if self._attendance is not None:
                fate = f"the work of {most} batches counts later, if it was in no round yet"
        level = logging.INFO if isinstance(error, RoundLeftError) else logging.WARNING
        logger.log(level, "round %d failed, %s: %s", self.round_index, fate, error)
        return OuterResult(
            round_index=self.round_index,
            fragment=self._state.fragment,
            outer_step=self.outer_step,
            committed=False,
            num_batches=num_batches,
            waited_s=waited_s,
            error=str(error),
        )

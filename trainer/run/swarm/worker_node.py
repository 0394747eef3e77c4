"""A worker as a process: holds one stage and computes the micro-batches that drivers send.

    build the stage → its newest checkpoint, if there is one → the others' state, in the first tenth of a round → serve
    → (lost touch with the others: take up their state) → asked to stop: finish, save, share

Three threads share the work: the event loop answers and asks, the compute thread does all arithmetic and every change
of weights, and the main thread decides about joining and leaving, and waits. Here is which of them does what, and when.
How a worker comes to serve is in `joining`, what it takes up and hands out in `state_exchange`, why it has to join anew
in `withdrawals`, and what it is put together from in `worker_parts`.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import math
import time
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, Final, TypeVar

from trainer.compression.activations import LinkMeter
from trainer.errors import TrainerError
from trainer.inner import StepResult
from trainer.network.discovery import Announcement, settled_uid
from trainer.network.discovery.stage_report import StageReport, StageUid
from trainer.outer.engine.strategy import OuterResult
from trainer.pipeline.stage import StepInfo
from trainer.pipeline.worker.service import Accepts, ServiceStatus
from trainer.run.config import RunConfig
from trainer.run.node.health import Health
from trainer.run.node.identity import NodeStats
from trainer.run.node.stopping import StopRequest
from trainer.run.node.watch import Watch
from trainer.run.signed import ChangesInForce, RunChange, SignedRun
from trainer.run.swarm.building import BuiltStage, WorkerSaving
from trainer.run.swarm.joining import Joining
from trainer.run.swarm.lifecycle import check_first_weights, shut_down_gracefully
from trainer.run.swarm.moving import StageMoves
from trainer.run.swarm.peer_view import SwarmPeers
from trainer.run.swarm.shape import SwarmShape, as_usage_errors, target_tokens_of
from trainer.run.swarm.state_exchange import StateExchange
from trainer.run.swarm.synchroniser import StagePeers
from trainer.run.swarm.withdrawals import Withdrawals
from trainer.run.swarm.worker_figures import WorkerFigures, stage_metrics, stage_report
from trainer.run.swarm.worker_parts import stage_network, stage_startup_check, stage_synchroniser, stage_worker

logger = logging.getLogger(__name__)

_LOOK_S = 0.25
_COMPUTE_S = 120.0
_MAX_FAREWELL_S = 4.0  # At most so long for the others to hear the last announcement.
_ACCEPTS: Final[dict[ServiceStatus, Accepts]] = {"joining": "nothing", "serving": "all", "leaving": "begun"}
T = TypeVar("T")


class WorkerNode:
    """One worker; ``stop`` says whether it has been asked to stop, ``run`` is the signed run it belongs to, if any.

    ``may_move`` says whether it may leave its stage.
    """

    def __init__(
        self,
        config: RunConfig,
        shape: SwarmShape,
        built: BuiltStage,
        stop: StopRequest,
        run: SignedRun | None = None,
        *,
        may_move: bool = False,
    ) -> None:
        self.moves_to = ""
        """The stage it has left its own for, to be known once it has run; empty: none."""
        self._began_s = time.monotonic()
        self._config = config
        self._built = built
        self._stop = stop
        self._is_diloco = config.moves_anchor
        self._averages_gradients = config.strategy == "grad"
        self._uid: StageUid | None = None
        self._worker_task: concurrent.futures.Future[None] | None = None
        self._fit_task: concurrent.futures.Future[None] | None = None
        self._remarks: tuple[str, ...] = ()  # Of the last round, under averaged gradients.
        self._saves_seen = (0, 0)  # Saved, and failed, as far as they were logged.
        network = self._network = stage_network(config, shape, built, stop, run)
        others = self._stage_peers = StagePeers(network)
        peers = self._peers = SwarmPeers(config, shape, lambda: network.announcements)
        synchroniser = self._synchroniser = stage_synchroniser(config, shape, built, network, others)
        self._startup_check = stage_startup_check(config, shape, built, peers)
        meter = LinkMeter(f"{built.name} of {config.node_id}", built.codec, config.swarm.subspace.max_error)
        worker = self._worker = stage_worker(
            config,
            shape,
            built,
            network,
            others,
            peers,
            synchroniser,
            meter,
            on_step=self._stepped,
            on_round=self._after_round,
        )
        self._saving = WorkerSaving(config, shape, built, synchroniser, worker, network.peer_id[:16])
        self._watch = Watch(
            config, network, stop.ask, partial(stage_metrics, worker, meter), role="worker", stage=built.name
        )
        self._watch.about = {
            "peer_id": network.peer_id,
            "num_parameters": sum(parameter.numel() for parameter in built.module.parameters()),
            "model": shape.model.to_dict(),
        }
        self._changes: ChangesInForce | None = None
        if run is not None:
            run.round_index = lambda: synchroniser.place()[0]
            self._changes = ChangesInForce(
                run, run.round_index, lambda: synchroniser.diloco, lambda: synchroniser.gradients, self._go_over
            )
        network.figures = WorkerFigures(config, shape, built, worker, self._watch, self._saving)
        self._withdrawals = Withdrawals(
            Health(config.health, noted=self._watch.work.withdrew),
            synchroniser,
            worker.stepper,
            others,
            network.is_on_its_own,
        )
        self._states = StateExchange(
            config,
            network,
            others,
            built,
            synchroniser,
            worker.stepper,
            compute=self._compute,
            adopted=self._adopted,
            stop=stop,
        )
        self._joining = Joining(
            config.swarm.join,
            self,
            others,
            self._states,
            synchroniser,
            worker.stepper,
            self._startup_check,
            self._withdrawals,
            has_common_state=config.has_common_state,
            follows_rounds=self._averages_gradients,
        )
        self._moves = StageMoves(config, shape, built.name, network.peer_id) if may_move else None

    def run(self) -> None:
        """Serves until it is asked to stop; raises `TrainerError` if it cannot begin, or not go on."""
        with self._watch, self._saving.checkpoints:
            try:
                self.set_status("joining")
                with as_usage_errors():
                    self._states.is_resumed = self._saving.resume()
                    self._startup_check.has_first_weights = not self._states.is_resumed
                self._go_by_changes()
                self._worker.register()
                self._network.start(self)
                check = self._peers.fit_check(self._network.endpoint)
                self._await(check.begin(self._stop))
                self._fit_task = asyncio.run_coroutine_threadsafe(check.go_on(), self._network.loop)
                self._take_part()
            finally:
                if self._fit_task is not None:
                    self._fit_task.cancel()
                self._network.stop()
        logger.info("%s stopped at version %d", self._uid, self._built.replica.version)

    def _take_part(self) -> None:
        self._worker.start()
        self._worker_task = asyncio.run_coroutine_threadsafe(self._worker.run(), self._network.loop)
        try:
            self._states.publish_resumed()
            if self._joining.join():
                if self._moves is not None:
                    self._moves.serves(self._joining.joined_s, self._joining.joined_s - self._began_s)
                self._serve()
            self._leave()
        finally:
            self._worker_task.cancel()
            self._await(self._worker.stop())

    # -- joining (see `trainer.run.swarm.joining.Joiner`) --------------------------------------------------------------

    def expects_others(self) -> bool:
        """Whether there is anybody to wait for."""
        return self._network.expects_others

    def check_and_name(self) -> None:
        """Compares first weights with those of the workers that are there, and takes a name that none of them has."""
        if not self._built.replica.version:
            check_first_weights(self._built.began_from, self._config.swarm.start_from, self._peers.reports())
        self._uid = self._settled_uid()

    def is_stopping(self) -> bool:
        """Whether the worker is asked to stop."""
        return self._stop()

    def is_over(self) -> bool:
        """Whether the worker is asked to stop; raises what ends its compute thread or its comparison with others."""
        for task in (self._worker_task, self._fit_task):
            if task is not None and task.done():
                task.result()
        self._network.check_admitted()
        return self._stop()

    def set_status(self, status: ServiceStatus) -> None:
        """Lets in what goes with the status, and announces it."""
        self._worker.service.status = status
        self._worker.service.accepts = _ACCEPTS[status]
        self._worker.stepper.joining = status == "joining"
        version = self._built.replica.version
        self._watch.observer.event("stage_status", stage=self._built.name, status=status, version=version)
        if self._uid is not None:
            self._network.announce()
        if status == "serving":
            logger.info("%s serves version %d at %s", self._uid, version, self._network.endpoint.address)

    def _adopted(self) -> None:
        """In the compute thread, once another worker's state is this one's."""
        self._go_by_changes()
        self._saving.changed(adopted=True)
        self._startup_check.took_up_state()

    # -- a signed run's changes ----------------------------------------------------------------------------------------

    def _go_by_changes(self) -> None:
        """In the compute thread: goes by the changes of the run that are in force now, if it is a signed one."""
        if self._changes is not None:
            self._changes.look()

    def _go_over(self, config: RunConfig, changes: Sequence[RunChange]) -> None:
        self._built.replica.configure(config.inner, config.swarm.stage)
        self._synchroniser.configure(config)
        self._worker.stepper.configure(
            target_tokens=target_tokens_of(config), auto_step_s=config.swarm.worker.auto_step_s
        )
        self._watch.changed(changes, self._synchroniser.place()[0])

    # -- serving -------------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        while not self.is_over():
            if reason := self._withdrawals.due_because():
                logger.warning("lost touch with the other workers of %s: %s", self._built.name, reason)
                self._watch.observer.event("withdrew", reason=reason)
                self._withdrawals.note(reason)
                self._joining.rejoin()
            elif self._moves_now():
                return
            elif not self._startup_check.may_serve():
                self._joining.rejoin()
            self._startup_check.compare()
            self._states.publish_for_newcomers()
            self._log_saves()
            time.sleep(_LOOK_S)

    def _log_saves(self) -> None:
        """Reports the checkpoints that the thread which writes them has ended since the last look."""
        checkpoints = self._saving.checkpoints
        saved, failed = self._saves_seen
        self._saves_seen = (checkpoints.saved, checkpoints.failed)
        for _ in range(checkpoints.saved - saved):
            self._watch.observer.checkpoint("saved", step=checkpoints.last_version, seconds=0.0)
        for _ in range(checkpoints.failed - failed):
            self._watch.observer.checkpoint("failed", step=self._built.replica.version, seconds=0.0)

    def _moves_now(self) -> bool:
        """Whether the worker is of more use in another stage, and leaves for it."""
        if self._moves is None or not self._moves.is_due(time.monotonic()):
            return False
        reports = {said.peer_id: said.stage for said in self._peers.workers_heard() if said.stage is not None}
        move = self._moves.look({**reports, self._network.peer_id: self._report()}, time.monotonic())
        if move is None:
            return False
        if not self._network.may_move_to(move.to):
            self._moves.put_off(time.monotonic())
            return False
        logger.info(
            "moves from %s to %s: the slowest stage does %.1f rows a second, and then %.1f",
            self._built.name,
            move.to,
            move.before,
            move.after,
        )
        self.moves_to = move.to
        return True

    def _stepped(self, info: StepInfo) -> None:
        """In the compute thread, after each step; only the tail knows a loss."""
        self._watch.observer.step(
            StepResult(
                step=info.version - 1,
                loss=math.nan if info.loss is None else info.loss,
                grad_norm=info.grad_norm,
                lr=info.lr,
                num_tokens=info.num_tokens,
                skipped=not info.applied and info.num_tokens > 0,
                seconds=info.seconds,
            )
        )
        self._withdrawals.stepped(is_skipped=not info.applied and info.num_tokens > 0)
        self._saving.stepped(info)
        self._go_by_changes()

    def _after_round(self, result: OuterResult) -> None:
        """In the compute thread, after each round."""
        self._go_by_changes()
        members: tuple[str, ...] = ()
        if result.report is None:
            self._watch.observer.round_failed(result.round_index, result.error)
        else:
            digest = "" if self._synchroniser.gradients is None else self._synchroniser.gradients.state_digest()
            self._watch.observer.round(result.report, outer_step=result.outer_step, state_digest=digest)
            members = result.report.members
            if len(members) > 1 and result.committed:
                self._withdrawals.shared()
                if self._config.swarm.whole_nodes:  # Whoever was in it holds the stage, and with what it had learned.
                    self._startup_check.took_up_state()
            remarks = result.report.remarks() if len(members) > 1 else self._remarks
            if remarks and remarks != self._remarks:  # With averaged gradients each step is a round.
                logger.warning("round %d of %s: %s", result.round_index, self._built.name, "; ".join(remarks))
            self._remarks = remarks if self._averages_gradients else ()
        if result.committed:
            self._saving.changed()
        if not self._withdrawals.note_round(result) and result.committed and self._is_diloco:
            self._states.publish(members)
            self._withdrawals.handed_out(len(members))

    # -- leaving -------------------------------------------------------------------------------------------------------

    def _leave(self) -> None:
        """Saves and shares this worker's state, if it is the stage's: an old one must not be the newest saved."""
        if not self._joining.is_current or self._withdrawals.due_because():
            self.set_status("joining")
            logger.info("leaving without saving: this worker had not caught up with the others of %s", self._built.name)
            return

        stepper = self._worker.stepper

        def refuse() -> None:
            self._worker.service.accepts = "nothing"
            self._worker.runtime.refuse_jobs()

        def step_and_save() -> None:  # In the compute thread, like `share`.
            stepper.joining = True  # It does not follow the others' steps after that either.
            stepper.flush()
            self._saving.save_changes()

        def share() -> None:  # The resulting state is for those that stay; the one before it was saved.
            if self._stage_peers.serving():
                stepper.note(self._synchroniser.share())
                return
            stepper.note(self._synchroniser.drain())
            self._network.collective.move_to(-1)  # Others that leave too do not wait for this one.

        self.set_status("leaving")
        time.sleep(_LOOK_S)  # For drivers to hear of it.
        try:
            shut_down_gracefully(
                leave_s=self._config.swarm.join.leave_s,
                num_unanswered=lambda: self._worker.service.num_under_way,
                refuse=refuse,
                save=lambda timeout_s: self._compute(step_and_save, timeout_s),
                share=lambda timeout_s: self._compute(share, timeout_s),
                clock=time.monotonic,
                sleep=time.sleep,
            )
        finally:
            self._log_saves()
            # Announces how much of its work outlives it; what the others have heard of does not count as perished.
            self._network.announce()
            time.sleep(min(_MAX_FAREWELL_S, 1.0 + 1.5 * self._config.discovery.poll_interval_s))

    # -- announcing ----------------------------------------------------------------------------------------------------

    def progress(self) -> NodeStats:
        """See `trainer.run.node.network.Listener`."""
        return NodeStats(inner_step=self._built.replica.version, stage=self._report())

    def peers(self, announcements: tuple[Announcement, ...]) -> None:
        """See `trainer.run.node.network.Listener`."""
        del announcements
        settled = self._settled_uid()
        if settled != self._uid:
            self._uid = settled
            self._network.announce()

    def state(self, outer_step: int, digest: str, part: str = "") -> None:
        """See `trainer.run.node.network.Listener`."""
        if self._config.moves_anchor:  # All members of a round hold the same; whole nodes as a part of theirs.
            self._watch.observer.event("part_state", stage=self._built.name, outer_step=outer_step, digest=digest)
        logger.debug("round %d can be fetched as %s", outer_step, digest[:12])

    def _report(self) -> StageReport:
        uid = str(self._uid or self._settled_uid())
        return stage_report(uid, self._built, self._worker, self._saving, self._synchroniser.place())

    def _settled_uid(self) -> StageUid:
        return settled_uid(self._built.name, self._network.peer_id, self._uid, self._network.announcements)

    # -- threads -------------------------------------------------------------------------------------------------------

    def _compute(self, function: Callable[[], T], timeout_s: float = _COMPUTE_S) -> T:
        """Calls ``function`` in the compute thread, before anything that waits there."""
        return self._await(self._worker.runtime.control(function), timeout_s)

    def _await(self, coroutine: Coroutine[Any, Any, T], timeout_s: float = _COMPUTE_S) -> T:
        future = asyncio.run_coroutine_threadsafe(coroutine, self._network.loop)
        try:
            return future.result(timeout_s)
        except concurrent.futures.TimeoutError:
            future.cancel()
            raise TrainerError(
                f"expected the compute thread to answer within {timeout_s:.0f} s, found it busy; is a round or the "
                "device hanging?"
            ) from None

"""A worker as a process: holds one stage and computes the micro-batches that drivers send.

    build the stage → its newest checkpoint, if there is one → the others' state, in the first tenth of a round → serve
    → (lost touch with the others: take up their state) → asked to stop: finish, save, share

Three threads share the work: the event loop answers and asks, the compute thread does all arithmetic and every change
of weights, and the main thread decides about joining and leaving, and waits.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import math
import time
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, Final, TypeVar

from trainer.compression.activations import LinkMeter
from trainer.errors import IncompatiblePeerError, RefusedError, TrainerError
from trainer.inner import StepResult
from trainer.network.discovery import Announcement, settled_uid
from trainer.network.discovery.stage_report import StageReport, StageUid
from trainer.outer.diloco import DiLoCoTrainer
from trainer.outer.engine.strategy import OuterResult
from trainer.pipeline.stage import StepInfo
from trainer.pipeline.worker import StageWorker
from trainer.pipeline.worker.service import Accepts, ServiceStatus
from trainer.run.config import RunConfig
from trainer.run.node.health import Health
from trainer.run.node.identity import NodeStats, identity_of
from trainer.run.node.network import Network
from trainer.run.node.peer_book import as_said
from trainer.run.node.stopping import StopRequest
from trainer.run.node.watch import Watch
from trainer.run.signed import SignedRun
from trainer.run.swarm.building import BuiltStage, WorkerSaving
from trainer.run.swarm.lifecycle import (
    StartupVersionCheck,
    catch_up,
    check_first_weights,
    confirm_current,
    is_ahead,
    rejoin_delay_s,
    shut_down_gracefully,
    version_of_state,
)
from trainer.run.swarm.moving import StageMoves
from trainer.run.swarm.peer_view import SwarmPeers, holds_stage, seen_as_part
from trainer.run.swarm.shape import SwarmShape, as_usage_errors, target_tokens_of
from trainer.run.swarm.synchroniser import JudgedCollective, ReplicaSynchroniser, StagePeers, state_choice, state_form
from trainer.run.swarm.worker_figures import WorkerFigures, stage_metrics, stage_report

logger = logging.getLogger(__name__)

_LOOK_S = 0.25
_COMPUTE_S = 120.0
_MAX_FAREWELL_S = 4.0  # At most so long for the others to hear the last announcement.
_MAX_ROUNDS_AHEAD = 3
"""With averaged gradients: steps of most others, after which a worker that has made none of them takes their state."""
_GRACE_LOOKS = 5  # Multiple of `JoinConfig.first_peers_s` after which a stage's state that nobody has counts as lost.
_STATE_WRITE_S = 10.0
"""How long the others may take to write a state, once they have heard that somebody is here to take it up."""
_ACCEPTS: Final[dict[ServiceStatus, Accepts]] = {"joining": "nothing", "serving": "all", "leaving": "begun"}
T = TypeVar("T")


def _num_fragments(config: RunConfig) -> int:
    """In how many rounds all of a replica's weights are shared."""
    if config.moves_anchor:
        return config.outer.num_fragments
    return 1 if config.strategy == "grad" else config.swarm.sparta.num_slices


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
        self._began_at, self._began_s = time.time(), time.monotonic()
        self._config = config
        self._run = run
        self._num_changes = 0
        self._built = built
        self._stop = stop
        self._is_diloco = config.moves_anchor
        self._averages_gradients = config.strategy == "grad"
        self._has_common_state = self._is_diloco or self._averages_gradients
        self._uid: StageUid | None = None
        self._lost_touch = False
        self._is_current = False  # It has the stage's state, which is worth saving and sharing.
        self._is_resumed = False  # It goes on from a checkpoint, and has not lost touch since.
        self._published_round = -1_000_000
        self._worker_task: concurrent.futures.Future[None] | None = None
        self._fit_task: concurrent.futures.Future[None] | None = None
        self._remarks: tuple[str, ...] = ()  # Of the last round, under averaged gradients.
        self._last_round_size = 0  # Members of the last committed round, until that has been looked at.
        self._joined_s = -math.inf
        self._rejoin_delay_s = 0.0
        rows, sparta = shape.model.vocab_size, config.swarm.sparta
        self._network: Network[Any] = Network(
            config,
            identity_of(config),
            shape.terms(built.name),
            lambda: rows,
            state_form(config, built.module, rows),
            stopping=stop,
            choose=state_choice(config),
            same_kind=partial(holds_stage, built.name),
            stages=shape.plan.names,
            near=shape.plan.around(built.name),
            run=run,
            stage=built.name,
            scope=built.name if config.swarm.whole_nodes else "",
            seen_as=seen_as_part(built.name, shape) if config.swarm.whole_nodes else as_said,
        )
        network, self._stage_peers = self._network, StagePeers(self._network)
        self._peers = SwarmPeers(config, shape, lambda: network.announcements)
        judged = JudgedCollective(
            network.collective,
            network.peer_id,
            network.distrust,
            num_slices=0 if self._has_common_state else sparta.num_slices,
            is_sparse=config.strategy == "sparseloco",
        )
        self._synchroniser = ReplicaSynchroniser(
            config,
            built,
            network.collective if self._averages_gradients else judged,
            self._stage_peers,
            lambda: network.collective.behind,
            rows,
            averager=judged if self._averages_gradients else None,
        )
        self._startup_check = StartupVersionCheck(
            built.name,
            shape.plan.names,
            config.swarm.checkpoint,
            _GRACE_LOOKS * config.swarm.join.first_peers_s,
            version=lambda: built.replica.version,
            reports=self._peers.reports,
        )
        self._meter = LinkMeter(f"{built.name} of {config.node_id}", built.codec, config.swarm.subspace.max_error)
        staleness = config.swarm.stage.max_staleness
        self._worker = StageWorker(
            network.endpoint,
            shape.plan,
            built.name,
            built.replica,
            built.codec,
            config.swarm.worker,
            target_tokens=target_tokens_of(config),
            peers=self._stage_peers.peers,
            strategy=self._synchroniser,
            gradients=self._synchroniser.gradients,
            meter=self._meter,
            batches=config.swarm.stage.backward == "recompute",
            num_fragments=_num_fragments(config),
            # Gradients of forward passes that are older than `max_staleness` are refused anyway.
            max_lead=max(staleness, config.outer.inner_steps)
            if self._is_diloco
            else _MAX_ROUNDS_AHEAD
            if self._averages_gradients
            else staleness,
            on_step=self._stepped,
            on_round=self._after_round,
            drivers=self._peers.drivers,
            keepers=self._peers.keepers,
        )
        self._worker.service.workers = lambda stage: {
            said.peer_id: said.peer() for said in self._peers.workers_heard(stage)
        }
        self._saving = WorkerSaving(config, shape, built, self._synchroniser, self._worker, network.peer_id[:16])
        figures = partial(stage_metrics, self._worker, self._meter)
        self._watch = Watch(config, network, stop.ask, figures, role="worker", stage=built.name)
        self._watch.about = {
            "peer_id": network.peer_id,
            "num_parameters": sum(parameter.numel() for parameter in built.module.parameters()),
            "model": shape.model.to_dict(),
        }
        self._saves_seen = (0, 0)  # Saved, and failed, as far as they were logged.
        if run is not None:
            run.round_index = lambda: self._synchroniser.place()[0]
        self._health = Health(config.health, noted=self._watch.work.withdrew)
        self._nonsense = ""  # Why what it computes is of no use; set in the compute thread.
        self._has_shared = False  # Whether it was in a committed round with others since it joined last.
        self._reported = WorkerFigures(config, shape, built, self._worker, self._watch, self._saving)
        network.figures = self._reported
        self._moves = StageMoves(config, shape, built.name, network.peer_id) if may_move else None

    def run(self) -> None:
        """Serves until it is asked to stop; raises `TrainerError` if it cannot begin, or not go on."""
        with self._watch, self._saving.checkpoints:
            try:
                self._set_status("joining")
                with as_usage_errors():
                    self._is_resumed = self._saving.resume()
                    self._startup_check.has_first_weights = not self._is_resumed
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
            if self._has_common_state and self._synchroniser.place()[0]:
                # To the others, what a checkpoint brought back is worth as much as the result of a round.
                self._network.publish(self._synchroniser.trainer.shared_state())
            if self._join():
                self._serve()
            self._leave()
        finally:
            self._worker_task.cancel()
            self._await(self._worker.stop())

    # -- joining -------------------------------------------------------------------------------------------------------

    def _join(self) -> bool:
        """Takes up the others' state when their round begins, and serves from then on; False: it is asked to stop."""
        self._wait_for_others()
        while True:
            may_serve = catch_up(
                self._config.swarm.join,
                others=self._serving_others,
                take_up=self._take_up_state,
                may_be_first=self._startup_check.may_serve,
                round_index=lambda: self._synchroniser.place()[0],
                is_current=self._is_still_current,
                is_over=self._is_over,
                clock=time.monotonic,
                sleep=time.sleep,
                max_behind=0 if self._averages_gradients else None,
            )
            if not may_serve:
                return False
            self._lost_touch = False
            if not self._averages_gradients or self._follows_until_current():
                break
            if self._is_over():
                return False
        self._is_current = True
        self._joined_s = time.monotonic()
        if self._moves is not None:
            self._moves.serves(self._joined_s, self._joined_s - self._began_s)
        if not self._averages_gradients:  # Or else it has followed their rounds.
            # From now on the others wait for it in a round.
            self._network.collective.move_to(self._synchroniser.place()[0])
        self._set_status("serving")
        self._worker.stepper.follows = False  # It takes part with what it counts from now on.
        address = self._network.endpoint.address
        logger.info("%s serves version %d at %s", self._uid, self._built.replica.version, address)
        return True

    def _follows_until_current(self) -> bool:
        """Takes part in rounds with nothing of its own until one begins that it is in; False: it has lost touch."""
        self._network.collective.move_to(self._synchroniser.place()[0])
        self._worker.stepper.follows = True
        is_current = confirm_current(
            self._config.swarm.join,
            others=self._serving_others,
            round_index=lambda: self._synchroniser.place()[0],
            is_lost=lambda: self._lost_touch,
            is_over=self._is_over,
            clock=time.monotonic,
            sleep=time.sleep,
        )
        if not is_current:
            self._worker.stepper.follows = False
            self._network.collective.move_to(-1)
        return is_current

    def _serving_others(self) -> list[StageReport]:
        """Reports of those that serve; with averaged gradients how far their round is by what they last exchanged.

        A step may be over before it is announced that it has begun.
        """
        reports = self._stage_peers.serving()
        share = self._worker.stepper.place_of_others if self._averages_gradients else None
        return reports if share is None else [it.model_copy(update={"round_position": share}) for it in reports]

    def _is_still_current(self) -> bool:
        """Whether the checkpoint this worker resumed from has the anchor that the others train from, bit for bit.

        Announced digests cost nothing, so the round that the others are in must be its own as well.
        """
        if not self._is_resumed or not self._is_diloco:
            return False
        return self._network.shares_common_state and self._synchroniser.place()[0] >= self._stage_peers.frontier()

    def _wait_for_others(self) -> None:
        deadline_s = time.monotonic() + self._config.swarm.join.first_peers_s
        looks = self._network.expects_others
        while looks and time.monotonic() < deadline_s and not self._stop() and not self._stage_peers.serving():
            time.sleep(_LOOK_S)
        if not self._built.replica.version:
            check_first_weights(self._built.began_from, self._config.swarm.start_from, self._peers.reports())
        self._uid = self._settled_uid()

    def _is_over(self) -> bool:
        """Whether the worker is asked to stop; raises what ends its compute thread or its comparison with others."""
        for task in (self._worker_task, self._fit_task):
            if task is not None and task.done():
                task.result()
        self._network.check_admitted()
        return self._stop()

    def _take_up_state(self) -> bool:
        """Fetches the others' state and puts it in place of this worker's; False: there was none to be had."""
        if self._has_common_state and not self._stage_peers.frontier() and not self._synchroniser.place()[0]:
            return True  # Before the first outer step all have the first weights as their anchor.
        if not self._built.replica.version and not any(report.version for report in self._stage_peers.serving()):
            return True  # Nobody has trained: all have the first weights.
        if self._is_resumed and is_ahead(self._built.replica.version, self._stage_peers.serving_workers()):
            logger.info("the others of %s are behind this worker's checkpoint, and will follow", self._built.name)
            return True
        wait_s = self._config.discovery.announce_interval_s + _STATE_WRITE_S
        if self._averages_gradients:
            self._network.let_go()  # One step behind is no better than none.
        shared = self._network.catch_up(wait_s=wait_s, stop=self._stop)
        if shared is None:
            return self._network.holds_common_state
        try:
            self._compute(lambda: self._adopt(shared))
        except (IncompatiblePeerError, RefusedError) as error:
            if isinstance(error, RefusedError) and error.reason != "internal":
                raise
            logger.warning("a state the others hand out does not fit, and is passed over: %s", error)
            self._network.pass_over_fetched()
            return False
        logger.info("took up the others' state of round %d", self._synchroniser.place()[0])
        return True

    def _go_by_changes(self) -> None:
        """Goes on by the changes of the run in force in the round it trains towards; in the compute thread."""
        if self._run is None:
            return
        trainer = self._synchroniser.trainer
        if isinstance(trainer, DiLoCoTrainer):
            trainer.changes = self._run.outer_changes(self._go_by)
            if trainer.awaits_result:  # What is heard of meanwhile may be in force in this round or behind it.
                return
        if self._synchroniser.gradients is not None:
            self._synchroniser.gradients.go_by = self._go_by_round
        self._go_by_round(None)

    def _go_by_round(self, change: int | None) -> None:
        """Goes on by a change that a round's members have agreed on; None: by those in force in the round to come."""
        if self._run is not None:
            self._go_by(self._run.number_at(self._synchroniser.place()[0]) if change is None else change)

    def _go_by(self, number: int) -> None:
        run = self._run
        if run is None or number == self._num_changes:
            return
        self._num_changes = number
        config = run.config_by(number)
        run.begin_by(number)
        self._built.replica.configure(config.inner, config.swarm.stage)
        self._synchroniser.configure(config)
        self._worker.stepper.configure(
            target_tokens=target_tokens_of(config), auto_step_s=config.swarm.worker.auto_step_s
        )
        self._watch.changed(run.chain.changes[:number], self._synchroniser.place()[0])

    def _adopt(self, shared: Any) -> None:
        """In the compute thread: weights, schedule and version are the others' from now on."""
        self._synchroniser.adopt(shared)
        self._go_by_changes()
        self._saving.changed(adopted=True)
        self._startup_check.took_up_state()
        versions = [said.stage.version for said in self._network.donors if said.stage is not None and not said.parts]
        if self._averages_gradients:  # The version is part of the state, which the others have left soon.
            self._worker.stepper.start_over(shared.num_inner_steps)
            return
        self._worker.stepper.start_over(version_of_state(shared.num_inner_steps, versions))
        self._network.publish(shared)

    # -- serving -------------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        while not self._is_over():
            if reason := self._unfit_because():
                logger.warning("lost touch with the other workers of %s: %s", self._built.name, reason)
                self._watch.observer.event("withdrew", reason=reason)
                if self._lost_touch and not self._has_shared and not self._nonsense:
                    self._health.missed_first_round(reason)
                else:
                    self._health.withdraw(reason)
                self._rejoin()
            elif self._moves_now():
                return
            elif not self._startup_check.may_serve():
                self._rejoin()
            self._startup_check.compare()
            self._hand_out_state()
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

    def _unfit_because(self) -> str:
        """Returns why the worker has to take up the others' state; empty: it has not, or there are no others."""
        num_members, self._last_round_size = self._last_round_size, 0
        is_on_its_own = num_members > 0 and self._network.is_on_its_own(num_members)
        reasons = (
            (self._lost_touch, "its rounds failed while the others went on, or they hold another state"),
            (self._synchroniser.is_lost(), "too many rounds behind the others, or its rounds failed without them"),
            (self._worker.stepper.is_left_behind, "too many steps behind the others"),
            (is_on_its_own, "most of the others hold a state that it has never had"),
            (bool(self._nonsense), self._nonsense),
        )
        found = next((reason for holds, reason in reasons if holds), "")
        return found if found and (is_on_its_own or self._stage_peers.serving()) else ""

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

    def _rejoin(self) -> None:
        self._set_status("joining")
        self._is_resumed = self._is_current = self._has_shared = False
        self._nonsense = ""
        self._network.collective.move_to(-1)  # Nobody waits in a round for a worker without a state to contribute.
        self._network.let_go()
        self._rejoin_delay_s = rejoin_delay_s(self._rejoin_delay_s, time.monotonic() - self._joined_s)
        ends_s = time.monotonic() + self._rejoin_delay_s
        while time.monotonic() < ends_s and not self._is_over():
            time.sleep(_LOOK_S)
        self._join()

    def _hand_out_state(self) -> None:
        """Publishes a state that changes with each step, if somebody is there to take it up.

        Of SPARTA not in each round, since somebody may claim to join for ever, and 12 bytes a parameter are copied each
        time. A state half as old as may be missed is good enough. With averaged gradients nothing but the newest is of
        use, and nothing is copied.
        """
        if self._is_diloco or not any(report.status == "joining" for report in self._stage_peers.reports()):
            return
        every_rounds = max(1, self._config.swarm.sparta.max_staleness_rounds // 2)
        round_index = self._synchroniser.place()[0]
        if self._averages_gradients and round_index > self._published_round:
            self._published_round = round_index
            self._network.publish(self._synchroniser.trainer.shared_state())
        elif not self._averages_gradients and round_index >= self._published_round + every_rounds:
            self._published_round = round_index
            self._network.publish(self._compute(self._synchroniser.trainer.shared_state))

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
        self._nonsense = self._health.step(is_skipped=not info.applied and info.num_tokens > 0) or self._nonsense
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
                self._has_shared = True
                self._health.shared()
                if self._config.swarm.whole_nodes:  # Whoever was in it holds the stage, and with what it had learned.
                    self._startup_check.took_up_state()
            remarks = result.report.remarks() if len(members) > 1 else self._remarks
            if remarks and remarks != self._remarks:  # With averaged gradients each step is a round.
                logger.warning("round %d of %s: %s", result.round_index, self._built.name, "; ".join(remarks))
            self._remarks = remarks if self._averages_gradients else ()
        if result.committed:
            self._saving.changed()
        if self._synchroniser.has_lost_touch(result):
            self._lost_touch = True
        elif result.committed and self._is_diloco:
            self._network.publish(self._synchroniser.trainer.shared_state(), members)
            self._last_round_size = len(members)

    # -- leaving -------------------------------------------------------------------------------------------------------

    def _leave(self) -> None:
        """Saves and shares this worker's state, if it is the stage's: an old one must not be the newest saved."""
        if not self._is_current or self._unfit_because():
            self._set_status("joining")
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

        self._set_status("leaving")
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

    def _set_status(self, status: ServiceStatus) -> None:
        self._worker.service.status = status
        self._worker.service.accepts = _ACCEPTS[status]
        self._worker.stepper.joining = status == "joining"
        version = self._built.replica.version
        self._watch.observer.event("stage_status", stage=self._built.name, status=status, version=version)
        if self._uid is not None:
            self._network.announce()

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

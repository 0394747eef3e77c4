"""A worker as a process: one stage, among the others of its stage, for whichever drivers send it micro-batches.

    build the stage → its newest checkpoint, if there is one → the others' state, in the first tenth of a round → serve
    → (lost touch with the others: take up their state) → asked to stop: finish, hand over, save

Three threads share the work: the event loop answers and asks, the compute thread does all arithmetic and every change
of weights, and the main thread decides about coming and going, and waits. A worker that is killed leaves nothing behind
but its last checkpoint; what its stage loses with it the account calls perished.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import time
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, Final, TypeVar

from trainer.compression.activations import LinkMeter
from trainer.errors import IncompatiblePeerError, RefusedError, TrainerError
from trainer.network.discovery import Announcement, settled_uid
from trainer.network.discovery.stage_report import StageReport, StageUid
from trainer.outer.engine.strategy import OuterResult
from trainer.pipeline.stage import StepInfo
from trainer.pipeline.worker import StageWorker
from trainer.pipeline.worker.service import Accepts, ServiceStatus
from trainer.run.config import RunConfig
from trainer.run.node.identity import NodeStats, identity_of
from trainer.run.node.network import Network
from trainer.run.node.stopping import StopRequest
from trainer.run.swarm.building import BuiltStage
from trainer.run.swarm.catch_up import StateCatchUp
from trainer.run.swarm.compatibility import SwarmTerms, check_first_weights, check_fit
from trainer.run.swarm.graceful_shutdown import GracefulShutdown
from trainer.run.swarm.joining import RejoinDelay, is_ahead, version_of_state
from trainer.run.swarm.judging import JudgedCollective
from trainer.run.swarm.keeper import KeeperSearch
from trainer.run.swarm.peer_view import RunPeerView, StagePeerView, is_of_stage
from trainer.run.swarm.saving import WorkerSaving
from trainer.run.swarm.shape import SwarmShape, target_tokens_of
from trainer.run.swarm.startup import beginning
from trainer.run.swarm.startup_check import StartupVersionCheck
from trainer.run.swarm.synchroniser import (
    DilocoSynchroniser,
    ReplicaSynchroniser,
    SpartaSynchroniser,
    state_choice,
    state_form,
)
from trainer.run.swarm.worker_watch import WorkerWatch

__all__ = ["WorkerNode"]

logger = logging.getLogger(__name__)

_LOOK_S = 0.25
_COMPUTE_S = 120.0
_HEARD_S = 4.0
_GRACE_LOOKS = 5
"""Times `JoinConfig.first_peers_s` a stage's state is waited for before the stage counts as lost."""
_HANDED_OUT_S = 10.0
"""How long the others may take to write a state, once they have heard that somebody is here to take it up."""
_ACCEPTS: Final[dict[ServiceStatus, Accepts]] = {"joining": "nothing", "serving": "all", "leaving": "begun"}
T = TypeVar("T")


class WorkerNode:
    """One worker.

    Args:
        config: of the run.
        shape: what all of the swarm agree on.
        built: its stage.
        stop: whether it has been asked to stop.
    """

    def __init__(self, config: RunConfig, shape: SwarmShape, built: BuiltStage, stop: StopRequest) -> None:
        self._config = config
        self._shape = shape
        self._built = built
        self._stop = stop
        self._uid: StageUid | None = None
        self._lost_touch = False
        self._is_current = False
        """It has the stage's state: what it saves and shares is worth something."""
        self._is_back = False
        """It goes on from a checkpoint, and has not lost touch since."""
        self._published_round = -1_000_000
        self._gossip: concurrent.futures.Future[None] | None = None
        self._comparing: concurrent.futures.Future[None] | None = None
        self._members = 0
        self._rejoin_delay = RejoinDelay()
        rows = shape.model.vocab_size
        self._network: Network[Any] = Network(
            config,
            identity_of(config),
            shape.terms(built.name),
            lambda: rows,
            state_form(config, built.module, rows),
            stopping=stop,
            choose=state_choice(config),
            same_kind=partial(is_of_stage, built.name),
            stages=shape.plan.names,
            near=shape.plan.around(built.name),
        )
        self._mates = StagePeerView(self._network)
        self._keeping = self._kept_together()
        self._meter = LinkMeter(f"{built.name} of {config.node_id}", built.codec, config.swarm.subspace.max_error)
        self._terms = SwarmTerms(shape)
        self._others = RunPeerView(self._network, self._terms, KeeperSearch(config))
        self._abreast = StartupVersionCheck(
            built.name,
            shape.plan.names,
            config.swarm.checkpoint,
            _GRACE_LOOKS * config.swarm.join.first_peers_s,
            version=lambda: built.replica.version,
            reports=self._others.reports,
        )
        self._worker = StageWorker(
            self._network.endpoint,
            shape.plan,
            built.name,
            built.replica,
            built.codec,
            config.swarm.worker,
            target_tokens=target_tokens_of(config),
            peers=self._mates.peers,
            strategy=self._keeping,
            meter=self._meter,
            batches=config.swarm.stage.backward == "recompute",
            num_fragments=self._num_parts(),
            max_lead=self._max_lead(),
            on_step=self._stepped,
            on_round=self._after_round,
            keepers=self._others.drivers,
            keeper=self._others.keeper,
        )
        self._worker.service.workers = self._others.workers
        who = self._network.peer_id[:16]
        self._saving = WorkerSaving(config, shape, built, self._keeping, self._worker, who)
        self._watch = WorkerWatch(config, self._network, self._worker, self._meter, stop.ask)

    def run(self) -> None:
        """Serves until it is asked to stop.

        Raises:
            TrainerError: it cannot begin, or not go on.
        """
        self._set_status("joining")
        with self._watch, self._saving:
            try:
                with beginning():
                    self._is_back = self._saving.resume()
                    self._abreast.is_anew = not self._is_back
                self._worker.register()
                self._network.start(self)
                self._refuse_strangers()
                self._take_part()
            finally:
                if self._comparing is not None:
                    self._comparing.cancel()
                self._network.stop()
        logger.info("%s stopped at version %d", self._uid, self._built.replica.version)

    def _take_part(self) -> None:
        self._worker.start()
        gossip = self._gossip = asyncio.run_coroutine_threadsafe(self._worker.run(), self._network.loop)
        try:
            self._publish_resumed()
            if self._join():
                self._serve()
            self._leave()
        finally:
            gossip.cancel()
            self._await(self._worker.stop())

    # -- coming --------------------------------------------------------------------------------------------------------

    def _refuse_strangers(self) -> None:
        check = self._terms.fit_check(self._network.endpoint, self._heard, self._config.run_id)
        self._await(check_fit(check, self._heard, stop=self._stop))
        self._comparing = asyncio.run_coroutine_threadsafe(check.go_on(), self._network.loop)

    def _heard(self) -> tuple[Announcement, ...]:
        return self._network.announcements

    def _join(self) -> bool:
        """Takes up the others' state when their round begins, and serves from then on; False: it is asked to stop."""
        self._wait_for_others()
        arrival = StateCatchUp(
            config=self._config.swarm.join,
            others=self._mates.serving,
            take_up=self._take_up_state,
            may_be_first=self._abreast.may_serve,
            round_index=lambda: self._keeping.place()[0],
            is_current=self._is_still_current,
            is_over=self._is_over,
            clock=time.monotonic,
            sleep=time.sleep,
        )
        if not arrival.run():
            return False
        self._lost_touch, self._is_current = False, True
        self._rejoin_delay.joined(time.monotonic())
        self._network.collective.move_to(self._keeping.place()[0])  # From now on the others wait for it in a round.
        self._set_status("serving")
        logger.info(
            "%s serves version %d at %s", self._uid, self._built.replica.version, self._network.endpoint.address
        )
        return True

    def _is_still_current(self) -> bool:
        """Whether the checkpoint this worker goes on from has the anchor that the others train from, bit for bit."""
        return self._is_back and self._config.strategy == "diloco" and self._network.shares_common_state

    def _wait_for_others(self) -> None:
        deadline_s = time.monotonic() + self._config.swarm.join.first_peers_s
        looks = bool(self._config.discovery.initial_peers)
        while looks and time.monotonic() < deadline_s and not self._stop() and not self._mates.serving():
            time.sleep(_LOOK_S)
        if not self._built.replica.version:
            check_first_weights(self._built.began_from, self._config.swarm.start_from, self._others.reports())
        self._uid = self._settled()

    def _is_over(self) -> bool:
        """Whether the worker is asked to stop.

        Raises:
            TrainerError: its compute thread cannot go on, or the others train something else.
        """
        for going_on in (self._gossip, self._comparing):
            if going_on is not None and going_on.done():
                going_on.result()
        return self._stop()

    def _take_up_state(self) -> bool:
        """The others' state, fetched and put in place of one's own; False where there was none to be had."""
        if not self._mates.frontier() and not self._keeping.place()[0] and self._config.strategy == "diloco":
            return True  # Before the first outer step all have the first weights as their anchor.
        if not self._built.replica.version and not any(report.version for report in self._mates.serving()):
            return True  # Nobody has trained: all have the first weights.
        if self._is_back and is_ahead(self._built.replica.version, self._mates.serving()):
            logger.info("the others of %s are behind this worker's checkpoint, and will follow", self._built.name)
            return True
        wait_s = self._config.discovery.announce_interval_s + _HANDED_OUT_S
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
        logger.info("took up the others' state of round %d", self._keeping.place()[0])
        return True

    def _adopt(self, shared: Any) -> None:
        """In the compute thread: weights, schedule and version are the others' from now on."""
        self._keeping.adopt(shared)
        self._saving.adopted()
        self._abreast.is_anew = False
        versions = [said.stage.version for said in self._network.donors if said.stage is not None]
        self._worker.stepper.start_over(version_of_state(shared.num_inner_steps, versions))
        self._network.publish(shared)

    # -- being there ---------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        while not self._is_over():
            if self._has_lost_touch():
                logger.warning("lost touch with the other workers of %s; taking up their state", self._built.name)
                self._rejoin()
            elif not self._abreast.may_serve():
                self._rejoin()
            self._abreast.compare()
            self._hand_out_state()
            time.sleep(_LOOK_S)

    def _has_lost_touch(self) -> bool:
        if self._lost_touch or self._keeping.is_lost() or self._worker.stepper.is_left_behind:
            return bool(self._mates.serving())
        members, self._members = self._members, 0
        return members > 0 and self._network.is_on_its_own(members)

    def _rejoin(self) -> None:
        self._set_status("joining")
        self._is_back = self._is_current = False
        self._network.collective.move_to(-1)  # Nobody waits in a round for one that has no state to bring to it.
        self._network.let_go()
        ends_s = time.monotonic() + self._rejoin_delay.next_s(time.monotonic())
        while time.monotonic() < ends_s and not self._is_over():
            time.sleep(_LOOK_S)
        self._join()

    def _publish_resumed(self) -> None:
        """What a checkpoint brought back is worth as much to the others as what a round makes."""
        if self._config.strategy == "diloco" and self._keeping.place()[0]:
            self._network.publish(self._keeping.shared_state())

    def _hand_out_state(self) -> None:
        """SPARTA's states change with each step: one is written when somebody is there to take it up.

        Not in each round, since somebody may claim to join for ever: 12 bytes a parameter are copied each time.
        """
        if self._config.strategy != "async_sparta":
            return
        round_index = self._keeping.place()[0]
        if self._mates.is_anybody_joining() and round_index >= self._published_round + self._hand_out_rounds():
            self._published_round = round_index
            self._network.publish(self._compute(self._keeping.shared_state))

    def _stepped(self, info: StepInfo) -> None:
        """In the compute thread, behind each step."""
        self._watch.stepped(info)
        self._saving.stepped(info)

    def _after_round(self, outcome: OuterResult) -> None:
        self._watch.round(outcome)
        if outcome.report is not None and len(outcome.report.members) > 1 and (remarks := outcome.report.remarks()):
            logger.warning("round %d of %s: %s", outcome.round_index, self._built.name, "; ".join(remarks))
        if outcome.committed:
            self._saving.shared()
        if self._keeping.has_lost_touch(outcome):
            self._lost_touch = True
        elif outcome.committed and self._config.strategy == "diloco":
            members = outcome.report.members if outcome.report is not None else ()
            self._network.publish(self._keeping.shared_state(), members)
            self._members = len(members)

    # -- going ---------------------------------------------------------------------------------------------------------

    def _leave(self) -> None:
        """Hands over what it has, unless that is not the stage's state: an old one must not become the newest saved.

        Raises:
            CheckpointError: it could not be saved.
        """
        if not self._is_current or self._has_lost_touch():
            self._set_status("joining")
            logger.info("leaving without saving: this worker had not caught up with the others of %s", self._built.name)
            return
        self._set_status("leaving")
        time.sleep(_LOOK_S)  # For drivers to hear of it.
        departure = GracefulShutdown(
            leave_s=self._config.swarm.join.leave_s,
            num_unanswered=lambda: self._worker.service.num_under_way,
            refuse=self._refuse,
            save=lambda timeout_s: self._compute(self._step_and_save, timeout_s),
            share=lambda timeout_s: self._compute(self._share, timeout_s),
            clock=time.monotonic,
            sleep=time.sleep,
        )
        try:
            departure.run()
        finally:
            self._network.announce()  # How much of what it has counted outlives it: once heard, nothing of it perishes.
            time.sleep(min(_HEARD_S, 1.0 + 1.5 * self._config.discovery.poll_interval_s))

    def _refuse(self) -> None:
        self._worker.service.accepts = "nothing"
        self._worker.runtime.refuse_jobs()

    def _step_and_save(self) -> None:
        """In the compute thread, which counts nothing any more."""
        self._worker.stepper.joining = True  # Nor does it follow the others' steps behind that.
        self._worker.stepper.flush()
        self._saving.save_changes()

    def _share(self) -> None:
        """In the compute thread. What it makes of the state is for those that stay: saved is what was before."""
        if self._mates.serving():
            self._worker.stepper.note(self._keeping.share())
            return
        self._worker.stepper.note(self._keeping.drain())
        self._network.collective.move_to(-1)  # Others that leave too do not wait for this one.

    # -- what it says --------------------------------------------------------------------------------------------------

    def progress(self) -> NodeStats:
        """See `trainer.run.node.network.Listener`."""
        return NodeStats(inner_step=self._built.replica.version, stage=self._report())

    def peers(self, announcements: tuple[Announcement, ...]) -> None:
        """See `trainer.run.node.network.Listener`."""
        del announcements
        settled = self._settled()
        if settled != self._uid:
            self._uid = settled
            self._network.announce()

    def state(self, outer_step: int, digest: str) -> None:
        """See `trainer.run.node.network.Listener`."""
        logger.debug("round %d can be fetched as %s", outer_step, digest[:12])

    def _report(self) -> StageReport:
        figures, (round_index, position) = self._worker.runtime.figures, self._keeping.place()
        resumed, resumed_through = self._saving.resumed if self._worker.service.status == "serving" else ("", 0)
        return StageReport(
            uid=str(self._uid or self._settled()),
            incarnation=self._worker.replies.incarnation,
            status=self._worker.service.status,
            version=self._built.replica.version,
            saved=self._saving.version,
            round_index=round_index,
            round_position=position,
            shared_through=self._worker.shared.count,
            num_tokens=self._built.replica.accumulated.num_tokens,
            queued=figures.queued,
            rows_per_s=figures.rows_per_s,
            busy=figures.busy,
            resumed=resumed,
            resumed_through=resumed_through,
            began_from=self._built.began_from,
            unsaved_s=self._saving.unsaved_s,
            unsaved_because=self._saving.failure,
        )

    # -- inside --------------------------------------------------------------------------------------------------------

    def _kept_together(self) -> ReplicaSynchroniser[Any]:
        config, built, collective = self._config, self._built, self._network.collective
        rows = self._shape.model.vocab_size
        is_sparta = config.strategy == "async_sparta"
        judged = JudgedCollective(
            collective,
            self._network.peer_id,
            self._network.distrust,
            num_slices=config.swarm.sparta.num_slices if is_sparta else 0,
        )
        if is_sparta:
            return SpartaSynchroniser(
                config,
                built.module,
                built.optimizer,
                judged,
                self._mates,
                built.after_average,
                built.kept_axes,
                rows,
            )
        return DilocoSynchroniser(
            config, built.module, judged, lambda: collective.behind, collective.move_to, rows, self._mates.frontier
        )

    def _max_lead(self) -> int:
        """How many steps the others may be ahead: gradients of forward passes further off are refused anyway."""
        staleness = self._config.swarm.stage.max_staleness
        return max(staleness, self._config.diloco.inner_steps) if self._config.strategy == "diloco" else staleness

    def _num_parts(self) -> int:
        config = self._config
        return config.swarm.sparta.num_slices if config.strategy == "async_sparta" else config.diloco.num_fragments

    def _set_status(self, status: ServiceStatus) -> None:
        self._worker.service.status = status
        self._worker.service.accepts = _ACCEPTS[status]
        self._worker.stepper.joining = status == "joining"
        if self._uid is not None:
            self._network.announce()

    def _settled(self) -> StageUid:
        return settled_uid(self._built.name, self._network.peer_id, self._uid, self._network.announcements)

    def _hand_out_rounds(self) -> int:
        """A state half as old as may be missed is good enough."""
        return max(1, self._config.swarm.sparta.max_staleness_rounds // 2)

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

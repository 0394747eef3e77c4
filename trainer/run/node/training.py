"""The loop of a node: inner steps, outer steps, checkpoints, until it is asked to stop.

A node that is killed goes on from its last checkpoint bit for bit (on a CPU, with the same number of threads):
everything that decides a step is in it. One whose round went on without it fetches the others' state, and joins later.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median_low
from typing import TYPE_CHECKING, Any, Protocol

from loader import GenesisDataset, LoaderError
from trainer.checkpoint.node import Checkpointer
from trainer.errors import CheckpointError, PeerUnavailableError, TrainerError
from trainer.evaluation import Evaluation, Evaluator
from trainer.inner import Batch, StepResult
from trainer.model import rows_for
from trainer.monitor import (
    MeteredIterator,
)
from trainer.monitor.metrics import CheckpointOutcome
from trainer.monitor.status import SpeedStatus
from trainer.monitor.swarm import plausible_node
from trainer.outer.engine.strategy import OuterResult
from trainer.run.config import RunConfig
from trainer.run.node.data import StoreWatch
from trainer.run.node.health import Health
from trainer.run.node.replica import Replica
from trainer.run.node.stopping import StopRequest
from trainer.run.node.watch import Watch

if TYPE_CHECKING:
    from trainer.outer.grad import GradTrainer
    from trainer.run.node.bucket_network import BucketNetwork
    from trainer.run.node.cluster import Ranks
    from trainer.run.node.network import Network
    from trainer.run.signed import ChangesInForce, RunChange, SignedRun

logger = logging.getLogger(__name__)

_MOST_STATES = 5
"""Taken up one after the other: the others may have gone on while their state was on its way, and a node that begins
to train on an old one comes too late to the next round, and to each one after that."""
_COMPARED_STEPS = 50
"""Steps between two looks at the others' losses, and about as many are in a smoothed one."""
_BEGIN_WAIT_S = 120.0
"""So long a newcomer waits for others that say they have trained to hand out their state."""
FIRST_STATE_S = 6 * 3600.0  # Some hundred inner steps of a large model on a slow machine.


class TrainingDisplay(Protocol):
    """Shows steps and rounds to a person or a program as they happen."""

    def step(self, result: StepResult) -> None:
        """Shows a step."""

    def outer(self, result: OuterResult) -> None:
        """Shows an attempt at a round."""

    def speed_from(self, speed: Callable[[], SpeedStatus | None]) -> None:
        """Takes what tells how fast training is, to be shown with steps."""

    def evaluation(self, found: Evaluation) -> None:
        """Shows a measurement of the model."""


@dataclass(slots=True, kw_only=True)
class Node:
    """The parts of one node, and its loop."""

    config: RunConfig
    ranks: Ranks
    replica: Replica
    dataset: GenesisDataset
    batches: MeteredIterator[Batch]
    store: StoreWatch
    checkpointer: Checkpointer
    watch: Watch
    network: Network[Any] | BucketNetwork | None
    display: TrainingDisplay
    stop: StopRequest
    evaluator: Evaluator
    curve_id: str = ""
    """What the node's curves are known by, from its first start with any on; empty: it had none."""
    current_loss: float = math.nan
    signed_run: SignedRun | None = None
    """The run it belongs to, whose changes it goes by; None: its options alone."""
    awaits_state: bool = False
    """Whether its weights are nobody's: it trains and saves nothing before it has taken up the others' state."""
    health: Health = field(init=False)
    _store_has_grown: bool = False
    _changes: ChangesInForce | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.health = Health(self.config.health, noted=self.watch.work.withdrew)
        if self.replica.gradients is not None:
            self.replica.gradients.is_over = self.stop
        if self.signed_run is not None:
            self._changes = self._changes_of(self.signed_run)

    def begin(self) -> None:
        """Joins the others, if there are any: takes up their state, and announces its own."""
        sharing = self.replica.sharing
        if self.signed_run is not None and sharing is not None:
            self.signed_run.round_index = lambda: sharing.round_index
        if self.network is not None:
            logger.info("looking for the other nodes of run %s", self.config.run_id)
            self.network.note_catching_up()
            self.network.start(self.watch)
            if self.replica.gradients is not None and self.replica.gradients.progress is not None:
                self.replica.gradients.progress.start()
        self.watch.set_shards(self.dataset.shards)
        if self.network is not None and self.replica.sharing is not None:
            self.network.publish(self.replica.sharing.shared_state())
            if self.awaits_state:
                self._await_state(self.network)
            else:
                self._catch_up(wait_s=_BEGIN_WAIT_S if self._comes_late() else 0.0)
        self._go_by_changes()
        self._record_state()

    def _comes_late(self) -> bool:
        """Whether others have made steps of averaged gradients, of whose state this node has none to begin with.

        They hand it out once they know of this node. Newcomers that did not wait would step apart from them.
        """
        gradients, network = self.replica.gradients, self.network
        if gradients is None or network is None or gradients.trainer.round_index:
            return False
        return any(said.inner_step > 0 for said in network.alike())

    def run(self) -> None:
        """Trains until asked to stop, or for ``max_steps``, and saves; after an error the last checkpoint is whole."""
        if self.awaits_state:
            logger.info("stopped before the state of the run was there: nothing to save")
            return
        logger.info(
            "training on %d shards; each is fetched and verified before its first use, where the cache has it not",
            len(self.dataset.shards),
        )
        self.display.speed_from(lambda: self.watch.tracker.speed)
        self.watch.end_step(0)
        try:
            while not (self._has_all_steps() or self._is_stopped()):
                self._step()
                if self.network is not None:
                    self.network.check_fit()
            # Unless a rank was asked to stop: one alone would wait for the others in vain. Then the round under way is
            # saved as such, and begun again.
            if self._has_all_steps() and not self.ranks.any(self.stop()):
                self._after_rounds(self.replica.drain())
        except PeerUnavailableError as error:
            if not (self.ranks.in_cluster and self.stop()):
                raise
            # Half a round is worth no checkpoint: the ranks go on from the one before.
            logger.warning("the other ranks stopped first: %s", error)
            return
        logger.info("saving step %d", self.replica.inner.step_index)
        self.save(wait=True)
        logger.info("stopped at step %d; all of it is in %s", self.replica.inner.step_index, self.checkpointer.path)
        self._log_unshared()

    def save(self, *, wait: bool = False) -> None:
        """Saves everything; a disk that is full is reported, and training goes on unless ``wait``."""
        began_s = time.perf_counter()
        outcome: CheckpointOutcome = "failed"
        try:
            if not wait and self.checkpointer.leaves_out():  # Asked first: contents of ranks are gathered from all.
                outcome = "skipped"
                return
            loader: dict[str, Any] = {"stream": self.dataset.state_dict(), "tracker": self.watch.tracker.state_dict()}
            loader |= {"curve_id": self.curve_id} if self.curve_id else {}
            taken = self.checkpointer.save(self.replica.contents(loader, self.current_loss).to_mapping(), wait=wait)
            outcome = "saved" if taken else "skipped"
        except CheckpointError as error:
            if wait:
                raise
            logger.warning("%s", error)
        finally:
            seconds = time.perf_counter() - began_s
            self.watch.observer.checkpoint(outcome, step=self.replica.inner.step_index, seconds=seconds)
            self.watch.spend("checkpoint", seconds)

    def take_steps(self, count: int) -> None:
        """Takes so many steps as `run` does, for measurements."""
        self.watch.end_step(0)
        for _ in range(count):
            self._step()

    def _is_stopped(self) -> bool:
        # Under DDP no rank may wait for the gradients of one that has left.
        return self.ranks.any(self.stop()) if self.config.strategy == "ddp" else self.stop()

    def _has_all_steps(self) -> bool:
        has_read = 0 < self.config.max_tokens <= self.replica.inner.num_tokens
        if self.config.max_tokens:  # Ranks may have read unequally, and none can go on without the others.
            has_read = self.ranks.any(has_read)
        return has_read or 0 < self.config.max_steps <= self.replica.inner.step_index

    def _go_by_changes(self) -> None:
        """Goes by the changes of the run that are in force now, if it is a signed one."""
        if self._changes is not None:
            self._changes.look()

    def _changes_of(self, run: SignedRun) -> ChangesInForce:
        from trainer.run.signed import ChangesInForce  # It brings the network, which a node alone does not need.

        def round_index() -> int | None:
            return None if self.replica.sharing is None else self.replica.sharing.round_index

        def gradients() -> GradTrainer | None:
            return None if self.replica.gradients is None else self.replica.gradients.trainer

        def go_over(config: RunConfig, changes: Sequence[RunChange]) -> None:
            self.replica.configure(config)
            if self.replica.sharing is not None:
                self.watch.changed(changes, self.replica.sharing.round_index)

        return ChangesInForce(run, round_index, lambda: self.replica.diloco, gradients, go_over)

    def _step(self) -> None:
        self._go_by_changes()
        result = self.replica.inner.step()
        if self.replica.gradients is not None and result.skipped and self.stop():
            return  # Cut short: what is added up is saved.
        if not result.skipped and math.isfinite(result.loss):  # Under DDP a rank may have had no label that counts.
            self.current_loss = result.loss
        num_tokens = self.replica.inner.num_tokens
        self.watch.observer.step(result, loader_wait_s=self.batches.take_wait_s(), num_tokens=num_tokens)
        self.watch.spend("data", result.data_s)
        self.watch.spend("compute", result.compute_s)
        self.watch.spend("optimizer", result.optimizer_s)
        self.display.step(result)
        self._store_has_grown |= self.store.look()
        began_s = time.perf_counter()
        outcomes = self.replica.after_inner_step(0 if result.skipped else self.replica.config.inner.accumulation_steps)
        self._after_rounds(outcomes)
        self.watch.spend("outer_step", time.perf_counter() - began_s)
        has_committed = any(outcome.committed for outcome in outcomes)
        if self.replica.gradients is None or not outcomes or has_committed:  # Or it was the round that failed.
            self._withdraw_if(self.health.step(is_skipped=result.skipped), own_state_is_void=True)
        if self.replica.inner.step_index % _COMPARED_STEPS == 0:
            self._withdraw_if(self.health.loss(self.watch.tracker.smoothed_loss, self._losses_of_others()))
        # Under averaged gradients each step is a round.
        committed = has_committed and self.replica.gradients is None
        self._evaluate(after_round=committed)
        if committed or self.replica.inner.step_index % self.config.checkpoint.every_steps == 0:
            self.save()
        self.watch.end_step(result.num_tokens)

    def _evaluate(self, *, after_round: bool) -> None:
        step = self.replica.inner.step_index
        with self.replica.measured() as model:
            found = self.evaluator.after_step(model, step, after_round=after_round)
        if found is not None:
            self.watch.observer.evaluation(found)
            self.display.evaluation(found)

    def _after_rounds(self, outcomes: Iterable[OuterResult]) -> None:
        # Where several parts' rounds failed together, the first has the states of all taken up.
        for outcome in outcomes:
            self._after_round(outcome)

    def _after_round(self, outcome: OuterResult) -> None:
        self.display.outer(outcome)
        if outcome.report is None:
            self.watch.observer.round_failed(outcome.round_index, outcome.error, outcome.part)
            collective = None if self.network is None else self.network.group(outcome.part).collective
            if collective is not None and collective.keeps_work and collective.behind:
                logger.info("this node takes up the others' state, with its own work on top of it: %s", outcome.error)
                self._catch_up(keep_work=True)
            elif collective is not None and collective.behind:
                self._withdraw_if("the others hold another state, or have gone on without it")
            else:
                self._withdraw_if(self.health.round_failed(others_went_on=self._others_went_on(outcome.part)))
            return
        if len(outcome.report.members) > 1:
            self.health.shared()
        self._adopt_store_changes()
        sharing, is_each_step = self.replica.sharing, self.replica.gradients is not None
        if self.network is not None and sharing is not None and (not is_each_step or self._others_need_a_state()):
            self.network.publish(sharing.shared_state(), outcome.report.members)
        digest = sharing.state_digest() if sharing is not None and is_each_step else ""
        self.watch.observer.round(
            outcome.report, outer_step=outcome.outer_step, state_digest=digest, stage=outcome.part
        )
        if is_each_step:  # Others that hold another state refuse this node's next round, which tells it.
            return
        if self.network is None and self.replica.diloco is not None:
            # A digest of a large state takes seconds, which training does not wait for.
            self.replica.diloco.when_digested(partial(self.watch.state, outcome.outer_step))
        if self.network is not None and self.network.group(outcome.part).is_on_its_own(len(outcome.report.members)):
            reason = "most of the others hold another state: this node was cut off from them"
            self._withdraw_if(reason, wait_s=0.0)

    def _others_went_on(self, part: str) -> bool:
        """Whether most of those that train alike say that they have made an outer step that this node has not."""
        own = self.replica.outer_step_of(part)
        if self.network is None or own is None:
            return False
        steps = [said.outer_step for said in self.network.group(part).alike()]
        return bool(steps) and median_low(steps) > own

    def _losses_of_others(self) -> list[float]:
        if self.network is None:
            return []
        losses = (plausible_node(said).loss for said in self.network.alike())
        return [loss for loss in losses if loss is not None]

    def _withdraw_if(self, reason: str, *, wait_s: float = 120.0, own_state_is_void: bool = False) -> None:
        """Takes the node out and takes up the others' state, if there is a reason and others with a state.

        With ``own_state_is_void`` any state of theirs is taken up, also the one that this node's last outer step made:
        its weights since then are worth nothing. Raises `UnfitNodeError` if this was once too often.
        """
        network = self.network
        if not reason or network is None or self.replica.sharing is None:
            return
        if own_state_is_void and not any(said.state_digest for said in network.alike()):
            return
        logger.warning("this node takes itself out, and takes up the others' state: %s", reason)
        self.watch.observer.event("withdrew", reason=reason)
        self.health.withdraw(reason)
        if own_state_is_void:
            network.let_go()
        self._catch_up(wait_s=wait_s, is_new=self.replica.gradients is not None and not own_state_is_void)

    def _others_need_a_state(self) -> bool:
        """Whether a node of the run holds none that others can fetch: it is new, or looks for theirs."""
        return self.network is not None and any(not found.state_digest for found in self.network.alike())

    def _adopt_store_changes(self) -> None:
        """Adds rows for the ids that all members know of, and the store's new shards, read from the next epoch on."""
        num_ids = self.ranks.least(self.store.num_ids)
        rows = rows_for(num_ids) if self.network is None else self.network.collective.agreed_vocabulary_rows
        before = self.replica.vocab_rows
        self.replica.grow(rows, num_ids)
        if rows > before:
            logger.info("vocabulary: %d rows, before %d", rows, before)
            self.watch.observer.event("vocabulary", rows=rows, before=before)
        if self._store_has_grown:
            try:
                num_shards = self.dataset.refresh()
            except LoaderError as error:
                logger.warning("the store's new shards cannot be read yet: %s", error)
            else:
                self._store_has_grown = False
                self.replica.refreshed(self.dataset.state_dict())
                logger.info("the store has %d shards now", num_shards)
                self.watch.observer.event("store", shards=num_shards)
        self.watch.set_shards(self.dataset.shards)

    def _catch_up(self, wait_s: float = 120.0, *, is_new: bool = False, keep_work: bool = False) -> None:
        """Takes up the others' state; ``is_new``: one that this node has never held; ``keep_work``: with its own work.

        Averaged gradients leave a state behind with each step: others that still announce one this node came too late
        with have none to offer before their step is over.
        """
        if self.network is None or self.replica.sharing is None:
            return
        if self.replica.gradients is not None and wait_s:
            self.network.let_go()  # One step behind is no better than none.
            self.network.announce()
        for _ in range(_MOST_STATES):
            shared = self.network.catch_up(wait_s=wait_s, stop=self.stop, is_new=is_new)
            if shared is None:
                break
            self.replica.adopt(shared, keep_work=keep_work)
            outer_step = self.replica.sharing.outer_step
            logger.info("took up the others' state of outer step %d", outer_step)
            self.watch.observer.event("adopted", outer_step=outer_step)
            self.network.publish(self.replica.sharing.shared_state())
            self.save()
            wait_s = 0.0
        self.network.move_to(self.replica.sharing.round_index)
        self._record_state()

    def _await_state(self, network: Network[Any] | BucketNetwork) -> None:
        """Takes up the others' state, which they hand out after their first outer step; raises `TrainerError`."""
        if not network.alike():
            raise TrainerError(
                f"expected a node of run {self.config.run_id} that began with the weights "
                f"{self.config.model.init_digest[:12]} to take the state from, found none; start this one again when "
                "there is one, or give it --init-from"
            )
        logger.info("waiting for the state of the run: others hand it out after their next outer step")
        self._catch_up(wait_s=FIRST_STATE_S)
        self.awaits_state = self.replica.sharing is not None and self.replica.sharing.round_index == 0
        if self.awaits_state and not self.stop():
            raise TrainerError(
                f"expected the others to hand out a state within {FIRST_STATE_S:.0f} s, found none; are they training?"
            )

    def _record_state(self) -> None:
        """Records which state the node holds: that of the snapshot others can fetch; alone, the state itself."""
        sharing = self.replica.sharing
        if sharing is None:
            return
        if self.network is not None:
            self.network.settle()
        digest = sharing.state_digest() if self.network is None else self.network.state_digest
        self.watch.tracker.set_state(sharing.outer_step, digest, inner_step=sharing.inner_step)

    def _log_unshared(self) -> None:
        diloco = self.replica.diloco
        if diloco is None or (self.network is None and not self.ranks.in_cluster):
            return
        num_steps, num_batches = diloco.unshared
        if num_batches:
            logger.info(
                "not shared with the others: %d steps (%d batches) since outer step %d; only the checkpoint has them, "
                "and they go into this node's next round when it is started again",
                num_steps,
                num_batches,
                diloco.outer_step,
            )

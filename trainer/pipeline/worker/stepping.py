"""`StageStepper`: when a stage steps, and how all of its workers step together.

A stage steps when its workers together have counted the target of tokens, by each worker's own tokens and the others'
last reports (`ProgressTracker`). The first worker to see it steps and tells the others, which follow as far as they
believe it, each with what it has accumulated; with nothing, its version follows and its weights stay. When nobody has
counted anything for `auto_step_s`, the stage steps with less than its target, if it has anything. After each step the
strategy (DiLoCo, SPARTA) runs in the same thread: a round that is waited for holds up the stage.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from trainer.network.rpc import Endpoint, Peer
from trainer.outer.engine.collective import RoundReport
from trainer.outer.engine.strategy import OuterResult
from trainer.pipeline.protocol.messages import ProgressReport
from trainer.pipeline.stage import StageReplica, StepInfo
from trainer.pipeline.worker.config import WorkerConfig
from trainer.pipeline.worker.progress import ProgressExchange, ProgressTracker
from trainer.pipeline.worker.replies import ReplyCache

logger = logging.getLogger(__name__)


Stepped = Callable[[StepInfo], None]  # Called after each step, in the compute thread.
Synchronised = Callable[[OuterResult], None]  # Called after each round, in the compute thread.


class StepStrategy(Protocol):
    """Keeps replicas of a stage together: `DiLoCoTrainer`, `SpartaTrainer`."""

    def after_inner_step(self, num_batches: int = 1) -> OuterResult | None:
        """Called after each step; 0 batches: the step changed nothing."""
        ...

    def answer_others(self) -> OuterResult | None:
        """Called between two jobs: takes part in a round that others wait for, if there is one.

        The others stand still meanwhile; a worker that first finished its step would have to do theirs as well.
        """
        ...


@dataclass(eq=False, repr=False, kw_only=True)
class StageStepper:
    """Steps one worker's replica together with the stage's others; arguments as of `StageWorker`."""

    endpoint: Endpoint
    replica: StageReplica
    replies: ReplyCache
    config: WorkerConfig
    target_tokens: int
    peers: Callable[[], tuple[Peer, ...]]
    strategy: StepStrategy | None
    max_lead: int
    clock: Callable[[], float]
    on_step: Stepped | None
    on_round: Synchronised | None
    on_news: Callable[[], None] | None = None
    """Called when another worker has reported something new: it may be time to step."""
    joining: bool = False  # While joining nothing steps, and the others do not count this worker.
    follows: bool = False
    """While joining: takes part in rounds of averaged gradients with nothing of its own, to stay current."""

    def __post_init__(self) -> None:
        self._own_id = self.endpoint.peer_id
        interval_s = self.config.progress_interval_s
        self._tracker = ProgressTracker(interval_s, self.max_lead, self.clock)
        self._exchange = ProgressExchange(
            self.endpoint,
            self._tracker,
            self.peers,
            self._report,
            interval_s=interval_s,
            target_tokens=self.target_tokens,
            on_news=self._tell_news,
        )
        self._seen = (0, 0)
        self._counted_s = self._stepped_s = self.clock()

    @property
    def is_left_behind(self) -> bool:
        """Whether the stage is too far ahead to be followed step by step."""
        return self._tracker.is_left_behind(self.replica.version)

    def configure(self, *, target_tokens: int, auto_step_s: float) -> None:
        """Steps at another target and time-out from the next step on; all workers of the stage have to."""
        self.target_tokens = target_tokens
        self.config = replace(self.config, auto_step_s=auto_step_s)

    @property
    def place_of_others(self) -> float | None:
        """How much of the next step's target the others have counted, 0 to 1; None: none was heard lately."""
        return self._tracker.place_of_others(self.target_tokens)

    def register(self) -> None:
        """Registers `stage/progress`; before the endpoint starts."""
        self._exchange.register()

    def between(self) -> None:
        """Steps if it is time; for the compute thread, between two jobs. Raises TrainerError if it cannot go on."""
        self._look()
        while not self.joining and self._is_due():
            self._step()
        if not self.joining and self.strategy is not None:
            self.note(self.strategy.answer_others())

    def flush(self) -> None:
        """Steps with what is accumulated, if anything, before leaving. For the compute thread."""
        if self.replica.accumulated.num_tokens:
            self._step()

    def note(self, result: OuterResult | None) -> None:
        """Notes a round's result, also of one that was asked for between two steps. For the compute thread."""
        if result is None:
            return
        if result.committed:
            self.replica.weights_changed()
            if result.contributed_steps_ago is not None and self._is_with_others(result.report):
                self.replies.shared.committed(result.fragment, result.contributed_steps_ago)
        if self.on_round is not None:
            self.on_round(result)

    def start_over(self, version: int) -> None:
        """Drops what was counted here, because another state of that version was adopted. For the compute thread."""
        dropped, num_known = self.replica.drop(), self.replies.taint()
        self.replica.set_version(version)
        self._stepped_s = self.clock()
        self.replica.weights_changed()
        logger.info(
            "at version %d of the others; %d tokens dropped, %d acknowledged", version, dropped.num_tokens, num_known
        )
        self._wake()

    async def run(self) -> None:
        """Exchanges progress with the stage's other workers until it is cancelled."""
        await self._exchange.run()

    def _report(self) -> ProgressReport:
        return ProgressReport(
            incarnation=self.replies.incarnation,
            version=self.replica.version,
            num_tokens=self.replica.accumulated.num_tokens,
            joining=self.joining,
        )

    def _look(self) -> None:
        seen = (self.replica.version, self.replica.accumulated.num_micro_batches)
        if seen != self._seen:
            self._seen, self._counted_s = seen, self.clock()
        self._exchange.look(self.replica.accumulated.num_tokens)

    def _is_due(self) -> bool:
        version, own_tokens = self.replica.version, self.replica.accumulated.num_tokens
        waited_s = self.clock() - self._stepped_s
        if self._tracker.version_to_follow(version, own_tokens, self.target_tokens, waited_s) > version:
            return True
        if not own_tokens:
            return False
        if self._tracker.stage_tokens(version, own_tokens) >= self.target_tokens:
            return True
        return self.clock() - max(self._counted_s, self._tracker.changed_s) > self.config.auto_step_s

    def _step(self) -> None:
        num_micro_batches = self.replica.accumulated.num_micro_batches
        info = self.replica.step(self.replica.version)
        self._stepped_s = self.clock()
        self.replies.stepped(info.version)
        if self.strategy is not None:
            self.note(self.strategy.after_inner_step(num_micro_batches if info.applied else 0))
        self._look()
        if self.on_step is not None:
            self.on_step(info)
        self._wake()

    def _is_with_others(self, report: RoundReport | None) -> bool:
        """Returns whether others hold all of this worker's contribution to a round."""
        if report is None or self._own_id not in report.members or len(report.members) == 1:
            return False
        return all(who != self._own_id for who, _ in report.dropped)

    def _wake(self) -> None:
        self._exchange.wake()

    def _tell_news(self) -> None:
        if self.on_news is not None:
            self.on_news()

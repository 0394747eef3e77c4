"""`StageStepper`: when a stage steps, and that all of its workers do.

A stage steps when its workers together have counted the target of tokens, which each of them finds from its own and
what the others said last. The worker that finds it first steps and says so; the others follow as far as they believe it
(`StageProgress`), each with what it has itself, or with nothing: then its version follows and its weights stay, since
no sample is ever invented. When nobody in the stage has counted anything for `auto_step_s`, it steps with less than its
target, if it has anything.

Behind each step comes the strategy (DiLoCo, SPARTA), in the same thread: a round that is waited for holds up the stage,
whose drivers are told `busy` or wait.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from trainer.errors import RpcError
from trainer.network.rpc import Endpoint, Peer, PeerId, Reply, Request
from trainer.outer.engine.collective import RoundReport
from trainer.outer.engine.strategy import OuterResult
from trainer.pipeline.protocol.messages import PROGRESS, ProgressReport
from trainer.pipeline.protocol.work import boottime_s
from trainer.pipeline.stage import StageReplica, StepInfo
from trainer.pipeline.worker.applying import StageReplies
from trainer.pipeline.worker.config import WorkerConfig
from trainer.pipeline.worker.progress import StageProgress
from trainer.pipeline.worker.sharing import SharedThrough

__all__ = ["StageStepper", "StepStrategy", "Stepped", "Synchronised"]

logger = logging.getLogger(__name__)

_MIN_TIMEOUT_S = 2.0
_TELL_SHARE = 1 / 8
"""Of a step's tokens: so much is counted between two exchanges at most, or stages whose steps are shorter than
`WorkerConfig.progress_interval_s` would step with far more than their target."""

Stepped = Callable[[StepInfo], None]
"""Told of every step, in the compute thread."""
Synchronised = Callable[[OuterResult], None]
"""Told of every round that has ended, in the compute thread."""


class StepStrategy(Protocol):
    """What keeps replicas of a stage together: `DiLoCoTrainer`, `SpartaTrainer`."""

    def after_inner_step(self, num_batches: int = 1) -> OuterResult | None:
        """Called behind each step; 0 batches: the step changed nothing."""
        ...

    def answer_others(self) -> OuterResult | None:
        """Takes part in a round that others wait for; called between two jobs, and does nothing else.

        They stand still meanwhile: a worker that first finished its step would have to do theirs as well.
        """
        ...


class StageStepper:
    """Steps one worker's replica together with the stage's others.

    Args:
        endpoint: not started yet.
        replica: what steps.
        replies: what is counted.
        shared: told what outlives this worker.
        config: intervals.
        target_tokens: of the stage, for one step.
        peers: the stage's other workers, now.
        strategy: called behind each step; None: nothing keeps replicas together.
        max_lead: versions to follow another worker over.
        clock: seconds; CLOCK_BOOTTIME but in tests.
        on_step: told of each, behind the round that it may have brought.
        on_round: told of each round.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        replica: StageReplica,
        replies: StageReplies,
        shared: SharedThrough,
        config: WorkerConfig,
        *,
        target_tokens: int,
        peers: Callable[[], tuple[Peer, ...]],
        strategy: StepStrategy | None = None,
        max_lead: int = 50,
        clock: Callable[[], float] = boottime_s,
        on_step: Stepped | None = None,
        on_round: Synchronised | None = None,
    ) -> None:
        self.joining = False
        """While joining nothing steps, and the others do not count this worker."""
        self.strategy = strategy
        self.on_news: Callable[[], None] | None = None
        """Called when another worker has said something: it may be time to step."""
        self._endpoint = endpoint
        self._own_id = endpoint.peer_id
        self._replica = replica
        self._replies = replies
        self._shared = shared
        self._config = config
        self._target_tokens = target_tokens
        self._peers = peers
        self._clock = clock
        self._on_step = on_step
        self._on_round = on_round
        self._progress = StageProgress(config.progress_interval_s, max_lead, clock)
        self._seen = (0, 0)
        self._told_tokens = 0
        self._counted_s = self._stepped_s = clock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._news = asyncio.Event()

    @property
    def is_left_behind(self) -> bool:
        """Whether the stage has moved on too far to be followed step by step."""
        return self._progress.is_left_behind(self._replica.version)

    def register(self) -> None:
        """Makes `stage/progress` answerable; before the endpoint starts."""
        self._endpoint.register(PROGRESS, ProgressReport, self._answer)

    def between(self) -> None:
        """Steps if it is time. Called by the compute thread between two jobs.

        Raises:
            TrainerError: optimizer or strategy cannot go on.
        """
        self._look()
        while not self.joining and self._is_due():
            self._step()
        if not self.joining and self.strategy is not None:
            self.note(self.strategy.answer_others())

    def flush(self) -> None:
        """Steps with what there is, if anything: before leaving. For the compute thread."""
        if self._replica.accumulated.num_tokens:
            self._step()

    def note(self, result: OuterResult | None) -> None:
        """A round has ended, if one has; also one that was asked for between two steps. For the compute thread."""
        if result is None:
            return
        if result.committed:
            self._replica.weights_changed()
            if result.contributed_steps_ago is not None and self._is_with_others(result.report):
                self._shared.committed(result.fragment, result.contributed_steps_ago)
        if self._on_round is not None:
            self._on_round(result)

    def start_over(self, version: int) -> None:
        """Another state was taken up: what was counted here and not shared is gone. For the compute thread.

        Args:
            version: of the new weights.
        """
        dropped = self._replica.drop()
        self._shared.start_over()
        num_known = self._replies.taint()
        self._replica.set_version(version)
        self._stepped_s = self._clock()
        self._replica.weights_changed()
        logger.info(
            "at version %d of the others; %d tokens dropped, %d acknowledged", version, dropped.num_tokens, num_known
        )
        self._wake()

    async def run(self) -> None:
        """Tells the stage's other workers how far this one is, and hears it of them, until it is cancelled."""
        self._loop = asyncio.get_running_loop()
        under_way: dict[str, asyncio.Task[None]] = {}
        try:
            while True:
                self._news.clear()
                self._told_tokens = self._replica.accumulated.num_tokens
                peers = {peer.peer_id: peer for peer in self._peers() if peer.peer_id not in (None, self._own_id)}
                self._progress.keep({peer_id for peer_id in peers if peer_id})
                under_way = {peer_id: task for peer_id, task in under_way.items() if not task.done()}
                for peer_id, peer in peers.items():
                    if peer_id and peer_id not in under_way:  # One that does not answer does not hold up the others.
                        under_way[peer_id] = self._loop.create_task(self._exchange(peer))
                with suppress(TimeoutError):  # Not wait_for: Python 3.11 may lose a cancellation in it.
                    async with asyncio.timeout(self._config.progress_interval_s):
                        await self._news.wait()
        finally:
            for task in under_way.values():
                task.cancel()
            await asyncio.gather(*under_way.values(), return_exceptions=True)

    def report(self) -> ProgressReport:
        """How far this worker is."""
        return ProgressReport(
            incarnation=self._replies.incarnation,
            version=self._replica.version,
            num_tokens=self._replica.accumulated.num_tokens,
            joining=self.joining,
        )

    def _look(self) -> None:
        """Notes whether anything was counted since last time."""
        seen = (self._replica.version, self._replica.accumulated.num_micro_batches)
        if seen != self._seen:
            self._seen, self._counted_s = seen, self._clock()
        if self._replica.accumulated.num_tokens - self._told_tokens >= self._target_tokens * _TELL_SHARE:
            self._wake()

    def _is_due(self) -> bool:
        version, own_tokens = self._replica.version, self._replica.accumulated.num_tokens
        waited_s = self._clock() - self._stepped_s
        if self._progress.version_to_follow(version, own_tokens, self._target_tokens, waited_s) > version:
            return True
        if not own_tokens:
            return False
        if self._progress.stage_tokens(version, own_tokens) >= self._target_tokens:
            return True
        idle_since_s = max(self._counted_s, self._progress.changed_s)
        return self._clock() - idle_since_s > self._config.auto_step_s

    def _step(self) -> None:
        num_micro_batches = self._replica.accumulated.num_micro_batches
        info = self._replica.step(self._replica.version)
        self._stepped_s = self._clock()
        self._shared.stepped(info.version, self._replies.stepped())
        if self.strategy is not None:
            self.note(self.strategy.after_inner_step(num_micro_batches if info.applied else 0))
        self._look()
        if self._on_step is not None:
            self._on_step(info)
        self._wake()

    def _is_with_others(self, report: RoundReport | None) -> bool:
        """Whether others hold the whole of what this worker brought to a round."""
        if report is None or self._own_id not in report.members or len(report.members) == 1:
            return False
        return all(who != self._own_id for who, _ in report.dropped)

    def _wake(self) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._news.set)

    async def _exchange(self, peer: Peer) -> None:
        timeout_s = max(_MIN_TIMEOUT_S, self._config.progress_interval_s)
        try:
            told = self.report()
            reply = await self._endpoint.call(peer, PROGRESS, told, ProgressReport, timeout_s=timeout_s)
        except RpcError as error:
            logger.debug("no progress heard of %s: %s", peer.address, error)
            return
        self._hear(reply.sender, reply.body)
        now = self.report()
        grown = now.num_tokens - told.num_tokens >= self._target_tokens * _TELL_SHARE
        if now.version != told.version or grown:  # There was news while this was under way.
            self._news.set()

    def _hear(self, peer_id: PeerId, report: ProgressReport) -> None:
        if self._progress.hear(peer_id, report) and self.on_news is not None:
            self.on_news()

    async def _answer(self, request: Request[ProgressReport]) -> Reply[ProgressReport]:
        if any(peer.peer_id == request.sender for peer in self._peers()):
            self._hear(request.sender, request.body)
        return Reply(self.report())

"""`StageStepper`: when a stage steps, and how all of its workers step together.

A stage steps when its workers together have counted the target of tokens, by each worker's own tokens and the others'
last reports (`ProgressTracker`). The first worker to see it steps and tells the others, which follow as far as they
believe it, each with what it has accumulated; with nothing, its version follows and its weights stay. When nobody has
counted anything for `auto_step_s`, the stage steps with less than its target, if it has anything. After each step the
strategy (DiLoCo, SPARTA) runs in the same thread: a round that is waited for holds up the stage.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from trainer.errors import RpcError
from trainer.network.rpc import Endpoint, Peer, PeerId, Reply, Request
from trainer.outer.engine.collective import RoundReport
from trainer.outer.engine.strategy import OuterResult
from trainer.pipeline.protocol.messages import PROGRESS, ProgressReport
from trainer.pipeline.stage import StageReplica, StepInfo
from trainer.pipeline.worker.config import WorkerConfig
from trainer.pipeline.worker.replies import ReplyCache

logger = logging.getLogger(__name__)

_MIN_TIMEOUT_S = 2.0
_TELL_SHARE = 1 / 8
"""Of a step's tokens: at most so much is counted between two exchanges. Stages whose steps are shorter than
`WorkerConfig.progress_interval_s` would otherwise step with far more than their target."""
_MAX_RATIO = 4
_MAX_AGE_EXCHANGES = 5
_MIN_MAX_AGE_S = 3.0
_SEEN_SHARE = 1 / 2
"""Of the target: another worker's step is followed at once if at least so much is seen of what made it step. The rest
may have been counted since its last report."""
_PATIENCE_EXCHANGES = 2

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


@dataclass(frozen=True, slots=True)
class _Heard:
    report: ProgressReport
    at_s: float
    before: ProgressReport | None  # The last report of an earlier version.

    def tokens(self, version: int) -> int | None:
        """Returns its tokens towards the step after that version, 0 if it is not there yet; None: it never said."""
        if self.report.version < version:
            return 0
        for report in (self.report, self.before):
            if report is not None and report.version == version:
                return report.num_tokens
        return None


class ProgressTracker:
    """What a stage's other workers reported last, as far as it is believed. Any thread may call it.

    Reports are bounded, because a worker that claims too much makes the others step with too little:

    - tokens: a report counts for at most four times the larger of the median report and one's own tokens;
    - a version that most of the others have reached is followed, unless it is further ahead than can be followed;
    - a version that only some have reached is followed by one step, and only when half of the target is seen to be
      counted, or two exchanges' time after one's own last step (a worker that did it all alone looks like a liar);
    - a report older than five exchanges counts for nothing.

    So while liars are fewer than half of the others, they can make a stage of n honest workers step at n / (2 n + 8) of
    its target, and with less than that once in two exchanges' time. Of two workers each has to believe the other.
    """

    def __init__(self, interval_s: float, max_lead: int, clock: Callable[[], float]) -> None:
        self.changed_s = clock()  # When another worker last reported something new.
        self._max_age_s = max(_MIN_MAX_AGE_S, _MAX_AGE_EXCHANGES * interval_s)
        self._patience_s = _PATIENCE_EXCHANGES * interval_s
        self._max_lead = max_lead
        self._clock = clock
        self._lock = threading.Lock()
        self._heard: dict[PeerId, _Heard] = {}

    def hear(self, peer_id: PeerId, report: ProgressReport) -> bool:
        """Notes another worker's report; returns whether it says something new."""
        now_s = self._clock()
        with self._lock:
            last = self._heard.get(peer_id)
            is_news = last is None or last.report != report
            before = None if last is None else last.report if last.report.version < report.version else last.before
            self._heard[peer_id] = _Heard(report, now_s, before)
            if is_news:
                self.changed_s = now_s
            return is_news

    def keep(self, peer_ids: Collection[PeerId]) -> None:
        """Forgets all others, which are no workers of the stage any more."""
        with self._lock:
            self._heard = {peer_id: heard for peer_id, heard in self._heard.items() if peer_id in peer_ids}

    def stage_tokens(self, version: int, own_tokens: int) -> int:
        """Returns the stage's believed tokens towards the step after ``version``, of those who took it too."""
        others = [tokens for heard in self._recent() if (tokens := heard.tokens(version)) is not None]
        if not others:
            return own_tokens
        everyone = sorted([own_tokens, *others])
        most = _MAX_RATIO * max(own_tokens, everyone[(len(everyone) - 1) // 2])
        return own_tokens + sum(min(tokens, most) for tokens in others)

    def version_to_follow(self, version: int, own_tokens: int, target_tokens: int, waited_s: float) -> int:
        """Returns the version the others have reached, as far as they are believed; at least one's own ``version``.

        The target is the stage's for one step, ``own_tokens`` count towards it; ``waited_s`` is since one's own last.
        """
        versions = sorted(heard.report.version for heard in self._recent())
        ahead = [other for other in versions if version < other <= version + self._max_lead]
        if not ahead:
            return version
        median = versions[(len(versions) - 1) // 2]
        if version < median <= version + self._max_lead:
            return median
        seen = self.stage_tokens(version, own_tokens) >= _SEEN_SHARE * target_tokens
        return version + 1 if seen or waited_s > self._patience_s else version

    def is_left_behind(self, version: int) -> bool:
        """Returns whether most others are too far ahead to be followed, so that their state has to be fetched."""
        recent = self._recent()
        return 2 * sum(heard.report.version > version + self._max_lead for heard in recent) > len(recent)

    def place_of_others(self, target_tokens: int) -> float | None:
        """Returns how much of the next step's target the others have counted, 0 to 1; None: none was heard lately."""
        recent = self._recent()
        if not recent:
            return None
        version = max(heard.report.version for heard in recent)
        found = [tokens for heard in recent if (tokens := heard.tokens(version)) is not None]
        return min(1.0, sum(found) / target_tokens)

    def _recent(self) -> list[_Heard]:
        oldest_s = self._clock() - self._max_age_s
        with self._lock:
            return [heard for heard in self._heard.values() if heard.at_s >= oldest_s and not heard.report.joining]


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
        self._tracker = ProgressTracker(self.config.progress_interval_s, self.max_lead, self.clock)
        self._seen = (0, 0)
        self._told_tokens = 0
        self._counted_s = self._stepped_s = self.clock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._news = asyncio.Event()

    @property
    def is_left_behind(self) -> bool:
        """Whether the stage is too far ahead to be followed step by step."""
        return self._tracker.is_left_behind(self.replica.version)

    @property
    def place_of_others(self) -> float | None:
        """How much of the next step's target the others have counted, 0 to 1; None: none was heard lately."""
        return self._tracker.place_of_others(self.target_tokens)

    def register(self) -> None:
        """Registers `stage/progress`; before the endpoint starts."""
        self.endpoint.register(PROGRESS, ProgressReport, self._answer)

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
        self._loop = asyncio.get_running_loop()
        under_way: dict[str, asyncio.Task[None]] = {}
        try:
            while True:
                self._news.clear()
                self._told_tokens = self.replica.accumulated.num_tokens
                peers = {peer.peer_id: peer for peer in self.peers() if peer.peer_id and peer.peer_id != self._own_id}
                self._tracker.keep(peers)
                under_way = {peer_id: task for peer_id, task in under_way.items() if not task.done()}
                for peer_id, peer in peers.items():
                    if peer_id not in under_way:  # One that does not answer does not hold up the others.
                        under_way[peer_id] = self._loop.create_task(self._exchange(peer))
                with suppress(TimeoutError):  # Not wait_for: Python 3.11 may lose a cancellation in it.
                    async with asyncio.timeout(self.config.progress_interval_s):
                        await self._news.wait()
        finally:
            for task in under_way.values():
                task.cancel()
            await asyncio.gather(*under_way.values(), return_exceptions=True)

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
        if self.replica.accumulated.num_tokens - self._told_tokens >= self.target_tokens * _TELL_SHARE:
            self._wake()

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
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._news.set)

    async def _exchange(self, peer: Peer) -> None:
        timeout_s = max(_MIN_TIMEOUT_S, self.config.progress_interval_s)
        try:
            told = self._report()
            reply = await self.endpoint.call(peer, PROGRESS, told, ProgressReport, timeout_s=timeout_s)
        except RpcError as error:
            logger.debug("no progress heard of %s: %s", peer.address, error)
            return
        self._hear(reply.sender, reply.body)
        now = self._report()
        grown = now.num_tokens - told.num_tokens >= self.target_tokens * _TELL_SHARE
        if now.version != told.version or grown:  # There was news while this was under way.
            self._news.set()

    def _hear(self, peer_id: PeerId, report: ProgressReport) -> None:
        if self._tracker.hear(peer_id, report) and self.on_news is not None:
            self.on_news()

    async def _answer(self, request: Request[ProgressReport]) -> Reply[ProgressReport]:
        if any(peer.peer_id == request.sender for peer in self.peers()):
            self._hear(request.sender, request.body)
        return Reply(self._report())

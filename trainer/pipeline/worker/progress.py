"""What workers that step together tell each other of their progress, and how much of it each believes."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass

from trainer.errors import RpcError
from trainer.network.rpc import Endpoint, Peer, PeerId, Reply, Request
from trainer.pipeline.protocol.messages import PROGRESS, ProgressReport

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


class ProgressExchange:
    """Exchanges one worker's progress with the others that step with it, and tells its tracker of theirs.

    Args:
        endpoint: not started yet, so that `stage/progress` can be registered.
        tracker: is told what the others report.
        peers: returns where the others are.
        report: returns this worker's progress; called in the event loop.
        interval_s: between two exchanges without news.
        target_tokens: of a step.
        on_news: called when another has reported something new.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        tracker: ProgressTracker,
        peers: Callable[[], tuple[Peer, ...]],
        report: Callable[[], ProgressReport],
        *,
        interval_s: float,
        target_tokens: int,
        on_news: Callable[[], None],
    ) -> None:
        self._endpoint = endpoint
        self._tracker = tracker
        self._peers = peers
        self._report = report
        self._interval_s = interval_s
        self._target_tokens = target_tokens
        self._on_news = on_news
        self._told_tokens = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._news = asyncio.Event()

    def register(self) -> None:
        """Registers `stage/progress`; before the endpoint starts."""
        self._endpoint.register(PROGRESS, ProgressReport, self._answer)

    def wake(self) -> None:
        """Has progress exchanged soon; from any thread."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._news.set)

    def look(self, num_tokens: int) -> None:
        """Has progress exchanged if this worker, with so many tokens now, has counted much since; from any thread."""
        if num_tokens - self._told_tokens >= self._target_tokens * _TELL_SHARE:
            self.wake()

    async def run(self) -> None:
        """Exchanges progress until it is cancelled."""
        self._loop = asyncio.get_running_loop()
        under_way: dict[str, asyncio.Task[None]] = {}
        own_id = self._endpoint.peer_id
        try:
            while True:
                self._news.clear()
                self._told_tokens = self._report().num_tokens
                peers = {peer.peer_id: peer for peer in self._peers() if peer.peer_id and peer.peer_id != own_id}
                self._tracker.keep(peers)
                under_way = {peer_id: task for peer_id, task in under_way.items() if not task.done()}
                for peer_id, peer in peers.items():
                    if peer_id not in under_way:  # One that does not answer does not hold up the others.
                        under_way[peer_id] = self._loop.create_task(self._exchange(peer))
                with suppress(TimeoutError):  # Not wait_for: Python 3.11 may lose a cancellation in it.
                    async with asyncio.timeout(self._interval_s):
                        await self._news.wait()
        finally:
            for task in under_way.values():
                task.cancel()
            await asyncio.gather(*under_way.values(), return_exceptions=True)

    async def _exchange(self, peer: Peer) -> None:
        timeout_s = max(_MIN_TIMEOUT_S, self._interval_s)
        try:
            told = self._report()
            reply = await self._endpoint.call(peer, PROGRESS, told, ProgressReport, timeout_s=timeout_s)
        except RpcError as error:
            logger.debug("no progress heard of %s: %s", peer.address, error)
            return
        self._hear(reply.sender, reply.body)
        now = self._report()
        grown = now.num_tokens - told.num_tokens >= self._target_tokens * _TELL_SHARE
        if now.version != told.version or grown:  # There was news while this was under way.
            self._news.set()

    def _hear(self, peer_id: PeerId, report: ProgressReport) -> None:
        if self._tracker.hear(peer_id, report):
            self._on_news()

    async def _answer(self, request: Request[ProgressReport]) -> Reply[ProgressReport]:
        if any(peer.peer_id == request.sender for peer in self._peers()):
            self._hear(request.sender, request.body)
        return Reply(self._report())

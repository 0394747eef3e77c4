"""The failure detector of a driver: which workers are proven gone, and which get no work for a while.

**Proof of death.** A process that is stopped, swapped out or busy keeps its port, and its kernel takes connections for
it. So silence proves nothing, and a refused connection proves that nobody listens *at that address*. On this machine
(loopback) that is the process itself. Elsewhere it may be a router whose mapping has lapsed, a forwarder or a firewall
that refuses, while the worker behind it lives, has counted, and steps with it. There two witnesses are needed:
connections are refused, *and* the worker's own key either announces another process at another address, or has
announced nothing since the first refusal for longer than a live worker ever stays silent (`StageDirectory.silence_s`).
The trade-off: the death of a worker elsewhere is known after that time (20 s by default) instead of at once.

**Bans.** Pure: times are arguments, seconds of any one clock. A worker's failures in a row double its ban from
``ban_s`` up to ``max_ban_s``; an answer that no honest worker gives costs ``malformed_ban_s`` at once. What was under
way when a worker was banned counts once: eight requests lost with one worker are one failure.

A worker that answers requests to count with refusals only is banned the same way after `DOUBTS` of them. That ban is
firm: forward passes, which it may run well or seem to, do not end it; only having counted something does.

A ban for silence is half-open (a circuit breaker): where a stage has nobody else, its worker is asked how it is doing,
and the ban ends once it answers (`may_be_asked`, `answers`), first after 1 s, then 2 s, up to 15 s.

A restarted worker (another incarnation) is free of a ban for silence, once until it has counted something, since
anybody may call itself restarted. It keeps firm bans and those for nonsense, because the key is still the same.
"""

from __future__ import annotations

import asyncio
import ipaddress
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from trainer.network.rpc.config import split_address
from trainer.pipeline.driver.workers import StageDirectory, StageWorker

__all__ = ["DOUBTS", "Bans", "Deaths", "is_refused"]

_MOST_KNOWN = 1024


class Deaths:
    """Which workers are proven to be gone; one for all stages, since it remembers when each was refused first.

    Args:
        directory: what is heard of them.
        clock: that of `LastWord.heard_s`.
    """

    def __init__(self, directory: StageDirectory, clock: Callable[[], float] = time.monotonic) -> None:
        self._directory = directory
        self._clock = clock
        self._refused_s: dict[tuple[str, str], float] = {}
        """By key and incarnation: since when connections are refused and nothing is heard."""

    async def found(self, worker: StageWorker, timeout_s: float) -> Literal["gone", "refused", "unknown"]:
        """What has become of the process that is known as ``worker``, by all that proves anything.

        ``refused``: nobody is let through to it now, and it may live; ``unknown``: somebody listens there, or nothing
        is heard.

        Args:
            worker: as it was when it was asked to count.
            timeout_s: seconds to try to reach it.
        """
        process = worker.key, worker.incarnation
        if not await is_refused(worker.peer.address, timeout_s):
            self._refused_s.pop(process, None)
            return "unknown"
        return "gone" if _is_loopback(worker.peer.address) or self._is_elsewhere_or_silent(worker) else "refused"

    def _is_elsewhere_or_silent(self, worker: StageWorker) -> bool:
        process = worker.key, worker.incarnation
        word, now_s = self._directory.last_word(worker.key), self._clock()
        if word is not None and word.incarnation != worker.incarnation and word.address != worker.peer.address:
            return True
        since_s = self._refused_s.pop(process, now_s)
        if word is not None and word.heard_s > since_s:
            since_s = now_s
        self._refused_s[process] = since_s
        if len(self._refused_s) > _MOST_KNOWN:
            del self._refused_s[next(iter(self._refused_s))]
        return now_s - since_s >= self._directory.silence_s


async def is_refused(address: str, timeout_s: float) -> bool:
    """Whether a connection to ``address`` (``host:port``) is refused; False where nothing is heard."""
    host, port = split_address(address)
    try:
        async with asyncio.timeout(timeout_s):
            _, writer = await asyncio.open_connection(host, port)
    except ConnectionRefusedError:
        return True
    except (OSError, TimeoutError, UnicodeError):  # The last of a host that can be no name.
        return False
    writer.transport.abort()  # The end of a connection that was never used is nobody's concern.
    return False


def _is_loopback(address: str) -> bool:
    host, _ = split_address(address)
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


DOUBTS = 5
"""Refusals in a row, each of which an honest worker may have a reason for; a stopped worker has some at once."""
_ASK_AFTER_S = 1.0
_MAX_ASK_AFTER_S = 15.0


@dataclass(slots=True)
class _Record:
    failures: int = 0
    """In a row."""
    since_s: float = float("-inf")
    until_s: float = float("-inf")
    malformed_until_s: float = float("-inf")
    doubts: int = 0
    """Refusals to count since it last counted."""
    is_silent: bool = False
    """Nothing was heard of it when it was banned last."""
    is_firm: bool = False
    """Only counting ends its ban."""
    is_forgiven: bool = False
    """A restart has ended a ban since it last counted."""


class Bans:
    """The bans of one stage's workers.

    Args:
        ban_s: of a first failure.
        max_ban_s: the longest of those that double.
        malformed_ban_s: of an answer that is none.
    """

    def __init__(self, *, ban_s: float, max_ban_s: float, malformed_ban_s: float) -> None:
        self._ban_s = ban_s
        self._max_ban_s = max_ban_s
        self._malformed_ban_s = malformed_ban_s
        self._records: dict[str, _Record] = {}

    def failed(self, worker: str, *, asked_s: float, now: float, is_silent: bool = False) -> float:
        """A request to it that was sent at ``asked_s`` has failed; returns until when it is banned.

        Args:
            worker: whose.
            asked_s: when the request was sent.
            now: the time.
            is_silent: nothing was heard of it.
        """
        record = self._records.setdefault(worker, _Record())
        if asked_s < record.since_s or now < record.until_s:
            return record.until_s  # It was sent before the ban that its fellows caused.
        record.failures += 1
        record.is_silent = is_silent
        record.since_s = now
        record.until_s = now + min(self._max_ban_s, self._ban_s * 2.0 ** min(record.failures - 1, 64))
        return record.until_s

    def doubted(self, worker: str, *, asked_s: float, now: float, doubts: int = 1) -> float:
        """It refused to count for a reason that honest workers have seldom; returns until when it is banned."""
        record = self._records.setdefault(worker, _Record())
        record.doubts += doubts
        if record.doubts >= DOUBTS:
            record.is_firm = True
            self.failed(worker, asked_s=asked_s, now=now)
        return self.until_s(worker)

    def malformed(self, worker: str, *, now: float) -> float:
        """It answered what no honest worker answers; returns until when it is banned."""
        record = self._records.setdefault(worker, _Record())
        record.since_s = now
        record.malformed_until_s = now + self._malformed_ban_s
        return record.malformed_until_s

    def is_caught(self, worker: str, now: float) -> bool:
        """Whether it is banned for nonsense."""
        record = self._records.get(worker)
        return record is not None and now < record.malformed_until_s

    def succeeded(self, worker: str) -> None:
        """It answered well: its failures are forgotten, and it is banned no longer for not answering."""
        record = self._records.get(worker)
        if record is not None and not record.is_firm:
            record.failures, record.until_s = 0, float("-inf")

    def may_be_asked(self, worker: str, now: float) -> bool:
        """Whether it is banned for silence, and for long enough to find out whether it still is silent."""
        record = self._records.get(worker)
        if record is None or not record.is_silent or record.is_firm or not self.is_banned(worker, now):
            return False
        after_s = min(_MAX_ASK_AFTER_S, _ASK_AFTER_S * 2.0 ** min(record.failures - 1, 64))
        return now >= max(record.since_s + after_s, record.malformed_until_s)

    def answers(self, worker: str, now: float) -> None:
        """It was asked how it is doing, and has answered."""
        if self.may_be_asked(worker, now):
            self._records[worker].until_s = float("-inf")

    def counted(self, worker: str) -> None:
        """It counted a micro-batch, and is beyond doubt."""
        record = self._records.get(worker)
        if record is not None:
            record.doubts, record.is_firm, record.is_forgiven = 0, False, False
            self.succeeded(worker)

    def restarted(self, worker: str) -> None:
        """It is said to be another process than the one that failed."""
        record = self._records.get(worker)
        if record is not None and not record.is_firm and not record.is_forgiven:
            record.until_s, record.is_forgiven = float("-inf"), True

    def until_s(self, worker: str) -> float:
        """Until when it is banned, or a time that has passed."""
        record = self._records.get(worker)
        return float("-inf") if record is None else max(record.until_s, record.malformed_until_s)

    def is_banned(self, worker: str, now: float) -> bool:
        """Whether it gets no work now."""
        return now < self.until_s(worker)

    def banned(self, now: float) -> dict[str, float]:
        """Those banned now, with the seconds that are left."""
        left = {worker: self.until_s(worker) - now for worker in self._records}
        return {worker: left_s for worker, left_s in sorted(left.items()) if left_s > 0}

    def tidy(self, now: float, keep: set[str]) -> None:
        """Forgets those that are neither in ``keep`` nor banned: keys cost nothing, so they must not pile up."""
        for worker in [worker for worker in self._records if worker not in keep and not self.is_banned(worker, now)]:
            del self._records[worker]

"""The failure detector of a driver: which workers are proven gone, and which get no work for a while.

A process that is stopped keeps its port, so silence proves nothing, and a refused connection proves only that nobody
listens *at that address*: the process itself on this machine (loopback), elsewhere maybe a router. There a second proof
is needed: the worker's key announces another process at another address, or nothing since the first refusal for longer
than a live worker ever stays silent (`StageDirectory.silence_s`, 20 s by default).
"""

from __future__ import annotations

import asyncio
import ipaddress
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from trainer.network.rpc.config import split_address
from trainer.pipeline.driver.config import DriverConfig
from trainer.pipeline.driver.workers import StageDirectory, StageWorker

_MAX_PROCESSES = 1024
DOUBTS = 5
"""Refusals in a row, each of which an honest worker may have a reason for; a worker that stops gives some at once."""
_ASK_AFTER_S = 1.0
_MAX_ASK_AFTER_S = 15.0
_NEVER_S = float("-inf")


class LivenessProbe:
    """Which workers are proven gone; one for all stages, since it remembers when each was refused first."""

    def __init__(self, directory: StageDirectory, clock: Callable[[], float] = time.monotonic) -> None:
        self._directory = directory
        self._clock = clock
        self._refused_s: dict[tuple[str, str], float] = {}
        """By key and incarnation: since when connections are refused and nothing is announced."""

    async def probe(self, worker: StageWorker, timeout_s: float) -> Literal["gone", "refused", "unknown"]:
        """Tries to find out what has become of a worker's process that was asked to count.

        ``gone`` is proof; ``refused``: it accepts no connection, but may live; ``unknown``: it listens, or nothing
        answers.
        """
        process, address = (worker.key, worker.incarnation), worker.peer.address
        if not await is_refused(address, timeout_s):
            self._refused_s.pop(process, None)
            return "unknown"
        if _is_loopback(address):
            return "gone"
        word, now_s = self._directory.last_word(worker.key), self._clock()
        if word is not None and word.incarnation != worker.incarnation and word.address != address:
            return "gone"
        since_s = self._refused_s.pop(process, now_s)
        if word is not None and word.heard_s > since_s:
            since_s = now_s
        self._refused_s[process] = since_s
        if len(self._refused_s) > _MAX_PROCESSES:
            del self._refused_s[next(iter(self._refused_s))]
        return "gone" if now_s - since_s >= self._directory.silence_s else "refused"


async def is_refused(address: str, timeout_s: float) -> bool:
    """Whether a connection to ``address`` (``host:port``) is refused; False where nothing answers."""
    host, port = split_address(address)
    try:
        async with asyncio.timeout(timeout_s):
            _, writer = await asyncio.open_connection(host, port)
    except ConnectionRefusedError:
        return True
    except (OSError, TimeoutError, UnicodeError):  # UnicodeError: a host that cannot be a name.
        return False
    writer.transport.abort()  # Nothing was sent, so nothing needs an orderly end.
    return False


def _is_loopback(address: str) -> bool:
    host, _ = split_address(address)
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


@dataclass(slots=True)
class _Record:
    failures: int = 0  # In a row.
    since_s: float = _NEVER_S
    until_s: float = _NEVER_S
    malformed_until_s: float = _NEVER_S
    doubts: int = 0  # Refusals to count since it last counted.
    is_silent: bool = False  # Whether it was last banned for silence.
    is_firm: bool = False  # Whether only counting ends its ban.
    is_forgiven: bool = False  # Whether a restart has ended a ban since it last counted.


class Bans:
    """The bans of one stage's workers, or of their hosts. Pure: times are arguments, in seconds of any one clock.

    Failures in a row double a ban; those of requests that were in flight when it began count once. `DOUBTS` refusals to
    count make a firm ban, which only counting ends, since forward passes the worker may seem to run well. A ban for
    silence is half-open (a circuit breaker): where a stage has no other worker, the banned one is asked for its status,
    first after 1 s, then 2 s, up to 15 s, and the ban ends once it answers. Another incarnation is free of such a ban
    too, once until it has counted something, since any worker may claim to have restarted.
    """

    def __init__(self, config: DriverConfig) -> None:
        self._config = config
        self._records: defaultdict[str, _Record] = defaultdict(_Record)

    def failed(self, worker: str, *, asked_s: float, now: float, is_silent: bool = False) -> float:
        """Counts a request sent at ``asked_s`` that has failed; returns until when the worker is banned."""
        record = self._records[worker]
        if asked_s < record.since_s or now < record.until_s:
            return record.until_s  # It was sent before the ban that the others caused.
        ban_s = self._config.ban_s * 2.0 ** min(record.failures, 64)
        record.failures += 1
        record.is_silent = is_silent
        record.since_s, record.until_s = now, now + min(self._config.max_ban_s, ban_s)
        return record.until_s

    def doubted(self, worker: str, *, asked_s: float, now: float, doubts: int = 1) -> float:
        """Counts refusals to count that honest workers rarely give; returns until when the worker is banned."""
        record = self._records[worker]
        record.doubts += doubts
        if record.doubts >= DOUBTS:
            record.is_firm = True
            self.failed(worker, asked_s=asked_s, now=now)
        return self.until_s(worker)

    def malformed(self, worker: str, *, now: float) -> float:
        """Bans a worker for an answer that no honest worker gives; returns until when."""
        record = self._records[worker]
        record.since_s = now
        record.malformed_until_s = now + self._config.malformed_ban_s
        return record.malformed_until_s

    def is_caught(self, worker: str, now: float) -> bool:
        """Whether it is banned for a malformed answer."""
        return now < self._record_of(worker).malformed_until_s

    def succeeded(self, worker: str) -> None:
        """Forgets a worker's failures, and ends its ban for them, unless that is firm."""
        record = self._record_of(worker)
        if not record.is_firm:
            record.failures, record.until_s = 0, _NEVER_S

    def may_be_asked(self, worker: str, now: float) -> bool:
        """Whether it is banned for silence, and for long enough to be asked for its status."""
        record = self._record_of(worker)
        if not record.is_silent or record.is_firm or not self.is_banned(worker, now):
            return False
        after_s = min(_MAX_ASK_AFTER_S, _ASK_AFTER_S * 2.0 ** min(record.failures - 1, 64))
        return now >= max(record.since_s + after_s, record.malformed_until_s)

    def answers(self, worker: str, now: float) -> None:
        """Ends the ban of a worker that has answered a request for its status."""
        if self.may_be_asked(worker, now):
            self._record_of(worker).until_s = _NEVER_S

    def counted(self, worker: str) -> None:
        """Clears a worker that has counted a micro-batch."""
        record = self._record_of(worker)
        record.doubts, record.is_firm, record.is_forgiven = 0, False, False
        self.succeeded(worker)

    def restarted(self, worker: str) -> None:
        """Ends the ban of a worker that is announced as another process than the one that failed."""
        record = self._record_of(worker)
        if not record.is_firm and not record.is_forgiven and record.since_s > _NEVER_S:
            record.until_s, record.is_forgiven = _NEVER_S, True

    def until_s(self, worker: str) -> float:
        """Returns until when it is banned, or a time in the past."""
        return max(self._record_of(worker).until_s, self._record_of(worker).malformed_until_s)

    def is_banned(self, worker: str, now: float) -> bool:
        """Whether it gets no work now."""
        return now < self.until_s(worker)

    def banned(self, now: float) -> dict[str, float]:
        """Returns the seconds left of all current bans."""
        left = {worker: self.until_s(worker) - now for worker in self._records}
        return {worker: left_s for worker, left_s in sorted(left.items()) if left_s > 0}

    def tidy(self, now: float, keep: set[str]) -> None:
        """Forgets workers neither in ``keep`` nor banned: keys cost nothing, so records must not pile up."""
        for worker in [worker for worker in self._records if worker not in keep and not self.is_banned(worker, now)]:
            del self._records[worker]

    def _record_of(self, worker: str) -> _Record:
        """The record to read; of a worker without one, a fresh one that is not kept."""
        return self._records.get(worker) or _Record()

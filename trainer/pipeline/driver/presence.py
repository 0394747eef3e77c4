"""Whether a worker is gone for good, so that what it has counted died with it: what is taken as proof, and what is not.

A process that is stopped, swapped out or busy keeps its port, and its kernel takes connections for it; so silence
proves nothing, and a refused connection proves that nobody listens *at that address*. On this machine (loopback) that
is the process itself. Elsewhere it may be a router whose mapping has lapsed, a forwarder or a firewall that refuses,
while the worker behind it lives, has counted, and steps with it. There two witnesses are needed: connections are
refused, *and* the worker's own key says that it is another process at another address by now, or has said nothing more
since it was refused first, for longer than a worker that lives ever stays silent (`StageDirectory.silence_s`).

The trade-off: that a worker elsewhere was killed is known after that time (20 s by default) instead of at once.
"""

from __future__ import annotations

import asyncio
import ipaddress
import time
from collections.abc import Callable
from typing import Literal

from trainer.network.rpc.config import split_address
from trainer.pipeline.driver.workers import StageDirectory, StageWorker

__all__ = ["Deaths", "is_refused"]

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

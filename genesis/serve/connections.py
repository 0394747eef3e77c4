"""The connections: how many there may be, and how long one may go without making progress.

uvicorn ends a connection that is idle between two answers, and no other: one on which no whole request head ever comes,
or whose client does not read, is kept for as long as the client likes (and counts against ``limit_concurrency``, whose
503 has no Retry-After). Here each connection has a deadline while it waits for its client; one sweep a second ends
those that are past it. A connection that waits for the server (a disk) has none.
"""

from __future__ import annotations

import asyncio
import time

from uvicorn.protocols.http.h11_impl import H11Protocol

from genesis.serve.exchange import CONNECTION
from genesis.serve.limits import ServeLimits
from genesis.serve.metrics import ServeMetrics

__all__ = ["BoundedConnection", "bounded_connections"]


class BoundedConnection(H11Protocol):
    """One client's connection; made by uvicorn, from the class that `bounded_connections` returns."""

    limits: ServeLimits
    metrics: ServeMetrics

    _deadline: float | None = None
    _reason = "idle"
    _is_over_limit = False

    @property
    def is_over_limit(self) -> bool:
        """Whether it is one too many, to be answered 503."""
        return self._is_over_limit

    @property
    def is_gone(self) -> bool:
        """Whether it is closed or closing."""
        return self.transport.is_closing()

    async def cut(self, reason: str) -> None:
        """Ends it at once, without sending what is still to be sent."""
        self.abort(reason)
        await asyncio.sleep(0)  # For uvicorn to learn of it before the answer that gave up returns.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Accepts, or refuses, a connection."""
        super().connection_made(transport)
        self.metrics.connections.inc()
        self.app_state = {**self.app_state, CONNECTION: self}
        beyond = len(self.connections) - self.limits.max_connections
        self._is_over_limit = beyond > 0
        if beyond > self.limits.max_refusals:
            self.abort("overload")
        else:
            self._wait_for_request()

    def connection_lost(self, exc: Exception | None) -> None:
        """Whoever ended it."""
        self.metrics.connections.dec()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """A part of a request: its head has to be whole within the idle time-out of its first byte."""
        if self._deadline is None and not self._is_answering:
            self._wait_for_request()
        super().data_received(data)
        if self._is_answering and self._reason == "idle":
            self._deadline = None

    def eof_received(self) -> bool:  # type: ignore[override]
        """A client that has closed its sending half still gets the answer it waits for; uvicorn would cut it short."""
        if self._is_answering:
            self.cycle.keep_alive = False
        return self._is_answering

    def pause_writing(self) -> None:
        """The client has not taken what was sent; now it has to."""
        self._deadline, self._reason = time.monotonic() + self.limits.stall_timeout_s, "stalled"
        super().pause_writing()

    def resume_writing(self) -> None:
        """It has."""
        self._deadline, self._reason = None, "idle"
        super().resume_writing()

    def expire(self, now: float) -> None:
        """Ends the connection if its client has had its time; ``now`` is monotonic."""
        if self._deadline is None and self.transport.is_closing():
            # Closing waits until the rest has been read, which has to happen too.
            self._deadline, self._reason = now + self.limits.stall_timeout_s, "stalled"
        if self._deadline is not None and now >= self._deadline:
            self.abort(self._reason)

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _wait_for_request(self) -> None:
        self._deadline, self._reason = time.monotonic() + self.limits.idle_timeout_s, "idle"

    def abort(self, reason: str) -> None:
        """Ends it at once; ``reason`` is what it is counted under."""
        if self.transport is not None:
            self.metrics.cut.labels(reason).inc()
            self.transport.abort()


def bounded_connections(server_limits: ServeLimits, server_metrics: ServeMetrics) -> type[BoundedConnection]:
    """The class of a server's connections."""

    class ServerConnection(BoundedConnection):
        limits = server_limits
        metrics = server_metrics

    return ServerConnection

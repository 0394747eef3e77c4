"""The connections of a server: how many there may be, how long one may go without progress, and the answers on one.

uvicorn closes a connection that is idle between two answers, and no other. One on which no whole request head ever
arrives, or whose client does not read, stays open (and counts against ``limit_concurrency``, whose 503 has no
Retry-After). Here each connection has a deadline while it waits for its client, and `expire_connections` closes those
that are past it. A connection that waits for the server (a disk) has none.

When all places are taken, a new connection gets the place of the one that has waited longest for its client, of the
host that has most: one that never sent a whole request head at any time, others after `_KEEP_S`. So a client that
opens many connections and sends half of a request on each excludes no other client. Such a connection is parked, not
closed: it stays open for a while, so that its client does not open the next one at once (of 200 that do after 0.5 s,
20 a second instead of 230), and is told 503 if it asks after all. The API of a training node does the same
(`trainer.monitor.server`).

`ServeLimits` has the numbers. The defaults: 512 connections hold at most 0.3 GB of unsent chunks and 1,024
descriptors; a client must take 256 KiB within the stall timeout, 4 kB/s, which the slowest home line does.

`HttpExchange` is one request and its answer: what was asked, and how the answer is sent, counted and logged.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

from starlette.responses import PlainTextResponse, Response
from starlette.types import Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from genesis.errors import UsageError
from genesis.open_files import raise_open_files
from genesis.serve.metrics import ServeMetrics

logger = logging.getLogger(__name__)

CONNECTION = "connection"
"""Where the ASGI state holds the request's `ServeConnection`."""


class ServeConnection(Protocol):
    """What an answer has to know of the connection it goes out on."""

    @property
    def is_over_limit(self) -> bool:
        """Whether it is one too many, to be answered 503."""

    @property
    def is_gone(self) -> bool:
        """Whether it is closed or closing."""

    async def cut(self, reason: str) -> None:
        """Ends it at once; ``reason`` is one of the label's values."""


class HttpExchange:
    """A request being answered, once."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, metrics: ServeMetrics) -> None:
        self.method: str = scope["method"]
        self.raw_path: bytes = scope["raw_path"]
        self.query: bytes = scope["query_string"]
        self.host: str = (scope.get("client") or ("",))[0]
        """The client's address."""
        self.connection: ServeConnection = scope["state"][CONNECTION]
        self.kind = "none"
        """What is asked for, as a label."""
        self._scope = scope
        self._receive = receive
        self._send = send
        self._metrics = metrics
        self._status = 500
        self._sent_bytes = 0
        self._began_at = time.perf_counter()

    @cached_property
    def headers(self) -> Mapping[str, str]:
        """The request's, by lower-case name; those that came several times joined, as RFC 9110 allows."""
        joined: dict[str, str] = {}
        for raw_name, raw_value in self._scope["headers"]:
            name, value = raw_name.decode("latin-1"), raw_value.decode("latin-1")
            joined[name] = f"{joined[name]}, {value}" if name in joined else value
        return joined

    async def respond(self, response: Response) -> None:
        """A whole answer at once."""
        if self._must_close:
            response.headers["connection"] = "close"
        await response(self._scope, self._receive, self._counted)

    async def refuse(self, status: int, reason: str, headers: Mapping[str, str]) -> None:
        """A status that carries no object, with one line of text."""
        await self.respond(PlainTextResponse(f"{reason}\n", status, headers))

    async def start(self, status: int, headers: Mapping[str, str], *, more_body: bool = False) -> None:
        """Status and headers; the body, if there is one, comes by `body`."""
        closing = {"connection": "close"} if self._must_close else {}
        raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in {**headers, **closing}.items()]
        await self._counted({"type": "http.response.start", "status": status, "headers": raw})
        if not more_body:
            await self.body(b"", more_body=False)

    async def body(self, chunk: bytes, *, more_body: bool) -> None:
        """A part of the body; returns once the connection has taken the part before it."""
        await self._counted({"type": "http.response.body", "body": chunk, "more_body": more_body})

    def finish(self) -> None:
        """Counts and logs it; called however it ended."""
        seconds = time.perf_counter() - self._began_at
        self._metrics.count(self.method, self._status, self.kind, seconds, self._sent_bytes)
        if logger.isEnabledFor(logging.DEBUG):
            client = (self._scope.get("client") or ("-",))[0]
            path = self.raw_path.decode("latin-1")
            logger.debug(
                "%s %s %r %d %d bytes %.3f s", client, self.method, path, self._status, self._sent_bytes, seconds
            )

    @property
    def _must_close(self) -> bool:
        """A request with a body (none is read), and one on a connection too many, is the last of its connection."""
        has_body = self.headers.get("content-length", "0") != "0" or "transfer-encoding" in self.headers
        return has_body or self.connection.is_over_limit

    async def _counted(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
        elif self.method != "HEAD":
            self._sent_bytes += len(message.get("body", b""))
        await self._send(message)


_KEEP_S = 5.0
"""How long a connection that has had an answer, or has one to take, may wait for its client before a newcomer gets its
place."""


class ConnectionMetrics(Protocol):
    """What is told of connections."""

    def connection_opened(self) -> None:
        """One was accepted, if only to be refused."""

    def connection_closed(self) -> None:
        """One has ended."""

    def connection_cut(self, reason: str) -> None:
        """The server ended one: ``idle``, ``stalled``, ``overload``, ``changed`` or ``stopping``."""


class Uncounted:
    """For servers that count no connections."""

    def connection_opened(self) -> None:
        """See `ConnectionMetrics`."""

    def connection_closed(self) -> None:
        """See `ConnectionMetrics`."""

    def connection_cut(self, reason: str) -> None:
        """See `ConnectionMetrics`."""


class BoundedConnection(H11Protocol):
    """One client's connection; made by uvicorn, from the class that `bounded_connections` returns."""

    limits: ServeLimits
    metrics: ConnectionMetrics

    _waiting_since: float | None = None
    """Since when it waits for its client; None: the client waits for the server."""
    _reason = "idle"
    _is_over_limit = False
    _is_parked = False

    @property
    def is_over_limit(self) -> bool:
        """Whether it is one too many, to be answered 503."""
        return self._is_over_limit

    @property
    def host(self) -> str:
        """The client's."""
        return self.client[0] if self.client else ""

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
        self.metrics.connection_opened()
        self.app_state = {**self.app_state, CONNECTION: self}
        beyond = len(self.connections) - self.limits.max_connections
        if beyond > 0:
            beyond = self._make_room()
        self._is_over_limit = beyond > 0
        if beyond > self.limits.max_refusals:
            self.abort("overload")
        else:
            self._wait_for_request()

    def connection_lost(self, exc: Exception | None) -> None:
        """Ended by the client or by the server."""
        self.metrics.connection_closed()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """A part of a request: its head has to be whole within the idle time-out of its first byte."""
        if self._waiting_since is None and not self._is_answering:
            self._wait_for_request()
        super().data_received(data)
        if self._is_answering and self._reason == "idle":
            self._waiting_since = None

    def eof_received(self) -> bool:  # type: ignore[override]
        """A client that has closed its sending half still gets the answer it waits for; uvicorn would cut it short."""
        if self._is_answering:
            self.cycle.keep_alive = False
        return self._is_answering

    def pause_writing(self) -> None:
        """The client has not taken what was sent; now it has to."""
        self._waiting_since, self._reason = time.monotonic(), "stalled"
        super().pause_writing()

    def resume_writing(self) -> None:
        """It has."""
        self._waiting_since, self._reason = None, "idle"
        super().resume_writing()

    def expire(self, now: float) -> None:
        """Ends the connection if its client has had its time; ``now`` is monotonic."""
        if self._waiting_since is None and self.transport.is_closing():
            # Closing waits until the rest has been read, which has to happen too.
            self._waiting_since, self._reason = now, "stalled"
        patience_s = self.limits.idle_timeout_s if self._reason == "idle" else self.limits.stall_timeout_s
        if self._is_parked:
            patience_s = self.limits.park_s
        if self._waiting_since is not None and now >= self._waiting_since + patience_s:
            self.abort(self._reason)

    @property
    def _has_asked(self) -> bool:
        """Whether a whole request head has come."""
        return self.cycle is not None

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _wait_for_request(self) -> None:
        self._waiting_since, self._reason = time.monotonic(), "idle"

    def _make_room(self) -> int:
        """Takes the place of the one that has waited for its client for longest; how many there are too many now."""
        alive = [it for it in self.connections if isinstance(it, BoundedConnection) and not it.is_gone]
        there = [it for it in alive if not it._is_parked]
        num_of = Counter(it.host for it in there)
        now = time.monotonic()
        waiting = [
            (num_of[it.host], now - it._waiting_since, id(it), it)
            for it in there
            if it._waiting_since is not None
            and it is not self
            and (not it._has_asked or now - it._waiting_since >= _KEEP_S)
        ]
        beyond = len(there) - self.limits.max_connections
        if beyond > 0 and waiting:
            max(waiting)[-1]._give_way(num_parked=len(alive) - len(there))
            beyond -= 1
        return beyond

    def _give_way(self, num_parked: int) -> None:
        if self._has_asked or num_parked >= self.limits.max_parked:
            self.abort("overload")
            return
        self._is_parked, self._reason, self._waiting_since = True, "overload", time.monotonic()
        self._is_over_limit = True

    def abort(self, reason: str) -> None:
        """Ends it at once; ``reason`` is what it is counted under."""
        if self.transport is not None:
            self.metrics.connection_cut(reason)
            self.transport.abort()


def bounded_connections(server_limits: ServeLimits, server_metrics: ConnectionMetrics) -> type[BoundedConnection]:
    """The class of a server's connections."""

    class ServerConnection(BoundedConnection):
        limits = server_limits
        metrics = server_metrics

    return ServerConnection


def expire_connections(connections: Iterable[object]) -> None:
    """Ends those whose clients have had their time; to be called about twice a second."""
    now = time.monotonic()
    for connection in list(connections):
        if isinstance(connection, BoundedConnection):
            connection.expire(now)


_SPARE_DESCRIPTORS = 64
"""For the process itself: standard streams, event loop, listening socket, libraries."""


@dataclass(frozen=True, slots=True)
class ServeLimits:
    """Bounds on connections."""

    max_connections: int = 512
    """Served at once; a further one gets the place of one that waits for its client, or is answered 503."""
    max_refusals: int = 64
    """Connections beyond `max_connections` that are still read, to be told 503; any further one is cut at once."""
    max_parked: int = 256
    """Connections that have lost their place before they sent a whole request head, and are not told so at once."""
    park_s: float = 10.0
    """How long these are kept open, so that clients that open new ones for those that end do it that seldom."""
    idle_timeout_s: float = 30.0
    """For a whole request head to come, and for the next one on a connection kept alive."""
    stall_timeout_s: float = 60.0
    """For a chunk to be taken by a client that reads."""
    grace_s: float = 10.0
    """For answers under way when the server is asked to stop."""

    def __post_init__(self) -> None:
        if self.max_connections < 1:
            raise UsageError(f"expected at least 1 connection, found {self.max_connections}")
        if self.max_parked < 0 or self.park_s < 0:
            raise UsageError(f"expected max_parked and park_s of 0 or more, found {self.max_parked} and {self.park_s}")
        if min(self.idle_timeout_s, self.stall_timeout_s) <= 0 or self.grace_s < 0:
            raise UsageError(
                f"expected time-outs above 0 s, found idle {self.idle_timeout_s}, stall {self.stall_timeout_s}, "
                f"grace {self.grace_s}"
            )


def fit_descriptors(limits: ServeLimits) -> ServeLimits:
    """Raises this process's limit of open files to what ``limits`` may need, or lowers ``limits`` to what it has.

    A connection takes two descriptors, its socket and the object it is sent.
    """
    needed = 2 * limits.max_connections + limits.max_refusals + _SPARE_DESCRIPTORS
    granted = raise_open_files(needed + limits.max_parked)
    if granted >= needed:
        return replace(limits, max_parked=min(limits.max_parked, granted - needed))
    fitting = max(1, (granted - limits.max_refusals - _SPARE_DESCRIPTORS) // 2)
    logger.warning(
        "%d connections need %d open files and the limit is %d: serving %d; raise it with 'ulimit -n'",
        limits.max_connections,
        needed,
        granted,
        fitting,
    )
    return replace(limits, max_connections=fitting, max_parked=0)

"""One request and its answer: what was asked, and how the answer is sent, counted and logged."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from functools import cached_property
from typing import Protocol

from starlette.responses import PlainTextResponse, Response
from starlette.types import Message, Receive, Scope, Send

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

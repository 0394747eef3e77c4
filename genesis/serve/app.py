"""The ASGI application: from a request to an answer.

Files are opened and read in a small pool of threads, so a slow disk delays who waits for it, not the event loop. A
body goes out in chunks of 256 KiB, the next one read once the connection has taken the last: an answer holds one or
two chunks, whatever the object's size. An object that is written into while it is sent (nothing of Genesis does that)
cuts the connection short of its Content-Length, which every client notices, instead of sending bytes of two versions.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from email.utils import formatdate
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

from starlette.responses import PlainTextResponse, Response
from starlette.types import Receive, Scope, Send

from genesis.serve.connections import HttpExchange
from genesis.serve.metrics import METRICS_MEDIA_TYPE, ServeMetrics
from genesis.serve.objects import OpenObject, PublicObject, open_folder, open_object, public_object
from genesis.serve.preconditions import (
    ByteRange,
    Precondition,
    UnsatisfiableRangeError,
    evaluate,
    parse_range,
    range_applies,
)

T = TypeVar("T")

logger = logging.getLogger(__name__)

CHUNK_BYTES = 256 << 10

_NO_STORE = {"cache-control": "no-store"}
_RETRY_AFTER = {**_NO_STORE, "retry-after": "2"}
_FORBIDDEN = {errno.EACCES, errno.EPERM}


class PageHandler(Protocol):
    """What answers requests for the store's page (`genesis.store_page`); it bounds the work that these cost itself."""

    def kind_of(self, raw_path: bytes) -> str | None:
        """The label of a request for the page; None: it is for something else."""

    async def answer(self, raw_path: bytes, query: bytes, headers: Mapping[str, str], host: str) -> Response:
        """The answer to a GET or HEAD of which `kind_of` gave a label."""

    def close(self) -> None:
        """Ends its threads."""


class StoreApp:
    """Answers GET and HEAD for the objects of one folder, its page if it has one, ``/healthz`` and ``/metrics``."""

    def __init__(
        self, root: Path, metrics: ServeMetrics, threads: ThreadPoolExecutor, page: PageHandler | None = None
    ) -> None:
        self._root = root
        self._metrics = metrics
        self._threads = threads
        self._page = page

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request, counted however it ends."""
        exchange = HttpExchange(scope, receive, send, self._metrics)
        with self._metrics.in_flight.track_inprogress():
            try:
                await self._answer(exchange)
            finally:
                exchange.finish()

    async def _answer(self, exchange: HttpExchange) -> None:
        if exchange.method not in ("GET", "HEAD"):
            await exchange.refuse(405, "expected GET or HEAD", {**_NO_STORE, "allow": "GET, HEAD"})
        elif exchange.raw_path == b"/healthz":
            exchange.kind = "healthz"
            await self._health(exchange)
        elif exchange.raw_path == b"/metrics":
            exchange.kind = "metrics"
            page = await self._in_thread(self._metrics.page)
            await exchange.respond(Response(page, headers={**_NO_STORE, "content-type": METRICS_MEDIA_TYPE}))
        elif exchange.connection.is_over_limit:
            await exchange.refuse(503, "too many connections; try again", _RETRY_AFTER)
        elif self._page is not None and (kind := self._page.kind_of(exchange.raw_path)) is not None:
            exchange.kind = kind
            await exchange.respond(
                await self._page.answer(exchange.raw_path, exchange.query, exchange.headers, exchange.host)
            )
        elif (wanted := public_object(exchange.raw_path)) is None:
            await exchange.refuse(404, "expected the key of a store's object, such as /manifest.json", _NO_STORE)
        else:
            exchange.kind = wanted.kind.value
            await self._object(exchange, wanted)

    async def _health(self, exchange: HttpExchange) -> None:
        try:
            await self._in_thread(partial(_check_folder, self._root))
        except OSError as error:
            logger.warning("cannot read the store's folder %s: %s", self._root, error.strerror)
            await exchange.refuse(503, "the store's folder cannot be read", _RETRY_AFTER)
        else:
            await exchange.respond(PlainTextResponse("ok\n", headers=_NO_STORE))

    async def _object(self, exchange: HttpExchange, wanted: PublicObject) -> None:
        try:
            found = await self._in_thread(partial(open_object, self._root, wanted.key))
        except OSError as error:
            logger.warning("cannot read %s/%s: %s", self._root, wanted.key, error.strerror)
            if error.errno in _FORBIDDEN:
                await exchange.refuse(403, "the server may not read that object", _NO_STORE)
            else:
                await exchange.refuse(503, "the object cannot be read now; try again", _RETRY_AFTER)
            return
        if found is None:
            await exchange.refuse(404, f"no object {wanted.key}", _NO_STORE)
            return
        try:
            await self._found(exchange, wanted, found)
        finally:
            found.close()

    async def _found(self, exchange: HttpExchange, wanted: PublicObject, found: OpenObject) -> None:
        outcome = evaluate(exchange.headers, found.etag, found.modified_s)
        if outcome is Precondition.FAILED:
            await exchange.refuse(412, f"the object is another one, {found.etag}", _NO_STORE)
        elif outcome is Precondition.NOT_MODIFIED:
            await exchange.start(304, _validators(wanted, found))
        else:
            try:
                part = _part_asked_for(exchange, found)
            except UnsatisfiableRangeError:
                beyond = {**_NO_STORE, "content-range": f"bytes */{found.size_bytes}"}
                await exchange.refuse(416, f"the object has {found.size_bytes} bytes", beyond)
            else:
                await self._content(exchange, wanted, found, part)

    async def _content(
        self, exchange: HttpExchange, wanted: PublicObject, found: OpenObject, part: ByteRange | None
    ) -> None:
        first, length = (part.first, part.length) if part else (0, found.size_bytes)
        headers = {
            **_validators(wanted, found),
            "accept-ranges": "bytes",
            "content-length": str(length),
            "content-type": wanted.media_type,
        }
        if part:
            headers["content-range"] = part.content_range
        has_body = exchange.method == "GET" and length > 0
        await exchange.start(206 if part else 200, headers, more_body=has_body)
        if has_body:
            await self._body(exchange, wanted, found, first, first + length)

    async def _body(
        self, exchange: HttpExchange, wanted: PublicObject, found: OpenObject, first: int, end: int
    ) -> None:
        while first < end and not exchange.connection.is_gone:
            size_bytes = min(CHUNK_BYTES, end - first)
            chunk = await self._in_thread(partial(found.read, first, size_bytes))
            if len(chunk) < size_bytes or not found.unchanged():
                logger.warning("%s/%s was written into while it was sent; cut that answer", self._root, wanted.key)
                await exchange.connection.cut("changed")
                return
            first += size_bytes
            await exchange.body(chunk, more_body=first < end)

    async def _in_thread(self, call: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, call)


def _check_folder(root: Path) -> None:
    with open_folder(root, []):
        """That it opens is all there is to know."""


def _validators(wanted: PublicObject, found: OpenObject) -> dict[str, str]:
    return {
        "cache-control": wanted.cache.value,
        "etag": found.etag,
        "last-modified": formatdate(found.modified_s, usegmt=True),
        "x-content-type-options": "nosniff",
    }


def _part_asked_for(exchange: HttpExchange, found: OpenObject) -> ByteRange | None:
    """The range, where ``Range`` counts: it is defined for GET alone."""
    headers = exchange.headers
    if exchange.method != "GET" or "range" not in headers:
        return None
    if not range_applies(headers.get("if-range"), found.etag, found.modified_s, time.time()):
        return None
    return parse_range(headers["range"], found.size_bytes)

"""A reverse proxy that does to requests what networks and overloaded servers do, on a seeded schedule.

    with FaultProxy(server.port, seed=7, rate=0.3) as proxy:
        ...                                   # speak to 127.0.0.1:proxy.port
    assert proxy.injected[Fault.LOST_ACK] > 0

The fault of request *n* is a function of (seed, n) alone, so a run with one client thread repeats exactly. Headers pass
unchanged, Host among them, since S3 signatures cover it. `FaultProxy.script` names the faults of the next requests.
"""

from __future__ import annotations

import http.client
import random
import select
import socket
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

_HANG_AT_MOST_S = 60.0
_FORWARD_TIMEOUT_S = 60.0
_LATENCY_S = 0.05
_DRIP_PIECES = 8
_DRIP_PAUSE_S = 0.01
_REMEMBERED_BYTES = 1 << 20
"""Larger answers are never given again as stale ones."""


class Fault(Enum):
    ERROR_500 = "the server is not asked; 500 InternalError"
    SLOW_DOWN = "the server is not asked; 503 SlowDown"
    TOO_MANY = "the server is not asked; 429 with Retry-After"
    HANG = "the server is not asked; no answer until the client gives up"
    CUT_BEFORE = "the server is not asked; the connection closes"
    LOST_ACK = "the server has done it; the connection closes before its answer"
    LOST_ACK_HANG = "the server has done it; no answer until the client gives up"
    LATE_500 = "the server has done it; 500 InternalError all the same"
    LATENCY = "the answer comes late"
    SHORT_BODY = "the connection closes after half of the body (GET only)"
    CUT_BODY = "the connection closes at some point of the body (GET only)"
    BIT_FLIP = "one bit of the body is another (GET only)"
    DRIP = "the body comes in pieces, with pauses (GET only)"
    STALE = "the first answer there was to the same request (GET only)"


_UNASKED_FAULTS = {Fault.ERROR_500, Fault.SLOW_DOWN, Fault.TOO_MANY, Fault.HANG, Fault.CUT_BEFORE}
_BODY_FAULTS = {Fault.SHORT_BODY, Fault.CUT_BODY, Fault.BIT_FLIP, Fault.DRIP, Fault.STALE}
READ_FAULTS = (
    Fault.ERROR_500, Fault.SLOW_DOWN, Fault.TOO_MANY, Fault.CUT_BEFORE, Fault.LOST_ACK, Fault.LATE_500, Fault.LATENCY,
    Fault.SHORT_BODY, Fault.CUT_BODY, Fault.DRIP,
)  # fmt: skip
"""Those a reader gets over by itself; a flipped bit or a stale answer it can only notice by digests."""
FAST_FAULTS = (
    Fault.ERROR_500, Fault.SLOW_DOWN, Fault.CUT_BEFORE, Fault.LOST_ACK, Fault.LATE_500, Fault.SHORT_BODY,
)  # fmt: skip
"""Those that cost the client no time-out."""


@dataclass(frozen=True, slots=True)
class Request:
    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    client_port: int = 0
    """Of the connection it came on."""

    def header(self, name: str) -> str | None:
        return next((value for given, value in self.headers.items() if given.lower() == name.lower()), None)


@dataclass(frozen=True, slots=True)
class Reply:
    status: int
    body: bytes = b""
    headers: tuple[tuple[str, str], ...] = ()
    cut_after: int | None = None
    """The connection closes after so many bytes of the body."""
    piece_bytes: int | None = None
    """The body comes in pieces of this size."""
    pause_s: float = 0.0
    """Before each piece but the first."""

    def header(self, name: str) -> str | None:
        return next((value for given, value in self.headers if given.lower() == name.lower()), None)

    def with_header(self, name: str, value: str | None) -> Reply:
        """The same with a header replaced, or (None) left out."""
        others = tuple(item for item in self.headers if item[0].lower() != name.lower())
        return replace(self, headers=others if value is None else (*others, (name, value)))


@dataclass(slots=True)
class _Schedule:
    seed: int
    rate: float
    faults: tuple[Fault, ...]
    scripted: list[Fault | None] = field(default_factory=list)
    requests: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def next(self, method: str) -> tuple[Fault | None, random.Random]:
        """The request's fault, and the generator for what is random about that."""
        with self.lock:
            number, self.requests = self.requests, self.requests + 1
            draw = random.Random(f"{self.seed}/{number}")
            if self.scripted:
                return self.scripted.pop(0), draw
        fault = draw.choice(self.faults) if self.faults else None
        if draw.random() >= self.rate or (fault in _BODY_FAULTS and method != "GET"):
            return None, draw
        return fault, draw


class FaultProxy:
    """The proxy, listening on ``port`` of 127.0.0.1 within its ``with``."""

    def __init__(
        self,
        target_port: int,
        *,
        seed: int = 0,
        rate: float = 0.0,
        faults: Sequence[Fault] = tuple(Fault),
        only: Callable[[Request], bool] | None = None,
        answer: Callable[[Request], Reply | None] | None = None,
        alter: Callable[[Request, Reply], Reply] | None = None,
        retry_after: str = "1",
    ) -> None:
        """Describes the proxy of the real server at ``target_port``.

        A share ``rate`` of the requests suffers one of ``faults``; those that ``only`` is false for pass and do not
        count. ``answer`` replies in the server's place where it does not return None, and ``alter`` changes what the
        server replied, both before any fault. ``retry_after`` is the header of `Fault.TOO_MANY`.
        """
        self.injected: Counter[Fault] = Counter()
        self.passed: list[Request] = []
        """Requests that reached the server, without their bodies."""
        self.watch: Callable[[Request], None] | None = None
        """Called with every request before anything else happens to it."""
        self._target_port = target_port
        self._schedule = _Schedule(seed, rate, tuple(faults))
        self._only = only
        self._answer = answer
        self._alter = alter
        self._retry_after = retry_after
        self._remembered: dict[tuple[str, str], Reply] = {}
        self._stopping = threading.Event()
        self._server: _Server | None = None
        self._thread: threading.Thread | None = None

    @property
    def port(self) -> int:
        assert self._server is not None, "the proxy has not been started"
        return int(self._server.server_address[1])

    @property
    def total_injected(self) -> int:
        return self.injected.total()

    def script(self, faults: Iterable[Fault | None]) -> None:
        """The next requests suffer these, in order (None: pass); after them the schedule goes on."""
        with self._schedule.lock:
            self._schedule.scripted.extend(faults)

    def __enter__(self) -> Self:
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.proxy = self
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        if self._server is not None and self._thread is not None:
            self._server.shutdown()
            self._server.server_close()
            self._thread.join(10)

    def handle(self, request: Request, client: socket.socket) -> Reply | None:
        if self.watch is not None:
            self.watch(request)
        replied = self._answer(request) if self._answer is not None else None
        if replied is not None:
            return replied
        counts = self._only is None or self._only(request)
        fault, draw = self._schedule.next(request.method) if counts else (None, random.Random(0))
        if fault is not None:
            with self._schedule.lock:
                self.injected[fault] += 1
        return self._suffer(fault, request, client, draw)

    def pause(self, seconds: float) -> bool:
        """Waits; False if the proxy is being stopped."""
        return not self._stopping.wait(seconds)

    def _suffer(
        self, fault: Fault | None, request: Request, client: socket.socket, draw: random.Random
    ) -> Reply | None:
        reply = None if fault in _UNASKED_FAULTS else self._asked(request)
        match fault:
            case Fault.ERROR_500 | Fault.LATE_500:
                return _s3_error(500, "InternalError")
            case Fault.SLOW_DOWN:
                return _s3_error(503, "SlowDown")
            case Fault.TOO_MANY:
                return Reply(429, headers=(("Retry-After", self._retry_after),))
            case Fault.HANG | Fault.LOST_ACK_HANG:
                return self._hang(client)
            case Fault.CUT_BEFORE | Fault.LOST_ACK:
                return None
            case Fault.LATENCY:
                self.pause(_LATENCY_S)
            case Fault.STALE:
                return self._remembered.get((request.method, request.path), reply)
        return reply if reply is None or fault is None else _damaged(fault, reply, draw)

    def _asked(self, request: Request) -> Reply | None:
        """What the server replies, altered and remembered."""
        reply = self._forward(request)
        if reply is not None and self._alter is not None:
            reply = self._alter(request, reply)
        if reply is not None and reply.status == 200 and len(reply.body) <= _REMEMBERED_BYTES:
            self._remembered.setdefault((request.method, request.path), reply)
        return reply

    def _hang(self, client: socket.socket) -> None:
        for _ in range(int(_HANG_AT_MOST_S / 0.1)):
            readable, _, _ = select.select([client], [], [], 0.1)
            if readable or self._stopping.is_set():
                return  # The client closed its end; nothing else comes, since the request was read whole.

    def _forward(self, request: Request) -> Reply | None:
        connection = http.client.HTTPConnection("127.0.0.1", self._target_port, timeout=_FORWARD_TIMEOUT_S)
        try:
            connection.putrequest(request.method, request.path, skip_host=True, skip_accept_encoding=True)
            for name, value in request.headers.items():
                if name.lower() not in ("expect", "connection"):
                    connection.putheader(name, value)
            connection.endheaders(request.body)
            response = connection.getresponse()
            body = response.read()
            with self._schedule.lock:
                self.passed.append(Request(request.method, request.path, request.headers, b""))
            hop = ("connection", "transfer-encoding", "keep-alive")
            headers = tuple(item for item in response.getheaders() if item[0].lower() not in hop)
            return Reply(response.status, body, headers)
        except (OSError, http.client.HTTPException):
            return None  # The server is down or being killed by the test: to the client, a cut connection.
        finally:
            connection.close()


def _damaged(fault: Fault, reply: Reply, draw: random.Random) -> Reply:
    size = len(reply.body)
    match fault:
        case Fault.SHORT_BODY:
            return replace(reply, cut_after=size // 2)
        case Fault.CUT_BODY:
            return replace(reply, cut_after=draw.randrange(size) if size else 0)
        case Fault.DRIP:
            return replace(reply, piece_bytes=size // _DRIP_PIECES + 1, pause_s=_DRIP_PAUSE_S)
        case Fault.BIT_FLIP if size:
            body = bytearray(reply.body)
            body[draw.randrange(size)] ^= 1 << draw.randrange(8)
            return replace(reply, body=bytes(body))
        case _:
            return reply


def _s3_error(status: int, code: str) -> Reply:
    body = f"<Error><Code>{code}</Code><Message>injected</Message></Error>".encode()
    return Reply(status, body, (("Content-Type", "application/xml"),))


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 64
    proxy: FaultProxy

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is what this proxy is for; anything else is a mistake in it."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def _relay(self) -> None:
        proxy = self.server.proxy  # type: ignore[attr-defined]
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        request = Request(self.command, self.path, dict(self.headers.items()), body, self.client_address[1])
        reply = proxy.handle(request, self.connection)
        if reply is None:
            self.close_connection = True
            return
        self._send(reply, proxy)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _relay

    def _send(self, reply: Reply, proxy: FaultProxy) -> None:
        self.send_response_only(reply.status)
        given = {name.lower() for name, _ in reply.headers}
        for name, value in reply.headers:
            self.send_header(name, value)
        if not given & {"content-length", "transfer-encoding"} and reply.status not in (204, 304):
            self.send_header("Content-Length", str(len(reply.body)))
        self.end_headers()
        if self.command != "HEAD":
            self._send_body(reply, proxy)
        if reply.cut_after is not None:
            self.close_connection = True

    def _send_body(self, reply: Reply, proxy: FaultProxy) -> None:
        body = reply.body if reply.cut_after is None else reply.body[: reply.cut_after]
        step = reply.piece_bytes or max(1, len(body))
        for offset in range(0, len(body), step):
            if offset and not proxy.pause(reply.pause_s):
                self.close_connection = True
                return
            self.wfile.write(body[offset : offset + step])

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: the tests' output is theirs."""

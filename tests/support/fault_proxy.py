"""A reverse proxy that does to requests what networks and overloaded servers do, on a seeded schedule.

    with FaultProxy(server.port, seed=7, rate=0.3) as proxy:
        ...                                   # speak to 127.0.0.1:proxy.port
    assert proxy.injected[Fault.LOST_ACK] > 0

The fault of request *n* is a function of (seed, n) alone, so a run with one client thread repeats exactly. Headers pass
unchanged, Host among them, since S3 signatures cover it. `FaultProxy.script` instead names the faults of the next
requests one by one, and ``answer`` lets a test reply in the server's place.
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
from types import TracebackType
from typing import Any, Self

_HANG_AT_MOST_S = 60.0
_FORWARD_TIMEOUT_S = 60.0


class Fault(Enum):
    """What happens to a request."""

    ERROR_500 = "the server is not asked; 500 InternalError"
    SLOW_DOWN = "the server is not asked; 503 SlowDown"
    TOO_MANY = "the server is not asked; 429 with Retry-After: 1"
    HANG = "the server is not asked; no answer until the client gives up"
    CUT_BEFORE = "the server is not asked; the connection closes"
    LOST_ACK = "the server has done it; the connection closes before its answer"
    LOST_ACK_HANG = "the server has done it; no answer until the client gives up"
    LATE_500 = "the server has done it; 500 InternalError all the same"
    SHORT_BODY = "the connection closes after half of the body (GET only)"


WRITE_FAULTS = tuple(fault for fault in Fault if fault is not Fault.SHORT_BODY)
FAST_FAULTS = (
    Fault.ERROR_500, Fault.SLOW_DOWN, Fault.CUT_BEFORE, Fault.LOST_ACK, Fault.LATE_500, Fault.SHORT_BODY,
)  # fmt: skip
"""Those that cost the client no time-out."""


@dataclass(frozen=True, slots=True)
class Request:
    """What the client sent."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes


@dataclass(frozen=True, slots=True)
class Reply:
    """What the client gets."""

    status: int
    body: bytes = b""
    headers: tuple[tuple[str, str], ...] = ()
    is_cut: bool = False
    """The connection closes after half of the body."""


@dataclass(slots=True)
class _Schedule:
    """Which request suffers what."""

    seed: int
    rate: float
    faults: tuple[Fault, ...]
    scripted: list[Fault | None] = field(default_factory=list)
    requests: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def next(self, method: str) -> Fault | None:
        with self.lock:
            number, self.requests = self.requests, self.requests + 1
            if self.scripted:
                return self.scripted.pop(0)
        draw = random.Random(f"{self.seed}/{number}")
        fault = draw.choice(self.faults) if self.faults else None
        if draw.random() >= self.rate or (fault is Fault.SHORT_BODY and method != "GET"):
            return None
        return fault


class FaultProxy:
    """The proxy, listening on ``port`` of 127.0.0.1 from `start` (or entering it) to `stop`."""

    def __init__(
        self,
        target_port: int,
        *,
        seed: int = 0,
        rate: float = 0.0,
        faults: Sequence[Fault] = tuple(Fault),
        only: Callable[[Request], bool] | None = None,
        answer: Callable[[Request], Reply | None] | None = None,
    ) -> None:
        """Describes the proxy.

        Args:
            target_port: of the real server, on 127.0.0.1.
            seed: of the schedule.
            rate: share of the requests that suffer a fault.
            faults: which they are drawn from.
            only: requests it is false for always pass and do not count.
            answer: replies in the server's place where it does not return None; asked before any fault.
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
        self._stopping = threading.Event()
        self._server: _Server | None = None
        self._thread: threading.Thread | None = None

    @property
    def port(self) -> int:
        """Where the proxy listens."""
        if self._server is None:
            raise RuntimeError("the proxy has not been started")
        return int(self._server.server_address[1])

    @property
    def total_injected(self) -> int:
        """Faults so far."""
        return self.injected.total()

    def script(self, faults: Iterable[Fault | None]) -> None:
        """The next requests suffer these, in order (None: pass); after them the schedule goes on."""
        with self._schedule.lock:
            self._schedule.scripted.extend(faults)

    def start(self) -> None:
        """Begins to listen."""
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.proxy = self
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stops listening and lets hanging requests go."""
        self._stopping.set()
        if self._server is not None and self._thread is not None:
            self._server.shutdown()
            self._server.server_close()
            self._thread.join(10)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def handle(self, request: Request, client: socket.socket) -> Reply | None:
        """What the client gets; None: its connection is closed."""
        if self.watch is not None:
            self.watch(request)
        replied = self._answer(request) if self._answer is not None else None
        if replied is not None:
            return replied
        fault = self._schedule.next(request.method) if self._only is None or self._only(request) else None
        if fault is not None:
            with self._schedule.lock:
                self.injected[fault] += 1
        return self._suffer(fault, request, client)

    def _suffer(self, fault: Fault | None, request: Request, client: socket.socket) -> Reply | None:
        match fault:
            case Fault.ERROR_500:
                return _s3_error(500, "InternalError")
            case Fault.SLOW_DOWN:
                return _s3_error(503, "SlowDown")
            case Fault.TOO_MANY:
                return Reply(429, headers=(("Retry-After", "1"),))
            case Fault.HANG:
                return self._hang(client)
            case Fault.CUT_BEFORE:
                return None
            case _:
                reply = self._forward(request)
        match fault:
            case Fault.LOST_ACK:
                return None
            case Fault.LOST_ACK_HANG:
                return self._hang(client)
            case Fault.LATE_500:
                return _s3_error(500, "InternalError")
            case Fault.SHORT_BODY:
                return None if reply is None else replace(reply, is_cut=True)
            case _:
                return reply

    def _hang(self, client: socket.socket) -> None:
        waited = 0.0
        while waited < _HANG_AT_MOST_S and not self._stopping.is_set():
            readable, _, _ = select.select([client], [], [], 0.1)
            if readable:  # The client closed its end; nothing else comes, since the request was read whole.
                return
            waited += 0.1

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
            return Reply(
                response.status, body, tuple(item for item in response.getheaders() if item[0].lower() not in hop)
            )
        except (OSError, http.client.HTTPException):
            return None  # The server is down or being killed by the test: to the client, a cut connection.
        finally:
            connection.close()


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
        request = Request(self.command, self.path, dict(self.headers.items()), body)
        reply = proxy.handle(request, self.connection)
        if reply is None:
            self.close_connection = True
            return
        self._send(reply)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _relay

    def _send(self, reply: Reply) -> None:
        self.send_response_only(reply.status)
        given = {name.lower() for name, _ in reply.headers}
        for name, value in reply.headers:
            self.send_header(name, value)
        if not given & {"content-length", "transfer-encoding"}:
            self.send_header("Content-Length", str(len(reply.body)))
        self.end_headers()
        body = reply.body[: len(reply.body) // 2] if reply.is_cut else reply.body
        if self.command != "HEAD":
            self.wfile.write(body)
        if reply.is_cut:
            self.close_connection = True

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: the tests' output is theirs."""

"""The HTTP interface in a thread and event loop of its own: training never waits for it.

The port is taken in the caller's thread, so that a port in use is one clear error. Stopping gives answers under way a
second to end. Connections are bounded as those of ``genesis serve`` are: in number, and in the time clients may take.
"""

from __future__ import annotations

import errno
import logging
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Self

import uvicorn
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from genesis.serve import ServeLimits
from genesis.serve.connections import CONNECTION, Uncounted, bounded_connections, expire_connections
from trainer.errors import TrainerUsageError
from trainer.monitor.config import ApiConfig

logger = logging.getLogger(__name__)

_START_WITHIN_S = 10.0
_STOP_WITHIN_S = 3.0
_LIMITS = ServeLimits(max_connections=64, max_refusals=16, idle_timeout_s=5.0, stall_timeout_s=10.0, grace_s=1.0)
_REASONS = {
    errno.EADDRINUSE: "something else listens there; give another --api-port (0: any free one) or --no-api",
    errno.EACCES: "not permitted; ports below 1024 need root: give a higher --api-port, 0 (any free one) or --no-api",
    errno.EADDRNOTAVAIL: "this machine has no such address; give another --api-host (0.0.0.0: all it has)",
}


class ApiServer:
    """Serves an application at the configured address from `start` to `stop`, or within a ``with``."""

    def __init__(self, app: ASGIApp, config: ApiConfig, *, first_path: str = "/api/training/verify") -> None:
        """``first_path`` is what the log names to look at first."""
        self._app = app
        self._config = config
        self._first_path = first_path
        self._listener: socket.socket | None = None
        self._server: _Server | None = None
        self._thread: threading.Thread | None = None

    @property
    def port(self) -> int:
        """The port taken; 0 while not started."""
        return int(self._listener.getsockname()[1]) if self._listener else 0

    @property
    def url(self) -> str:
        """The interface's address, such as ``http://127.0.0.1:8000``."""
        host = self._config.host
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}"

    def start(self) -> Self:
        """Takes the port and serves. Raises `TrainerUsageError`: the address cannot be listened at."""
        self._listener = _listen(self._config.host, self._config.port)
        config = uvicorn.Config(
            _refusing_when_full(self._app),
            loop="asyncio",
            http=bounded_connections(_LIMITS, Uncounted()),
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="error",
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=round(_LIMITS.idle_timeout_s),
            timeout_graceful_shutdown=round(_LIMITS.grace_s),
        )
        self._server = server = _Server(config)
        self._thread = threading.Thread(target=server.run, args=([self._listener],), name="training-api", daemon=True)
        self._thread.start()
        deadline = time.monotonic() + _START_WITHIN_S
        while not server.started and self._thread.is_alive() and time.monotonic() < deadline:
            time.sleep(0.005)
        if not server.started:
            self.stop()
            raise TrainerUsageError("the API's server did not start, see the log; go on without it by --no-api")
        logger.info("API at %s%s", self.url, self._first_path)
        return self

    def stop(self) -> None:
        """Ends within about a second; answers that take longer are cut."""
        if self._server is None or self._thread is None:
            return
        self._server.should_exit = True
        with _answers_cut_silently():
            self._thread.join(_STOP_WITHIN_S)
            if self._thread.is_alive():
                self._server.force_exit = True
                self._thread.join(_STOP_WITHIN_S)
        if self._listener:
            self._listener.close()
        self._server = self._thread = self._listener = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()


@contextmanager
def _answers_cut_silently() -> Iterator[None]:
    """Uvicorn logs each answer that it cuts as an error with a traceback: at a stop that is no news."""
    told = logging.getLogger("uvicorn.error")
    before, told.disabled = told.disabled, True
    try:
        yield
    finally:
        told.disabled = before


class _Server(uvicorn.Server):
    """uvicorn's server without its signal handlers; it ends connections whose clients take too long."""

    async def on_tick(self, counter: int) -> bool:
        """Runs ten times a second."""
        if counter % 5 == 0:
            expire_connections(self.server_state.connections)
        return await super().on_tick(counter)

    def capture_signals(self) -> AbstractContextManager[None]:  # type: ignore[override]
        return nullcontext()


def _refusing_when_full(app: ASGIApp) -> ASGIApp:
    """Answers 503 on connections beyond the limit."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        connection = scope.get("state", {}).get(CONNECTION)
        if connection is not None and connection.is_over_limit:
            headers = {"retry-after": "1", "connection": "close", "cache-control": "no-store"}
            refusal = JSONResponse({"detail": "too many connections; try again"}, status_code=503, headers=headers)
            await refusal(scope, receive, send)
        else:
            await app(scope, receive, send)

    return answer


def _listen(host: str, port: int) -> socket.socket:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise TrainerUsageError(
            f"--api-host {host}: expected an address of this machine, found none: {reason}"
        ) from None
    family, kind, protocol, _, address = found[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_LIMITS.max_connections)
    except OSError as error:
        listener.close()
        reason = _REASONS.get(error.errno or 0, error.strerror or str(error))
        raise TrainerUsageError(f"cannot listen at {host} port {port} for the API: {reason}") from None
    return listener

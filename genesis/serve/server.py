"""Running and stopping the server.

It serves until it is told to stop, then takes no new connection, gives answers under way ``grace_s`` to end, and cuts
the rest. uvicorn does not see the process's signals: the caller handles them.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import uvicorn

from genesis.errors import StoreAccessError, UsageError
from genesis.serve.app import PageHandler, StoreApp
from genesis.serve.connections import (
    BoundedConnection,
    ServeLimits,
    bounded_connections,
    expire_connections,
    fit_descriptors,
)
from genesis.serve.metrics import ServeMetrics

logger = logging.getLogger(__name__)

_THREADS = 8
"""Reads under way at once: what a disk can use; more would only take turns with the interpreter."""
_SWEEP_EVERY_S = 0.5


def check_folder(folder: Path) -> Path:
    """The absolute path of a folder that can be served; it may be empty and be populated while it is served.

    Raises:
        StoreAccessError: there is no such folder, or it cannot be read.
    """
    folder = folder.absolute()
    try:
        next(folder.iterdir(), None)
    except OSError as error:
        raise StoreAccessError(
            f"expected a store in the folder {folder}, found: {error.strerror}; check --store (an empty folder will "
            "do, 'genesis populate' can fill it later)"
        ) from None
    return folder


class StoreServer:
    """One folder behind one listening socket."""

    def __init__(
        self, folder: Path, listener: socket.socket, limits: ServeLimits, page: PageHandler | None = None
    ) -> None:
        self._folder = folder
        self._page = page
        self._listener = listener
        self._limits = limits
        self._server: _Server | None = None
        self._cut_at = float("inf")

    async def run(self) -> None:
        """Serves until `stop`; closes the socket."""
        limits = fit_descriptors(self._limits)
        metrics = ServeMetrics(self._folder)
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="genesis-serve") as threads:
            app = StoreApp(self._folder, metrics, threads, self._page)
            server = self._server = _Server(_configuration(app, limits, metrics))
            server.should_exit = self._cut_at < float("inf")  # Told to stop before it began.
            sweeping = asyncio.create_task(self._sweep(server))
            try:
                await server.serve(sockets=[self._listener])
            finally:
                sweeping.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await sweeping
                if self._page is not None:
                    self._page.close()

    def stop(self, *, at_once: bool = False) -> None:
        """Makes `run` return: after the answers under way, within ``grace_s``, or ``at_once``."""
        self._cut_at = time.monotonic() + (0 if at_once else self._limits.grace_s)
        if self._server is not None:
            self._server.should_exit = True

    async def _sweep(self, server: _Server) -> None:
        while True:
            await asyncio.sleep(_SWEEP_EVERY_S)
            expire_connections(server.server_state.connections)
            if time.monotonic() >= self._cut_at:
                for connection in list(server.server_state.connections):
                    if isinstance(connection, BoundedConnection):
                        connection.abort("stopping")


class _Server(uvicorn.Server):
    """uvicorn's, without its signal handlers."""

    def capture_signals(self) -> AbstractContextManager[None]:  # type: ignore[override]
        return nullcontext()


def _configuration(app: StoreApp, limits: ServeLimits, metrics: ServeMetrics) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=bounded_connections(limits, metrics),
        loop="asyncio",
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="error",
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=max(1, round(limits.idle_timeout_s)),
    )


_BACKLOG = 1_024
_REASONS = {
    errno.EADDRINUSE: "the port is in use; stop what listens there (see 'ss -ltnp') or give another --port (0: any)",
    errno.EACCES: "not permitted; ports below 1024 need root, give a higher --port",
    errno.EADDRNOTAVAIL: "this machine has no such address; give another --host (0.0.0.0: all it has)",
}


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens at the first address of ``host``; port 0 takes a free one.

    Raises:
        UsageError: it cannot.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise UsageError(f"--host {host}: expected an address of this machine, found none: {reason}") from None
    family, kind, protocol, _, address = found[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        reason = _REASONS.get(error.errno or 0, error.strerror or str(error))
        raise UsageError(f"cannot listen at {host} port {port}: {reason}") from None
    listener.setblocking(False)
    return listener


def address_of(listener: socket.socket, host: str) -> str:
    """The URL to reach it by, with the name its host was given by."""
    shown = f"[{host}]" if ":" in host else host
    return f"http://{shown}:{listener.getsockname()[1]}/"

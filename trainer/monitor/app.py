"""The HTTP interface: two pages of status (spec O-1, O-2), health, metrics, shutdown; two more of a driver's pipeline.

Pages of strangers in a browser on this machine can send requests to 127.0.0.1. They can read nothing: answers have no
CORS headers, and host names that are not this machine's are refused (DNS rebinding). Requests that stop the node are
refused if a browser marks them as coming from elsewhere, or if another user of this machine sends them.
"""

from __future__ import annotations

import hmac
import ipaddress
import os
import socket
import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path
from typing import Final

from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.concurrency import run_in_threadpool
from pydantic import BaseModel
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from trainer.monitor.config import ApiConfig
from trainer.monitor.metrics import METRICS_MEDIA_TYPE, TrainingMetrics
from trainer.monitor.pages.routes import PageSource, ReadGuard, add_page
from trainer.monitor.status import (
    ACCOUNT_PATH,
    STAGES_PATH,
    Health,
    PipelineView,
    SwarmAccount,
    SwarmStages,
    TrainingStatus,
    VerifyStatus,
)
from trainer.monitor.tracker import TrainingTracker


@dataclass(frozen=True, kw_only=True, slots=True)
class ShutdownHook:
    """How POST /api/shutdown stops the node."""

    callback: Callable[[], None]
    """Asks the node to stop as SIGTERM does, and returns at once; called in the API's thread."""
    token: str = ""
    """What the header X-Genesis-Token must be; empty: the request has to come from a process of this node's user, with
    no proxy in between."""


class Stopping(BaseModel):
    """The node is stopping: it ends the current step, saves a checkpoint and exits."""

    status: str = "stopping"


def create_app(
    tracker: TrainingTracker,
    metrics: TrainingMetrics,
    *,
    config: ApiConfig | None = None,
    shutdown: ShutdownHook | None = None,
    pipeline: PipelineView | None = None,
    page: PageSource | None = None,
) -> FastAPI:
    """Builds the ASGI application; what shuts down, a driver's pages and the page only where given."""
    # FastAPI's own page is off: it runs scripts from a CDN under this node's origin.
    app = FastAPI(title="Genesis training node", version="1", docs_url=None, redoc_url=None)
    add_guards(app, config or ApiConfig())
    if page is not None:
        add_page(app, page)
    if pipeline is not None:
        add_pipeline_pages(app, pipeline)
    if shutdown:
        _add_shutdown(app, shutdown)

    @app.get("/api/training/verify", summary="Is training working?", response_model=VerifyStatus)
    async def verify() -> TrainingStatus:
        return tracker.status()

    @app.get("/api/training/global", summary="The run as a whole, as far as this node can see it.")
    async def global_status() -> TrainingStatus:
        return tracker.status()

    @app.get("/healthz", summary="The process answers; when it last trained.")
    async def health() -> Health:
        return tracker.health()

    @app.get(
        "/metrics",
        summary="Figures for Prometheus, in its text form.",
        response_class=Response,
        responses={200: {"content": {"text/plain": {}}}},
    )
    async def prometheus() -> Response:
        return Response(metrics.page(), media_type=METRICS_MEDIA_TYPE)

    return app


def add_guards(app: FastAPI, config: ApiConfig) -> None:
    """Has an application ask for the configured host names and token, in this order."""
    app.add_middleware(ReadGuard, token=config.read_token)
    app.add_middleware(HostGuard, allowed_hosts=config.allowed_hosts)


def add_pipeline_pages(app: FastAPI, view: PipelineView) -> None:
    """Adds a driver's two pages to a node's interface."""

    @app.get(
        ACCOUNT_PATH,
        summary="What has become of the data: leased = done + lost + open.",
        responses={503: {"description": "The keeper of the account has not been heard from yet."}},
    )
    async def account() -> SwarmAccount:
        found = view.account()
        if found is None:
            raise HTTPException(503, "the keeper of the account has not been heard from yet; ask again")
        return found

    @app.get(STAGES_PATH, summary="The stages, who holds them, and how they stand.")
    async def stages() -> SwarmStages:
        return view.stages()


def _add_shutdown(app: FastAPI, hook: ShutdownHook) -> None:
    @app.post(
        "/api/shutdown",
        summary="Stops the node as Ctrl+C does; from this machine, by its user, or with X-Genesis-Token if one is set.",
        status_code=202,
        responses={403: {"description": "Not from this machine, not by this user, or by another site's page."}},
    )
    async def stop(request: Request) -> Stopping:
        client_host = request.client.host if request.client else None
        server: tuple[str, int | None] | None = request.scope.get("server")
        client_user = None
        if request.client and server and server[1] is not None and not hook.token:
            # It reads a table of all connections of this machine: not on the loop that answers other requests.
            ends = (request.client.host, request.client.port), (server[0], server[1])
            client_user = await run_in_threadpool(user_of_peer, *ends)
        refusal = shutdown_refusal(request.headers, client_host, request.url.scheme, hook.token, client_user)
        if refusal:
            raise HTTPException(403, refusal)
        hook.callback()
        return Stopping()


_TABLES: Final = (Path("/proc/self/net/tcp"), Path("/proc/self/net/tcp6"))


def user_of_peer(client: tuple[str, int], server: tuple[str, int]) -> int | None:
    """Returns the user id of the process at the client's end of a connection; ends are address and port.

    None: the client has closed its socket, is elsewhere (or in another network namespace), or the platform is silent.
    """
    for table in _TABLES:
        try:
            lines = table.read_text(encoding="ascii").splitlines()[1:]
        except OSError:
            continue
        family = socket.AF_INET6 if table.name == "tcp6" else socket.AF_INET
        wanted = (_hex_of(client, family), _hex_of(server, family))
        for line in lines:
            fields = line.split()
            # A socket that no process holds any more has no inode, and is listed as root's.
            if (fields[1], fields[2]) == wanted and fields[9] != "0":
                return int(fields[7])
    return None


def _hex_of(end: tuple[str, int], family: socket.AddressFamily) -> str:
    """Formats an end as the kernel does: the address in 32-bit words of this machine's byte order, and the port."""
    address = ipaddress.ip_address(end[0])
    if family == socket.AF_INET6 and isinstance(address, IPv4Address):
        address = IPv6Address(f"::ffff:{address}")
    packed = (_without_mapping(address) if family == socket.AF_INET else address).packed
    words = [int.from_bytes(packed[at : at + 4], sys.byteorder) for at in range(0, len(packed), 4)]
    return "".join(f"{word:08X}" for word in words) + f":{end[1]:04X}"


_FORWARDED = ("forwarded", "x-forwarded-for", "x-forwarded-host", "x-real-ip", "via")
_HEADERS = {
    "cross-origin-resource-policy": "same-origin",
    "x-content-type-options": "nosniff",
}


class HostGuard:
    """Answers 421 to requests for a host name that is not this machine's; marks all answers as same-origin."""

    def __init__(self, app: ASGIApp, *, allowed_hosts: Collection[str]) -> None:
        self._app = app
        own_names = {"localhost", socket.gethostname().lower()}
        self._allowed = frozenset(own_names.union(name.lower() for name in allowed_hosts))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles one request."""

        async def send_marked(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(_HEADERS)
                headers.setdefault("cache-control", "no-store")  # The page's files say themselves how long they hold.
            await send(message)

        if scope["type"] == "http" and not self._is_ours(Headers(scope=scope).get("host", "")):
            detail = "expected this machine's name or address as Host; other names: api.allowed_hosts"
            await JSONResponse({"detail": detail}, status_code=421)(scope, receive, send_marked)
        else:
            await self._app(scope, receive, send_marked)

    def _is_ours(self, host: str) -> bool:
        host = host.strip().lower()
        name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
        # IP addresses always pass: a page cannot make one its own origin.
        return name in self._allowed or _address(name) is not None


def shutdown_refusal(
    headers: Headers, client_host: str | None, scheme: str, token: str, client_user: int | None
) -> str | None:
    """Returns why a request may not stop this node; None if it may.

    ``client_user`` is the user id of the client's process, None if it is unknown; it counts where ``token``, which
    ``X-Genesis-Token`` must be, is empty.
    """
    address = _address(client_host or "")
    if address is None or not _without_mapping(address).is_loopback:
        return "expected a request from this machine"
    own_origin = f"{scheme}://{headers.get('host', '')}"
    if headers.get("origin", own_origin) != own_origin:
        return "expected no request of another site's page (Origin)"
    if headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
        return "expected no request of another site's page (Sec-Fetch-Site)"
    if token:
        given = headers.get("x-genesis-token", "").encode("latin-1")  # As headers are read: the bytes that were sent.
        return None if hmac.compare_digest(given, token.encode()) else "expected the token in X-Genesis-Token"
    if any(name in headers for name in _FORWARDED):
        return "expected a request that no proxy forwarded; set a token to allow that"
    if client_user is None:
        return "expected a process of this node's user, found no way to tell whose it is; set a token to allow that"
    if client_user not in (os.getuid(), 0):
        return "expected a process of this node's user; set a token to allow others"
    return None


def _without_mapping(address: IPv4Address | IPv6Address) -> IPv4Address | IPv6Address:
    return (isinstance(address, IPv6Address) and address.ipv4_mapped) or address


def _address(host: str) -> IPv4Address | IPv6Address | None:
    """Returns a host's address if it is one and not a name."""
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None

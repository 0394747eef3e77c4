"""The HTTP interface: two pages of status (spec O-1, O-2), health, metrics, shutdown; of a driver `pipeline` too.

Everything is read only but the shutdown, which exists if the node gives a callback for it. No page has CORS headers.
/openapi.json describes the answers; FastAPI's own page for it is off, since it runs scripts from a CDN under this
node's origin. An answer takes 1 ms of the interpreter, /metrics 2 ms.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.concurrency import run_in_threadpool
from pydantic import BaseModel

from trainer.monitor.access import HostGuard, shutdown_refusal, user_of_peer
from trainer.monitor.config import ApiConfig
from trainer.monitor.metrics import METRICS_MEDIA_TYPE, TrainingMetrics
from trainer.monitor.pipeline import PipelineView, add_pipeline_pages
from trainer.monitor.status import Health, TrainingStatus, VerifyStatus
from trainer.monitor.tracker import TrainingTracker

__all__ = ["ShutdownHook", "create_app"]


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
) -> FastAPI:
    """Builds the interface as an ASGI application.

    Args:
        tracker: source of the status.
        metrics: source of /metrics.
        config: further host names of this machine.
        shutdown: what POST /api/shutdown does; without it there is no such path.
        pipeline: source of a driver's pages; without it there are no such paths.
    """
    app = FastAPI(title="Genesis training node", version="1", docs_url=None, redoc_url=None)
    app.add_middleware(HostGuard, allowed_hosts=config.allowed_hosts if config else ())
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

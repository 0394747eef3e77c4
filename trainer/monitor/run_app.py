"""A monitor's HTTP interface: a page for people, the run as JSON, its course over time, figures for Prometheus.

It shows what anybody in the run could see, changes nothing, and runs no script of anybody else: the page's own script
writes text, never markup, since names come from strangers. By default only this machine can read it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from importlib import resources
from typing import Annotated, Any, Final

from fastapi import FastAPI, HTTPException, Query, Response
from fastapi.responses import HTMLResponse
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Gauge, generate_latest

from trainer.monitor.app import HostGuard
from trainer.monitor.run_view import RunView

RUN_PATH: Final = "/api/run"
_POLICY: Final = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'"

Course = Callable[[float], list[dict[str, Any]]]
"""Returns the run over time, from a moment on (seconds since 1970)."""


def create_run_app(view: Callable[[], RunView | None], course: Course, allowed_hosts: Collection[str] = ()) -> FastAPI:
    """Builds the application; ``view`` returns the latest look, None before the first."""
    app = FastAPI(title="Genesis run monitor", version="1", docs_url=None, redoc_url=None)
    app.add_middleware(HostGuard, allowed_hosts=allowed_hosts)
    page = resources.files("trainer.monitor").joinpath("run_page.html").read_text(encoding="utf-8")

    def latest() -> RunView:
        found = view()
        if found is None:
            raise HTTPException(503, "the run has not been looked at yet; ask again")
        return found

    @app.get("/", summary="A page for people.", response_class=HTMLResponse)
    async def index() -> HTMLResponse:
        return HTMLResponse(page, headers={"content-security-policy": _POLICY})

    @app.get(
        RUN_PATH,
        summary="The run as it was last looked at.",
        responses={503: {"description": "The run has not been looked at yet."}},
    )
    async def run() -> RunView:
        return latest()

    @app.get("/api/run/course", summary="Step, tokens, loss and speed over time.")
    def run_course(since: Annotated[float, Query(ge=0, description="Seconds since 1970.")] = 0.0) -> dict[str, Any]:
        return {"looks": course(since)}

    @app.get("/healthz", summary="The monitor answers.")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/metrics", summary="Figures for Prometheus.", response_class=Response)
    async def metrics() -> Response:
        return Response(_metrics(latest()), media_type=CONTENT_TYPE_LATEST)

    return app


def _metrics(view: RunView) -> bytes:
    """Figures of the run and its stages; none by node, whose number strangers decide."""
    registry = CollectorRegistry()

    def gauge(name: str, text: str, labels: tuple[str, ...] = ()) -> Gauge:
        return Gauge(f"genesis_run_{name}", text, labels, registry=registry)

    progress = view.progress
    for name, text, value in (
        ("step", "Step of the run.", progress.step),
        ("loss_nats", "Mean over the nodes, nats a token.", progress.loss),
        ("trained_tokens", "Tokens trained on.", progress.trained_tokens),
        ("tokens_per_second", "Of the whole run.", progress.tokens_per_s),
        ("nodes", "Nodes that announce themselves.", progress.num_nodes),
        ("nodes_reached", "Of them, those that answer.", progress.num_reached),
    ):
        if value is not None:
            gauge(name, text).set(value)
    replicas = gauge("stage_replicas", "Workers that serve a stage.", ("stage",))
    for stage in view.stages:
        replicas.labels(stage.stage).set(stage.num_replicas)
    alarms = gauge("alarms", "Alarms that stand, by kind.", ("kind",))
    for kind in {alarm.kind for alarm in view.alarms}:
        alarms.labels(kind).set(sum(alarm.kind == kind for alarm in view.alarms))
    return generate_latest(registry)

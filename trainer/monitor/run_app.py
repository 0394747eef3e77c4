"""A monitor's HTTP interface: the page of the run, the run as JSON, its course over time, figures for Prometheus.

It shows what anybody in the run could see and changes nothing. By default only this machine can read it.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import Annotated, Any, Final, get_args

from fastapi import FastAPI, HTTPException, Query, Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Gauge, generate_latest

from trainer.monitor.app import add_guards
from trainer.monitor.config import ApiConfig
from trainer.monitor.pages.routes import PageSource, add_page
from trainer.monitor.run_view import AlarmKind, Health, RunView, StageSummary

RUN_PATH: Final = "/api/run"

Course = Callable[[float], list[dict[str, Any]]]
"""Returns the run over time, from a moment on (seconds since 1970)."""


def create_run_app(
    view: Callable[[], RunView | None], course: Course, page: PageSource, config: ApiConfig | None = None
) -> FastAPI:
    """Builds the application; ``view`` returns the latest look, None before the first."""
    app = FastAPI(title="Genesis run monitor", version="1", docs_url=None, redoc_url=None)
    add_guards(app, config or ApiConfig())
    add_page(app, page)

    def latest() -> RunView:
        found = view()
        if found is None:
            raise HTTPException(503, "the run has not been looked at yet; ask again")
        return found

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
    gauge("looked_at_timestamp_seconds", "When the run was looked at, seconds since 1970.").set(
        datetime.fromisoformat(view.time).timestamp()
    )
    by_health = gauge("nodes_by_health", "Nodes by what the monitor makes of them.", ("health",))
    for health in get_args(Health):
        by_health.labels(health).set(sum(node.health == health for node in view.nodes))
    _stage_metrics(view, gauge)
    if view.account is not None:
        account = gauge("micro_batches", "Of the account: leased is done + lost + open.", ("state",))
        for state in ("leased", "done", "lost", "open"):
            account.labels(state).set(getattr(view.account.micro_batches, state))
    alarms = gauge("alarms", "Alarms that stand, by kind.", ("kind",))
    for kind in get_args(AlarmKind):  # Those that do not stand as 0: a rule can tell them from a monitor that is gone.
        alarms.labels(kind).set(sum(alarm.kind == kind for alarm in view.alarms))
    return generate_latest(registry)


def _stage_metrics(view: RunView, gauge: Callable[..., Gauge]) -> None:
    """Figures by stage; of a run of whole models the stage is empty."""
    of_stages: list[tuple[Gauge, Callable[[StageSummary], float | None]]] = [
        (gauge("stage_replicas", "Workers that serve a stage.", ("stage",)), lambda stage: stage.num_replicas),
        (gauge("stage_version", "Optimizer steps of its newest weights.", ("stage",)), lambda stage: stage.version),
        (gauge("stage_rows_per_second", "Of its workers together.", ("stage",)), lambda stage: stage.rows_per_s),
        (gauge("stage_busy_ratio", "Mean share of time its workers compute.", ("stage",)), lambda stage: stage.busy),
    ]
    for stage in view.stages:
        for metric, value_of in of_stages:
            if (value := value_of(stage)) is not None:
                metric.labels(stage.stage).set(value)
    ages: dict[str, float] = {}
    known = {"", *(stage.stage for stage in view.stages)}  # A stranger may announce any.
    for node in view.nodes:
        if node.checkpoint_age_s is not None and node.role != "driver" and node.stage in known:
            ages[node.stage] = min(node.checkpoint_age_s, ages.get(node.stage, node.checkpoint_age_s))
    age = gauge("checkpoint_age_seconds", "Age of the newest checkpoint.", ("stage",))
    for name, seconds in ages.items():
        age.labels(name).set(seconds)

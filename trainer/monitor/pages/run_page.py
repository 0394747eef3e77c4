"""A run's page: what a monitor has seen (`RunView`), as the page shows it.

A monitor knows no step of a node by itself, so whether training works is judged from the losses of its looks, by the
rule that a node goes by (`trainer.monitor.losses`): the latest must be below its first ones by more than their noise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Literal

from trainer.monitor.losses import FIRST_LOSSES, has_fallen, loss_trend
from trainer.monitor.pages.log_lines import LogLines
from trainer.monitor.pages.page_view import (
    CheckpointStatus,
    DataStatus,
    Incident,
    LogLine,
    PageNode,
    PageRound,
    PageStage,
    PageView,
)
from trainer.monitor.pages.seen_course import Read
from trainer.monitor.pages.texts import NAME, harmless
from trainer.monitor.run_view import NodeSummary, RoundSummary, RunView, StageSummary

_MIN_LOOKS: Final = 32
_LATEST: Final = 2_000
_NODES_SHOWN: Final = 512
_ALARMS_SHOWN: Final = 100
_INCIDENTS_SHOWN: Final = 60
_LINES_SHOWN: Final = 120
_ENDED: Final = (
    "SELECT began_at, ended_at, kind, subject, text FROM alarm "
    "ORDER BY max(began_at, coalesce(ended_at, 0)) DESC LIMIT ?"
)
_FIRST: Final = "SELECT loss FROM look WHERE loss IS NOT NULL ORDER BY at LIMIT ?"
_LAST: Final = "SELECT loss FROM look WHERE loss IS NOT NULL ORDER BY at DESC LIMIT ?"


def run_page(view: RunView, read: Read, lines: LogLines, utc: Callable[[float], str]) -> PageView:
    """Returns the page of a look; ``read`` queries the monitor's history, ``utc`` writes a moment."""
    progress = view.progress
    verdict, reasons, trend = _verdict(view, read)
    rounds = tuple(map(_round, view.rounds))
    nodes = _nodes(view.nodes)
    return PageView(
        scope="run",
        run_id=harmless(view.run_id, NAME),
        time=view.time,
        kind=progress.kind,
        verdict=verdict,
        reasons=reasons,
        loss=progress.loss,
        loss_of="mean of some 50 steps a node",
        loss_trend=trend,
        step=progress.step,
        step_name="steps of the run" if progress.kind == "swarm" else "outer steps",
        tokens=progress.trained_tokens,
        tokens_per_s=progress.tokens_per_s if progress.kind == "swarm" else progress.tokens_per_s or None,
        num_nodes=progress.num_nodes,
        num_reached=progress.num_reached,
        total_steps=progress.total_steps,
        data_shards=progress.data_shards,
        convergence=progress.convergence,
        last_round=rounds[0] if rounds else None,
        budget=progress.budget,
        stages=tuple(map(_stage, view.stages)),
        account=view.account,
        nodes=nodes,
        rounds=rounds,
        data=None if progress.data_shards is None else DataStatus(num_shards=progress.data_shards),
        checkpoints=_checkpoints(view.nodes),
        alarms=tuple(
            it.model_copy(update={"subject": harmless(it.subject, NAME), "text": harmless(it.text)})
            for it in view.alarms[:_ALARMS_SHOWN]
        ),
        incidents=_incidents(read, utc),
        log=tuple(LogLine(time=utc(it.at), level=it.level, text=it.text) for it in lines.latest(_LINES_SHOWN)),
        dht=view.dht,
        unverified=tuple(map(harmless, view.unverified)),
    )


def _verdict(
    view: RunView, read: Read
) -> tuple[
    Literal["verified", "not-verified", "unknown"],
    tuple[str, ...],
    Literal["improving", "stable", "degrading", "unknown"],
]:
    """Whether training works, what speaks against it, and where the loss goes."""
    first = [float(row[0] or 0.0) for row in read(_FIRST, (FIRST_LOSSES,))]
    latest = [float(row[0] or 0.0) for row in read(_LAST, (_LATEST,))][::-1]
    trend = loss_trend(latest)
    reasons = [f"{it.subject}: {it.text}" for it in view.alarms if it.kind in ("empty-stage", "failing-rounds")]
    if view.progress.num_nodes and not view.progress.num_reached:
        reasons.append("no node of it answers this monitor")
    elif not view.progress.num_nodes:
        reasons.append("no node of it is known to this monitor")
    size = min(FIRST_LOSSES, len(latest) // 2)
    if reasons:
        return "not-verified", tuple(map(harmless, reasons)), trend
    if len(latest) < _MIN_LOOKS:
        text = f"too early to judge: {len(latest)} looks with a loss of the {_MIN_LOOKS} needed; wait"
        return "unknown", (text,), trend
    if not has_fallen(first[:size], latest[-size:]):
        text = "the latest losses are not below the first ones that this monitor saw by more than their noise"
        return "not-verified", (text,), trend
    return "verified", (), trend


def _nodes(nodes: Sequence[NodeSummary]) -> tuple[PageNode, ...]:
    newest: dict[str, int] = {}
    for node in nodes:
        if node.step is not None and node.role != "driver":
            newest[node.stage] = max(node.step, newest.get(node.stage, 0))
    return tuple(_node(node, newest.get(node.stage)) for node in nodes[:_NODES_SHOWN])


def _node(node: NodeSummary, newest: int | None) -> PageNode:
    has_step = node.step is not None and node.role != "driver"
    has_report = node.report_age_s is not None
    return PageNode(
        node_id=harmless(node.node_id, NAME),
        peer_id=node.peer_id,
        role=node.role,
        stage=node.stage,
        status=node.status,
        health=node.health,
        step=node.step if has_step else None,
        behind=newest - node.step if has_step and newest is not None and node.step is not None else None,
        inner_steps=None if node.role == "driver" else node.inner_steps,
        loss=node.loss,
        tokens_per_s=node.tokens_per_s,
        tokens=node.tokens,
        pflops=node.pflops,
        confirmed_pflops=node.confirmed_pflops,
        hours=node.hours,
        rounds_shared=node.rounds_shared if has_report else None,
        rounds_failed=node.rounds_failed if has_report else None,
        withdrawals=node.withdrawals if has_report else None,
        clock_offset_s=node.clock_offset_s,
        memory_bytes=node.memory_bytes or None,
        sent_bytes_per_s=node.sent_bytes_per_s,
        received_bytes_per_s=node.received_bytes_per_s,
        checkpoint_age_s=node.checkpoint_age_s,
        num_shards=None if node.role == "driver" else node.num_shards,
        software=harmless(node.software, NAME) or None,
        state_digest=(node.state_digest or "")[:16] or None,
        doubts=tuple(map(harmless, node.doubts[:4])),
    )


def _stage(stage: StageSummary) -> PageStage:
    return PageStage(
        stage=stage.stage,
        num_serving=stage.num_replicas,
        num_joining=stage.num_joining,
        version=stage.version,
        rows_per_s=stage.rows_per_s,
        busy=stage.busy,
        workers=tuple(
            it.model_copy(
                update={"node_id": harmless(it.node_id, NAME), "unsaved_because": harmless(it.unsaved_because)}
            )
            for it in stage.workers
        ),
    )


def _round(it: RoundSummary) -> PageRound:
    same = it.model_dump(exclude={"error"})
    return PageRound(**same, error=harmless(it.error) if it.num_failed == it.num_reports else "")


def _checkpoints(nodes: Sequence[NodeSummary]) -> tuple[CheckpointStatus, ...]:
    ages: dict[str, float] = {}
    for node in nodes:
        if node.role in ("node", "worker") and node.checkpoint_age_s is not None:
            ages[node.stage] = min(node.checkpoint_age_s, ages.get(node.stage, node.checkpoint_age_s))
    return tuple(
        CheckpointStatus(subject=stage or "any node", age_s=round(age, 1)) for stage, age in sorted(ages.items())
    )


def _incidents(read: Read, utc: Callable[[float], str]) -> tuple[Incident, ...]:
    found: list[tuple[float, Incident]] = []
    for began_at, ended_at, kind, subject, text in read(_ENDED, (_INCIDENTS_SHOWN,)):
        told = harmless(f"{subject}: {text}")
        found.append(
            (float(began_at or 0), Incident(time=utc(float(began_at or 0)), kind=str(kind), text=told, is_bad=True))
        )
        if ended_at is not None:
            at = float(ended_at)
            found.append((at, Incident(time=utc(at), kind=f"{kind} is over", text=harmless(str(subject)))))
    found.sort(key=lambda it: -it[0])
    return tuple(incident for _, incident in found[:_INCIDENTS_SHOWN])

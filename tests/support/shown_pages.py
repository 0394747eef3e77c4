"""The page of a node and of a run without their processes: real trackers and histories, served at a real port."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from trainer.monitor import ApiConfig, ApiServer, Observer, TrainingMetrics, TrainingTracker, create_app
from trainer.monitor.history import History, SeenLook, SeenReport, SeenRound
from trainer.monitor.metrics import Sources
from trainer.monitor.pages.log_lines import LogLines
from trainer.monitor.pages.node_history import NodeHistory
from trainer.monitor.pages.node_page import NodePage, PageFacts
from trainer.monitor.pages.routes import PageSource
from trainer.monitor.pages.run_page import run_page
from trainer.monitor.pages.seen_course import run_course
from trainer.monitor.run_app import create_run_app
from trainer.monitor.run_view import NodeSummary, RunProgress, RunView
from trainer.monitor.work import WorkTally
from trainer.run.monitoring.summary import utc


@dataclass
class ShownNode:
    """A node that is observed and has a page, without the node."""

    tracker: TrainingTracker
    observer: Observer
    history: NodeHistory
    page: NodePage
    url: str


@contextmanager
def shown_node(
    path: Path | None = None,
    *,
    role: Any = "node",
    config: ApiConfig | None = None,
    stages: Sequence[str] = (),
    **limits: int,
) -> Iterator[ShownNode]:
    config = ApiConfig(port=0) if config is None else config
    tracker = TrainingTracker("gpu-7", peer_id="f" * 64, inner_steps=100, role=role, stages=stages)
    metrics = TrainingMetrics(Sources(status=tracker.status), node_id="gpu-7")
    work = WorkTally()
    history = NodeHistory(tracker.status, path, "run-1", look_s=0.2)
    observer = Observer(tracker, metrics, work=work, history=history)
    facts = PageFacts(node_id="gpu-7", run_id="run-1", role=role, stall_s=1e6, **limits)
    with LogLines() as lines, history:
        page = NodePage(facts, tracker, work, history, lines)
        app = create_app(tracker, metrics, config=config, page=PageSource(page.view, page.course))
        with ApiServer(app, config) as server:
            yield ShownNode(tracker, observer, history, page, server.url)


def a_node(name: str, **changes: Any) -> NodeSummary:
    unknown = dict.fromkeys(NodeSummary.model_fields)
    counts = dict.fromkeys(("micro_batches", "rounds_shared", "rounds_alone", "rounds_failed", "withdrawals"), 0)
    texts = {"role": "node", "stage": "", "status": "", "software": "1.0", "health": "ok"}
    known = {"node_id": name, "peer_id": f"{name:_<64}"[:64], "is_reached": True, "pflops": 1.5, "hours": 2.0}
    known |= {"tokens": 1_000, "tokens_per_s": 100.0, "memory_bytes": 1_000_000_000, "loss": 3.5, "step": 4}
    return NodeSummary.model_validate(
        {**unknown, **counts, **texts, **known, "report_age_s": 5.0, "doubts": (), **changes}
    )


def a_view(nodes: Sequence[NodeSummary] = (), *, at: float | None = None, **changes: Any) -> RunView:
    progress = RunProgress(
        kind="whole-model",
        step=4,
        trained_tokens=123_456_789,
        loss=3.25,
        tokens_per_s=1_234.5,
        num_nodes=len(nodes),
        num_reached=len(nodes),
        num_reporting=len(nodes),
        total_steps=4_321,
        data_shards=17,
        convergence=100.0,
    )
    content = {"run_id": "run-1", "time": utc(time.time() if at is None else at), "progress": progress}
    return RunView.model_validate({**content, "nodes": tuple(nodes), **changes})


def fill(history: History, *, num_nodes: int, num_looks: int, every_s: float, end_at: float) -> None:
    """Writes what a monitor keeps of a run: looks, and each minute the nodes' reports and a round."""
    for index in range(num_looks):
        at = end_at - (num_looks - 1 - index) * every_s
        loss = 3.0 + 5.0 / (1.0 + index / 40)
        look = SeenLook(at=at, step=index, tokens=index * 50_000, loss=loss, tokens_per_s=5e3, nodes=num_nodes)
        minute, is_new = divmod(index, max(1, round(60 / every_s)))
        if not is_new:
            reports = [
                SeenReport(
                    at=at + number / 1e3,
                    peer_id=f"{number:064x}",
                    node_id=f"node-{number}",
                    incarnation="i",
                    role="node",
                    loss=loss + (number % 7) / 10,
                    tokens=index * 100,
                    tokens_per_s=20.0,
                    flops=1e12 * index,
                )
                for number in range(num_nodes)
            ]
            phases = {"agree_s": 0.5, "reduce_s": 2.0, "vote_s": 0.1}
            rounds = [
                SeenRound(
                    stage="",
                    round_index=minute,
                    peer_id=f"{number:064x}",
                    at=at,
                    members=num_nodes,
                    completeness=1.0,
                    seconds=3.0,
                    sent_bytes=1_000_000,
                    error="too few members" if minute % 7 == 3 else "",
                    **phases,
                )
                for number in range(min(num_nodes, 8))
            ]
            history.add_reports(reports, rounds)
        history.add_look(look, ())


@contextmanager
def shown_run(
    view: Callable[[], RunView | None], history: History, *, config: ApiConfig | None = None
) -> Iterator[str]:
    """The dashboard's address, of a view and a history that the caller makes."""
    config = ApiConfig(port=0) if config is None else config
    made: dict[int, Any] = {}
    with LogLines() as lines:

        def page() -> Any:
            found = view()
            if found is None:
                return None
            if id(found) not in made:
                made.clear()
                made[id(found)] = run_page(found, history.rows_of, lines, utc)
            return made[id(found)]

        app = create_run_app(view, lambda since: [], PageSource(page, partial(run_course, history.rows_of)), config)
        with ApiServer(app, config, first_path="/api/run") as server:
            yield server.url

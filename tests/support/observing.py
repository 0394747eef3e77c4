"""Steps, rounds and announcements as the trainer's other packages report them to trainer.monitor."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

from trainer.monitor import (
    ApiConfig,
    ApiServer,
    LostShare,
    PerishedShare,
    SwarmAccount,
    SwarmStages,
    TallyStatus,
    TrainingMetrics,
    TrainingTracker,
    WorkerStatus,
    create_app,
)
from trainer.monitor.metrics import Sources

_OF_STEP = {"step": 1, "loss": 4.0, "grad_norm": 0.5, "lr": 1e-4, "num_tokens": 4096, "skipped": False, "seconds": 0.25}
_OF_ROUND = {"round_index": 0, "members": ("a" * 64, "b" * 64), "dropped": (), "completeness": 1.0, "rule": "mean"}
_OF_ROUND |= {"sent_bytes": 1_000, "received_bytes": 2_000, "seconds": 1.5, "num_passes": 1, "weights": (1.0, 1.0)}
_OF_ROUND |= {"validation": (), "note": "", "phases": (0.2, 1.0, 0.3), "bits_per_value": (8.0, 16.0)}
Step: Any = partial(SimpleNamespace, **_OF_STEP)
Report: Any = partial(SimpleNamespace, **_OF_ROUND)


@dataclass(frozen=True, slots=True)
class Announced:
    """An Announcement."""

    peer_id: str
    node_id: str = ""
    outer_step: int = 1
    state_digest: str = "d1"
    inner_step: int = 100
    loss: float | None = 3.0
    tokens_per_s: float = 1_000.0
    shards: tuple[int, ...] = ()
    stage_name: str = ""
    part_states: tuple[tuple[str, int, str], ...] = ()
    expires_at: float = float("inf")


def an_account(**changes: object) -> SwarmAccount:
    content: dict[str, object] = {
        "micro_batches": TallyStatus(leased=120, done=100, lost=3, open=17),
        "tokens": TallyStatus(leased=122_880, done=102_400, lost=3_072, open=17_408),
        "lost": (LostShare(stage="body-1", reason="unclear", micro_batches=3),),
        "perished": (PerishedShare(stage="head", micro_batches=1),),
    }
    content |= {"node_id": "driver-1", "keeper": "driver-1", "age_s": 0.0}
    content |= {"trained_tokens": 102_400, "waiting": 5, "reissued": 2, "leases": 2}
    return SwarmAccount.model_validate(content | changes)


def a_worker(uid: str, **changes: object) -> WorkerStatus:
    content: dict[str, object] = {"uid": uid, "node_id": "n", "peer_id": "f" * 64, "status": "serving", "version": 12}
    content |= {"num_tokens": 4096, "queued": 1, "rows_per_s": 30.0, "busy": 0.75}
    return WorkerStatus.model_validate(content | changes)


def some_stages(**changes: object) -> SwarmStages:
    workers = (a_worker("head.0.42"), a_worker("head.0.43", status="joining", version=11, rows_per_s=0.0))
    head = {"num_serving": 1, "version": 12, "rows_per_s": 30.0, "empty_for_s": 0.0, "workers": workers}
    tail = {"num_serving": 0, "version": None, "rows_per_s": 0.0, "empty_for_s": 7.5, "workers": ()}
    content: dict[str, object] = {"node_id": "driver-1", "time": "2026-11-21T03:00:00Z", "step": 12, "loss": 5.25}
    content |= {"tokens_per_s": 1234.5, "in_flight": 8}
    content["stages"] = ({"stage": "head", "num_layers": 1} | head, {"stage": "tail", "num_layers": 1} | tail)
    return SwarmStages.model_validate(content | changes)


@dataclass
class SeenPipeline:
    of_account: SwarmAccount | None = field(default_factory=an_account)
    of_stages: SwarmStages = field(default_factory=some_stages)

    def account(self) -> SwarmAccount | None:
        return self.of_account

    def stages(self) -> SwarmStages:
        return self.of_stages


def driver_api(view: SeenPipeline, port: int = 0) -> ApiServer:
    tracker = TrainingTracker("driver-1", peer_id="f" * 64)
    sources = Sources(status=tracker.status, refused=dict, rpc_bytes=lambda: (0, 0), lost_events=lambda: 0)
    metrics = TrainingMetrics(sources, node_id="driver-1", run_id="run")
    config = ApiConfig(port=port)
    return ApiServer(create_app(tracker, metrics, config=config, pipeline=view), config)

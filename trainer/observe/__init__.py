"""What a node says of its training: a log of events, figures over HTTP, curves as a picture.

    observer = Observer(TrainingTracker("gpu-7"), TrainingMetrics(...), EventLog(Path("logs"), "gpu-7"))
    observer.step(result)                  # the training thread, after each step: 11 to 35 µs
    with ApiServer(create_app(...), ApiConfig()) as server:
        ...                                # curl localhost:8000/api/training/verify

Guarantees: the training thread never waits for a disk, a socket or a reader; memory is bounded however long a run is
and however many peers announce themselves; what a peer announces can bend a figure by a bounded amount and never make
it NaN. The trade-off: the log is written by a thread some 10 ms behind, which a kill -9 loses.

FastAPI, prometheus-client and matplotlib are imported when what needs them is first named.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainer.observe.app import ShutdownHook, create_app
    from trainer.observe.config import ApiConfig
    from trainer.observe.event_log import EventLog
    from trainer.observe.facts import AnnouncedNode, RoundFacts, StepFacts
    from trainer.observe.metered import MeteredIterator
    from trainer.observe.metrics import TrainingMetrics
    from trainer.observe.observer import Observer
    from trainer.observe.pipeline import (
        LostShare,
        PerishedShare,
        PipelineView,
        StageStatus,
        SwarmAccount,
        SwarmStages,
        TallyStatus,
        WorkerStatus,
    )
    from trainer.observe.plot import plot
    from trainer.observe.reading import Event, read_events
    from trainer.observe.server import ApiServer
    from trainer.observe.status import TrainingStatus
    from trainer.observe.tracker import TrainingTracker

__all__ = [
    "AnnouncedNode",
    "ApiConfig",
    "ApiServer",
    "Event",
    "EventLog",
    "LostShare",
    "MeteredIterator",
    "Observer",
    "PerishedShare",
    "PipelineView",
    "RoundFacts",
    "ShutdownHook",
    "StageStatus",
    "StepFacts",
    "SwarmAccount",
    "SwarmStages",
    "TallyStatus",
    "TrainingMetrics",
    "TrainingStatus",
    "TrainingTracker",
    "WorkerStatus",
    "create_app",
    "plot",
    "read_events",
]

_MODULES = {
    "AnnouncedNode": "facts",
    "ApiConfig": "config",
    "ApiServer": "server",
    "Event": "reading",
    "EventLog": "event_log",
    "LostShare": "pipeline",
    "MeteredIterator": "metered",
    "Observer": "observer",
    "PerishedShare": "pipeline",
    "PipelineView": "pipeline",
    "RoundFacts": "facts",
    "ShutdownHook": "app",
    "StageStatus": "pipeline",
    "StepFacts": "facts",
    "SwarmAccount": "pipeline",
    "SwarmStages": "pipeline",
    "TallyStatus": "pipeline",
    "TrainingMetrics": "metrics",
    "TrainingStatus": "status",
    "TrainingTracker": "tracker",
    "WorkerStatus": "pipeline",
    "create_app": "app",
    "plot": "plot",
    "read_events": "reading",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'trainer.observe' has no attribute {name!r}")
    value = getattr(import_module(f"trainer.observe.{_MODULES[name]}"), name)
    globals()[name] = value
    return value

"""Monitoring of a node's training: a log of events, metrics over HTTP, plots of curves.

    observer = Observer(TrainingTracker("gpu-7"), TrainingMetrics(...), EventLog(Path("logs"), "gpu-7"))
    observer.step(result)                  # the training thread, after each step: 11 to 35 µs
    with ApiServer(create_app(...), ApiConfig()) as server:
        ...                                # curl localhost:8000/api/training/verify

Guarantees: the training thread never waits for a disk, a socket or a reader; memory is bounded however long a run is
and however many peers announce themselves; what a peer announces can change a metric by a bounded amount and never make
it NaN. The trade-off: a thread writes the log some 10 ms behind, and a kill -9 loses that much.

FastAPI, prometheus-client and matplotlib are imported when a name that needs them is first used.
"""

from __future__ import annotations

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

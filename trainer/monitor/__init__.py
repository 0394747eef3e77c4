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

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

"""A node that is observed, and its interface on a real port."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from trainer.monitor import ApiConfig, ApiServer, Observer, ShutdownHook, TrainingMetrics, TrainingTracker, create_app
from trainer.monitor.metrics import Sources


@dataclass
class ObservedNode:
    """What observes a node, without the node."""

    tracker: TrainingTracker
    metrics: TrainingMetrics
    observer: Observer
    refused: Counter[str] = field(default_factory=Counter)
    stops: list[str] = field(default_factory=list)

    @contextmanager
    def served(self, *, token: str = "", **pages: Any) -> Iterator[httpx.Client]:
        """A client of its interface, with a shutdown that needs the token, if there is one."""
        config = ApiConfig(port=0, allowed_hosts=("node.example.org",))
        hook = ShutdownHook(callback=lambda: self.stops.append("asked"), token=token)
        app = create_app(self.tracker, self.metrics, config=config, **{"shutdown": hook} | pages)
        with (
            ApiServer(app, config) as server,
            httpx.Client(base_url=server.url, trust_env=False, timeout=30.0) as client,
        ):
            yield client


def observed_node() -> ObservedNode:
    tracker = TrainingTracker("gpu-7", peer_id="f" * 64, inner_steps=100)
    refused: Counter[str] = Counter()
    sources = Sources(status=tracker.status, refused=lambda: refused, rpc_bytes=lambda: (70, 80), lost_events=lambda: 3)
    metrics = TrainingMetrics(sources, node_id="gpu-7", run_id="run")
    return ObservedNode(tracker, metrics, Observer(tracker, metrics), refused)


@pytest.fixture
def node() -> ObservedNode:
    return observed_node()


@pytest.fixture
def client(node: ObservedNode) -> Iterator[httpx.Client]:
    with node.served() as client:
        yield client

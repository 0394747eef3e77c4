"""A node that is observed, and its interface on a real port."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

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


@dataclass
class Api:
    """A client of a running interface."""

    node: ObservedNode
    url: str
    client: httpx.Client

    def json(self, path: str) -> dict[str, object]:
        answer = self.client.get(path)
        answer.raise_for_status()
        return answer.json()

    def metrics(self) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
        return samples(self.client.get("/metrics").text)


def samples(page: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    }


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
def api(node: ObservedNode) -> Iterator[Api]:
    """Served with a shutdown that needs no token."""
    config = ApiConfig(port=0, allowed_hosts=("node.example.org",))
    hook = ShutdownHook(callback=lambda: node.stops.append("asked"))
    with (
        ApiServer(create_app(node.tracker, node.metrics, config=config, shutdown=hook), config) as server,
        httpx.Client(base_url=server.url, trust_env=False, timeout=30.0) as client,
    ):
        yield Api(node, server.url, client)

"""What the server counts, for Prometheus: docs/serve.md lists the names.

Every label takes its values from a list fixed here or in `objects`, so no client can add a series: an unknown method is
``other``, and what names no object is ``none``. The registry belongs to the server, not to the process. A page costs
3 to 4 ms; the store's figures are parsed again only when manifest.json is another file.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from genesis.serve.summary import ManifestReader

METRICS_MEDIA_TYPE = CONTENT_TYPE_LATEST
_SECONDS = (0.001, 0.005, 0.02, 0.1, 0.5, 2.0, 10.0, 60.0, 300.0)
_METHODS = frozenset({"GET", "HEAD"})


class ServeMetrics:
    """The counters of one server, and the gauges of its store."""

    def __init__(self, root: Path) -> None:
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "genesis_serve_requests",
            "Requests answered, also those cut short.",
            ["method", "status", "kind"],
            registry=self._registry,
        )
        self._sent = Counter(
            "genesis_serve_sent_bytes", "Bytes of bodies handed to connections.", ["kind"], registry=self._registry
        )
        self._seconds = Histogram(
            "genesis_serve_request_seconds",
            "From a request's head to the last byte handed over.",
            ["kind"],
            buckets=_SECONDS,
            registry=self._registry,
        )
        self.in_flight = Gauge("genesis_serve_requests_in_flight", "Requests being answered.", registry=self._registry)
        self._connections = Gauge("genesis_serve_connections", "Open connections.", registry=self._registry)
        self._cut = Counter(
            "genesis_serve_cut_connections",
            "Connections the server ended: idle (no request came), stalled (nothing was read), overload, changed "
            "(the object was written into while it was sent), stopping.",
            ["reason"],
            registry=self._registry,
        )
        ProcessCollector(registry=self._registry)
        self._registry.register(_StoreCollector(ManifestReader(root)))

    def count(self, method: str, status: int, kind: str, seconds: float, sent_bytes: int) -> None:
        """One request that is over, with the bytes of its body that were handed over."""
        self._requests.labels(method if method in _METHODS else "other", str(status), kind).inc()
        self._seconds.labels(kind).observe(seconds)
        self._sent.labels(kind).inc(sent_bytes)

    def connection_opened(self) -> None:
        """See `genesis.serve.connections.ConnectionMetrics`."""
        self._connections.inc()

    def connection_closed(self) -> None:
        """See `genesis.serve.connections.ConnectionMetrics`."""
        self._connections.dec()

    def connection_cut(self, reason: str) -> None:
        """See `genesis.serve.connections.ConnectionMetrics`."""
        self._cut.labels(reason).inc()

    def page(self) -> bytes:
        """All of it in Prometheus' text form. Reads manifest.json."""
        return generate_latest(self._registry)


class _StoreCollector(Collector):
    """The store's own figures, read when they are asked for."""

    def __init__(self, reader: ManifestReader) -> None:
        self._reader = reader

    def collect(self) -> Iterator[GaugeMetricFamily]:
        summary = self._reader.read()
        yield GaugeMetricFamily(
            "genesis_store_published", "1 if there is a manifest that can be read.", float(summary is not None)
        )
        if summary is None:
            return
        yield GaugeMetricFamily("genesis_store_total_shards", "Shards in the manifest.", summary.total_shards)
        yield GaugeMetricFamily("genesis_store_total_tokens", "Token ids in the manifest.", summary.total_tokens)
        yield GaugeMetricFamily(
            "genesis_store_total_size_bytes", "Bytes of all shards in the manifest.", summary.total_size_bytes
        )
        yield GaugeMetricFamily("genesis_store_manifest_sequence", "The manifest's sequence number.", summary.sequence)

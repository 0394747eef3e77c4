"""What the server counts, for Prometheus: docs/serve.md lists the names.

Every label takes its values from a list fixed here or in `objects`, so no client can add a series: an unknown method is
``other``, and what names no object is ``none``. The registry belongs to the server, not to the process. A page costs
3 to 4 ms.

The figures of the store's manifest are parsed again only when manifest.json is another file: a manifest of 600 segments
takes 4 ms to parse, and a look at the file 30 µs.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from dataclasses import dataclass
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

from genesis.serve.objects import open_object
from manifests import MANIFEST_KEY, ContractError, Manifest

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


logger = logging.getLogger(__name__)

_MAX_MANIFEST_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class StoreSummary:
    """What a manifest says of its store."""

    total_shards: int
    total_tokens: int
    total_size_bytes: int
    sequence: int


class ManifestReader:
    """Reads a folder's manifest; safe from many threads."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._lock = threading.Lock()
        self._etag: str | None = None
        self._summary: StoreSummary | None = None

    def read(self) -> StoreSummary | None:
        """The published figures; None if there is no manifest, or none that can be read (which is logged once)."""
        with self._lock:
            try:
                found = open_object(self._root, MANIFEST_KEY)
            except OSError as error:
                return self._remember("unreadable", None, f"cannot be read: {error.strerror}")
            if found is None:
                return self._remember(None, None)
            try:
                if found.etag == self._etag:
                    return self._summary
                if found.size_bytes > _MAX_MANIFEST_BYTES:
                    return self._remember(found.etag, None, f"has {found.size_bytes:,} bytes; that is no manifest")
                return self._remember(found.etag, _summary_of(found.read(0, found.size_bytes)))
            except (OSError, ContractError) as error:
                return self._remember(found.etag, None, str(error))
            finally:
                found.close()

    def _remember(self, etag: str | None, summary: StoreSummary | None, trouble: str = "") -> StoreSummary | None:
        if trouble and etag != self._etag:
            logger.warning("%s/%s %s; it is served as it is", self._root, MANIFEST_KEY, trouble)
        self._etag, self._summary = etag, summary
        return summary


def _summary_of(body: bytes) -> StoreSummary:
    manifest = Manifest.from_json(body)
    return StoreSummary(
        total_shards=manifest.total_shards,
        total_tokens=manifest.total_tokens,
        total_size_bytes=manifest.total_size_bytes,
        sequence=manifest.sequence,
    )

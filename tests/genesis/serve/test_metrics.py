"""The pages for operators."""

from __future__ import annotations

import pytest

from genesis.store import CachePolicy, FolderStore
from manifests import MANIFEST_KEY, Manifest
from tests.genesis.serve.conftest import make_store
from tests.support.serve_process import genesis_serve


@pytest.fixture
def fresh(tmp_path, contents):
    make_store(tmp_path / "store", contents)
    with genesis_serve(tmp_path / "store") as server:
        yield server


@pytest.mark.slow
def test_requests_and_bytes(fresh, contents):
    etag = fresh.get("/manifest.json").headers["etag"]
    fresh.get("/manifest.json", if_none_match=etag)
    fresh.request("HEAD", "/shard_7.pt")
    fresh.get("/shard_7.pt")
    fresh.get("/shard_7.pt", range="bytes=0-9")
    fresh.get("/shard_7.pt", range="bytes=99999999-")
    fresh.get("/nothing")
    fresh.get("/shard_12.pt")
    fresh.get("/healthz")
    counted = {
        (labels["method"], labels["status"], labels["kind"]): value
        for (name, found), value in fresh.metrics().items()
        if name == "genesis_serve_requests_total" and (labels := dict(found))
    }
    assert counted == {
        ("GET", "200", "manifest"): 1,
        ("GET", "304", "manifest"): 1,
        ("HEAD", "200", "shard"): 1,
        ("GET", "200", "shard"): 1,
        ("GET", "206", "shard"): 1,
        ("GET", "416", "shard"): 1,
        ("GET", "404", "none"): 1,
        ("GET", "404", "shard"): 1,
        ("GET", "200", "healthz"): 1,
    }
    assert fresh.metric("genesis_serve_sent_bytes_total", kind="manifest") == len(contents["manifest.json"])
    assert fresh.metric("genesis_serve_sent_bytes_total", kind="shard") >= len(contents["shard_7.pt"]) + 10
    assert fresh.metric("genesis_serve_request_seconds_count", kind="shard") == 5
    assert fresh.metric("genesis_serve_request_seconds_bucket", kind="shard", le="+Inf") == 5
    assert fresh.metric("genesis_serve_requests_in_flight") == 1  # The one that asks.
    assert fresh.metric("genesis_serve_connections") >= 1
    page = fresh.get("/metrics")
    assert page.headers["content-type"].startswith("text/plain; version=")
    assert page.headers["cache-control"] == "no-store"
    assert fresh.request("HEAD", "/metrics").content == b""


@pytest.mark.slow
def test_clients_add_no_series(fresh):
    for number in range(12):
        fresh.request(f"METHOD{number}", f"/path{number}")
        fresh.get(f"/path{number}.pt?x={number}", x_header=str(number))
        fresh.get(f"/shard_{number + 100}.pt")
    series = {labels for name, labels in fresh.metrics() if name == "genesis_serve_requests_total"}
    assert series == {
        frozenset({("method", "other"), ("status", "405"), ("kind", "none")}),
        frozenset({("method", "GET"), ("status", "404"), ("kind", "none")}),
        frozenset({("method", "GET"), ("status", "404"), ("kind", "shard")}),
    }


@pytest.mark.slow
def test_the_stores_figures_follow_its_manifest(fresh, tmp_path, contents):
    manifest = Manifest.from_json(contents[MANIFEST_KEY])
    assert _figures(fresh) == (manifest.total_shards, manifest.total_tokens, manifest.total_size_bytes, 3)
    store = FolderStore(tmp_path / "store")
    grown = manifest.model_copy(update={"sequence": 4, "signature": None})
    store.put(MANIFEST_KEY, grown.to_json(), cache=CachePolicy.SHORT)
    assert _figures(fresh) == (manifest.total_shards, manifest.total_tokens, manifest.total_size_bytes, 4)
    (tmp_path / "store" / MANIFEST_KEY).write_bytes(b"{broken")
    for _ in range(3):
        assert fresh.metric("genesis_store_published") == 0
    assert fresh.get("/manifest.json").content == b"{broken"  # Readers refuse it with a better message.
    fresh.stop()
    assert sum(MANIFEST_KEY in line for line in fresh.errors) == 1


def _figures(server):
    names = ("total_shards", "total_tokens", "total_size_bytes", "manifest_sequence")
    return tuple(server.metric(f"genesis_store_{name}") for name in names)

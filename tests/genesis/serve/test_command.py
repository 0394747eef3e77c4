"""Starting and stopping ``genesis serve``, and its pages for operators."""

from __future__ import annotations

import json
import signal
import socket

import pytest

from genesis.cli.app import run
from genesis.store import CachePolicy, FolderStore
from manifests import MANIFEST_KEY, Manifest
from tests.genesis.serve.conftest import make_store
from tests.support.serve_process import genesis_serve

LARGE_BYTES = 30_000_000


@pytest.fixture(scope="module")
def large(tmp_path_factory, contents):
    root = tmp_path_factory.mktemp("command") / "store"
    make_store(root, contents | {"shard_0.pt": b"x" * LARGE_BYTES})
    return root


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)])
def test_it_says_what_it_serves_and_a_signal_lets_answers_end(large, number, code):
    with (
        genesis_serve(large, "--json") as server,
        server.connect(receive_buffer_bytes=65_536) as client,
        server.connect() as idle,
    ):
        announced = {"url": f"{server.url}/", "sequence": 3, "total_shards": 1, "total_tokens": 8}
        assert json.loads(server.announcement) == {"folder": str(large), **announced}
        idle.ask(b"/manifest.json").answer()
        client.ask(b"/shard_0.pt").head()
        begun = client.read(100_000)
        server.process.send_signal(number)
        assert idle.is_closed()
        server.wait_until_closed()
        assert begun + client.read(LARGE_BYTES - len(begun)) == b"x" * LARGE_BYTES
        assert client.is_closed()
        assert server.wait() == code
    assert not any("Traceback" in line for line in server.errors)


@pytest.mark.slow
def test_answers_that_do_not_end_are_cut_and_at_once_by_a_second_signal(large):
    with genesis_serve(large, "--grace-s", "0.5") as server, server.connect(receive_buffer_bytes=4096) as client:
        client.ask(b"/shard_0.pt").head()
        assert server.stop() == 143
        assert len(client.read(LARGE_BYTES)) < LARGE_BYTES
    assert not any("Traceback" in line for line in server.errors)
    with genesis_serve(large, "--grace-s", "3600") as server, server.connect(receive_buffer_bytes=4096) as client:
        client.ask(b"/shard_0.pt").head()
        server.process.send_signal(signal.SIGINT)
        server.wait_until_closed()
        assert server.stop(signal.SIGTERM) == 130  # What the first one was.


def test_a_port_in_use(store_folder, capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert run(["serve", "--store", str(store_folder), "--port", port]) == 2
    said = capsys.readouterr()
    assert f"port {port}" in said.err
    assert "in use" in said.err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--host", "no-such-host.invalid"], "no-such-host.invalid"),
        (["--host", "192.0.2.1"], "no such address"),
        (["--store", "s3://bucket/prefix"], "only folders are served"),
        (["--store", "https://example.org"], "only folders are served"),
    ],
)
def test_options_that_make_no_sense(store_folder, options, words, capsys):
    assert run(["serve", "--store", str(store_folder), "--port", "0", *options]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert words in said.err


def test_a_folder_that_is_not_there(tmp_path, capsys):
    (tmp_path / "file").write_text("x")
    for missing in (tmp_path / "none", tmp_path / "file"):
        assert run(["serve", "--store", str(missing), "--port", "0"]) == 1
        said = capsys.readouterr()
        assert said.out == ""
        assert str(missing) in said.err
        assert "check --store" in said.err


@pytest.mark.slow
def test_an_empty_folder_is_served_and_filled_later(tmp_path, contents):
    with genesis_serve(tmp_path) as server:
        assert "nothing published yet" in server.announcement
        assert server.get("/manifest.json").status_code == 404
        assert server.get("/healthz").status_code == 200
        assert server.metric("genesis_store_published") == 0
        store = FolderStore(tmp_path)
        for key, body in contents.items():
            store.put(key, body, cache=CachePolicy.IMMUTABLE)
            assert server.get(f"/{key}").content == body
        assert server.metric("genesis_store_published") == 1


@pytest.mark.slow
def test_a_folder_behind_a_link_that_goes_away_for_a_while(tmp_path, contents):
    make_store(tmp_path / "store", contents)
    (tmp_path / "link").symlink_to(tmp_path / "store")
    with genesis_serve(tmp_path / "link") as server:
        assert server.get("/manifest.json").content == contents["manifest.json"]
        (tmp_path / "store").rename(tmp_path / "elsewhere")
        assert server.get("/manifest.json").status_code == 404
        health = server.get("/healthz")
        assert (health.status_code, health.headers["retry-after"]) == (503, "2")
        (tmp_path / "elsewhere").rename(tmp_path / "store")
        assert server.get("/manifest.json").content == contents["manifest.json"]
        assert server.get("/healthz").text == "ok\n"


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
    fresh.get("/shard_7.pt", range="bytes=0-9")
    fresh.get("/nothing")
    fresh.get("/shard_12.pt")
    counted = {
        (labels["method"], labels["status"], labels["kind"]): value
        for (name, found), value in fresh.metrics().items()
        if name == "genesis_serve_requests_total" and (labels := dict(found))
    }
    assert counted == {
        ("GET", "200", "manifest"): 1,
        ("GET", "304", "manifest"): 1,
        ("HEAD", "200", "shard"): 1,
        ("GET", "206", "shard"): 1,
        ("GET", "404", "none"): 1,
        ("GET", "404", "shard"): 1,
    }
    assert fresh.metric("genesis_serve_sent_bytes_total", kind="manifest") == len(contents["manifest.json"])
    assert fresh.metric("genesis_serve_request_seconds_count", kind="shard") == 3
    page = fresh.get("/metrics")
    assert page.headers["content-type"].startswith("text/plain; version=")
    assert page.headers["cache-control"] == "no-store"
    assert fresh.request("HEAD", "/metrics").content == b""


@pytest.mark.slow
def test_clients_add_no_series_and_the_figures_follow_the_manifest(fresh, tmp_path, contents):
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
    manifest = Manifest.from_json(contents[MANIFEST_KEY])
    assert _figures(fresh) == (manifest.total_shards, manifest.total_tokens, manifest.total_size_bytes, 3)
    store = FolderStore(tmp_path / "store")
    grown = manifest.model_copy(update={"sequence": 4, "signature": None})
    store.put(MANIFEST_KEY, grown.to_json(), cache=CachePolicy.SHORT)
    assert _figures(fresh) == (manifest.total_shards, manifest.total_tokens, manifest.total_size_bytes, 4)
    (tmp_path / "store" / MANIFEST_KEY).write_bytes(b"{broken")
    assert fresh.metric("genesis_store_published") == 0
    assert fresh.get("/manifest.json").content == b"{broken"  # Readers refuse it with a better message.


def _figures(server):
    names = ("total_shards", "total_tokens", "total_size_bytes", "manifest_sequence")
    return tuple(server.metric(f"genesis_store_{name}") for name in names)

"""Clients that are many, slow, silent or deaf."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import pytest

from tests.genesis.serve.conftest import make_store
from tests.support.serve_process import RawClient, ServeProcess, genesis_serve
from tests.support.waiting import wait_until

DEAF_BYTES = 12_000_000
"""More than the buffers of a connection on loopback hold."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory, contents):
    root = tmp_path_factory.mktemp("limits") / "store"
    make_store(root, contents | {"shard_0.pt": b"x" * DEAF_BYTES})
    return root


@pytest.fixture(scope="module")
def impatient(folder) -> Iterator[ServeProcess]:
    """A server with short time-outs."""
    with genesis_serve(folder, "--idle-timeout-s", "1.5", "--stall-timeout-s", "1.5") as server:
        yield server


@pytest.mark.slow
def test_a_hundred_slow_clients_keep_nobody_waiting(folder, contents):
    with genesis_serve(folder) as server, contextlib.ExitStack() as stack:
        slow = [stack.enter_context(server.connect(receive_buffer_bytes=4096)) for _ in range(100)]
        for client in slow:
            assert client.ask(b"/shard_0.pt").head()[0] == 200
        assert server.metric("genesis_serve_requests_in_flight") >= 100
        for key in ("manifest.json", "shard_7.pt"):
            assert server.get(f"/{key}").content == contents[key]
        memory = server.metric("process_resident_memory_bytes")
        assert memory < 400e6, f"{memory / 1e6:.0f} MB for 100 clients"
        for client in slow[:3]:
            assert client.read(DEAF_BYTES) == b"x" * DEAF_BYTES


@pytest.mark.slow
def test_one_too_many_is_told_so(folder, contents):
    with genesis_serve(folder, "--max-connections", "3") as server, contextlib.ExitStack() as stack:
        clients = []
        for _ in range(3):
            clients.append(stack.enter_context(server.connect()))
            assert clients[-1].ask(b"/manifest.json").answer()[0] == 200
        clients.append(stack.enter_context(server.connect()))
        status, headers, _ = clients[3].ask(b"/manifest.json").answer()
        assert (status, headers["retry-after"], headers["connection"]) == (503, "2", "close")
        assert headers["cache-control"] == "no-store"
        assert clients[3].is_closed()
        # Those that are in go on, and the operator can look.
        assert clients[0].ask(b"/shard_7.pt").answer()[2] == contents["shard_7.pt"]
        assert server.get("/healthz").status_code == 200
        assert server.metric("genesis_serve_requests_total", method="GET", status="503", kind="none") == 1
        clients[0].socket.close()
        wait_until(lambda: server.get("/manifest.json").status_code == 200)
        # One that says nothing gives way to the next one.
        mute = [stack.enter_context(server.connect()) for _ in range(5)]
        assert all(client.is_closed() for client in mute[:4])


@pytest.mark.slow
def test_half_requests_keep_nobody_out(folder, contents):
    with genesis_serve(folder, "--max-connections", "10") as server, contextlib.ExitStack() as stack:
        halves = [stack.enter_context(server.connect()) for _ in range(30)]
        for half in halves:
            half.send(b"GET /manifest.json HTTP/1.1\r\nHost: loc")
        for _ in range(3):
            assert server.get("/manifest.json").content == contents["manifest.json"]
        assert server.metric("genesis_serve_connections") > 30, "nobody is told at once to try again"
        halves[0].send(b"alhost\r\n\r\n")
        assert halves[0].answer()[0] == 503, "its place is another's"
        server.wait_for_metric("genesis_serve_cut_connections_total", 20, reason="overload")


@pytest.mark.slow
def test_clients_that_say_or_read_nothing_and_one_that_reads_slowly(impatient):
    with impatient.connect() as mute, impatient.connect() as client:
        assert client.ask(b"/manifest.json").answer()[0] == 200
        assert client.is_closed()
        assert mute.is_closed()
    before = impatient.metric("genesis_serve_cut_connections_total", reason="stalled")
    with impatient.connect(receive_buffer_bytes=4096) as client:
        client.ask(b"/shard_0.pt").head()
        impatient.wait_for_metric("genesis_serve_cut_connections_total", before + 1, reason="stalled")
        assert len(client.read(DEAF_BYTES)) < DEAF_BYTES
    wait_until(lambda: impatient.metric("genesis_serve_requests_in_flight") == 1)  # The one that asks.
    # A second and a half for every 256 KiB would be too slow; a fiftieth of a second, for more than that, is not.
    with impatient.connect(receive_buffer_bytes=65_536) as client:
        client.ask(b"/shard_0.pt").head()
        pause, got = threading.Event(), 0
        while got < DEAF_BYTES:
            part = client.read(min(400_000, DEAF_BYTES - got))
            assert part
            got += len(part)
            pause.wait(0.02)


@pytest.mark.slow
def test_a_request_that_comes_drop_by_drop(impatient):
    before = impatient.metric("genesis_serve_cut_connections_total", reason="idle")
    with impatient.connect() as client:
        client.ask(b"/manifest.json").answer()
        client.send(b"GET /manifest.json HTTP/1.1\r\n")
        wait_until(lambda: _is_cut_while_dripping(client))
    impatient.wait_for_metric("genesis_serve_cut_connections_total", before + 1, reason="idle")


def _is_cut_while_dripping(client: RawClient) -> bool:
    try:
        client.send(b"X: y\r\n")
    except ConnectionError:
        return True
    return False


@pytest.mark.slow
def test_descriptors_and_connections_are_given_back(impatient, contents):
    def leave() -> None:
        with impatient.connect(receive_buffer_bytes=4096) as client:
            client.ask(b"/shard_0.pt").head()

    leave()
    wait_until(lambda: impatient.metric("genesis_serve_connections") == 1)
    before = impatient.metric("process_open_fds")
    for _ in range(40):
        leave()
    wait_until(lambda: impatient.metric("genesis_serve_connections") == 1)
    assert impatient.metric("process_open_fds") <= before + 1
    assert impatient.get("/shard_7.pt").content == contents["shard_7.pt"]

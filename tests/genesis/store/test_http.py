"""Reading over HTTP, from a real web server (``rclone serve http``) through the fault proxy."""

from __future__ import annotations

import contextlib
import gzip
import random
import socket
import socketserver
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from genesis.errors import ObjectNotFoundError, StoreAccessError, StoreError, StoreUnavailableError
from genesis.store import CachePolicy, FolderStore
from genesis.store.http import HttpStore, _check_redirect
from genesis.store.limits import RetryPolicy
from manifests import InvalidDocumentError
from tests.genesis.store.conftest import QUICK
from tests.support.fault_proxy import Fault, FaultProxy, Reply, Request
from tests.support.s3_servers import Server, rclone_http

BODY = random.Random(8).randbytes(300_000)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("web")
    FolderStore(root / "store").put("shard_0.pt", BODY, cache=CachePolicy.IMMUTABLE)
    return root


@pytest.fixture(scope="module")
def web(folder: Path) -> Iterator[Server]:
    with rclone_http(folder) as server:
        yield server


@pytest.fixture
def http_store() -> Iterator[Callable[..., HttpStore]]:
    with contextlib.ExitStack() as stack:

        def make(port: int, policy: RetryPolicy = QUICK, **options: int) -> HttpStore:
            store = HttpStore(f"http://127.0.0.1:{port}/store/", policy=policy, **options)
            return stack.enter_context(contextlib.closing(store))

        yield make


def test_it_reads_and_cannot_list(web, http_store):
    store = http_store(web.port)
    found = store.get("shard_0.pt")
    assert found.body == BODY
    info = store.head("shard_0.pt")
    assert info is not None
    assert (info.size_bytes, info.etag) == (len(BODY), found.etag)
    assert info.modified_at is not None
    assert store.head("none") is None
    with pytest.raises(ObjectNotFoundError, match="none"):
        store.get("none")
    with pytest.raises(StoreError, match="manifest"):
        store.list()
    with pytest.raises(InvalidDocumentError):
        store.get("../web/store/shard_0.pt")


def test_a_store_that_is_not_public(web, http_store):
    with FaultProxy(web.port, answer=lambda request: Reply(403)) as proxy:
        store = http_store(proxy.port)
        for use in (store.get, store.head):
            with pytest.raises(StoreAccessError, match=r"403.*public"):
                use("shard_0.pt")


def test_an_answer_larger_than_any_object(web, http_store):
    with pytest.raises(StoreError, match=r"at most 1,000 bytes, found 300,000"):
        http_store(web.port, max_object_bytes=1000).get("shard_0.pt")

    def chunked(request: Request) -> Reply:
        body = b"2710\r\n" + bytes(10_000) + b"\r\n"
        return Reply(200, body * 50 + b"0\r\n\r\n", (("Transfer-Encoding", "chunked"), ("Content-Type", "x/y")))

    with FaultProxy(web.port, answer=chunked) as proxy:
        assert len(http_store(proxy.port).get("k").body) == 500_000
        with pytest.raises(StoreError, match="at most 100,000 bytes"):
            http_store(proxy.port, max_object_bytes=100_000).get("k")


def test_redirects_are_followed_but_not_for_ever(web, http_store):
    def redirect(request: Request) -> Reply | None:
        if request.path == "/store/moved":
            return Reply(302, headers=(("Location", "/store/shard_0.pt"),))
        return Reply(302, headers=(("Location", request.path),)) if request.path == "/store/loop" else None

    with FaultProxy(web.port, answer=redirect) as proxy:
        store = http_store(proxy.port)
        assert store.get("moved").body == BODY
        with pytest.raises(StoreError, match="more than 5 redirects"):
            store.get("loop")


ELSEWHERE = ("http://127.0.0.1:1/x", "http://localhost:{port}/x", "http://169.254.169.254/x")
NO_HOST = ("http://a..b/x", f"http://{'a' * 64}.example/x", "http://[::1/x", "http://h:999999/x", "ftp://h/x")


def test_a_redirect_to_another_origin_without_tls_or_to_no_host_is_not_followed(web, http_store):
    locations = list(ELSEWHERE + NO_HOST)

    def redirect(request: Request) -> Reply:
        return Reply(302, headers=(("Location", locations[0].format(port=web.port)),))

    with FaultProxy(web.port, answer=redirect) as proxy:
        store = http_store(proxy.port)
        while locations:
            says = "expected a redirect to https or within" if locations[0] in ELSEWHERE else None
            for use in (store.get, store.head):
                with pytest.raises(StoreError, match=says):
                    use("shard_0.pt")
            locations.pop(0)


@pytest.mark.parametrize(
    ("source", "target", "is_followed"),
    [
        ("http://a/x", "https://b/y", True),
        ("http://a/x", "http://a:80/y", True),
        ("https://a/x", "http://a/x", False),
        ("http://a/x", "http://a:8080/x", False),
    ],
)
def test_where_a_redirect_may_lead(source, target, is_followed):
    if is_followed:
        _check_redirect(httpx.URL(source), httpx.URL(target), "k")
    else:
        with pytest.raises(StoreError, match="expected a redirect"):
            _check_redirect(httpx.URL(source), httpx.URL(target), "k")


@contextlib.contextmanager
def raw_server(speak: Callable[[socket.socket, threading.Event], None]) -> Iterator[int]:
    """The port of a server that answers each connection by what ``speak`` sends on it; for what no server would say."""
    stopping = threading.Event()

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            with contextlib.suppress(OSError):
                self.request.recv(65536)
                speak(self.request, stopping)

    with socketserver.TCPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            stopping.set()
            server.shutdown()
            thread.join(30)


def drip_headers(connection: socket.socket, stopping: threading.Event) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\nX-Slow: ")
    while not stopping.wait(0.01):
        connection.sendall(b"x")


def interim_without_end(connection: socket.socket, stopping: threading.Event) -> None:
    while not stopping.wait(0.001):
        connection.sendall(b"HTTP/1.1 103 Early Hints\r\n\r\n")


def endless_redirect(connection: socket.socket, stopping: threading.Event) -> None:
    connection.sendall(b"HTTP/1.1 302 Found\r\nLocation: /there\r\nTransfer-Encoding: chunked\r\n\r\n")
    while not stopping.is_set():
        connection.sendall(b"10000\r\n" + bytes(0x10000) + b"\r\n")


@pytest.mark.parametrize("speak", [drip_headers, interim_without_end])
def test_an_answer_that_never_begins(speak, http_store):
    """Each byte comes well within the read time-out; only the call's deadline ends it."""
    with raw_server(speak) as port:
        store = http_store(port, replace(QUICK, deadline_s=0.3))
        for use in (store.get, store.head):
            with pytest.raises(StoreUnavailableError, match="attempts"):
                use("k")


def test_bodies_of_redirects_and_compressed_ones_are_not_read(http_store, web):
    with raw_server(endless_redirect) as port, pytest.raises(StoreError, match="more than 5 redirects"):
        http_store(port).get("k")
    # It was not asked for, and what a few bytes expand to is without bound.
    bomb = gzip.compress(bytes(10 << 20))
    reply = Reply(200, bomb, (("Content-Encoding", "gzip"), ("ETag", '"1"')))
    with (
        FaultProxy(web.port, answer=lambda request: reply) as proxy,
        pytest.raises(StoreError, match="Content-Encoding 'gzip'"),
    ):
        http_store(proxy.port).get("k", max_bytes=1 << 20)


def test_a_server_without_etags(web, folder, http_store):
    """Time and size tell objects apart, but not surely: nothing is believed unchanged, nothing cut is gone on with."""
    requests: list[Request] = []
    with FaultProxy(web.port) as proxy:
        proxy.watch = requests.append
        store = http_store(proxy.port)
        found = store.get("shard_0.pt")
        again = store.get_if_changed("shard_0.pt", found.etag)
        assert again == found
        proxy.script([Fault.SHORT_BODY])
        assert store.get("shard_0.pt").body == BODY
    assert not any(request.header("range") or request.header("if-none-match") for request in requests)


def test_a_proxy_named_by_the_environment(web, http_store, monkeypatch):
    """The request goes there, whole address and all, but not for hosts in NO_PROXY."""
    paths: list[str] = []

    def note(request: Request) -> Reply:
        paths.append(request.path)
        return Reply(200, b"from the proxy", (("ETag", '"1"'),))

    with FaultProxy(web.port, answer=note) as proxy:
        monkeypatch.setenv("http_proxy", f"http://user:pass@127.0.0.1:{proxy.port}")
        monkeypatch.setenv("no_proxy", "localhost")
        assert http_store(web.port).get("shard_0.pt").body == b"from the proxy"
        assert paths == [f"http://127.0.0.1:{web.port}/store/shard_0.pt"]
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        assert http_store(web.port).get("shard_0.pt").body == BODY


def test_basic_authentication(web):
    seen: list[str | None] = []
    with FaultProxy(web.port) as proxy:
        proxy.watch = lambda request: seen.append(request.header("authorization"))
        url = f"http://user:secret@127.0.0.1:{proxy.port}/store"
        with contextlib.closing(HttpStore(url, policy=QUICK)) as store:
            assert store.get("shard_0.pt").body == BODY
    assert seen == ["Basic dXNlcjpzZWNyZXQ="]

"""Real servers, one of each a test session, and the stores over them."""

from __future__ import annotations

import itertools
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from genesis.store import CachePolicy, FolderStore, ReadableStore, Store, Throttle, open_readable
from genesis.store.limits import RetryPolicy
from genesis.store.s3 import S3Store
from tests.support.fault_proxy import FaultProxy
from tests.support.mounts import mounted
from tests.support.s3_servers import Server, moto_s3, point_boto3_at, rclone_s3, serving

BUCKET = "bucket"
QUICK = RetryPolicy(
    deadline_s=30, first_contact_s=0.5, connect_timeout_s=2, read_timeout_s=10, first_wait_s=0.005, longest_wait_s=0.05
)
_numbers = itertools.count()


@pytest.fixture(scope="session")
def moto() -> Iterator[Server]:
    with moto_s3(BUCKET) as server:
        yield server


@pytest.fixture(scope="session")
def rclone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with rclone_s3(tmp_path_factory.mktemp("rclone"), BUCKET) as server:
        yield server


@pytest.fixture
def s3_env(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Points boto3 at a server, or at a proxy of it."""

    return lambda server, port=None: point_boto3_at(server, port, monkeypatch)


@pytest.fixture
def fresh_url() -> Callable[[], str]:
    """An ``s3://`` address nothing has been written to."""
    return lambda: f"s3://{BUCKET}/{uuid.uuid4().hex[:8]}/{next(_numbers)}"


@pytest.fixture
def s3_store(fresh_url: Callable[[], str]) -> Iterator[Callable[..., S3Store]]:
    """Makes S3 stores that are closed after the test."""
    with ExitStack() as stack:

        def make(url: str | None = None, policy: RetryPolicy = QUICK, **options: int) -> S3Store:
            return stack.enter_context(closing(S3Store(url or fresh_url(), policy=policy, **options)))

        yield make


@pytest.fixture
def start_proxy() -> Iterator[Callable[..., FaultProxy]]:
    """Starts proxies before a port that end with the test."""
    with ExitStack() as stack:
        yield lambda port, **options: stack.enter_context(FaultProxy(port, **options))


def _opened(kind: str, request: pytest.FixtureRequest) -> Store:
    if kind == "folder":
        return FolderStore(request.getfixturevalue("tmp_path") / "store")
    request.getfixturevalue("s3_env")(request.getfixturevalue(kind))
    store: S3Store = request.getfixturevalue("s3_store")()
    return store


@pytest.fixture(params=["folder", "moto", "rclone"])
def store(request: pytest.FixtureRequest) -> Store:
    """An empty store of every kind."""
    return _opened(request.param, request)


@pytest.fixture(params=["folder", "moto"])
def exact_store(request: pytest.FixtureRequest) -> Store:
    """An empty store of every kind that honours conditional writes."""
    return _opened(request.param, request)


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    with mounted(tmp_path / "disk", "-t", "tmpfs", "-o", "size=1m", "tmpfs") as folder:
        yield folder


@pytest.fixture
def read_only_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system that is mounted read-only."""
    with mounted(tmp_path / "disk", "-t", "tmpfs", "-o", "ro", "tmpfs") as folder:
        yield folder


@pytest.fixture(scope="session")
def web_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `web_server` serves."""
    return tmp_path_factory.mktemp("web")


@pytest.fixture(scope="session")
def web_server(web_folder: Path) -> Iterator[Server]:
    """``genesis serve``: strong ETags, ranges, conditions."""

    def command(port: int) -> list[str]:
        return [sys.executable, "-m", "genesis", "serve", "--store", str(web_folder), "--port", str(port)]

    with serving(command) as server:
        yield server


@dataclass(frozen=True, slots=True)
class Origin:
    """A store on a real server, written to directly, and read at another port: a proxy's."""

    kind: str
    server: Server
    writer: Store
    open: Callable[..., ReadableStore]
    """``open(port, policy=, throttle=)``; what it opens is closed after the test."""

    def put(self, body: bytes, key: str | None = None) -> str:
        """Writes an object, a new one unless ``key`` is given, and returns its key."""
        key = key or f"shard_{next(_numbers)}.pt"
        self.writer.put(key, body, cache=CachePolicy.IMMUTABLE)
        return key


@pytest.fixture(scope="session")
def direct_writer() -> Iterator[Callable[[Server], S3Store]]:
    """Gives a store on an S3 server, connected to the server itself whatever boto3 is told later; one a server."""
    with ExitStack() as stack:

        @cache
        def connected(server: Server) -> S3Store:
            store = stack.enter_context(closing(S3Store(f"s3://{BUCKET}/{uuid.uuid4().hex[:8]}", policy=QUICK)))
            with pytest.MonkeyPatch.context() as environment:
                for name, value in server.environment().items():
                    environment.setenv(name, value)
                store.head("connect")
            return store

        yield connected


@pytest.fixture(params=["serve", "moto", "rclone"])
def origin(request: pytest.FixtureRequest) -> Iterator[Origin]:
    """Each kind of server that is read over a network."""
    kind = request.param
    server: Server = request.getfixturevalue("web_server" if kind == "serve" else kind)
    writer: Store = (
        FolderStore(request.getfixturevalue("web_folder"))
        if kind == "serve"
        else request.getfixturevalue("direct_writer")(server)
    )

    with ExitStack() as stack:

        def open_at(
            port: int | None = None, policy: RetryPolicy = QUICK, throttle: Throttle | None = None
        ) -> ReadableStore:
            if kind != "serve":
                request.getfixturevalue("s3_env")(server, port)
            url = f"http://127.0.0.1:{port or server.port}" if kind == "serve" else writer.url
            return stack.enter_context(closing(open_readable(url, policy=policy, throttle=throttle)))

        yield Origin(kind, server, writer, open_at)

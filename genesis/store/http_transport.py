"""The HTTP transport beneath `genesis.store.http`, and what its answers and failures mean.

An answer or a failed connection means one of three things: the object is absent, the request is to be tried again, or
the user is to be told in one line.

Connections are kept alive, and none outlasts the call it works for. A time-out of httpx covers one ``recv``: a server
that sends a byte of its headers now and then, or interim answers without end, holds a request for as long as it likes
(measured: 100 KiB of headers at a byte a second last a day). Here every wait ends with its call at the latest. That
needs a custom network backend, which httpx's transport does not take; so this transport stands directly on
httpcore's public interface and handles the proxy variables (``HTTP_PROXY``, ``HTTPS_PROXY``, ``ALL_PROXY``,
``NO_PROXY``) itself.
"""

from __future__ import annotations

import ssl
import threading
import urllib.request
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import httpcore
import httpx

from genesis.errors import StoreAccessError, StoreError
from genesis.store.limits import TimeLimit
from genesis.store.resuming import parse_retry_after_s
from genesis.store.retrying import TransientError

_TRANSIENT = {408, 425, 429, 500, 502, 503, 504}
_ABSENT = {404, 410}
_ACCESS = {401, 403, 407}
_PLAIN_ENCODINGS = {"", "identity", "aws-chunked"}
"""The last is a trace some S3 gateways leave of how an object was uploaded; its bytes are plain."""


@contextmanager
def connection_errors(what: str) -> Iterator[None]:
    """Turns the libraries' exceptions into this project's.

    Args:
        what: what is attempted, for messages: ``read https://host/manifest.json``.

    Raises:
        TransientError: what may pass.
        StoreError: what does not.
    """
    try:
        yield
    except (httpcore.ConnectError, httpcore.ConnectTimeout, httpcore.ProxyError) as error:
        raise TransientError(f"cannot connect: {error}", connecting=True) from error
    except (httpcore.TimeoutException, httpcore.NetworkError, httpcore.RemoteProtocolError) as error:
        raise TransientError(str(error) or type(error).__name__) from error
    except (
        httpcore.ProtocolError,
        httpcore.UnsupportedProtocol,
        httpx.HTTPError,
        httpx.InvalidURL,
        UnicodeError,
    ) as error:  # UnicodeError: a redirect to a name that no host can have.
        raise StoreError(f"cannot {what}: {error}; check the address") from error


def is_absent(response: httpx.Response, where: str) -> bool:
    """Whether the answer says that there is no such object.

    Args:
        response: the answer; its body is not looked at.
        where: the object's address, for messages.

    Raises:
        TransientError: the server says so because of what may pass.
        StoreAccessError: it may not be read.
    """
    status = response.status_code
    if status in _TRANSIENT:
        retry_after_s = parse_retry_after_s(response.headers.get("retry-after", ""))
        raise TransientError(f"answered {status}", retry_after_s=retry_after_s)
    if status in _ACCESS:
        raise StoreAccessError(
            f"cannot read {where}: answered {status}; check that the store is public (a bucket that may not be listed "
            "answers so for missing objects too)"
        )
    return status in _ABSENT


def check_status(response: httpx.Response, where: str, *expected: int) -> None:
    """Refuses an answer of any other status.

    Raises:
        StoreError: it has another.
    """
    if response.status_code not in expected:
        raise StoreError(
            f"cannot read {where}: expected status {expected[0]}, found {response.status_code}; check the address"
        )


def check_encoding(response: httpx.Response, where: str) -> None:
    """Refuses a body that is compressed without a request for that: what it holds could be of any size.

    Raises:
        StoreError: it is.
    """
    encoding = response.headers.get("content-encoding", "").strip().lower()
    if encoding not in _PLAIN_ENCODINGS:
        raise StoreError(
            f"cannot read {where}: expected its plain bytes, found Content-Encoding {encoding!r}; switch off "
            "compression for the store in the server"
        )


_MAX_CONNECTIONS = 100
_MAX_IDLE_CONNECTIONS = 32
_IDLE_S = 60.0
"""A node asks for a manifest or a shard more often than that while it trains."""

_calls = threading.local()


@contextmanager
def working_for(limit: TimeLimit) -> Iterator[None]:
    """Lets no wait of this thread, on a connection of this module, go beyond ``limit``."""
    _calls.limit = limit
    try:
        yield
    finally:
        _calls.limit = None


def _left_s(timeout_s: float | None, expired: type[httpcore.TimeoutException]) -> float | None:
    limit: TimeLimit | None = getattr(_calls, "limit", None)
    if limit is None:
        return timeout_s
    left_s = limit.remaining_s()
    if left_s <= 0:
        raise expired("the time was up")
    return left_s if timeout_s is None else min(timeout_s, left_s)


class _BoundedStream(httpcore.NetworkStream):
    """A connection whose every wait is bounded."""

    def __init__(self, stream: httpcore.NetworkStream) -> None:
        self._stream = stream

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        return self._stream.read(max_bytes, _left_s(timeout, httpcore.ReadTimeout))

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._stream.write(buffer, _left_s(timeout, httpcore.WriteTimeout))

    def close(self) -> None:
        self._stream.close()

    def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.NetworkStream:
        left_s = _left_s(timeout, httpcore.ConnectTimeout)
        return _BoundedStream(self._stream.start_tls(ssl_context, server_hostname, left_s))

    def get_extra_info(self, info: str) -> object:
        return self._stream.get_extra_info(info)


class _BoundedBackend(httpcore.NetworkBackend):
    """Opens such connections."""

    def __init__(self) -> None:
        self._backend = httpcore.SyncBackend()

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.NetworkStream:
        left_s = _left_s(timeout, httpcore.ConnectTimeout)
        return _BoundedStream(self._backend.connect_tcp(host, port, left_s, local_address, socket_options))


class _Body(httpx.SyncByteStream):
    """An answer's body, as it comes."""

    def __init__(self, response: httpcore.Response) -> None:
        self._response = response

    def __iter__(self) -> Iterator[bytes]:
        yield from self._response.iter_stream()

    def close(self) -> None:
        self._response.close()


class BoundedTransport(httpx.BaseTransport):
    """Pools of bounded connections, one for each proxy and one for none. Raises httpcore's exceptions."""

    def __init__(self) -> None:
        """Reads no environment and opens nothing yet."""
        self._ssl_context: ssl.SSLContext | None = None
        self._pools: dict[str, httpcore.ConnectionPool] = {}
        self._lock = threading.Lock()

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """The answer, its body still to come."""
        url = request.url
        response = self._pool(url).handle_request(
            httpcore.Request(
                method=request.method,
                url=httpcore.URL(scheme=url.raw_scheme, host=url.raw_host, port=url.port, target=url.raw_path),
                headers=request.headers.raw,
                content=request.stream,
                extensions=request.extensions,
            )
        )
        return httpx.Response(
            status_code=response.status,
            headers=response.headers,
            stream=_Body(response),
            extensions=response.extensions,
        )

    def close(self) -> None:
        """Closes all connections."""
        with self._lock:
            for pool in self._pools.values():
                pool.close()

    def _pool(self, url: httpx.URL) -> httpcore.ConnectionPool:
        proxy = _proxy_for(url)
        with self._lock:
            if proxy not in self._pools:
                self._pools[proxy] = self._opened(proxy)
            return self._pools[proxy]

    def _opened(self, proxy: str) -> httpcore.ConnectionPool:
        if self._ssl_context is None:
            self._ssl_context = httpx.create_ssl_context()
        backend = _BoundedBackend()
        if not proxy:
            return httpcore.ConnectionPool(
                ssl_context=self._ssl_context,
                max_connections=_MAX_CONNECTIONS,
                max_keepalive_connections=_MAX_IDLE_CONNECTIONS,
                keepalive_expiry=_IDLE_S,
                network_backend=backend,
            )
        address = httpx.Proxy(proxy)
        return httpcore.HTTPProxy(
            proxy_url=str(address.url),
            proxy_auth=address.raw_auth,
            ssl_context=self._ssl_context,
            max_connections=_MAX_CONNECTIONS,
            max_keepalive_connections=_MAX_IDLE_CONNECTIONS,
            keepalive_expiry=_IDLE_S,
            network_backend=backend,
        )


def _proxy_for(url: httpx.URL) -> str:
    """The proxy the environment names for an address; empty if there is none."""
    proxies = urllib.request.getproxies()
    proxy = proxies.get(url.scheme) or proxies.get("all") or ""
    if not proxy or urllib.request.proxy_bypass(url.host):
        return ""
    return proxy if "://" in proxy else f"http://{proxy}"

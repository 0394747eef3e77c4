"""Reading a store over http(s), as a CDN serves it: no credentials, nothing to install on the server.

Connections are kept alive and shared by all threads of a process; 429 (with its ``Retry-After``), 5xx, time-outs and
cut connections are retried until the call's deadline, a cut body from where it ended (`genesis.store.resuming`). What
comes is held against its ``Content-Length`` and a largest size, and is not decompressed, so a server cannot fill the
memory; nor can it hold a call beyond its deadline (`genesis.store.http_transport`). A redirect is followed within its
origin or to https, five times at most: a server asked by https cannot redirect to plain http, and one
asked by http cannot direct requests to other hosts of its network. The trade-off: HTTP has no listing; a manifest names
everything there is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import TypeVar
from urllib.parse import urlsplit, urlunsplit

import httpx

from genesis.errors import ObjectNotFoundError, StoreError, UsageError
from genesis.store.base import ObjectInfo, PerProcess, StoredObject
from genesis.store.http_transport import (
    BoundedTransport,
    check_encoding,
    check_status,
    connection_errors,
    is_absent,
    working_for,
)
from genesis.store.limits import Meter, RetryPolicy, Throttle, TimeLimit
from genesis.store.resuming import MAX_OBJECT_BYTES, Answer, Download, opaque_etag, parse_date, parse_size
from genesis.store.retrying import Retrier
from manifests import check_key

T = TypeVar("T")

_OK, _PART, _UNCHANGED, _REFUSED = 200, 206, 304, (412, 416)
_REDIRECTS = 5


class HttpStore:
    """A store behind a web server, read-only."""

    def __init__(
        self,
        url: str,
        *,
        policy: RetryPolicy | None = None,
        throttle: Throttle | None = None,
        max_object_bytes: int = MAX_OBJECT_BYTES,
    ) -> None:
        """Names the address; nothing is contacted yet.

        Args:
            url: ``https://host/prefix``; ``user:password@`` is sent as basic authentication and never shown.
            policy: deadlines and time-outs.
            throttle: bounds what is received.
            max_object_bytes: larger answers are refused.

        Raises:
            UsageError: the address makes no sense.
        """
        parts = urlsplit(url)
        if parts.scheme.lower() not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise UsageError(f"expected an address such as https://host/prefix, found {_without_user(url)}")
        self._policy = policy or RetryPolicy()
        self._base = url.rstrip("/")
        self._throttle = throttle
        self._max_object_bytes = max_object_bytes
        self._retrier = Retrier(self._policy)
        self._meter = Meter(throttle)
        self._client = PerProcess(self._connect)

    def __repr__(self) -> str:
        return f"HttpStore({self.url!r})"

    def __reduce__(self) -> tuple[Callable[[], HttpStore], tuple[()]]:
        """A pickle holds what the store was made from; connections and counts stay behind."""
        make = functools.partial(
            HttpStore, self._base, policy=self._policy, throttle=self._throttle, max_object_bytes=self._max_object_bytes
        )
        return make, ()

    @property
    def url(self) -> str:
        """The address, without credentials."""
        return _without_user(self._base)

    @property
    def received_bytes(self) -> int:
        """Bytes of bodies this process has received, those of attempts that failed too."""
        return self._meter.received_bytes

    def get(self, key: str, *, max_bytes: int | None = None) -> StoredObject:
        """The whole object."""
        found = self._fetch(key, max_bytes, {}, known_etag=None)
        if found is None:
            raise StoreError(f"cannot read {self.url}/{key}: expected status 200, found 304; check the server's caches")
        return found

    def get_if_changed(self, key: str, etag: str, *, max_bytes: int | None = None) -> StoredObject | None:
        """The whole object, or None if its ETag still is ``etag``; always the object if the server gives no ETags."""
        known_etag = opaque_etag(etag) if etag.endswith('"') else None
        # Strong in form: servers compare weakly here, and those that compare texts know the tag they gave out.
        return self._fetch(key, max_bytes, {"If-None-Match": known_etag} if known_etag else {}, known_etag=known_etag)

    def head(self, key: str) -> ObjectInfo | None:
        """Size and ETag, or None if there is no such object."""

        def attempt() -> ObjectInfo | None:
            with self._answered("HEAD", key, {}) as response:
                if is_absent(response, self._name(key)):
                    return None
                check_status(response, self._name(key), _OK)
                response.read()  # There is no body; the connection is kept once that has been seen.
            size_bytes = parse_size(response.headers.get("content-length", ""))
            if size_bytes is None:
                raise StoreError(f"{self.url} does not say how large {key!r} is; expected a Content-Length")
            modified_at = parse_date(response.headers.get("last-modified", ""))
            return ObjectInfo(key=key, size_bytes=size_bytes, etag=_etag(response), modified_at=modified_at)

        return self._call("look at", key, attempt, self._policy.deadline())

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Not over HTTP.

        Raises:
            StoreError: always.
        """
        raise StoreError(
            f"{self.url} cannot be listed over HTTP; the manifest names what is there, or give the store's s3:// "
            "address or folder"
        )

    def close(self) -> None:
        """Closes the connections; the next call opens new ones."""
        client = self._client.take()
        if client is not None:
            client.close()

    def _connect(self) -> httpx.Client:
        return connect(self._policy)

    def _answered(self, method: str, key: str, headers: Mapping[str, str]) -> AbstractContextManager[httpx.Response]:
        return answered(self._client.get(), method, self._address(key), headers, self._name(key))

    def _address(self, key: str) -> str:
        return f"{self._base}/{check_key(key)}"

    def _fetch(
        self, key: str, max_bytes: int | None, headers: Mapping[str, str], known_etag: str | None
    ) -> StoredObject | None:
        """The object; None if the server says that it is unchanged."""
        most = self._max_object_bytes if max_bytes is None else min(max_bytes, self._max_object_bytes)
        download = Download(self._name(key), self._policy, self._meter, max_bytes=most)

        def attempt() -> StoredObject | None:
            held = download.held
            ask = headers
            if held.resumable_etag is not None:
                ask = {"Range": f"bytes={held.size_bytes}-", "If-Range": held.resumable_etag}
            with self._answered("GET", key, ask) as response:
                return self._received(response, key, download, known_etag)

        try:
            return self._call("read", key, attempt, download)
        finally:
            download.discard()

    def _received(
        self, response: httpx.Response, key: str, download: Download, known_etag: str | None
    ) -> StoredObject | None:
        where = self._name(key)
        if is_absent(response, where):
            raise ObjectNotFoundError(f"expected an object {key!r} at {self.url}, found none")
        resuming = download.held.resumable_etag is not None
        if response.status_code == _UNCHANGED and known_etag is not None and not resuming:
            response.read()  # There is no body; the connection is kept once that has been seen.
            return None
        check_status(response, where, _OK, *((_PART, *_REFUSED) if resuming else ()))
        etag = _etag(response)
        if response.status_code in (_OK, _PART) and etag == known_etag:
            return None  # It ignores If-None-Match.
        check_encoding(response, where)
        download.begin(answer_of(response))
        for chunk in response.iter_raw():
            download.append(chunk)
        return StoredObject(body=download.finish(), etag=etag)

    def _call(self, action: str, key: str, attempt: Callable[[], T], limit: TimeLimit) -> T:
        what = f"{action} {self._name(key)}"

        def once() -> T:
            with connection_errors(what), working_for(limit):
                return attempt()

        return self._retrier.call(what, once, limit)

    def _name(self, key: str) -> str:
        """The object's address, without credentials."""
        return f"{self.url}/{key}"


def connect(policy: RetryPolicy) -> httpx.Client:
    """A client whose waits end with their calls, and that asks for bodies as they are stored."""
    return httpx.Client(
        transport=BoundedTransport(),
        timeout=httpx.Timeout(policy.read_timeout_s, connect=policy.connect_timeout_s),
        # Compressed on the way, a body's length could not be told in advance.
        headers={"Accept-Encoding": "identity"},
    )


@contextmanager
def answered(
    client: httpx.Client, method: str, url: str, headers: Mapping[str, str], name: str
) -> Iterator[httpx.Response]:
    """The answer, redirects followed, its body unread; httpx would read those of the redirects, whatever size.

    Args:
        client: as `connect` makes it.
        method: of the request.
        url: where to.
        headers: of the request.
        name: the address without credentials, for messages.

    Raises:
        StoreError: a redirect leads where it may not, or there are too many.
    """
    request = client.build_request(method, url, headers=dict(headers))
    for _ in range(_REDIRECTS + 1):
        response = client.send(request, stream=True)
        try:
            if response.next_request is None:
                yield response
                return
            _check_redirect(request.url, response.next_request.url, name)
            request = response.next_request
        finally:
            response.close()
    raise StoreError(f"cannot read {name}: found more than {_REDIRECTS} redirects; check the address")


def _check_redirect(source: httpx.URL, target: httpx.URL, name: str) -> None:
    """Raises StoreError where a redirect leads neither to https nor to the same scheme, host and port."""
    if target.scheme != "https" and _origin(target) != _origin(source):
        raise StoreError(
            f"cannot read {name}: expected a redirect to https or within {source.scheme}://{source.netloc.decode()}, "
            f"found one to {_without_user(str(target))[:200]}; give the store's final address"
        )


def _origin(url: httpx.URL) -> tuple[str, str, int | None]:
    return url.scheme, url.host, url.port  # httpx leaves a scheme's own port out.


def _without_user(url: str) -> str:
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


def answer_of(response: httpx.Response) -> Answer:
    """Returns what a download needs to know of an answer: its status and headers."""
    headers = response.headers
    return Answer(
        response.status_code,
        etag=headers.get("etag", ""),
        content_length=headers.get("content-length", ""),
        content_range=headers.get("content-range", ""),
    )


def _etag(response: httpx.Response) -> str:
    """The server's ETag; where it gives none, the time and size it gives, which GET and HEAD agree on."""
    headers = response.headers
    found = opaque_etag(headers.get("etag", ""))
    return found or f"{headers.get('last-modified', '')}/{headers.get('content-length', '')}"

"""Reading a store over http(s), as a CDN serves it: no credentials, nothing to install on the server.

Connections are kept alive and shared by all threads; 429 (with its ``Retry-After``), 5xx, time-outs and cut connections
are retried until the call's deadline; what comes is held against its ``Content-Length`` and a largest size, so a server
cannot fill the memory. The trade-off: HTTP has no listing; a manifest names everything there is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import TypeVar
from urllib.parse import urlsplit, urlunsplit

import httpx

from genesis.errors import ObjectNotFoundError, StoreAccessError, StoreError, UsageError
from genesis.store.base import ObjectInfo, StoredObject
from genesis.store.retrying import Deadline, Retrier, RetryPolicy, TransientError
from manifests import check_key

__all__ = ["HttpStore"]

T = TypeVar("T")

_TRANSIENT = {408, 425, 429, 500, 502, 503, 504}
_ABSENT = {404, 410}
_REDIRECTS = 5


class HttpStore:
    """A store behind a web server, read-only."""

    def __init__(self, url: str, *, policy: RetryPolicy | None = None, max_object_bytes: int = 1 << 30) -> None:
        """Names the address; nothing is contacted yet.

        Args:
            url: ``https://host/prefix``; ``user:password@`` is sent as basic authentication and never shown.
            policy: deadlines and time-outs.
            max_object_bytes: larger answers are refused.

        Raises:
            UsageError: the address makes no sense.
        """
        parts = urlsplit(url)
        if parts.scheme.lower() not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise UsageError(f"expected an address such as https://host/prefix, found {_without_user(url)}")
        self._policy = policy or RetryPolicy()
        self._base = url.rstrip("/")
        self._max_object_bytes = max_object_bytes
        self._retrier = Retrier(self._policy)
        self._client = httpx.Client(
            follow_redirects=True,
            max_redirects=_REDIRECTS,
            timeout=httpx.Timeout(self._policy.read_timeout_s, connect=self._policy.connect_timeout_s),
            # Compressed on the way, a body's length could not be told in advance.
            headers={"Accept-Encoding": "identity"},
        )

    def __repr__(self) -> str:
        return f"HttpStore({self.url!r})"

    @property
    def url(self) -> str:
        """The address, without credentials."""
        return _without_user(self._base)

    def get(self, key: str) -> StoredObject:
        """The whole object."""
        deadline = self._policy.deadline()

        def attempt() -> StoredObject | None:
            with self._client.stream("GET", self._address(key)) as response:
                if self._is_absent(response, key):
                    return None
                return StoredObject(body=self._body(response, key, deadline), etag=_etag(response))

        found = self._call("read", key, attempt, deadline)
        if found is None:
            raise ObjectNotFoundError(f"expected an object {key!r} at {self.url}, found none")
        return found

    def head(self, key: str) -> ObjectInfo | None:
        """Size and ETag, or None if there is no such object."""

        def attempt() -> ObjectInfo | None:
            response = self._client.head(self._address(key))
            if self._is_absent(response, key):
                return None
            size_bytes = _content_length(response)
            if size_bytes is None:
                raise StoreError(f"{self.url} does not say how large {key!r} is; expected a Content-Length")
            return ObjectInfo(key=key, size_bytes=size_bytes, etag=_etag(response), modified_at=_modified_at(response))

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
        """Closes the connections."""
        self._client.close()

    def _address(self, key: str) -> str:
        return f"{self._base}/{check_key(key)}"

    def _call(self, action: str, key: str, attempt: Callable[[], T], deadline: Deadline) -> T:
        what = f"{action} {self.url}/{key}"

        def once() -> T:
            try:
                return attempt()
            except (httpx.ConnectError, httpx.ConnectTimeout) as error:
                raise TransientError(f"cannot connect: {error}", connecting=True) from error
            except (httpx.TimeoutException, httpx.NetworkError, httpx.RemoteProtocolError) as error:
                raise TransientError(str(error) or type(error).__name__) from error
            except (httpx.HTTPError, httpx.InvalidURL) as error:
                raise StoreError(f"cannot {what}: {error}; check the address") from error

        return self._retrier.call(what, once, deadline)

    def _is_absent(self, response: httpx.Response, key: str) -> bool:
        """Whether there is no such object; anything but that and success is raised."""
        status = response.status_code
        if status in _TRANSIENT:
            raise TransientError(f"answered {status}", retry_after_s=_retry_after_s(response))
        if status in (401, 403, 407):
            raise StoreAccessError(
                f"cannot read {self.url}/{key}: answered {status}; check that the store is public (a bucket that may "
                "not be listed answers so for missing objects too)"
            )
        if status in _ABSENT:
            return True
        if status != httpx.codes.OK:
            raise StoreError(f"cannot read {self.url}/{key}: expected status 200, found {status}; check the address")
        return False

    def _body(self, response: httpx.Response, key: str, deadline: Deadline) -> bytes:
        expected = _content_length(response)
        self._check_size(expected or 0, key)
        chunks, size = [], 0
        for chunk in response.iter_bytes():
            chunks.append(chunk)
            size += len(chunk)
            self._check_size(size, key)
            if self._policy.is_over(deadline, size):
                raise TransientError(f"{size:,} bytes had come when the time was up")
        if expected is not None and response.num_bytes_downloaded != expected:
            raise TransientError(f"expected {expected:,} bytes, {response.num_bytes_downloaded:,} came")
        return b"".join(chunks)

    def _check_size(self, size_bytes: int, key: str) -> None:
        if size_bytes > self._max_object_bytes:
            raise StoreError(
                f"{self.url}/{key}: expected at most {self._max_object_bytes:,} bytes, found {size_bytes:,} or more; "
                "this is no object of a store"
            )


def _without_user(url: str) -> str:
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


def _content_length(response: httpx.Response) -> int | None:
    value = response.headers.get("content-length", "")
    return int(value) if value.isascii() and value.isdigit() else None


def _etag(response: httpx.Response) -> str:
    """The server's ETag; where it gives none, the time and size it gives, which GET and HEAD agree on."""
    etag: str = response.headers.get("etag", "")
    if etag:
        return etag.removeprefix("W/")
    return f"{response.headers.get('last-modified', '')}/{response.headers.get('content-length', '')}"


def _modified_at(response: httpx.Response) -> datetime | None:
    return _parsed_date(response.headers.get("last-modified", ""))


def _parsed_date(text: str) -> datetime | None:
    try:
        moment = parsedate_to_datetime(text)
    except ValueError:
        return None
    return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)


def _retry_after_s(response: httpx.Response) -> float | None:
    """What the server asks for, in either of the header's two forms."""
    value = response.headers.get("retry-after", "")
    if value.isascii() and value.isdigit():
        return float(value)
    moment = _parsed_date(value)
    return None if moment is None else max(0.0, (moment - datetime.now(UTC)).total_seconds())

"""Input files behind web servers: exact addresses, pinned by size and ETag, and read by ranges.

HTTP has no listing, so every file is given by its address, and may be signed or hold ``user:password@``; neither is
shown, recorded, or part of a file's name, so a fresh signature is the same input. A file is looked at with a request
for its first byte, since signed addresses allow no HEAD: the answer says how large it is, whether ranges are served,
and its ETag. A server without ETags is asked for the first and last 64 KiB instead, whose digest stands for the file.

Connections, redirects, retries and proxies are those of stores behind HTTP (`genesis.store.http`).
"""

from __future__ import annotations

import functools
import hashlib
import posixpath
from collections.abc import Callable, Mapping
from typing import TypeVar
from urllib.parse import unquote, urlsplit

import httpx

from genesis.errors import InputChangedError, InputNotFoundError, PreconditionFailedError, SourceError, StoreError
from genesis.sources.base import InputFile
from genesis.sources.ranges import RangeReader
from genesis.sources.selection import Candidate
from genesis.store.base import PerProcess
from genesis.store.http import answered, connect
from genesis.store.http_transport import check_encoding, connection_errors, is_absent, working_for
from genesis.store.limits import RetryPolicy, TimeLimit
from genesis.store.parts import PartDownload
from genesis.store.resuming import Answer, opaque_etag, parse_content_range, parse_size
from genesis.store.retrying import Retrier

T = TypeVar("T")

_POLICY = RetryPolicy()
_EDGE_BYTES = 64 << 10
_DIGEST = "edges:"
"""Begins the digest of a file whose server gives no ETag; none begins so."""
_client = PerProcess(lambda: connect(_POLICY))
_FIRST_BYTE: Mapping[str, str] = {"Range": "bytes=0-0"}
_OK, _REFUSED, _UNSATISFIABLE = 200, (401, 403, 407), 416


@functools.cache
def _retrier(host: str) -> Retrier:
    """One a host: it remembers that the host has answered, and so deserves more patience than a wrong address."""
    return Retrier(_POLICY)


def web_candidate(url: str) -> Candidate:
    """The file at an address; nothing is asked yet.

    Raises:
        InputNotFoundError: it is no address of a file.
    """
    try:
        parts = urlsplit(url)
        host = parts.hostname
    except ValueError:
        host = None
    if host is None:
        raise InputNotFoundError(f"--input: expected an address such as https://host/a.parquet, found {_shown(url)!r}")
    path = unquote(parts.path).lstrip("/")
    if "*" in path or not path or path.endswith("/"):
        raise InputNotFoundError(
            f"--input {_shown(url)!r}: a web server cannot be listed; give the address of each file, such as "
            "https://host/file.parquet"
        )
    return Candidate("https", f"{host}/{path}", posixpath.basename(path), url, asked_for=True)


def look(url: str) -> tuple[int, str]:
    """Size and digest of the file at an address.

    Raises:
        InputNotFoundError: there is none.
        SourceError: it cannot be read, or not by ranges.
    """
    size_bytes, etag = _call(url, lambda limit: _first_answer(url), "look at")
    if etag:
        return size_bytes, etag
    digest = hashlib.sha256(f"{size_bytes}\n".encode())
    for start in dict.fromkeys((0, max(0, size_bytes - _EDGE_BYTES))):
        digest.update(_read(url, _shown(url), start, min(start + _EDGE_BYTES, size_bytes), size_bytes, ""))
    return size_bytes, _DIGEST + digest.hexdigest()


def _first_answer(url: str, headers: Mapping[str, str] = _FIRST_BYTE) -> tuple[int, str]:
    name = _shown(url)
    with answered(_client.get(), "GET", url, headers, name) as response:
        _check_present(response, name)
        if response.status_code == _UNSATISFIABLE and headers:
            return _first_answer(url, {})  # An empty file has no first byte.
        content_range = response.headers.get("content-range", "")
        part = parse_content_range(content_range)
        size_bytes = part.total if part else parse_size(response.headers.get("content-length", ""))
        if size_bytes is None or (part is None and size_bytes > 0):
            raise StoreError(
                f"expected a part (206) for bytes=0-0, found {response.status_code}; the server does not serve ranges: "
                "download the file and give that"
            )
        check_encoding(response, name)
        return size_bytes, opaque_etag(response.headers.get("etag", "")) or ""


def _check_present(response: httpx.Response, name: str) -> None:
    status = response.status_code
    if status in _REFUSED:
        raise SourceError(
            f"{name}: access refused ({status}); give the login as https://user:password@host/…, or an address whose "
            "signature has not expired"
        )
    if status != _UNSATISFIABLE and is_absent(response, name):
        raise InputNotFoundError(f"{name}: there is none ({status}); check the address")


class WebReader(RangeReader):
    """Reads ranges of the file at an address, as long as it is that of the plan."""

    def __init__(self, file: InputFile) -> None:
        super().__init__(file)
        self._etag = "" if file.digest.startswith(_DIGEST) else file.digest

    def read(self, start: int, end: int) -> bytearray:
        """Bytes ``start:end``, cut off at the file's end."""
        end = min(end, self.size_bytes)
        return _read(self._file.location, self._file.name, start, end, self.size_bytes, self._etag)


def _read(url: str, name: str, start: int, end: int, total_bytes: int, etag: str) -> bytearray:
    if end <= start:
        return bytearray()
    part = PartDownload(name, start, end, total_bytes=total_bytes, etag=etag, policy=_POLICY)

    def attempt(limit: TimeLimit) -> bytearray:
        if part.is_complete:  # The answer before broke off behind the last byte.
            return part.finish()
        with answered(_client.get(), "GET", url, {"Range": part.range_header}, name) as response:
            _check_present(response, name)
            check_encoding(response, name)
            headers = response.headers
            # A server that gave no ETag may give one now, another machine of a cluster, say.
            found = headers.get("etag", "") if etag else ""
            part.begin(Answer(response.status_code, etag=found, content_range=headers.get("content-range", "")))
            for chunk in response.iter_raw():
                part.append(chunk)
        return part.finish()

    return _call(url, attempt, "read", part)


def _call(url: str, attempt: Callable[[TimeLimit], T], action: str, limit: TimeLimit | None = None) -> T:
    name = _shown(url)
    what = f"{action} {name}"
    bounded = limit or _POLICY.deadline()

    def once() -> T:
        with connection_errors(what), working_for(bounded):
            return attempt(bounded)

    try:
        return _retrier(urlsplit(url).netloc).call(what, once, bounded)
    except PreconditionFailedError as error:
        raise InputChangedError(f"{error} during the run: run it again") from error
    except StoreError as error:
        message = str(error)
        raise SourceError(message if name in message else f"{name}: {message}") from error


def _shown(url: str) -> str:
    """The address without its login and signature."""
    scheme, separator, rest = url.partition("://")
    place = rest.partition("?")[0].partition("#")[0]
    host, slash, path = place.partition("/")
    return f"{scheme}{separator}{host.rpartition('@')[2]}{slash}{path}"

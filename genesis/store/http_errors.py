"""What an HTTP answer or a failed connection means: there is none, try again, or one line for the user."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import httpcore
import httpx

from genesis.errors import StoreAccessError, StoreError
from genesis.store.headers import parse_retry_after_s
from genesis.store.retrying import TransientError

__all__ = ["check_encoding", "check_status", "connection_errors", "is_absent"]

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
    """Refuses a body that is compressed though nobody asked for that: what it holds could be of any size.

    Raises:
        StoreError: it is.
    """
    encoding = response.headers.get("content-encoding", "").strip().lower()
    if encoding not in _PLAIN_ENCODINGS:
        raise StoreError(
            f"cannot read {where}: expected its plain bytes, found Content-Encoding {encoding!r}; switch off "
            "compression for the store in the server"
        )

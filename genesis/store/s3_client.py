"""The boto3 client behind an `s3://` address, made at first use, and the reader bodies are sent from.

boto3's own environment variables, profiles and ``AWS_ENDPOINT_URL`` hold. A server other than Amazon's is addressed by
path (``host/bucket/key``), which every gateway understands; botocore would put the bucket into the host's name.
Checksums are sent only as plain headers: the trailing form botocore chooses for https is stored by older gateways
as part of the object.
"""

from __future__ import annotations

import io
import re
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, cast
from urllib.parse import urlsplit

import boto3
from botocore.config import Config
from typing_extensions import Buffer

from genesis.errors import UsageError
from genesis.store.per_process import PerProcess
from genesis.store.policy import Deadline, RetryPolicy
from manifests import InvalidDocumentError, check_key

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

__all__ = ["S3Connection", "S3Location", "body_file"]

_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._\-]{1,254}")
_AMAZON = re.compile(r"\.amazonaws\.com(\.cn)?$")
_POOL = 32
"""Connections kept open: at least the number of threads that put at once."""


@dataclass(frozen=True, slots=True)
class S3Location:
    """A bucket and the prefix of the store's keys in it (empty, or ending in a slash)."""

    bucket: str
    prefix: str

    @classmethod
    def parse(cls, url: str) -> S3Location:
        """Reads ``s3://bucket/prefix``.

        Raises:
            UsageError: it is not of that form.
        """
        parts = urlsplit(url)
        prefix = parts.path.strip("/")
        try:
            valid = (
                parts.scheme.lower() == "s3" and _BUCKET.fullmatch(parts.netloc) and not parts.query + parts.fragment
            )
            if prefix:
                check_key(prefix)
        except InvalidDocumentError:
            valid = False
        if not valid:
            raise UsageError(f"expected an address such as s3://bucket/prefix, found {url}")
        return cls(parts.netloc, prefix + "/" * bool(prefix))

    @property
    def url(self) -> str:
        """The address, without a slash at its end."""
        return f"s3://{self.bucket}/{self.prefix}".rstrip("/")


class S3Connection:
    """A client a process: made when first asked for, by one thread, and again in a forked child."""

    def __init__(self, policy: RetryPolicy) -> None:
        self._policy = policy
        self._client = PerProcess(self._connect)

    def client(self) -> S3Client:
        """The client; boto3's clients, unlike its sessions, are safe to share between threads.

        Raises:
            UsageError: the endpoint's address makes no sense.
            botocore.exceptions.BotoCoreError: the profile or configuration file does not.
        """
        return self._client.get()

    def endpoint(self) -> str:
        """The server's address, for messages."""
        client = self._client.peek()
        return "S3" if client is None else client.meta.endpoint_url

    def close(self) -> None:
        """Closes the connections; the next call opens new ones."""
        client = self._client.take()
        if client is not None:
            client.close()

    def _connect(self) -> S3Client:
        session = boto3.session.Session()
        try:
            client = session.client("s3", config=self._config())
            if not _AMAZON.search(urlsplit(client.meta.endpoint_url).hostname or ""):
                client.close()
                client = session.client("s3", config=self._config().merge(Config(s3={"addressing_style": "path"})))
            client.meta.events.register("before-parse.s3.GetObject", _plain_error_body)
        except ValueError as error:
            raise UsageError(f"expected an address such as https://host:port in AWS_ENDPOINT_URL: {error}") from None
        return client

    def _config(self) -> Config:
        return Config(
            connect_timeout=self._policy.connect_timeout_s,
            read_timeout=self._policy.read_timeout_s,
            retries={"mode": "standard", "total_max_attempts": 1},  # The one layer of retries is `retrying`.
            request_checksum_calculation="when_required",
            response_checksum_validation="when_supported",
            max_pool_connections=_POOL,
            tcp_keepalive=True,
        )


def _plain_error_body(response_dict: dict[str, object], **_: object) -> None:
    """Gives botocore's parser the bytes it expects in an error.

    An error that carries a checksum header (rclone: 500 while an object is being replaced) reaches the parser of
    botocore 1.44 as a stream, and ends in an AttributeError there.
    """
    if int(str(response_dict["status_code"])) >= 300 and not isinstance(response_dict["body"], bytes):
        response_dict["body"] = b""


class _BodyReader(io.RawIOBase):
    """A file over a buffer, without a copy, that stops at a deadline.

    botocore takes no memoryview; and a body given as bytes is sent in one ``sendall``, whose time-out is that of
    connecting and covers all of it, so that 20 MB would fail on any line slower than 16 Mbit/s. A file is sent in
    blocks of 16 KiB, each with its own time-out.
    """

    def __init__(self, body: Buffer, deadline: Deadline) -> None:
        super().__init__()
        self._view = memoryview(body).cast("B")
        self._deadline = deadline
        self._position = 0

    def readable(self) -> bool:
        """True."""
        return True

    def seekable(self) -> bool:
        """True."""
        return True

    def tell(self) -> int:
        """Bytes before the next read."""
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Moves to ``offset`` and returns the position."""
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: len(self._view)}[whence]
        self._position = max(0, start + offset)
        return self._position

    def readinto(self, buffer: Buffer) -> int:
        """Fills ``buffer`` as far as there are bytes and returns their number.

        Raises:
            TimeoutError: the deadline has passed.
        """
        if self._deadline.remaining_s() < 0:
            raise TimeoutError(f"{self._position:,} of {len(self._view):,} bytes sent when the time was up")
        target = memoryview(buffer).cast("B")
        part = self._view[self._position : self._position + len(target)]
        target[: len(part)] = part
        self._position += len(part)
        return len(part)


def body_file(body: Buffer, deadline: Deadline) -> IO[bytes]:
    """``body`` as the file boto3 sends it from."""
    return cast("IO[bytes]", _BodyReader(body, deadline))

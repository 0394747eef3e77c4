"""The boto3 client behind an `s3://` address, and what its errors mean.

The client is made at first use. boto3's environment variables, profiles and ``AWS_ENDPOINT_URL`` hold. A server other
than Amazon's is addressed by path (``host/bucket/key``), which every gateway understands. Checksums are sent as plain
headers: the trailing form that botocore chooses for https is stored by older gateways as part of the object.

An error means one of three things: try again, a condition was refused, or the user is to be told in one line. Codes of
Amazon, of the common gateways (MinIO, Ceph, R2, rclone) and botocore's own exceptions are known; any other code is
judged by its HTTP status: 429 and 5xx may pass, 401 and 403 are about access.
"""

from __future__ import annotations

import io
import re
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, cast
from urllib.parse import urlsplit

import boto3
from botocore.config import Config
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectionError,
    ConnectTimeoutError,
    CredentialRetrievalError,
    EndpointConnectionError,
    FlexibleChecksumError,
    HTTPClientError,
    IncompleteReadError,
    NoCredentialsError,
    PartialCredentialsError,
    ProfileNotFound,
    SSOTokenLoadError,
    TokenRetrievalError,
    UnauthorizedSSOTokenError,
)
from botocore.parsers import ResponseParserError
from typing_extensions import Buffer

from genesis.errors import StoreAccessError, StoreError, StoreFullError, UsageError
from genesis.store.base import ConditionRefused, PerProcess
from genesis.store.limits import Deadline, RetryPolicy
from genesis.store.resuming import parse_retry_after_s
from genesis.store.retrying import TransientError
from manifests import InvalidDocumentError, check_key

_CHECK_KEYS = "check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or the profile in AWS_PROFILE"
_CHECK_REGION = "set AWS_DEFAULT_REGION to the bucket's region"
_SIGN_IN = "sign in again (such as 'aws sso login') or set fresh AWS_* variables"
_NOT_PERMITTED = (
    "the credentials do not permit it; grant s3:ListBucket on the bucket (without it a missing object looks the "
    "same) and s3:GetObject, s3:PutObject, s3:DeleteObject on its objects"
)

_ACCESS = {
    "NoSuchBucket": "there is no such bucket; create it or check the address",
    "InvalidBucketName": "no bucket can have this name; check the address",
    "AccessDenied": _NOT_PERMITTED,
    "AllAccessDisabled": _NOT_PERMITTED,
    "AccountProblem": "the account is not in good standing",
    "InvalidAccessKeyId": f"the server knows no such access key; {_CHECK_KEYS}",
    "SignatureDoesNotMatch": f"the secret key does not fit the access key; {_CHECK_KEYS}",
    "ExpiredToken": f"the session token has expired; {_SIGN_IN}",
    "InvalidToken": f"the session token is not valid; {_SIGN_IN}",
    "TokenRefreshRequired": f"the session token must be refreshed; {_SIGN_IN}",
    "RequestTimeTooSkewed": "this machine's clock is wrong; set it",
    "PermanentRedirect": f"the bucket is in another region; {_CHECK_REGION}",
    "AuthorizationHeaderMalformed": f"the request was signed for another region; {_CHECK_REGION}",
    "IllegalLocationConstraintException": f"the bucket is in another region; {_CHECK_REGION}",
    "MethodNotAllowed": "the store can only be read",
    "401": f"not signed in; {_CHECK_KEYS}",
    "403": _NOT_PERMITTED,
}
_FULL = {"QuotaExceeded", "QuotaExceededException", "InsufficientStorage", "XMinioStorageFull", "507"}
_FULL_WORDS = ("no space left", "quota exceeded", "storage full", "disk full")
_TRANSIENT = {
    "SlowDown", "SlowDownRead", "SlowDownWrite", "InternalError", "ServiceUnavailable", "RequestTimeout", "Throttling",
    "ThrottlingException", "RequestLimitExceeded", "TooManyRequests", "BadDigest", "IncompleteBody", "OperationAborted",
    "ConditionalRequestConflict", "RequestTimeoutException", "BandwidthLimitExceeded",
}  # fmt: skip
_CREDENTIALS = (
    NoCredentialsError, PartialCredentialsError, CredentialRetrievalError, TokenRetrievalError, SSOTokenLoadError,
    UnauthorizedSSOTokenError,
)  # fmt: skip
_CONNECTING = (EndpointConnectionError, ConnectTimeoutError, ConnectionError)
_PASSING = (HTTPClientError, IncompleteReadError, FlexibleChecksumError, ResponseParserError)


def error_code(error: ClientError) -> str:
    """The S3 error code; the HTTP status as text where the answer had no body (HEAD)."""
    return str(error.response.get("Error", {}).get("Code", ""))


def error_status(error: ClientError) -> int:
    """The HTTP status."""
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def refuses_checksum(error: ClientError) -> bool:
    """Whether the server does not take the CRC32 a body was sent with (gateways older than 2022)."""
    message = str(error.response.get("Error", {}).get("Message", "")).lower()
    return error_code(error) == "NotImplemented" or (error_status(error) == 400 and "checksum" in message)


def translate(
    error: ClientError | BotoCoreError | ResponseParserError, what: str, endpoint: str
) -> StoreError | TransientError | ConditionRefused:
    """The exception to raise for botocore's.

    Args:
        error: what botocore raised.
        what: what was attempted, such as ``write s3://bucket/manifest.json``.
        endpoint: the server's address.
    """
    if isinstance(error, ClientError):
        return _translate_answer(error, what, endpoint)
    if isinstance(error, _CREDENTIALS):
        return StoreAccessError(
            f"cannot {what}: no usable AWS credentials ({error}); set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY or "
            "AWS_PROFILE, or read a public bucket by its https:// address"
        )
    if isinstance(error, ProfileNotFound):
        return StoreAccessError(f"cannot {what}: {error}; check AWS_PROFILE")
    if isinstance(error, _CONNECTING):
        return TransientError(f"cannot connect to {endpoint}: {error}", connecting=True)
    if isinstance(error, _PASSING):
        return TransientError(f"{endpoint}: {error}")
    return StoreError(f"cannot {what} at {endpoint}: {error}")


def _translate_answer(error: ClientError, what: str, endpoint: str) -> StoreError | TransientError | ConditionRefused:
    code, status = error_code(error), error_status(error)
    message = str(error.response.get("Error", {}).get("Message", ""))
    if code == "PreconditionFailed" or status == 412:
        return ConditionRefused(message)
    if code in _FULL or status == 507 or any(words in message.lower() for words in _FULL_WORDS):
        return StoreFullError(f"cannot {what}: {endpoint} has no space left ({code}: {message}); make room there")
    if code in _TRANSIENT or status in (429, 500, 502, 503, 504):
        return TransientError(
            f"{endpoint} answered {status} {code} {message}".rstrip(), retry_after_s=_retry_after(error)
        )
    if code in _ACCESS or status in (401, 403):
        return StoreAccessError(f"cannot {what} at {endpoint}: {code}: {_ACCESS.get(code, _ACCESS['403'])}")
    return StoreError(f"cannot {what}: {endpoint} answered {status} {code} {message}".rstrip())


def _retry_after(error: ClientError) -> float | None:
    return parse_retry_after_s(error.response.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("retry-after", ""))


if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client


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
            signature_version="s3v4",  # Of presigned addresses too, which boto3 signs the old way in some regions.
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

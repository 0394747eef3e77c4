"""The S3 operations a store needs, each complete: retried until its deadline, its errors in this project's words.

What is sent carries a CRC32 (or, where a gateway refuses that, a Content-MD5), and what comes is held against its
length and its checksum, or, where the server gives none, its ETag. A call may outlast its deadline by one read
time-out; and by as long as a server takes that lets the headers of its answer drip, since botocore gives no hold on
its connections (over HTTP, where servers are strangers, that is bounded: `genesis.store.http_transport`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import TYPE_CHECKING, TypeVar, cast

import urllib3.exceptions
from botocore.exceptions import BotoCoreError, ClientError
from botocore.parsers import ResponseParserError

from genesis.errors import PreconditionFailedError, StoreAccessError
from genesis.store.base import (
    CachePolicy,
    ConditionRefused,
    ConditionUnsupported,
    ObjectInfo,
    StoredObject,
    WriteCondition,
)
from genesis.store.limits import Deadline, Meter, RetryPolicy, TimeLimit
from genesis.store.parts import PartDownload
from genesis.store.resuming import Answer, Download
from genesis.store.retrying import Retrier, TransientError
from genesis.store.s3_client import S3Connection, body_file, error_code, error_status, refuses_checksum, translate
from genesis.store.s3_reading import NothingRead, S3Read, content_md5, crc32, quoted_etag

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client
    from mypy_boto3_s3.type_defs import PutObjectRequestTypeDef
    from urllib3 import HTTPResponse

T = TypeVar("T")

_ABSENT = {"NoSuchKey", "404", "NotFound"}
_READ_BYTES = 64 << 10
_CONTENT_TYPES = {".json": "application/json", ".zst": "application/zstd", ".txt": "text/plain; charset=utf-8"}


class S3Bucket:
    """Operations on one bucket; keys are whole, prefix included."""

    def __init__(self, name: str, policy: RetryPolicy, meter: Meter) -> None:
        self.name = name
        self._policy = policy
        self._meter = meter
        self._connection = S3Connection(policy)
        self._retrier = Retrier(policy)
        self._known_to_exist = False
        self._sends_md5 = False
        self._etags_are_md5 = True

    @property
    def endpoint(self) -> str:
        """The server's address."""
        return self._connection.endpoint()

    def close(self) -> None:
        """Closes the connections."""
        self._connection.close()

    def get(self, key: str, deadline: Deadline) -> StoredObject | None:
        """The object, or None if there is none."""
        found = self.read(key, deadline=deadline)
        return found if isinstance(found, StoredObject) else None

    def read(
        self, key: str, *, deadline: Deadline, max_bytes: int = sys.maxsize, unless_etag: str | None = None
    ) -> StoredObject | NothingRead:
        """The object, unless there is none, or its ETag is ``unless_etag``.

        Args:
            key: the object's whole key.
            deadline: of the call, beyond which what it moves has time of its own.
            max_bytes: a larger object is refused.
            unless_etag: an ETag as this store gives them.
        """
        where = f"s3://{self.name}/{key}"
        download = Download(where, self._policy, self._meter, max_bytes=max_bytes, deadline=deadline)
        reading = S3Read(self.name, key, download, unless_etag)
        doubtful: set[str] = set()

        def attempt(client: S3Client) -> StoredObject | NothingRead:
            found = reading.attempt(client)
            if isinstance(found, StoredObject) and self._etags_are_md5 and reading.proof.contradicts_md5(found.body):
                digest = content_md5(found.body)
                if digest not in doubtful:
                    doubtful.add(digest)
                    download.discard()
                    raise TransientError(
                        f"{self.endpoint} sent {len(found.body):,} bytes that are not those of its ETag"
                    )
                self._etags_are_md5 = False  # The same bytes twice: what looked like an MD5 is something else.
            return found

        try:
            found = self._run_if_present("read", key, attempt, download)
        finally:
            download.discard()
        return NothingRead.ABSENT if found is None else found

    def read_part(self, key: str, part: PartDownload) -> bytearray:
        """A part of the object.

        Raises:
            PreconditionFailedError: the object is not the one the part is of.
            StoreError: it cannot be read, or not by ranges.
        """

        def attempt(client: S3Client) -> bytearray:
            response = client.get_object(Bucket=self.name, Key=key, Range=part.range_header, IfMatch=part.etag)
            status = response["ResponseMetadata"]["HTTPStatusCode"]
            etag = quoted_etag(response.get("ETag"))
            with response["Body"] as raw:
                part.begin(Answer(status, etag=etag, content_range=response.get("ContentRange", "")))
                while chunk := cast("HTTPResponse", raw).read1(_READ_BYTES):
                    self._meter.received(len(chunk))
                    part.append(chunk)
            return part.finish()

        try:
            return self.run("read", key, attempt, part)
        except ConditionRefused:
            raise PreconditionFailedError(
                f"{part.name}: expected the ETag {part.etag}, found another; it has been replaced"
            ) from None

    def head(self, key: str, deadline: Deadline) -> ObjectInfo | None:
        """What is known of the object, or None if there is none."""

        def attempt(client: S3Client) -> ObjectInfo:
            response = client.head_object(Bucket=self.name, Key=key)
            return _info(key, response["ContentLength"], response.get("ETag"), response.get("LastModified"))

        info = self._run_if_present("look at", key, attempt, deadline)
        if info is None and not self._known_to_exist:
            self._check_exists(deadline)  # HEAD says 404 for a missing bucket too.
        return info

    def objects(self, prefix: str) -> Iterator[ObjectInfo]:
        """Objects whose key begins with ``prefix``, as the server orders them; every page has a deadline of its own."""
        after = ""
        while True:
            page, complete = self._page(prefix, after, self._policy.deadline())
            yield from page
            if complete:
                return
            after = page[-1].key

    def put(self, key: str, body: memoryview, cache: CachePolicy, condition: WriteCondition, deadline: Deadline) -> str:
        """Stores an object in one request and returns its ETag.

        Raises:
            ConditionRefused: the condition did not hold, perhaps because an earlier attempt already succeeded.
            ConditionUnsupported: the server has no conditional writes.
        """

        def attempt(client: S3Client) -> str:
            request: PutObjectRequestTypeDef = {
                "Bucket": self.name,
                "Key": key,
                "Body": body_file(body, deadline),
                "CacheControl": cache.value,
                "ContentType": content_type(key),
            }
            if self._sends_md5:
                request["ContentMD5"] = content_md5(body)
            else:
                request["ChecksumCRC32"] = crc32(body)
            if condition.if_absent:
                request["IfNoneMatch"] = "*"
            if condition.if_match is not None:
                request["IfMatch"] = condition.if_match
            try:
                return quoted_etag(client.put_object(**request).get("ETag"))
            except ClientError as error:
                raise self.judge_write(error, condition) from error

        return self.run("write", key, attempt, deadline)

    def delete(self, key: str, deadline: Deadline) -> None:
        """Removes an object; none there is success."""
        self._run_if_present("delete", key, lambda client: client.delete_object(Bucket=self.name, Key=key), deadline)

    def run(self, action: str, key: str, attempt: Callable[[S3Client], T], limit: TimeLimit) -> T:
        """The result of ``attempt``, which is given a client and repeated while its failures may pass.

        Args:
            action: what it does, for messages; the object's address follows.
            key: the object's whole key.
            attempt: may raise botocore's errors.
            limit: of the call.
        """
        what = f"{action} s3://{self.name}/{key}"

        def once() -> T:
            try:
                return attempt(self._connection.client())
            except (ClientError, BotoCoreError, ResponseParserError) as error:
                raise translate(error, what, self.endpoint) from error
            except (urllib3.exceptions.HTTPError, TimeoutError) as error:
                raise TransientError(f"{self.endpoint}: {error}") from error

        result = self._retrier.call(what, once, limit)
        self._known_to_exist = True
        return result

    def judge_write(self, error: ClientError, condition: WriteCondition) -> Exception:
        """The exception to raise for a write's error: its own, unless it means something `translate` cannot know."""
        if not self._sends_md5 and refuses_checksum(error):
            self._sends_md5 = True
            return TransientError(f"{self.endpoint} refuses CRC32 checksums; sending MD5 from now on")
        if condition and error_status(error) == 501:
            return ConditionUnsupported(str(error))
        if condition.if_match is not None and error_code(error) in _ABSENT:
            return ConditionRefused(str(error))
        return error

    def _page(self, prefix: str, after: str, deadline: Deadline) -> tuple[list[ObjectInfo], bool]:
        def attempt(client: S3Client) -> tuple[list[ObjectInfo], bool]:
            response = client.list_objects_v2(Bucket=self.name, Prefix=prefix, StartAfter=after)
            page = [
                _info(entry["Key"], entry["Size"], entry.get("ETag"), entry.get("LastModified"))
                for entry in response.get("Contents", [])
            ]
            return page, not (page and response.get("IsTruncated", False))

        return self.run("list", prefix, attempt, deadline)

    def _run_if_present(self, action: str, key: str, attempt: Callable[[S3Client], T], limit: TimeLimit) -> T | None:
        def absent_is_none(client: S3Client) -> T | None:
            try:
                return attempt(client)
            except ClientError as error:
                if error_code(error) in _ABSENT:
                    return None
                raise

        seen = self._known_to_exist
        result = self.run(action, key, absent_is_none, limit)
        self._known_to_exist = seen or result is not None
        return result

    def _check_exists(self, deadline: Deadline) -> None:
        def attempt(client: S3Client) -> bool:
            try:
                client.head_bucket(Bucket=self.name)
            except ClientError as error:
                return error_status(error) != 404  # 403: it may exist and is none of our business.
            return True

        if not self.run("look at", "", attempt, deadline):
            raise StoreAccessError(
                f"there is no bucket {self.name!r} at {self.endpoint} (NoSuchBucket); create it or check the address"
            )


def content_type(key: str) -> str:
    """The ``Content-Type`` of an object, by its key."""
    return next((kind for suffix, kind in _CONTENT_TYPES.items() if key.endswith(suffix)), "application/octet-stream")


def _info(key: str, size_bytes: int, etag: str | None, modified_at: datetime | None) -> ObjectInfo:
    modified = None if modified_at is None else modified_at.astimezone(UTC)
    return ObjectInfo(key=key, size_bytes=size_bytes, etag=quoted_etag(etag), modified_at=modified)

"""Multipart uploads to S3, and the probe that tells whether a server honours conditional writes.

Each request is complete in itself: retried until its deadline, its errors translated. Each part is retried by itself,
and the parts of an upload that fails are deleted. Parts go one after another in order, which every gateway takes and
some insist on (rclone streams them to its disk); a populator already puts from several threads. A part has 16 MiB, so
that a cut connection costs at most that; parts are larger only where 10,000 of them, the most S3 allows, would not do.

Of conditional writes: Amazon, MinIO, Ceph and R2 do; some gateways take the headers and ignore them (``rclone serve
s3`` 1.75), which nothing in their answers shows. The probe writes a one-byte object under a fresh name, tries what must
be refused, and deletes it: five requests, once a store. Single and multipart writes are probed apart, since servers
differ there too.
"""

from __future__ import annotations

import logging
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING

from botocore.exceptions import ClientError

from genesis.errors import StoreError
from genesis.store.base import CachePolicy, ConditionRefused, ConditionUnsupported, WriteCondition
from genesis.store.limits import Deadline
from genesis.store.s3_bucket import S3Bucket, content_type
from genesis.store.s3_client import body_file, error_code
from genesis.store.s3_reading import content_md5, quoted_etag

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client
    from mypy_boto3_s3.type_defs import (
        CompletedPartTypeDef,
        CompleteMultipartUploadRequestTypeDef,
        UploadPartRequestTypeDef,
    )

logger = logging.getLogger(__name__)


class UploadVanished(Exception):  # noqa: N818 - an answer to be judged, not yet an error
    """A multipart upload is unknown to the server: completed by an attempt whose answer was lost, or aborted."""


@dataclass(frozen=True, slots=True)
class Upload:
    """A multipart upload that was started."""

    key: str
    id: str


def start_upload(bucket: S3Bucket, key: str, cache: CachePolicy, deadline: Deadline) -> Upload:
    """Begins a multipart upload."""

    def attempt(client: S3Client) -> Upload:
        response = client.create_multipart_upload(
            Bucket=bucket.name, Key=key, CacheControl=cache.value, ContentType=content_type(key)
        )
        return Upload(key, response["UploadId"])

    return bucket.run("start writing", key, attempt, deadline)


def upload_part(
    bucket: S3Bucket, upload: Upload, number: int, body: memoryview, deadline: Deadline
) -> CompletedPartTypeDef:
    """Sends part ``number`` (from 1)."""

    def attempt(client: S3Client) -> CompletedPartTypeDef:
        request: UploadPartRequestTypeDef = {
            "Bucket": bucket.name,
            "Key": upload.key,
            "UploadId": upload.id,
            "PartNumber": number,
            "Body": body_file(body, deadline),
            "ContentMD5": content_md5(body),  # A CRC32 would have to be announced at the start, which gateways refuse.
        }
        return {"PartNumber": number, "ETag": client.upload_part(**request)["ETag"]}

    return bucket.run(f"write part {number} of", upload.key, attempt, deadline)


def complete_upload(
    bucket: S3Bucket, upload: Upload, parts: list[CompletedPartTypeDef], condition: WriteCondition, deadline: Deadline
) -> str:
    """Makes the parts the object and returns its ETag.

    Raises:
        ConditionRefused: as `put`.
        ConditionUnsupported: as `put`.
        UploadVanished: the server does not know the upload (any more).
    """

    def attempt(client: S3Client) -> str:
        request: CompleteMultipartUploadRequestTypeDef = {
            "Bucket": bucket.name,
            "Key": upload.key,
            "UploadId": upload.id,
            "MultipartUpload": {"Parts": parts},
        }
        if condition.if_absent:
            request["IfNoneMatch"] = "*"
        if condition.if_match is not None:
            request["IfMatch"] = condition.if_match
        try:
            return quoted_etag(client.complete_multipart_upload(**request).get("ETag"))
        except ClientError as error:
            if error_code(error) in ("NoSuchUpload", "ConditionalRequestConflict"):
                raise UploadVanished(upload.id) from error
            raise bucket.judge_write(error, condition) from error

    return bucket.run("finish writing", upload.key, attempt, deadline)


def abort_upload(bucket: S3Bucket, upload: Upload, deadline: Deadline) -> None:
    """Throws the parts away."""

    def attempt(client: S3Client) -> None:
        client.abort_multipart_upload(Bucket=bucket.name, Key=upload.key, UploadId=upload.id)

    bucket.run("give up writing", upload.key, attempt, deadline)


PART_BYTES = 16 << 20
MIN_PART_BYTES = 5 << 20
"""The smallest part S3 accepts, but for the last."""
_MAX_PARTS = 10_000
_ABORT_DEADLINE_S = 20.0


def put_in_parts(
    bucket: S3Bucket,
    key: str,
    body: memoryview,
    cache: CachePolicy,
    condition: WriteCondition,
    deadline: Deadline,
    *,
    part_bytes: int = PART_BYTES,
) -> str:
    """Stores an object by a multipart upload and returns its ETag.

    Raises:
        ConditionRefused: the condition did not hold, perhaps because an earlier attempt already succeeded.
        UploadVanished: the outcome is unknown; what is there now tells it.
        StoreError: it could not be written; the parts have been thrown away.
    """
    step = max(part_bytes, -(-len(body) // _MAX_PARTS))
    upload = start_upload(bucket, key, cache, deadline)
    try:
        parts = [
            upload_part(bucket, upload, number, body[offset : offset + step], deadline)
            for number, offset in enumerate(range(0, len(body), step), start=1)
        ]
        return complete_upload(bucket, upload, parts, condition, deadline)
    except BaseException:
        _abort(bucket, upload)
        raise


def _abort(bucket: S3Bucket, upload: Upload) -> None:
    try:
        abort_upload(bucket, upload, Deadline.after(_ABORT_DEADLINE_S))
    except StoreError as error:
        logger.warning(
            "the parts of upload %s stay behind (%s); a lifecycle rule for incomplete uploads removes such",
            upload.id,
            error,
        )


_ANYTHING = WriteCondition()
_ABSENT = WriteCondition(if_absent=True)
_WRONG_MATCH = WriteCondition(if_match='"00000000000000000000000000000000"')


def put_conditions_hold(bucket: S3Bucket, prefix: str, deadline: Deadline) -> bool:
    """Whether PutObject honours If-None-Match and If-Match."""
    key = _probe_key(prefix)
    etag = bucket.put(key, memoryview(b"0"), CachePolicy.NONE, _ANYTHING, deadline)
    try:
        return (
            _put_is_refused(bucket, key, _ABSENT, deadline)
            and _put_is_refused(bucket, key, _WRONG_MATCH, deadline)
            and not _put_is_refused(bucket, key, WriteCondition(if_match=etag), deadline)
        )
    except ConditionUnsupported:
        return False
    finally:
        _remove(bucket, key, deadline)


def upload_conditions_hold(bucket: S3Bucket, prefix: str, deadline: Deadline) -> bool:
    """Whether CompleteMultipartUpload honours If-None-Match and If-Match."""
    key = _probe_key(prefix)
    bucket.put(key, memoryview(b"0"), CachePolicy.NONE, _ANYTHING, deadline)
    try:
        return _upload_is_refused(bucket, key, _ABSENT, deadline) and _upload_is_refused(
            bucket, key, _WRONG_MATCH, deadline
        )
    except ConditionUnsupported:
        return False
    finally:
        _remove(bucket, key, deadline)


def _probe_key(prefix: str) -> str:
    return f"{prefix}probe/{secrets.token_hex(8)}"


def _put_is_refused(bucket: S3Bucket, key: str, condition: WriteCondition, deadline: Deadline) -> bool:
    body = memoryview(secrets.token_bytes(8))
    try:
        bucket.put(key, body, CachePolicy.NONE, condition, deadline)
    except ConditionRefused:
        # A lost acknowledgement looks like a refusal; the object tells them apart.
        found = bucket.get(key, deadline)
        return found is None or found.body != body
    return False


def _upload_is_refused(bucket: S3Bucket, key: str, condition: WriteCondition, deadline: Deadline) -> bool:
    upload = start_upload(bucket, key, CachePolicy.NONE, deadline)
    part = upload_part(bucket, upload, 1, memoryview(b"1"), deadline)
    try:
        complete_upload(bucket, upload, [part], condition, deadline)
    except ConditionRefused:
        abort_upload(bucket, upload, deadline)
        return True
    return False


def _remove(bucket: S3Bucket, key: str, deadline: Deadline) -> None:
    try:
        bucket.delete(key, deadline)
    except StoreError as error:
        logger.warning("a probe object of one byte stays behind: %s", error)

"""Finding out whether a server honours conditional writes, by trying.

Amazon, MinIO, Ceph and R2 do; some gateways take the headers and ignore them (``rclone serve s3`` 1.75), which nothing
in their answers shows. The probe writes a one-byte object under a fresh name, tries what must be refused, and deletes
it: five requests, once a store. Single and multipart writes are probed apart, since servers differ there too.
"""

from __future__ import annotations

import logging
import secrets

from genesis.errors import StoreError
from genesis.store.base import CachePolicy, ConditionRefused, ConditionUnsupported, WriteCondition
from genesis.store.policy import Deadline
from genesis.store.s3_bucket import S3Bucket
from genesis.store.s3_uploads import abort_upload, complete_upload, start_upload, upload_part

_ANYTHING = WriteCondition()
_ABSENT = WriteCondition(if_absent=True)
_WRONG_MATCH = WriteCondition(if_match='"00000000000000000000000000000000"')

logger = logging.getLogger(__name__)


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

"""Large bodies in parts: each part is retried by itself, and parts that come to nothing are thrown away.

Parts go one after another in order, which every gateway takes and some insist on (rclone streams them to its disk);
a populator already puts from several threads. 16 MiB parts, so that a cut connection costs at most those; larger ones
only where 10,000 parts, the most S3 allows, would not do.
"""

from __future__ import annotations

import logging

from genesis.errors import StoreError
from genesis.store.base import CachePolicy
from genesis.store.conditions import WriteCondition
from genesis.store.policy import Deadline
from genesis.store.s3_bucket import S3Bucket
from genesis.store.s3_uploads import Upload, abort_upload, complete_upload, start_upload, upload_part

__all__ = ["MIN_PART_BYTES", "PART_BYTES", "put_in_parts"]

PART_BYTES = 16 << 20
MIN_PART_BYTES = 5 << 20
"""The smallest part S3 accepts, but for the last."""
_MAX_PARTS = 10_000
_ABORT_DEADLINE_S = 20.0

logger = logging.getLogger(__name__)


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

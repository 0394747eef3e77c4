"""One attempt at reading an object, or the rest of one, from S3.

The body is read from the connection as it comes, at most 64 KiB at a time: botocore's own reader waits until it has as
much as it was asked for, which a server that sends a byte now and then never lets happen, and loses what had come when
a connection is cut. Its checks are therefore made here (`genesis.store.s3_checksums`), over the whole body.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, cast

from botocore.exceptions import ClientError

from genesis.store.base import StoredObject
from genesis.store.download import Download
from genesis.store.resuming import Answer, opaque_etag
from genesis.store.retrying import TransientError
from genesis.store.s3_checksums import Proof
from genesis.store.s3_client import error_status

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client
    from mypy_boto3_s3.type_defs import GetObjectOutputTypeDef, GetObjectRequestTypeDef
    from urllib3 import HTTPResponse

__all__ = ["NothingRead", "S3Read", "quoted_etag"]

_READ_BYTES = 64 << 10


class NothingRead(Enum):
    """Why a read that did not fail brought no object."""

    ABSENT = "there is none"
    UNCHANGED = "it still has the ETag asked about"


class S3Read:
    """A read of one object, attempt after attempt."""

    def __init__(self, bucket: str, key: str, download: Download, unless_etag: str | None) -> None:
        """Names the object.

        Args:
            bucket: its bucket.
            key: its whole key.
            download: collects its bytes.
            unless_etag: if this is its ETag, it is not read.
        """
        self.proof = Proof()
        """What the server says of the bytes."""
        self._bucket = bucket
        self._key = key
        self._download = download
        self._unless_etag = unless_etag

    def attempt(self, client: S3Client) -> StoredObject | NothingRead:
        """The object, or why there is nothing to read.

        Raises:
            ClientError: as boto3 raises it.
            TransientError: the object, or a part of it, is still missing.
        """
        held_etag = self._download.held.resumable_etag
        try:
            response = client.get_object(**self._request(held_etag))
        except ClientError as error:
            status = error_status(error)
            if status == 304 and held_etag is None and self._unless_etag is not None:
                return NothingRead.UNCHANGED
            if status in (412, 416) and held_etag is not None:
                self._download.begin(Answer(status))  # Which says that it starts over.
            raise
        with response["Body"] as raw:
            return self._received(response, cast("HTTPResponse", raw))

    def _request(self, held_etag: str | None) -> GetObjectRequestTypeDef:
        request: GetObjectRequestTypeDef = {"Bucket": self._bucket, "Key": self._key}
        if held_etag is not None:
            request["Range"] = f"bytes={self._download.held.size_bytes}-"
            request["IfMatch"] = held_etag
        elif self._unless_etag is not None:
            request["IfNoneMatch"] = self._unless_etag
        return request

    def _received(self, response: GetObjectOutputTypeDef, raw: HTTPResponse) -> StoredObject | NothingRead:
        etag = quoted_etag(response.get("ETag"))
        if etag == self._unless_etag:
            return NothingRead.UNCHANGED  # It ignores If-None-Match.
        self._download.begin(_answer(response, etag))
        if self._download.held.size_bytes == 0:
            self.proof = Proof.of(response, etag)
        while chunk := raw.read1(_READ_BYTES):
            self._download.append(chunk)
        return self._checked(StoredObject(body=self._download.finish(), etag=etag))

    def _checked(self, found: StoredObject) -> StoredObject:
        if self.proof.contradicts_checksum(found.body):
            self._download.discard()
            raise TransientError(f"{len(found.body):,} bytes came that are not those of the object's checksum")
        return found


def quoted_etag(etag: str | None) -> str:
    """One spelling of an ETag: some gateways leave out the quotes here and there.

    Raises:
        TransientError: there is none, as rclone answers while an object is being replaced.
    """
    found = opaque_etag(etag or "")
    if found is None:
        raise TransientError("the server gave no ETag")
    return found


def _answer(response: GetObjectOutputTypeDef, etag: str) -> Answer:
    is_weak = response["ETag"].startswith("W/")
    return Answer(
        response["ResponseMetadata"]["HTTPStatusCode"],
        etag=f"W/{etag}" * is_weak or etag,
        content_length=str(response.get("ContentLength", "")),
        content_range=response.get("ContentRange", ""),
    )

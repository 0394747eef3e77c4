"""One attempt at reading an object, or the rest of one, from S3, and the checksums it is held against.

The body is read from the connection as it comes, at most 64 KiB at a time: botocore's own reader waits until it has as
much as it was asked for, which a server that sends a byte now and then never lets happen, and loses what had come when
a connection is cut. Its checks are therefore made here, over the whole body, however many answers it came in.

Full-object CRC32, SHA-1 and SHA-256 are checked where the server gives them. The other kinds (CRC32C, CRC64NVME,
checksums of parts) would need code of their own; there the ETag serves, where it is the body's MD5.
"""

from __future__ import annotations

import base64
import hashlib
import re
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, cast

from botocore.exceptions import ClientError
from typing_extensions import Buffer

from genesis.store.base import StoredObject
from genesis.store.resuming import Answer, Download, opaque_etag
from genesis.store.retrying import TransientError
from genesis.store.s3_client import error_status

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client
    from mypy_boto3_s3.type_defs import GetObjectOutputTypeDef, GetObjectRequestTypeDef
    from urllib3 import HTTPResponse

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


_MD5_ETAG = re.compile(r'"[0-9a-f]{32}"')
_ENCRYPTED = ("SSEKMS", "SSECustomer")
"""Fields of an answer whose ETag looks like an MD5 and is not."""


def crc32(body: Buffer) -> str:
    """The ``x-amz-checksum-crc32`` header of a body."""
    return base64.b64encode(zlib.crc32(body).to_bytes(4, "big")).decode()


def content_md5(body: Buffer) -> str:
    """The ``Content-MD5`` header of a body."""
    return base64.b64encode(hashlib.md5(body, usedforsecurity=False).digest()).decode()


def _sha1(body: Buffer) -> str:
    return base64.b64encode(hashlib.sha1(body, usedforsecurity=False).digest()).decode()


def _sha256(body: Buffer) -> str:
    return base64.b64encode(hashlib.sha256(body).digest()).decode()


_ALGORITHMS: dict[str, Callable[[Buffer], str]] = {
    "ChecksumCRC32": crc32,
    "ChecksumSHA256": _sha256,
    "ChecksumSHA1": _sha1,
}


@dataclass(frozen=True, slots=True)
class Proof:
    """What an answer says of the whole object's bytes."""

    checksum: tuple[str, str] | None = None
    """boto3's name of the field, and its value."""
    md5: str | None = None
    """In hexadecimal; what an ETag that looks like one says, which may be something else."""

    @classmethod
    def of(cls, response: Mapping[str, object], etag: str) -> Proof:
        """Reads boto3's answer to a request for the whole object."""
        given = ((name, response.get(name)) for name in _ALGORITHMS)
        # Those of multipart uploads end in the number of parts and are not of the bytes themselves.
        whole = [(name, value) for name, value in given if isinstance(value, str) and "-" not in value]
        if whole:
            return cls(checksum=whole[0])
        is_md5 = _MD5_ETAG.fullmatch(etag) and not any(name.startswith(_ENCRYPTED) for name in response)
        return cls(md5=etag.strip('"') if is_md5 else None)

    def contradicts_checksum(self, body: Buffer) -> bool:
        """Whether the body is certainly not the object."""
        return self.checksum is not None and _ALGORITHMS[self.checksum[0]](body) != self.checksum[1]

    def contradicts_md5(self, body: Buffer) -> bool:
        """Whether the body is not the object, if its ETag is an MD5.

        ``rclone serve s3`` 1.75, asked while an object is being replaced, sends the new one cut to the length of the
        old (1% of reads in a test that does nothing else); only the ETag shows it.
        """
        return self.md5 is not None and hashlib.md5(body, usedforsecurity=False).hexdigest() != self.md5

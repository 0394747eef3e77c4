"""Checksums of S3 bodies: those sent along, and those a whole body is held against however many answers it came in.

Full-object CRC32, SHA-1 and SHA-256 are checked where the server gives them; the other kinds (CRC32C, CRC64NVME,
checksums of parts) would need code of their own, and there the ETag serves, where it is the body's MD5.
"""

from __future__ import annotations

import base64
import hashlib
import re
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from typing_extensions import Buffer

__all__ = ["Proof", "content_md5", "crc32"]

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

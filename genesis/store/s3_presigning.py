"""Signs requests to an S3 bucket for others, who need no key for it: presigned addresses (SigV4 in the query).

An address is good for one request: its method, name and time, and every header that was signed with it. A PUT's size,
condition, type and cache policy are such headers, so whoever has the address can put one object of exactly that size,
and none over another where it was signed with ``if_absent``. Signing contacts nobody: 0.3 ms each on one core.

The trade-off: an address cannot be taken back before it expires, so lives are to be short.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal

from genesis.errors import UsageError
from genesis.store.base import CachePolicy
from genesis.store.limits import RetryPolicy
from genesis.store.s3_bucket import content_type
from genesis.store.s3_client import S3Connection, S3Location
from manifests import check_key

RequestKind = Literal["get", "list", "put", "delete"]

MAX_LIFE_S: Final = 7 * 86_400
"""The longest that S3 lets an address live."""
LIST_PAGE_NAMES: Final = 1000


@dataclass(frozen=True, slots=True)
class BucketRequest:
    """A request that an address is wanted for."""

    kind: RequestKind
    key: str
    """Of the object; for a list, what names are to begin with, which may be empty."""
    after: str = ""
    """Of a list: the last name of the page before."""
    size_bytes: int = 0
    """Of a put."""
    if_absent: bool = True
    """Of a put: only where there is no object of that name."""


@dataclass(frozen=True, slots=True)
class SignedAddress:
    """One presigned request: what to send, to which address, and for how long that is good."""

    url: str
    headers: tuple[tuple[str, str], ...]
    """Signed ones, which have to be sent as they are."""
    life_s: float
    """Seconds from when it was signed."""


class S3Presigner:
    """Signs requests below one prefix of a bucket, with the credentials that boto3 finds."""

    def __init__(self, url: str, *, policy: RetryPolicy | None = None) -> None:
        """Names the bucket, ``s3://bucket/prefix``; raises UsageError if the address makes no sense."""
        self._location = S3Location.parse(url)
        self._connection = S3Connection(policy or RetryPolicy())

    @property
    def url(self) -> str:
        """``s3://bucket/prefix``."""
        return self._location.url

    def sign(self, request: BucketRequest, life_s: int) -> SignedAddress:
        """Returns the address of one request.

        Raises:
            UsageError: the life is not one S3 allows.
            InvalidDocumentError: no object can have that name.
        """
        if not 1 <= life_s <= MAX_LIFE_S:
            raise UsageError(f"expected an address to live 1 s to a week, found {life_s} s")
        operation, parameters, headers = self._operation(request)
        url = self._connection.client().generate_presigned_url(
            operation, Params={"Bucket": self._location.bucket, **parameters}, ExpiresIn=life_s
        )
        return SignedAddress(url, headers, float(life_s))

    def _operation(self, request: BucketRequest) -> tuple[str, dict[str, Any], tuple[tuple[str, str], ...]]:
        prefix = self._location.prefix
        if request.kind == "list":
            page: dict[str, Any] = {"Prefix": prefix + request.key, "MaxKeys": LIST_PAGE_NAMES}
            if request.after:
                page["StartAfter"] = prefix + check_key(request.after)
            return "list_objects_v2", page, ()
        full = prefix + check_key(request.key)
        if request.kind != "put":
            return f"{request.kind}_object", {"Key": full}, ()
        cache = CachePolicy.IMMUTABLE if request.if_absent else CachePolicy.NONE
        parameters: dict[str, Any] = {
            "Key": full,
            "ContentLength": request.size_bytes,
            "CacheControl": cache.value,
            "ContentType": content_type(full),
        }
        headers = [
            ("Content-Length", str(request.size_bytes)),
            ("Cache-Control", cache.value),
            ("Content-Type", parameters["ContentType"]),
        ]
        if request.if_absent:
            parameters["IfNoneMatch"] = "*"
            headers.append(("If-None-Match", "*"))
        return "put_object", parameters, tuple(headers)

    def close(self) -> None:
        """Gives back connections."""
        self._connection.close()

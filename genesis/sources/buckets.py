"""Input files in S3 buckets: listed, pinned by size and ETag, and read by ranges.

``s3://bucket/key`` is one file, ``s3://bucket/folder`` every readable file below it, ``s3://bucket/folder/*.csv`` what
matches (``*`` stays within a folder, ``**`` crosses them). Keys are taken as they are written, without decoding. The
client is that of stores: its environment variables, profiles and ``AWS_ENDPOINT_URL``, its retries and deadlines. One
connection pool a bucket and process. Listing takes a request a 1,000 keys below the pattern's fixed beginning.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator

from genesis.errors import InputChangedError, InputNotFoundError, PreconditionFailedError, SourceError, StoreError
from genesis.sources.base import InputFile, fixed_folder, is_pattern, matches
from genesis.sources.opening import READABLE, format_of
from genesis.sources.ranges import RangeReader
from genesis.sources.selection import Candidate, asks_for
from genesis.store.base import ObjectInfo
from genesis.store.limits import Meter, RetryPolicy
from genesis.store.parts import PartDownload
from genesis.store.s3_bucket import S3Bucket
from genesis.store.s3_client import S3Location

_POLICY = RetryPolicy()
_MAGIC = re.compile(r"[*?\[]")


@functools.cache
def _bucket(name: str) -> S3Bucket:
    return S3Bucket(name, _POLICY, Meter())


def s3_candidates(url: str) -> list[Candidate]:
    """The files that an input means.

    Raises:
        InputNotFoundError: there are none.
        SourceError: the bucket cannot be listed.
        UsageError: it is no such address.
    """
    name, _, key = url.partition("://")[2].partition("/")
    S3Location.parse(f"s3://{name}")
    bucket = _bucket(name)
    try:
        found = list(_matching(bucket, key) if is_pattern(key) else _named(bucket, key))
    except StoreError as error:
        raise SourceError(f"--input {url!r}: {error}") from error
    if not found:
        raise InputNotFoundError(
            f"--input {url!r}: no such object, and none below it or matching it that is one of {READABLE}"
        )
    return found


def _named(bucket: S3Bucket, key: str) -> Iterator[Candidate]:
    info = bucket.head(key, _POLICY.deadline()) if key and not key.endswith("/") else None
    if info is not None:
        yield _candidate(bucket, info, key.rpartition("/")[2], asked_for=True)
        return
    folder = key and key.rstrip("/") + "/"
    for info in bucket.objects(folder):
        if format_of(info.key) is not None:
            yield _candidate(bucket, info, info.key.removeprefix(folder), asked_for=False)


def _matching(bucket: S3Bucket, pattern: str) -> Iterator[Candidate]:
    fixed = fixed_folder(pattern)
    folder = fixed and f"{fixed}/"
    for info in bucket.objects(_MAGIC.split(pattern, maxsplit=1)[0]):
        if matches(info.key, pattern) and not info.key.endswith("/"):
            yield _candidate(bucket, info, info.key.removeprefix(folder), asked_for=asks_for(pattern, info.key))


def _candidate(bucket: S3Bucket, info: ObjectInfo, relative: str, *, asked_for: bool) -> Candidate:
    path = f"{bucket.name}/{info.key}"
    return Candidate("s3", path, relative, f"s3://{path}", asked_for, info.size_bytes, info.etag)


class S3Reader(RangeReader):
    """Reads ranges of one object, as long as it is that of the plan."""

    def __init__(self, file: InputFile) -> None:
        super().__init__(file)
        name, _, self._key = file.location.removeprefix("s3://").partition("/")
        self._bucket = _bucket(name)

    def read(self, start: int, end: int) -> bytearray:
        """Bytes ``start:end``, cut off at the file's end."""
        end = min(end, self.size_bytes)
        if end <= start:
            return bytearray()
        part = PartDownload(
            self._file.name, start, end, total_bytes=self.size_bytes, etag=self._file.digest, policy=_POLICY
        )
        try:
            return self._bucket.read_part(self._key, part)
        except PreconditionFailedError as error:
            raise InputChangedError(f"{error} during the run: run it again") from error
        except StoreError as error:
            raise SourceError(f"{self._file.name}: {error}") from error

"""A store in an S3 bucket, Amazon's or any gateway's, through boto3.

Guarantees, beyond those of every store: a conditional write whose acknowledgement was lost is found to have succeeded
by reading the object back; bodies over 64 MiB go in parts, which are thrown away if it fails; every object carries
its ``Cache-Control`` and ``Content-Type``.

Some gateways ignore conditions; they are probed (`s3_uploads`) and a warning names them. There a conditional write
becomes: look, compare, write, look again. That tells a populator that another is at work, but is **not atomic**: of
two writers between the looks, both may believe they won.
"""

from __future__ import annotations

import functools
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace

from typing_extensions import Buffer

from genesis.errors import ObjectNotFoundError, PreconditionFailedError, StoreError, StoreUnavailableError, UsageError
from genesis.store.base import (
    CachePolicy,
    ConditionRefused,
    ObjectInfo,
    PerProcess,
    StoredObject,
    WriteCondition,
    settle,
)
from genesis.store.limits import Deadline, Meter, RetryPolicy, Throttle
from genesis.store.resuming import opaque_etag
from genesis.store.s3_bucket import S3Bucket
from genesis.store.s3_client import S3Location
from genesis.store.s3_reading import NothingRead
from genesis.store.s3_uploads import (
    MIN_PART_BYTES,
    PART_BYTES,
    UploadVanished,
    put_conditions_hold,
    put_in_parts,
    upload_conditions_hold,
)
from manifests import InvalidDocumentError, check_key

_UPLOADS = 3
"""How often a multipart upload that vanished is begun again."""

logger = logging.getLogger(__name__)


class S3Store:
    """Objects below one prefix of a bucket; see the module's docstring for what it guarantees."""

    def __init__(
        self,
        url: str,
        *,
        policy: RetryPolicy | None = None,
        throttle: Throttle | None = None,
        multipart_threshold_bytes: int = 64 << 20,
        part_bytes: int = PART_BYTES,
    ) -> None:
        """Names the bucket; nothing is contacted yet.

        Args:
            url: ``s3://bucket/prefix``.
            policy: deadlines and time-outs.
            throttle: bounds what is received.
            multipart_threshold_bytes: larger bodies go in parts.
            part_bytes: size of those, at least 5 MiB.

        Raises:
            UsageError: the address or a size makes no sense.
        """
        if part_bytes < MIN_PART_BYTES:
            raise UsageError(f"expected part_bytes of at least {MIN_PART_BYTES:,}, found {part_bytes:,}")
        self._location = S3Location.parse(url)
        self._policy = policy or RetryPolicy()
        self._throttle = throttle
        self._meter = Meter(throttle)
        self._bucket = S3Bucket(self._location.bucket, self._policy, self._meter)
        self._threshold_bytes = multipart_threshold_bytes
        self._part_bytes = part_bytes
        self._probing = PerProcess(threading.Lock)
        self._honours_puts: bool | None = None
        self._honours_uploads: bool | None = None

    def __repr__(self) -> str:
        return f"S3Store({self.url!r})"

    def __reduce__(self) -> tuple[Callable[[], S3Store], tuple[()]]:
        """A pickle holds what the store was made from; connections, counts and what was probed stay behind."""
        make = functools.partial(
            S3Store,
            self._location.url,
            policy=self._policy,
            throttle=self._throttle,
            multipart_threshold_bytes=self._threshold_bytes,
            part_bytes=self._part_bytes,
        )
        return make, ()

    @property
    def url(self) -> str:
        """``s3://bucket/prefix``."""
        return self._location.url

    @property
    def conditional_writes(self) -> bool:
        """Whether ``if_absent`` and ``if_match`` are honoured; probed once, at the first question."""
        with self._probing.get():
            if self._honours_puts is None:
                self._honours_puts = put_conditions_hold(self._bucket, self._location.prefix, self._policy.deadline())
                self._warn_unless(self._honours_puts, "writes")
            return self._honours_puts

    @property
    def received_bytes(self) -> int:
        """Bytes of objects this process has received, those of attempts that failed too."""
        return self._meter.received_bytes

    def get(self, key: str, *, max_bytes: int | None = None) -> StoredObject:
        """The whole object."""
        found = self._read(key, max_bytes, None)
        if found is None:
            raise StoreError(f"cannot read {key!r} from {self.url}: expected the object, found 'not modified'")
        return found

    def get_if_changed(self, key: str, etag: str, *, max_bytes: int | None = None) -> StoredObject | None:
        """The whole object, or None if its ETag still is ``etag``."""
        return self._read(key, max_bytes, opaque_etag(etag))

    def head(self, key: str) -> ObjectInfo | None:
        """Size and ETag, or None if there is no such object."""
        info = self._bucket.head(self._full(key), self._policy.deadline())
        return None if info is None else replace(info, key=key)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """All objects whose key begins with ``prefix``, in key order; what no key can name is left out."""
        for info in self._bucket.objects(self._location.prefix + prefix):
            key = info.key.removeprefix(self._location.prefix)
            try:
                check_key(key)
            except InvalidDocumentError:
                continue
            yield replace(info, key=key)

    def put(
        self, key: str, body: Buffer, *, cache: CachePolicy, if_absent: bool = False, if_match: str | None = None
    ) -> str:
        """Stores an object and returns its ETag."""
        condition = WriteCondition(if_absent, if_match)
        view = memoryview(body).cast("B")
        full, deadline = self._full(key), self._policy.deadline(view.nbytes)
        if condition and not self._honours(view):
            return self._put_emulated(full, view, cache, condition, deadline)
        try:
            return self._write(full, view, cache, condition, deadline)
        except ConditionRefused:
            return settle(self._name(full), condition, self._bucket.get(full, deadline), view)

    def delete(self, key: str) -> None:
        """Removes an object; none there is success."""
        self._bucket.delete(self._full(key), self._policy.deadline())

    def close(self) -> None:
        """Gives back connections."""
        self._bucket.close()

    def _full(self, key: str) -> str:
        return self._location.prefix + check_key(key)

    def _read(self, key: str, max_bytes: int | None, unless_etag: str | None) -> StoredObject | None:
        """The object; None if it is unchanged."""
        found = self._bucket.read(
            self._full(key),
            deadline=self._policy.deadline(),
            max_bytes=sys.maxsize if max_bytes is None else max_bytes,
            unless_etag=unless_etag,
        )
        if found is NothingRead.ABSENT:
            raise ObjectNotFoundError(f"expected an object {key!r} in {self.url}, found none")
        return found if isinstance(found, StoredObject) else None

    def _name(self, full: str) -> str:
        return f"s3://{self._location.bucket}/{full}"

    def _write(
        self, full: str, view: memoryview, cache: CachePolicy, condition: WriteCondition, deadline: Deadline
    ) -> str:
        if view.nbytes <= self._threshold_bytes:
            return self._bucket.put(full, view, cache, condition, deadline)
        for _ in range(_UPLOADS):
            try:
                return put_in_parts(self._bucket, full, view, cache, condition, deadline, part_bytes=self._part_bytes)
            except UploadVanished:
                found = self._bucket.get(full, deadline)
                if found is not None and found.body == view:
                    return found.etag
        raise StoreUnavailableError(
            f"cannot write {self._name(full)}: {self._bucket.endpoint} forgot its multipart upload {_UPLOADS} times; "
            "check whether something aborts uploads there"
        )

    def _put_emulated(
        self, full: str, view: memoryview, cache: CachePolicy, condition: WriteCondition, deadline: Deadline
    ) -> str:
        """A conditional write on a server that has none; not atomic."""
        before = self._bucket.head(full, deadline)
        if not condition.holds_for(None if before is None else before.etag):
            return settle(self._name(full), condition, self._bucket.get(full, deadline), view)
        etag = self._write(full, view, cache, WriteCondition(), deadline)
        after = self._bucket.head(full, deadline)
        if after is not None and after.etag == etag:
            return etag
        found = self._bucket.get(full, deadline)
        if found is not None and found.body == view:
            return found.etag
        raise PreconditionFailedError(
            f"{self._name(full)}: another writer replaced the object just written; stop one of the two, since "
            f"{self._bucket.endpoint} has no conditional writes to keep them apart"
        )

    def _honours(self, view: memoryview) -> bool:
        if view.nbytes <= self._threshold_bytes or not self.conditional_writes:
            return self.conditional_writes
        with self._probing.get():
            if self._honours_uploads is None:
                deadline = self._policy.deadline()
                self._honours_uploads = upload_conditions_hold(self._bucket, self._location.prefix, deadline)
                self._warn_unless(self._honours_uploads, "multipart uploads")
            return self._honours_uploads

    def _warn_unless(self, honoured: bool, what: str) -> None:
        if not honoured:
            logger.warning(
                "%s ignores conditions on %s: two populators on %s cannot be kept apart exactly; run only one",
                self._bucket.endpoint, what, self.url,
            )  # fmt: skip

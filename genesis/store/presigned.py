"""A bucket without a key for it: every request goes to an address that somebody else has signed (`s3_presigning`).

An `AddressSource` is asked for addresses, several at once: with one for an object that was listed come those of others
listed beside it. Addresses for reading are kept and renewed when three quarters of their life are over; one that the
bucket refuses is asked for again once. Everything else is as in every store: calls have deadlines, what passes is tried
again, bodies and listings are bounded, a write whose answer was lost is recognised.

The trade-off: whoever signs decides what exists for this node, and whether the store honours conditions; it cannot
forge what is signed or named by its digest. An object costs one request to the signer for up to 32 objects.
"""

from __future__ import annotations

import threading
import time
import xml.etree.ElementTree as ElementTree
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Final, Protocol, TypeAlias, TypeVar
from urllib.parse import unquote

import httpx
from typing_extensions import Buffer

from genesis.errors import ObjectNotFoundError, StoreAccessError, StoreError
from genesis.store.base import (
    CachePolicy,
    ConditionRefused,
    ObjectInfo,
    PerProcess,
    StoredObject,
    WriteCondition,
    settle,
)
from genesis.store.http import answer_of, answered, connect
from genesis.store.http_transport import check_status, connection_errors, working_for
from genesis.store.limits import Meter, RetryPolicy, TimeLimit
from genesis.store.resuming import (
    MAX_OBJECT_BYTES,
    Download,
    opaque_etag,
    parse_content_range,
    parse_date,
    parse_retry_after_s,
    parse_size,
)
from genesis.store.retrying import Retrier, TransientError
from genesis.store.s3_presigning import BucketRequest, SignedAddress
from manifests import InvalidDocumentError, check_key

T = TypeVar("T")
Page: TypeAlias = tuple[list[ObjectInfo], bool]
"""Objects, and whether no page follows."""

MOST_ASKED: Final = 32
"""Addresses that are asked for at once."""
_MOST_KEPT: Final = 4096
_MOST_LISTED: Final = 512
_USED_SHARE: Final = 0.75
"""Of an address's life, after which another one is asked for."""
_MAX_PAGE_BYTES: Final = 4 << 20
_BLOCK_BYTES: Final = 256 << 10
_TRANSIENT: Final = frozenset({408, 409, 425, 429, 500, 502, 503, 504})
_REFUSED: Final = frozenset({400, 401, 403})
_ABSENT: Final = frozenset({404, 410})


class AddressSource(Protocol):
    """Signs requests for this node."""

    def addresses(self, requests: Sequence[BucketRequest]) -> Sequence[SignedAddress]:
        """Returns an address for each request, in their order; raises GenesisError."""


class PresignedStore:
    """The part of a bucket that a source signs addresses for; see the module's docstring for what it guarantees.

    ``url`` names it, for people. ``is_signed`` says of an object that was listed whether the source signs reads of it:
    one that it refuses would cost those that are asked for together with it.
    """

    def __init__(
        self,
        url: str,
        source: AddressSource,
        *,
        policy: RetryPolicy | None = None,
        clock: Callable[[], float] = time.monotonic,
        is_signed: Callable[[str], bool] = lambda _key: True,
    ) -> None:
        self._url = url
        self._source = source
        self._is_signed = is_signed
        self._policy = policy or RetryPolicy()
        self._retrier = Retrier(self._policy)
        self._meter = Meter()
        self._client = PerProcess(lambda: connect(self._policy))
        self._clock = clock
        self._guard = threading.Lock()
        self._kept: OrderedDict[BucketRequest, tuple[SignedAddress, float]] = OrderedDict()  # And when it is used up.
        self._listed: OrderedDict[str, None] = OrderedDict()

    @property
    def url(self) -> str:
        """The bucket, for people."""
        return self._url

    @property
    def conditional_writes(self) -> bool:
        """True: whoever signs has probed that (it would refuse to sign otherwise)."""
        return True

    @property
    def received_bytes(self) -> int:
        """Bytes of objects this process has received, those of attempts that failed too."""
        return self._meter.received_bytes

    def get(self, key: str, *, max_bytes: int | None = None) -> StoredObject:
        """See `ReadableStore.get`."""
        most = MAX_OBJECT_BYTES if max_bytes is None else min(max_bytes, MAX_OBJECT_BYTES)
        request = BucketRequest("get", check_key(key))
        download = Download(self._name(key), self._policy, self._meter, max_bytes=most)

        def attempt() -> StoredObject:
            held = download.held
            ask = {"Range": f"bytes={held.size_bytes}-"} if held.resumable_etag is not None else {}
            with self._answer("GET", request, ask) as response:
                if response.status_code in _ABSENT:
                    raise ObjectNotFoundError(f"expected an object {key!r} in {self._url}, found none")
                check_status(response, self._name(key), 200, *((206, 412, 416) if ask else ()))
                download.begin(answer_of(response))
                for chunk in response.iter_raw():
                    download.append(chunk)
                return StoredObject(body=download.finish(), etag=_etag(response))

        try:
            return self._call("read", key, attempt, download)
        finally:
            download.discard()

    def get_if_changed(self, key: str, etag: str, *, max_bytes: int | None = None) -> StoredObject | None:
        """See `ReadableStore.get_if_changed`."""
        found = self.get(key, max_bytes=max_bytes)
        return None if found.etag and found.etag == opaque_etag(etag) else found

    def head(self, key: str) -> ObjectInfo | None:
        """See `ReadableStore.head`; a read of one byte, so that no address of its own is needed."""
        request = BucketRequest("get", check_key(key))

        def attempt() -> ObjectInfo | None:
            with self._answer("GET", request, {"Range": "bytes=0-0"}) as response:
                status = response.status_code
                if status in _ABSENT:
                    return None
                check_status(response, self._name(key), 206, 200, 416)
                size_bytes = 0 if status == 416 else _size_of(response)
                if size_bytes is None:
                    raise StoreError(f"{self._url} does not say how large {key!r} is")
                modified_at = parse_date(response.headers.get("last-modified", ""))
                return ObjectInfo(key=key, size_bytes=size_bytes, etag=_etag(response), modified_at=modified_at)

        return self._call("look at", key, attempt, self._policy.deadline())

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """See `ReadableStore.list`; a page of 1,000 names a request."""
        after = ""
        while True:
            page, is_last = self._page(prefix, after)
            self._note_listed([info.key for info in page])
            yield from page
            if is_last or not page:
                return
            after = page[-1].key

    def put(
        self, key: str, body: Buffer, *, cache: CachePolicy, if_absent: bool = False, if_match: str | None = None
    ) -> str:
        """See `Store.put`; the cache policy is the signer's, and ``if_match`` cannot be asked for."""
        condition = WriteCondition(if_absent, if_match)
        if if_match is not None:
            raise StoreError(f"cannot write {self._name(key)}: expected no If-Match, which nobody signs here")
        view = memoryview(body).cast("B")
        request = BucketRequest("put", check_key(key), size_bytes=view.nbytes, if_absent=if_absent)

        def attempt() -> str:
            with self._answer("PUT", request, {}, view) as response:
                if response.status_code == 412:
                    raise ConditionRefused(key)
                check_status(response, self._name(key), 200, 201, 204)
                response.read()
                return _etag(response)

        try:
            return self._call("write", key, attempt, self._policy.deadline(view.nbytes))
        except ConditionRefused:
            return settle(self._name(key), condition, self._found(key), view)
        finally:
            with self._guard:
                self._kept.pop(request, None)  # Its attempts share an address; another write asks for its own.

    def delete(self, key: str) -> None:
        """See `Store.delete`."""
        request = BucketRequest("delete", check_key(key))

        def attempt() -> None:
            with self._answer("DELETE", request, {}) as response:
                if response.status_code not in _ABSENT:
                    check_status(response, self._name(key), 200, 204)

        self._call("delete", key, attempt, self._policy.deadline())

    def close(self) -> None:
        """Closes the connections; the next call opens new ones."""
        client = self._client.take()
        if client is not None:
            client.close()

    # -- requests ------------------------------------------------------------------------------------------------------

    @contextmanager
    def _answer(
        self, method: str, request: BucketRequest, headers: dict[str, str], body: memoryview | None = None
    ) -> Iterator[httpx.Response]:
        """The bucket's answer to a signed request, its body unread; what may pass is raised as `TransientError`."""
        address, is_kept = self._address(request)
        all_headers = {**headers, **dict(address.headers)}
        client, name = self._client.get(), self._name(request.key)
        if body is None:
            with answered(client, method, address.url, all_headers, name) as response:
                self._check_passing(response, request, is_kept=is_kept)
                yield response
            return
        blocks = (bytes(body[start : start + _BLOCK_BYTES]) for start in range(0, len(body), _BLOCK_BYTES))
        response = client.send(
            client.build_request(method, address.url, headers=all_headers, content=blocks), stream=True
        )
        try:
            self._check_passing(response, request, is_kept=is_kept)
            yield response
        finally:
            response.close()

    def _check_passing(self, response: httpx.Response, request: BucketRequest, *, is_kept: bool) -> None:
        status = response.status_code
        if status in _TRANSIENT:
            raise TransientError(
                f"answered {status}", retry_after_s=parse_retry_after_s(response.headers.get("retry-after", ""))
            )
        if status in _REFUSED:
            with self._guard:
                self._kept.pop(request, None)
            if is_kept:
                raise TransientError(f"answered {status} to an address signed before; asking for another")
            raise StoreAccessError(
                f"cannot {request.kind} {self._name(request.key)}: the bucket refuses a signed address ({status}); "
                "check the clocks and the credentials of whoever signs"
            )

    def _call(self, action: str, key: str, attempt: Callable[[], T], limit: TimeLimit) -> T:
        what = f"{action} {self._name(key)}"

        def once() -> T:
            with connection_errors(what), working_for(limit):
                return attempt()

        return self._retrier.call(what, once, limit)

    def _found(self, key: str) -> StoredObject | None:
        try:
            return self.get(key)
        except ObjectNotFoundError:
            return None

    def _page(self, prefix: str, after: str) -> Page:
        request = BucketRequest("list", prefix, after=after)

        def attempt() -> Page:
            with self._answer("GET", request, {}) as response:
                check_status(response, self._name(prefix), 200)
                body = bytearray()
                for chunk in response.iter_raw():
                    body += chunk
                    if len(body) > _MAX_PAGE_BYTES:
                        raise StoreError(f"{self._url}: expected a listing of at most {_MAX_PAGE_BYTES} bytes")
                self._meter.received(len(body))
                return parse_listing(bytes(body), prefix)

        return self._call("list", prefix, attempt, self._policy.deadline())

    def _name(self, key: str) -> str:
        return f"{self._url}/{key}"

    # -- addresses -----------------------------------------------------------------------------------------------------

    def _address(self, request: BucketRequest) -> tuple[SignedAddress, bool]:
        """Returns an address of the request, and whether it is one that was kept."""
        with self._guard:
            found = self._kept.get(request)
            if found is not None and self._clock() < found[1]:
                return found[0], True
            requests = [request, *(self._neighbours(request) if request.kind == "get" else ())]
        asked_at = self._clock()
        signed = self._source.addresses(requests)
        if len(signed) != len(requests):
            raise StoreError(f"{self._url}: expected {len(requests)} signed addresses, found {len(signed)}")
        with self._guard:
            for each, address in zip(requests, signed, strict=True):
                self._kept[each] = (address, asked_at + _USED_SHARE * address.life_s)
                self._kept.move_to_end(each)
                self._listed.pop(each.key, None)
            while len(self._kept) > _MOST_KEPT:
                self._kept.popitem(last=False)
        return signed[0], False

    def _neighbours(self, request: BucketRequest) -> Sequence[BucketRequest]:
        """Objects listed beside one that is to be read, which are likely to be read next."""
        self._listed.pop(request.key, None)
        folder = request.key.rpartition("/")[0]
        beside = [key for key in self._listed if key.rpartition("/")[0] == folder]
        return [BucketRequest("get", key) for key in beside[-(MOST_ASKED - 1) :]]

    def _note_listed(self, keys: Sequence[str]) -> None:
        with self._guard:
            for key in keys[-_MOST_LISTED:]:
                if self._is_signed(key) and BucketRequest("get", key) not in self._kept:
                    self._listed[key] = None
                    self._listed.move_to_end(key)
            while len(self._listed) > _MOST_LISTED:
                self._listed.popitem(last=False)


def parse_listing(body: bytes, prefix: str) -> Page:
    """Reads a page of ListObjectsV2: the objects, named from ``prefix`` on, and whether it is the last page.

    Addresses are signed below the store's own prefix, which comes before ``prefix`` in the names and is cut off. What
    no key can name is left out.

    Raises:
        StoreError: it is no such page.
    """
    try:
        root = ElementTree.fromstring(body)
        space = root.tag[: root.tag.index("}") + 1] if root.tag.startswith("{") else ""
        is_encoded = root.findtext(f"{space}EncodingType") == "url"
        listed = _text(root.findtext(f"{space}Prefix") or "", is_encoded=is_encoded)
        if not listed.endswith(prefix):
            raise ValueError(f"it lists {listed!r}")
        base = listed.removesuffix(prefix) if prefix else listed
        found = []
        for entry in root.findall(f"{space}Contents"):
            key = _text(entry.findtext(f"{space}Key") or "", is_encoded=is_encoded)
            size_bytes = parse_size(entry.findtext(f"{space}Size") or "")
            if not key.startswith(listed) or size_bytes is None:
                raise ValueError(f"it lists {key!r} of {size_bytes} bytes")
            modified_at = datetime.fromisoformat(entry.findtext(f"{space}LastModified") or "").astimezone(UTC)
            etag = opaque_etag(entry.findtext(f"{space}ETag") or "") or ""
            key = key.removeprefix(base)
            try:
                check_key(key)
            except InvalidDocumentError:
                continue
            found.append(ObjectInfo(key=key, size_bytes=size_bytes, etag=etag, modified_at=modified_at))
        return found, root.findtext(f"{space}IsTruncated") != "true"
    except (ElementTree.ParseError, ValueError, OverflowError) as error:
        raise StoreError(f"expected a listing of a bucket below {prefix!r}, found something else: {error}") from None


def _text(value: str, *, is_encoded: bool) -> str:
    return unquote(value.replace("+", " "), errors="strict") if is_encoded else value


def _etag(response: httpx.Response) -> str:
    return opaque_etag(response.headers.get("etag", "")) or ""


def _size_of(response: httpx.Response) -> int | None:
    part = parse_content_range(response.headers.get("content-range", ""))
    return part.total if part is not None else parse_size(response.headers.get("content-length", ""))

"""Stores over addresses that somebody else signs, against a real server that checks every signature."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

import httpx
import pytest

from genesis.errors import ObjectNotFoundError, PreconditionFailedError, StoreAccessError, StoreError
from genesis.store.base import CachePolicy
from genesis.store.presigned import MOST_ASKED, PresignedStore, parse_listing
from genesis.store.s3 import S3Store
from genesis.store.s3_presigning import BucketRequest, S3Presigner, SignedAddress
from tests.support.s3_servers import Server, moto_s3, point_boto3_at


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with moto_s3("bucket", verifies=True) as running:
        yield running


class Source:
    """Signs whatever is asked for, and remembers what that was."""

    def __init__(self, presigner: S3Presigner, life_s: int = 600) -> None:
        self.presigner = presigner
        self.life_s = life_s
        self.asked: list[Sequence[BucketRequest]] = []
        self.lives_s: dict[str, int] = {}  # By key, where it is not `life_s`.
        self.said_life_s: float | None = None

    def addresses(self, requests: Sequence[BucketRequest]) -> list[SignedAddress]:
        self.asked.append(tuple(requests))
        found = [self.presigner.sign(each, self.lives_s.get(each.key, self.life_s)) for each in requests]
        return found if self.said_life_s is None else [replace(each, life_s=self.said_life_s) for each in found]


@pytest.fixture
def source(server: Server, monkeypatch: pytest.MonkeyPatch) -> Source:
    point_boto3_at(server, None, monkeypatch)
    return Source(S3Presigner(f"s3://bucket/run-{time.time_ns()}"))


def test_objects_are_put_read_listed_and_removed_without_a_key(source: Source) -> None:
    store = PresignedStore("the bucket", source)
    etag = store.put("rounds/a", b"12345", cache=CachePolicy.IMMUTABLE, if_absent=True)
    assert store.get("rounds/a").body == b"12345"
    assert store.get("rounds/a").etag == etag
    assert S3Store(source.presigner.url).get("rounds/a").body == b"12345"
    head = store.head("rounds/a")
    assert head is not None
    assert (head.size_bytes, head.etag) == (5, etag)
    assert head.modified_at is not None
    assert abs(head.modified_at.timestamp() - time.time()) < 60
    [info] = store.list("rounds/")
    assert (info.key, info.size_bytes, info.etag) == ("rounds/a", 5, etag)
    assert store.head("rounds/b") is None
    with pytest.raises(ObjectNotFoundError):
        store.get("rounds/b")
    store.delete("rounds/a")
    assert list(store.list("rounds/")) == []


def test_a_put_where_there_is_one_is_refused_unless_it_is_the_same(source: Source) -> None:
    store = PresignedStore("the bucket", source)
    store.put("a", b"first", cache=CachePolicy.IMMUTABLE, if_absent=True)
    store.put("a", b"first", cache=CachePolicy.IMMUTABLE, if_absent=True)  # Its answer was lost.
    with pytest.raises(PreconditionFailedError):
        store.put("a", b"other", cache=CachePolicy.IMMUTABLE, if_absent=True)
    assert store.get("a").body == b"first"


def test_what_is_larger_than_expected_is_not_read(source: Source) -> None:
    store = PresignedStore("the bucket", source)
    store.put("a", bytes(1000), cache=CachePolicy.IMMUTABLE, if_absent=True)
    with pytest.raises(StoreError, match="at most 999"):
        store.get("a", max_bytes=999)


def test_an_address_is_good_for_its_request_alone(source: Source) -> None:
    request = BucketRequest("put", "rounds/a", size_bytes=5)
    address = source.presigner.sign(request, 600)
    headers = dict(address.headers)
    with httpx.Client() as client:

        def status(body: bytes, **changes: str | None) -> int:
            wanted = {name: value for name, value in (headers | changes).items() if value is not None}
            return client.put(address.url, content=body, headers=wanted).status_code

        assert status(b"123456", **{"Content-Length": "6"}) == 403
        assert status(b"12345", **{"If-None-Match": None}) == 403
        assert client.get(address.url).status_code == 403
        assert (
            client.put(address.url.replace("rounds/a", "rounds/b"), content=b"12345", headers=headers).status_code
            == 403
        )
        assert status(b"12345") == 200
        assert status(b"54321") == 412
    assert S3Store(source.presigner.url).get("rounds/a").body == b"12345"


def test_what_is_not_signed_costs_nothing_that_is(source: Source) -> None:
    store = PresignedStore("the bucket", source, is_signed=lambda key: "stray" not in key)
    for name in ("a", "b", "stray"):
        store.put(f"rounds/{name}", b"x", cache=CachePolicy.IMMUTABLE, if_absent=True)
    source.asked.clear()
    assert len(list(store.list("rounds/"))) == 3
    store.get("rounds/a")
    assert {each.key for each in source.asked[-1]} == {"rounds/a", "rounds/b"}


def test_addresses_come_together_and_are_renewed_before_they_expire(source: Source) -> None:
    now_s = 0.0
    store = PresignedStore("the bucket", source, clock=lambda: now_s)
    for number in range(5):
        store.put(f"rounds/{number}", b"x", cache=CachePolicy.IMMUTABLE, if_absent=True)
    source.asked.clear()
    assert len(list(store.list("rounds/"))) == 5
    for number in range(5):
        store.get(f"rounds/{number}")
    assert [len(each) for each in source.asked] == [1, 5]
    assert max(len(each) for each in source.asked) <= MOST_ASKED
    now_s = 0.74 * source.life_s
    store.get("rounds/0")
    assert len(source.asked) == 2
    now_s = 0.76 * source.life_s
    store.get("rounds/0")
    assert len(source.asked) == 3


def test_an_address_that_has_expired_is_asked_for_again(source: Source) -> None:
    store = PresignedStore("the bucket", source)
    for name in ("a", "b"):
        store.put(f"rounds/{name}", b"x", cache=CachePolicy.IMMUTABLE, if_absent=True)
    assert len(list(store.list("rounds/"))) == 2
    source.said_life_s, source.lives_s = 600.0, {"rounds/b": 1}
    store.get("rounds/a")  # Both addresses come together; b's is not used before it has expired.
    source.lives_s = {}
    source.asked.clear()
    time.sleep(2.1)
    assert store.get("rounds/b").body == b"x"
    assert len(source.asked) == 1


def test_whoever_signs_with_another_key_is_told_so(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "another")
    store = PresignedStore("the bucket", Source(S3Presigner(source.presigner.url)))
    with pytest.raises(StoreAccessError, match="refuses a signed address"):
        store.get("a")


def test_many_threads_share_a_store(source: Source) -> None:
    store = PresignedStore("the bucket", source)
    errors: list[Exception] = []

    def put_and_get(number: int) -> None:
        try:
            store.put(f"rounds/{number}", bytes([number]), cache=CachePolicy.IMMUTABLE, if_absent=True)
            assert store.get(f"rounds/{number}").body == bytes([number])
        except Exception as error:  # noqa: BLE001 - shown below
            errors.append(error)

    threads = [threading.Thread(target=put_and_get, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"<html></html>",
        b"<ListBucketResult><Prefix>other/</Prefix></ListBucketResult>",
        b"<ListBucketResult><Prefix>p/rounds/</Prefix><Contents><Key>q</Key><Size>1</Size></Contents></ListBucketResult>",
        b"<ListBucketResult><Prefix>p/rounds/</Prefix><Contents><Key>p/rounds/a</Key><Size>-1</Size></Contents>"
        b"</ListBucketResult>",
        b"<ListBucketResult><Prefix>p/rounds/</Prefix><Contents><Key>p/rounds/a</Key><Size>1</Size>"
        b"<LastModified>yesterday</LastModified></Contents></ListBucketResult>",
    ],
)
def test_what_is_no_listing_is_refused(body: bytes) -> None:
    with pytest.raises(StoreError, match="expected a listing"):
        parse_listing(body, "rounds/")

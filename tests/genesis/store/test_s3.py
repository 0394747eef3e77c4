"""What only S3 has: headers, parts, gateways without conditions, and the many ways access fails."""

from __future__ import annotations

import hashlib
import logging
import random
import uuid
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest

from genesis.errors import (
    PreconditionFailedError,
    StoreAccessError,
    StoreError,
    StoreFullError,
    StoreUnavailableError,
    UsageError,
)
from genesis.store import CachePolicy
from genesis.store.cloudfront import Invalidator
from genesis.store.s3 import S3Store
from tests.genesis.store.conftest import BUCKET, QUICK
from tests.support.fault_proxy import FAST_FAULTS, Fault, FaultProxy, Reply, Request
from tests.support.s3_servers import Server, boto3_client, rclone_s3, s3_client

NONE = CachePolicy.NONE
PART = 5 << 20
PARTS = {"multipart_threshold_bytes": 1 << 20, "part_bytes": PART}
BIG = random.Random(2).randbytes(2 * PART + 12_345)


def uploads(server: Server) -> list[object]:
    with closing(s3_client(server)) as client:
        return list(client.list_multipart_uploads(Bucket=BUCKET).get("Uploads", []))


def is_put(request: Request) -> bool:
    return request.method == "PUT" and "uploadId" not in request.path


@pytest.fixture
def proxied(moto, s3_env, start_proxy):
    """Starts a proxy before moto's server and points boto3 at it."""

    def start(**options: object) -> FaultProxy:
        proxy = start_proxy(moto.port, **options)
        s3_env(moto, proxy.port)
        return proxy

    return start


@pytest.mark.slow
def test_headers_and_stores_of_one_bucket(moto, s3_env, s3_store, fresh_url):
    s3_env(moto)
    store = s3_store()
    store.put("shard_0.pt", b"1", cache=CachePolicy.IMMUTABLE)
    store.put("manifest.json", b"{}", cache=CachePolicy.SHORT)
    S3Store(store.url, policy=QUICK, multipart_threshold_bytes=0).put("big.zst", b"1", cache=CachePolicy.IMMUTABLE)
    client = s3_client(moto)
    prefix = store.url.removeprefix(f"s3://{BUCKET}/")
    heads = {
        key: client.head_object(Bucket=BUCKET, Key=f"{prefix}/{key}")
        for key in ("shard_0.pt", "manifest.json", "big.zst")
    }
    assert {key: (head["CacheControl"], head["ContentType"]) for key, head in heads.items()} == {
        "shard_0.pt": ("public, max-age=31536000, immutable", "application/octet-stream"),
        "manifest.json": ("public, max-age=60, must-revalidate", "application/json"),
        "big.zst": ("public, max-age=31536000, immutable", "application/zstd"),
    }
    url = fresh_url()
    first, second = s3_store(url + "/a"), s3_store(url + "/ab")
    first.put("k", b"1", cache=NONE)
    second.put("k", b"2", cache=NONE)
    assert [info.key for info in first.list()] == ["k"]
    assert first.get("k").body == b"1"


@pytest.mark.slow
def test_a_listing_of_many_pages(tmp_path, s3_env, s3_store):
    folder = tmp_path / BUCKET / "pages"
    (folder / "packed").mkdir(parents=True)
    keys = [f"shard_{number}.pt" for number in range(1205)] + [f"packed/shard_{number}.zst" for number in range(1205)]
    for name in (*keys, "not a key"):
        (folder / name).touch()
    with rclone_s3(tmp_path, BUCKET) as server:
        s3_env(server)
        store = s3_store(f"s3://{BUCKET}/pages")
        assert [info.key for info in store.list()] == sorted(keys)
        assert len(list(store.list("packed/shard_1"))) == 316


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["moto", "rclone"])
def test_large_bodies_go_in_parts(kind, request, s3_env, s3_store):
    server = request.getfixturevalue(kind)
    s3_env(server)
    store = s3_store(**PARTS)
    etag = store.put("k", memoryview(BIG), cache=NONE, if_absent=True)
    assert store.get("k").body == BIG
    assert store.put("k", BIG, cache=NONE, if_absent=True) == etag
    changed = store.put("k", BIG[:-1], cache=NONE, if_match=etag)
    assert changed != etag
    for condition in ({"if_absent": True}, {"if_match": etag}):
        with pytest.raises(PreconditionFailedError):
            store.put("k", BIG[:-2], cache=NONE, **condition)
    assert store.get("k").body == BIG[:-1]
    assert uploads(server) == []


@pytest.mark.slow
def test_parts_that_come_to_nothing_are_thrown_away(moto, proxied, s3_store):
    def refuse(request: Request) -> Reply | None:
        full = b"<Error><Code>QuotaExceeded</Code><Message>no more</Message></Error>"
        return Reply(403, full) if "partNumber=2" in request.path else None

    proxied(answer=refuse)
    with pytest.raises(StoreFullError, match="QuotaExceeded"):
        s3_store(**PARTS).put("k", BIG, cache=NONE)
    assert uploads(moto) == []


@pytest.mark.slow
@pytest.mark.parametrize("condition", [{}, {"if_absent": True}])
def test_faults_at_every_request_of_an_upload(condition, moto, proxied, s3_store):
    """Requests of a put in parts: start, three parts, complete; each suffers each fault once."""
    proxy = proxied()
    store = s3_store(**PARTS)
    assert store.conditional_writes
    store.put("warm", bytes(2 << 20), cache=NONE, if_absent=True)
    for fault in (Fault.CUT_BEFORE, Fault.LOST_ACK, Fault.LATE_500):
        proxy.script(step for _ in range(5) for step in (fault, None))
        key = f"{fault.name}-k"
        etag = store.put(key, BIG, cache=NONE, **condition)
        found = store.get(key)
        assert found.body == BIG
        assert found.etag == etag
    assert proxy.total_injected >= 13


@pytest.mark.slow
def test_a_lost_acknowledgement_and_then_another_writer(moto, proxied, s3_store):
    """The retry must not overwrite what the other wrote on top of the write whose answer was lost."""
    proxy = proxied(only=is_put)
    store = s3_store()
    assert store.conditional_writes
    first = store.put("k", b"1", cache=NONE)
    bucket_key = f"{store.url}/k".removeprefix(f"s3://{BUCKET}/")
    sent: list[Request] = []

    def other_writes_before_the_second(request: Request) -> None:
        sent.append(request)
        if len(sent) == 2:
            with closing(s3_client(moto)) as client:
                client.put_object(Bucket=BUCKET, Key=bucket_key, Body=b"other")

    proxy.script([Fault.LOST_ACK])
    proxy.watch = lambda request: other_writes_before_the_second(request) if is_put(request) else None
    with pytest.raises(PreconditionFailedError):
        store.put("k", b"2", cache=NONE, if_match=first)
    assert store.get("k").body == b"other"


@pytest.mark.slow
def test_a_conflict_is_tried_again(proxied, s3_store):
    conflicts = iter([True])

    def conflict_once(request: Request) -> Reply | None:
        conditional = is_put(request) and "If-None-Match" in request.headers and "/probe/" not in request.path
        conflict = Reply(409, b"<Error><Code>ConditionalRequestConflict</Code></Error>")
        return conflict if conditional and next(conflicts, False) else None

    proxied(answer=conflict_once)
    store = s3_store()
    etag = store.put("k", b"1", cache=NONE, if_absent=True)
    assert store.get("k").etag == etag
    assert next(conflicts, None) is None, "the conflict happened"


@pytest.mark.slow
def test_servers_that_hang_and_the_deadline(proxied, s3_store):
    proxy = proxied()
    store = s3_store(policy=replace(QUICK, read_timeout_s=0.2))
    proxy.script([None, Fault.HANG, None, Fault.LOST_ACK_HANG])
    store.put("k", b"1", cache=NONE)
    store.put("k", b"2", cache=NONE)
    store.put("k", b"3", cache=NONE)
    assert store.get("k").body == b"3"
    assert proxy.total_injected == 2
    proxied(rate=1.0, faults=[Fault.SLOW_DOWN]).script([None])
    store = s3_store(policy=replace(QUICK, deadline_s=1))
    store.head("k")  # Connected: making a client may take longer than the deadline.
    with pytest.raises(StoreUnavailableError, match=r"SlowDown.*attempts: \d+"):
        store.put("k", b"1", cache=NONE)


@pytest.mark.slow
def test_a_checksum_is_sent_and_given_up_for_gateways_that_refuse_it(proxied, s3_store):
    def refuse_crc(request: Request) -> Reply | None:
        if any("crc32" in name.lower() for name in request.headers):
            return Reply(400, b"<Error><Code>InvalidArgument</Code><Message>unknown checksum header</Message></Error>")
        return None

    seen: list[Request] = []
    proxied(answer=lambda request: seen.append(request) or refuse_crc(request))
    store = s3_store()
    store.put("k", b"123456789", cache=NONE)
    store.put("k2", b"1", cache=NONE)
    assert store.get("k").body == b"123456789"
    puts = [{name.lower(): value for name, value in request.headers.items()} for request in seen if is_put(request)]
    assert [("x-amz-checksum-crc32" in put, "content-md5" in put) for put in puts] == [
        (True, False), (False, True), (False, True),
    ]  # fmt: skip
    assert puts[0]["x-amz-checksum-crc32"] == "y/Q5Jg=="  # CRC-32's check value, cbf43926, in base64.


@pytest.mark.slow
def test_a_body_that_is_not_its_etags_or_checksums_is_read_again(proxied, s3_store):
    """So is everything, once, on a gateway whose ETags look like an MD5 and are not."""
    cut, other = b"right, but cut", b"another kind of ETag"
    right, wrong = '"' + hashlib.md5(cut).hexdigest() + '"', '"' + "0" * 32 + '"'
    crc32 = ("x-amz-checksum-crc32", "y/Q5Jg==")
    replies = [
        *(Reply(200, cut[:5], (("ETag", right),)), Reply(200, cut, (("ETag", right),))),
        *(Reply(200, other, (("ETag", wrong),)), Reply(200, other, (("ETag", wrong),))),
        Reply(200, b"once more", (("ETag", wrong),)),
        *(Reply(500, b"", (crc32,)), Reply(200, b"123456789", (("ETag", '""'), crc32))),
        *(
            Reply(200, b"126456789", (("ETag", '"opaque"'), crc32)),
            Reply(200, b"123456789", (("ETag", '"opaque"'), crc32)),
        ),
    ]
    proxied(answer=lambda request: replies.pop(0))
    store = s3_store()
    assert [store.get("k").body for _ in range(3)] == [cut, other, b"once more"]
    assert s3_store().get("k").body == b"123456789"
    assert replies == []


@pytest.mark.slow
def test_a_gateway_that_ignores_conditions(rclone, s3_env, s3_store):
    s3_env(rclone)
    store = s3_store()
    assert not store.conditional_writes
    assert list(store.list()) == []
    # On a server without conditions, what another writes between the write and the second look is noticed.
    other = s3_client(rclone)
    with FaultProxy(rclone.port) as proxy:
        s3_env(rclone, proxy.port)
        store = s3_store()
        assert not store.conditional_writes
        key = f"{store.url}/k".removeprefix(f"s3://{BUCKET}/")
        heads: list[Request] = []

        def write_before_the_second_look(request: Request) -> None:
            if request.method == "HEAD" and request.path.endswith("/k"):
                heads.append(request)
                if len(heads) == 2:
                    other.put_object(Bucket=BUCKET, Key=key, Body=b"other")

        proxy.watch = write_before_the_second_look
        with pytest.raises(PreconditionFailedError, match="another writer"):
            store.put("k", b"mine", cache=NONE, if_absent=True)
    assert len(heads) >= 2


def test_a_gateway_that_does_not_implement_conditions(proxied, s3_store):
    def not_implemented(request: Request) -> Reply | None:
        conditional = {"if-none-match", "if-match"} & {name.lower() for name in request.headers}
        return Reply(501, b"<Error><Code>NotImplemented</Code></Error>") if conditional else None

    proxied(answer=not_implemented)
    store = s3_store()
    assert not store.conditional_writes
    etag = store.put("k", b"1", cache=NONE, if_absent=True)
    with pytest.raises(PreconditionFailedError):
        store.put("k", b"2", cache=NONE, if_absent=True)
    store.put("k", b"3", cache=NONE, if_match=etag)
    assert store.get("k").body == b"3"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["moto", "rclone"])
def test_no_such_bucket(kind, request, s3_env, s3_store):
    s3_env(request.getfixturevalue(kind))
    store = s3_store("s3://no-such-bucket/x")
    for call in (
        *(lambda: store.get("k"), lambda: store.head("k"), lambda: list(store.list()), lambda: store.delete("k")),
        *(lambda: store.put("k", b"", cache=NONE), lambda: store.put("k", b"", cache=NONE, if_absent=True)),
    ):
        with pytest.raises(StoreAccessError, match=r"no-such-bucket.*NoSuchBucket"):
            call()


@pytest.mark.parametrize(
    ("variable", "says"),
    [("AWS_ACCESS_KEY_ID", "InvalidAccessKeyId"), ("AWS_SECRET_ACCESS_KEY", "SignatureDoesNotMatch")],
)
def test_wrong_credentials(variable, says, rclone, s3_env, s3_store, monkeypatch):
    s3_env(rclone)
    monkeypatch.setenv(variable, "wrong-one")
    store = s3_store()
    for call in (lambda: store.get("k"), lambda: store.put("k", b"", cache=NONE), lambda: list(store.list())):
        with pytest.raises(StoreAccessError, match=rf"{says}.*AWS_ACCESS_KEY_ID"):
            call()
    with pytest.raises(StoreAccessError, match="403"):
        store.head("k")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("environment", "error", "says"),
    [
        (
            {"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": ""},
            StoreAccessError,
            "usable AWS credentials.*AWS_PROFILE",
        ),
        ({"AWS_PROFILE": "nobody"}, StoreAccessError, r"nobody.*AWS_PROFILE"),
        ({"AWS_ENDPOINT_URL": "no address"}, UsageError, "AWS_ENDPOINT_URL"),
        ({"AWS_ENDPOINT_URL": "http://nowhere.invalid:9"}, StoreUnavailableError, "http://nowhere.invalid:9"),
    ],
)
def test_an_environment_that_leads_nowhere(environment, error, says, moto, s3_env, s3_store, monkeypatch):
    s3_env(moto)
    for name, value in environment.items():
        monkeypatch.setenv(name, value) if value else monkeypatch.delenv(name)
    with pytest.raises(error, match=says):
        s3_store().get("k")


@pytest.mark.parametrize(
    ("status", "code", "error", "says"),
    [
        (403, "AccessDenied", StoreAccessError, "s3:PutObject"),
        (400, "ExpiredToken", StoreAccessError, "sign in again"),
        (301, "PermanentRedirect", StoreAccessError, "AWS_DEFAULT_REGION"),
        (507, "InsufficientStorage", StoreFullError, "make room"),
        (400, "EntityTooLarge", StoreError, "EntityTooLarge"),
    ],
)
def test_refusals_are_errors_at_once(status, code, error, says, proxied, s3_store):
    asked: list[Request] = []

    def refuse(request: Request) -> Reply | None:
        if request.method == "HEAD":  # A redirected client asks where the bucket is.
            return Reply(404)
        asked.append(request)
        return Reply(status, f"<Error><Code>{code}</Code><Message>so it is</Message></Error>".encode())

    proxied(answer=refuse)
    with pytest.raises(error, match=rf"{code}") as caught:
        s3_store().put("k", b"", cache=NONE)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(asked) == 1


@pytest.mark.slow
def test_two_hundred_calls_through_faults(proxied, s3_store):
    """Whatever fails on the way, every call succeeds and the store ends as a model of it says."""
    proxy = proxied(seed=4, rate=0.3, faults=FAST_FAULTS)
    store = s3_store()
    draw = random.Random(6)
    model: dict[str, tuple[bytes, str]] = {}
    for number in range(200):
        key, body = f"k{draw.randrange(12)}", b"%d:" % number + draw.randbytes(draw.randrange(3000))
        action = draw.choice(["put", "swap", "create", "get", "head", "delete"])
        there = model.get(key)
        if action == "delete":
            store.delete(key)
            model.pop(key, None)
        elif action == "put" or (action == "create" and there is None):
            model[key] = body, store.put(key, body, cache=NONE, if_absent=action == "create")
        elif action == "swap" and there is not None:
            model[key] = body, store.put(key, body, cache=NONE, if_match=there[1])
        elif action in ("create", "swap"):
            condition = {"if_absent": True} if there else {"if_match": '"0"'}
            with pytest.raises(PreconditionFailedError):
                store.put(key, body, cache=NONE, **condition)
        elif action == "get" and there is not None:
            assert store.get(key).body == there[0]
        else:
            info = store.head(key)
            assert (info and info.etag) == (there and there[1])
    assert {info.key: info.etag for info in store.list()} == {key: etag for key, (_, etag) in model.items()}
    assert {key: store.get(key).body for key in model} == {key: body for key, (body, _) in model.items()}
    assert proxy.total_injected > 50
    assert len(proxy.injected) == 6


@pytest.fixture
def cloudfront(moto, s3_env) -> Iterator[Any]:
    s3_env(moto)
    with closing(boto3_client(moto, "cloudfront")) as client:
        yield client


@pytest.fixture
def distribution(cloudfront: Any) -> str:
    origin = {"Id": "o", "DomainName": "bucket.s3.amazonaws.com", "S3OriginConfig": {"OriginAccessIdentity": ""}}
    config = {
        "CallerReference": uuid.uuid4().hex,
        "Comment": "",
        "Enabled": True,
        "Origins": {"Quantity": 1, "Items": [origin]},
        "DefaultCacheBehavior": {"TargetOriginId": "o", "ViewerProtocolPolicy": "allow-all"},
    }
    name: str = cloudfront.create_distribution(DistributionConfig=config)["Distribution"]["Id"]
    return name


def sent(cloudfront: Any, distribution: str) -> list[list[str]]:
    listed = cloudfront.list_invalidations(DistributionId=distribution)["InvalidationList"].get("Items", [])
    got = [cloudfront.get_invalidation(DistributionId=distribution, Id=item["Id"])["Invalidation"] for item in listed]
    return [sorted(one["InvalidationBatch"]["Paths"]["Items"]) for one in got]


@pytest.mark.slow
def test_at_most_once_a_minute_the_last_not_lost_and_below_a_prefix(cloudfront, distribution):
    times_s = [100.0]
    invalidator = Invalidator(distribution, clock=lambda: times_s[-1])
    invalidator.flush()
    assert sent(cloudfront, distribution) == []
    counts = []
    for now in (100, 101, 159.9, 160, 161, 300):
        times_s.append(now)
        invalidator.published()
        counts.append(len(sent(cloudfront, distribution)))
    assert counts == [1, 1, 1, 2, 2, 3]
    times_s.append(301)
    invalidator.published()
    invalidator.flush()
    assert sent(cloudfront, distribution) == [["/manifest.json", "/tokenizer.json"]] * 4
    Invalidator(distribution, prefix="data/v1/").published()
    both = ["/data/v1/manifest.json", "/data/v1/tokenizer.json", "/manifest.json", "/tokenizer.json"]
    assert both in sent(cloudfront, distribution)


@pytest.mark.slow
def test_a_failure_is_a_warning_and_sent_later(cloudfront, distribution, monkeypatch, caplog):
    invalidator = Invalidator(distribution)
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    with caplog.at_level(logging.WARNING, "genesis"):
        invalidator.published()
    assert [distribution in record.getMessage() for record in caplog.records] == [True]
    assert sent(cloudfront, distribution) == []
    monkeypatch.delenv("AWS_PROFILE")
    invalidator.flush()
    assert len(sent(cloudfront, distribution)) == 1

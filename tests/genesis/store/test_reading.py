"""What a training node's downloads survive, over HTTP and S3, from real servers through the fault proxy."""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from genesis.errors import ObjectNotFoundError, StoreUnavailableError
from genesis.store import CachePolicy, FolderStore, ReadableStore, RetryPolicy, Throttle
from genesis.store.http import HttpStore
from tests.genesis.store.conftest import QUICK, Origin
from tests.support.fault_proxy import READ_FAULTS, FaultProxy, Reply, Request

BODY = random.Random(8).randbytes(300_000)
OTHER = random.Random(9).randbytes(280_000)
IMPATIENT = replace(QUICK, deadline_s=1.0, slowest_bytes_per_s=1e9)


class Answers:
    """Changes the server's answers to GETs one by one, by functions from request and reply to reply; notes requests."""

    def __init__(self, *changes) -> None:
        self.left = list(changes)
        self.requests: list[Request] = []

    @property
    def ranges(self) -> list[str | None]:
        return [request.header("range") for request in self.requests]

    def __call__(self, request: Request, reply: Reply) -> Reply:
        if request.method != "GET":
            return reply
        self.requests.append(request)
        change = self.left.pop(0) if len(self.left) > 1 else self.left[0]
        return change(request, reply)


def untouched(request: Request, reply: Reply) -> Reply:
    return reply


def cut(after: int):
    return lambda request, reply: replace(reply, cut_after=after)


def instead(status: int, body: bytes = b"", **headers: str):
    """Another answer, with the ETag of the server's unless there is one in ``headers``."""

    def change(request: Request, reply: Reply) -> Reply:
        given = {"etag": reply.header("etag"), **{name.replace("_", "-"): value for name, value in headers.items()}}
        return Reply(status, body, tuple((name, value) for name, value in given.items() if value is not None))

    return change


def weakened(then=untouched):
    def change(request: Request, reply: Reply) -> Reply:
        return then(request, reply.with_header("etag", f"W/{reply.header('etag')}"))

    return change


@pytest.fixture
def proxied(origin: Origin, start_proxy) -> Callable[..., FaultProxy]:
    """Starts a proxy before the origin."""
    return lambda **options: start_proxy(origin.server.port, **options)


@pytest.fixture
def reading(origin: Origin, proxied) -> Callable[..., tuple[str, Answers, ReadableStore]]:
    """Writes an object; gives its key, the changed answers of a proxy, and a store that reads through it."""

    def start(*changes, body: bytes = BODY, policy: RetryPolicy = QUICK) -> tuple[str, Answers, ReadableStore]:
        answers = Answers(*changes)
        return origin.put(body), answers, origin.open(proxied(alter=answers).port, policy)

    return start


@pytest.mark.slow
def test_a_cut_body_goes_on_where_it_ended(reading):
    key, answers, store = reading(cut(100_000), cut(50_000), untouched)
    found = store.get(key)
    assert found.body == BODY
    assert answers.ranges == [None, "bytes=100000-", "bytes=150000-"]
    assert store.received_bytes == len(BODY)
    assert store.get_if_changed(key, found.etag) is None


def test_an_object_replaced_meanwhile(origin, proxied, reading):
    key = origin.put(BODY)

    def cut_and_replaced(request: Request, reply: Reply) -> Reply:
        origin.put(OTHER, key)
        return replace(reply, cut_after=100_000)

    answers = Answers(cut_and_replaced, untouched)
    store = origin.open(proxied(alter=answers).port)
    assert store.get(key).body == OTHER
    assert answers.ranges[:2] == [None, "bytes=100000-"]
    key, answers, store = reading(untouched, cut(1_000), untouched)
    etag = store.get(key).etag
    origin.put(OTHER, key)
    found = store.get_if_changed(key, etag)
    assert found is not None
    assert found.body == OTHER
    assert answers.ranges == [None, None, "bytes=1000-"]


WRONG_RESTS = {  # `test_resuming` has them all.
    "refused": instead(416),
    "range ignored": instead(200, BODY),
    "another start": instead(206, BODY[99_999:], content_range="bytes 99999-299999/300000"),
    "another ETag": instead(206, OTHER[100_000:], content_range="bytes 100000-279999/280000", etag='"0"'),
    "weakened meanwhile": weakened(),
}


@pytest.mark.slow
def test_a_rest_that_is_not_the_rest(reading):
    key, answers, store = reading(untouched)
    for name, wrong in WRONG_RESTS.items():
        answers.left, answers.requests = [cut(100_000), wrong, untouched], []
        assert store.get(key).body == BODY, name
        assert answers.ranges[:2] == [None, "bytes=100000-"], name
        assert set(answers.ranges[2:]) <= {None}, name


def test_a_body_with_a_weak_etag_is_not_gone_on_with(reading):
    key, answers, store = reading(weakened(cut(100_000)), untouched)
    assert store.get(key).body == BODY
    assert answers.ranges == [None, None]


@pytest.mark.slow
def test_an_unchanged_object_is_not_sent_and_one_that_is_gone_is_told(origin, reading):
    key, answers, store = reading(untouched)
    first = store.get(key)
    received = store.received_bytes
    assert store.get_if_changed(key, first.etag) is None
    assert store.get_if_changed(key, f"W/{first.etag}") is None
    assert store.received_bytes == received
    assert [request.header("if-none-match") for request in answers.requests] == [None, first.etag, first.etag]
    origin.put(OTHER, key)
    second = store.get_if_changed(key, first.etag)
    assert second is not None
    assert second.body == OTHER
    assert second.etag != first.etag
    origin.writer.delete(key)
    with pytest.raises(ObjectNotFoundError, match=key):
        store.get_if_changed(key, second.etag)


def test_a_server_that_ignores_if_none_match(origin, proxied):
    key = origin.put(BODY)
    store = origin.open(proxied(alter=Answers(untouched, weakened(instead(200, BODY)))).port)
    etag = store.get(key).etag
    received = store.received_bytes
    assert store.get_if_changed(key, etag) is None
    assert store.received_bytes == received


@pytest.mark.slow
@pytest.mark.parametrize("ends_cut", [False, True])
def test_a_drip_comes_to_an_end(ends_cut, origin, proxied):
    """A byte now and then is an answer within every time-out; cut and gone on with, it is progress of a kind too."""
    key = origin.put(BODY)

    def drip(request: Request, reply: Reply) -> Reply:
        return replace(reply, piece_bytes=1, pause_s=0.01, cut_after=5 if ends_cut else None)

    answers = Answers(drip)
    store = origin.open(proxied(alter=answers).port, IMPATIENT)
    store.head(key)  # Connected: making a client may take longer than the deadline.
    with pytest.raises(StoreUnavailableError, match="attempts"):
        store.get(key)
    assert 0 < store.received_bytes < 1000


@pytest.mark.slow
def test_a_body_cut_again_and_again_at_its_end_comes_to_an_end(reading):
    """Nothing can be gone on with, so the same bytes come each time: they are progress once."""
    key, answers, store = reading(weakened(cut(len(BODY) - 1)), policy=replace(IMPATIENT, slowest_bytes_per_s=1e6))
    store.head(key)
    with pytest.raises(StoreUnavailableError, match="attempts"):
        store.get(key)
    assert set(answers.ranges) == {None}


@pytest.mark.slow
def test_the_wait_for_a_throttle_is_not_the_servers(web_server, web_folder):
    """At this cap the body takes longer than the deadline allows, and is received all the same."""
    FolderStore(web_folder).put("shard_900.pt", BODY, cache=CachePolicy.IMMUTABLE)
    answers = Answers(cut(150_000), untouched)
    policy, throttle = replace(QUICK, deadline_s=1.5, slowest_bytes_per_s=1e9), Throttle(100_000, burst_bytes=1_000)
    with FaultProxy(web_server.port, alter=answers) as proxy:
        store = HttpStore(f"http://127.0.0.1:{proxy.port}", policy=policy, throttle=throttle)
        assert store.get("shard_900.pt", max_bytes=len(BODY)).body == BODY
        store.close()
    assert answers.ranges == [None, "bytes=150000-"]


@pytest.mark.slow
def test_a_hundred_reads_by_threads_through_faults(origin, proxied):
    proxy = proxied(seed=3, rate=0.4, faults=READ_FAULTS, retry_after="0")
    bodies = {origin.put(body): body for body in (BODY, OTHER, b"", b"1", BODY[:70_000])}
    store = origin.open(proxy.port)

    def read(number: int) -> bool:
        key = list(bodies)[number % len(bodies)]
        return store.get(key, max_bytes=len(bodies[key])).body == bodies[key]

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(read, range(100)))
    assert set(proxy.injected) == set(READ_FAULTS)

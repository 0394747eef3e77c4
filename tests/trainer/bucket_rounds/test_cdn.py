"""Reads by way of a CDN that serves what it likes: nothing unverified is taken, and the bucket has it all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from genesis.errors import ObjectNotFoundError, StoreUnavailableError
from genesis.store.base import CachePolicy, StoredObject
from manifests.serialisation import sha256_hex
from tests.support.bucket_rounds import Interposed, Replica, folder, settings_of, together
from trainer.bucket_rounds.place import Place
from trainer.bucket_rounds.snapshots import fetch_snapshot, put_snapshot
from trainer.network.transfer import Expectation
from trainer.network.transfer.snapshot import describe_chunks


class Cdn(Interposed):
    """A folder behind a cache; ``answer`` makes what it serves of what the folder has."""

    def __init__(self, path: Path, answer: Callable[[str, bytes], bytes]) -> None:
        super().__init__(folder(path))
        self.answer = answer
        self.num_reads = 0

    def get(self, key: str, *, max_bytes: int | None = None) -> StoredObject:
        self.num_reads += 1
        found = super().get(key, max_bytes=max_bytes)
        return replace(found, body=self.answer(key, found.body))


def whole(_key: str, body: bytes) -> bytes:
    return body


def absent(key: str, _body: bytes) -> bytes:
    raise ObjectNotFoundError(f"expected an object {key}, found none")


def away(key: str, _body: bytes) -> bytes:
    raise StoreUnavailableError(f"cannot read {key}")


def flipped(_key: str, body: bytes) -> bytes:
    return body[:-3] + bytes([body[-3] ^ 1]) + body[-2:]


class Stale:
    """Serves the first object that it ever served in the place of every other."""

    def __init__(self) -> None:
        self._first: bytes | None = None

    def __call__(self, _key: str, body: bytes) -> bytes:
        self._first = self._first or body
        return self._first


@pytest.mark.parametrize(
    "answer", [whole, absent, away, flipped, Stale()], ids=["whole", "absent", "away", "bad", "stale"]
)
def test_a_round_ends_alike_whatever_a_cdn_serves(tmp_path: Path, answer: Callable[[str, bytes], bytes]) -> None:
    cdn = Cdn(tmp_path, answer)
    replicas = [Replica(settings_of(folder(tmp_path), place=Place(folder(tmp_path), "s3", cdn))) for _ in range(2)] + [
        Replica(settings_of(folder(tmp_path)))
    ]
    for _ in range(2):
        together({str(number): each.take_part for number, each in enumerate(replicas)})
    assert len({each.digest() for each in replicas}) == 1
    assert [len(each.report.members) for each in replicas[0].results] == [3, 3]
    assert cdn.num_reads >= 1
    cost = replicas[0].settings.place.cost
    assert (cost.cdn_bytes > 0) == (answer not in (absent, away))
    if answer is away:
        assert cdn.num_reads <= 8  # It rests; only reads that had begun came to it.
    if answer is whole:
        assert cost.received_bytes < 3 * cost.cdn_bytes


@pytest.mark.parametrize("answer", [whole, absent, flipped])
def test_a_snapshot_comes_whole_whatever_a_cdn_serves(tmp_path: Path, answer: Callable[[str, bytes], bytes]) -> None:
    vector = torch.arange(1000, dtype=torch.float32)
    descriptor, pages = describe_chunks({"round": 3}, {"anchor": vector})
    put_snapshot(Place(folder(tmp_path)), 3, descriptor, pages, {"anchor": vector})
    place = Place(folder(tmp_path), "s3", Cdn(tmp_path, answer))
    found = fetch_snapshot(place, 3, descriptor.digest, tmp_path / "state", lambda _: Expectation(max_bytes=1 << 20))
    assert torch.equal(found.tensors["anchor"], vector)


def test_what_a_cdn_serves_costs_the_bucket_nothing(tmp_path: Path) -> None:
    folder(tmp_path).put("a", b"12345", cache=None, if_absent=True)  # type: ignore[arg-type]
    place = Place(folder(tmp_path), "s3", Cdn(tmp_path, whole))
    assert place.get_verified("a", 10, bytes) == b"12345"
    assert (place.cost.num_reads, place.cost.received_bytes, place.cost.cdn_bytes) == (0, 0, 5)
    assert "from the CDN" in place.cost.text("s3")


def test_what_is_named_by_its_digest_is_read_at_a_cdn_and_dated_by_the_bucket(tmp_path: Path) -> None:
    bucket, cdn = folder(tmp_path / "bucket"), folder(tmp_path / "cdn")
    place, digest = Place(bucket, "s3", cdn), sha256_hex(b"12345")
    assert place.get_digested("a", 10, digest) is None
    for store in (bucket, cdn):
        store.put("a", b"12345", cache=CachePolicy.IMMUTABLE)
    found = place.get_digested("a", 10, digest)
    assert found is not None and found[0] == b"12345" and found[1] > 0
    assert (place.cost.received_bytes, place.cost.cdn_bytes) == (0, 5)
    assert place.get_digested("a", 4, digest) is None
    cdn.put("a", b"other", cache=CachePolicy.IMMUTABLE)
    again = place.get_digested("a", 10, digest)
    assert again is not None and again[0] == b"12345"
    bucket.put("a", b"other", cache=CachePolicy.IMMUTABLE)
    assert place.get_digested("a", 10, digest) is None

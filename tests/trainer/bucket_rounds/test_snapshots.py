"""What newcomers take from a bucket: what most members vouch for, chunk by chunk, whoever wrote it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from genesis.errors import StoreFullError, StoreUnavailableError
from genesis.store.base import CachePolicy
from tests.support.bucket_rounds import FAST, Interposed, Replica, folder, settings_of, together
from trainer.bucket_rounds.documents import Wish
from trainer.bucket_rounds.object_names import snapshot_prefix, wish_key
from trainer.bucket_rounds.place import Place
from trainer.bucket_rounds.snapshots import PART_CHUNKS, fetch_snapshot, put_snapshot
from trainer.errors import StateTransferError
from trainer.network.transfer import Descriptor, Expectation
from trainer.network.transfer.descriptor import CHUNK_BYTES
from trainer.network.transfer.snapshot import describe_chunks

VALUES = (PART_CHUNKS + 2) * CHUNK_BYTES // 4 + 5


def anything(descriptor: Descriptor) -> Expectation:
    return Expectation(max_bytes=1 << 28)


def stored(path: Path) -> tuple[str, torch.Tensor]:
    """Puts the snapshot of a vector that takes two objects."""
    vector = torch.arange(VALUES, dtype=torch.float32)
    descriptor, pages = describe_chunks({"round": 3}, {"anchor": vector})
    put_snapshot(Place(folder(path)), 3, descriptor, pages, {"anchor": vector})
    return descriptor.digest, vector


def test_a_snapshot_comes_back_whole_and_goes_on_after_an_interruption(tmp_path: Path) -> None:
    digest, vector = stored(tmp_path / "bucket")
    num_gets = 0

    def fail(name: str, key: str) -> None:
        nonlocal num_gets
        if name == "get" and "data-" in key:
            num_gets += 1
            if num_gets == 2:
                raise StoreUnavailableError("no answer; run the same command again")

    place = Place(Interposed(folder(tmp_path / "bucket"), fail))
    with pytest.raises(StoreUnavailableError):
        fetch_snapshot(place, 3, digest, tmp_path / "states", anything)
    found = fetch_snapshot(place, 3, digest, tmp_path / "states", anything)
    assert torch.equal(found.tensors["anchor"], vector)
    assert num_gets == 3  # The first object was not fetched again.
    again = fetch_snapshot(place, 3, digest, tmp_path / "states", anything)
    assert torch.equal(again.tensors["anchor"], vector)
    assert num_gets == 3


@pytest.mark.parametrize(
    "name",
    [
        "descriptor",
        pytest.param("pages", marks=pytest.mark.slow),
        pytest.param("data-000000", marks=pytest.mark.slow),
        "data-000001",
    ],
)
@pytest.mark.parametrize("damage", ["flipped", "short", "long", "gone"])
def test_no_byte_of_a_false_snapshot_is_used(tmp_path: Path, name: str, damage: str) -> None:
    digest, _ = stored(tmp_path)
    store, key = folder(tmp_path), snapshot_prefix(3, digest) + name
    body = bytearray(store.get(key).body)
    if damage == "gone":
        store.delete(key)
    else:
        body[len(body) // 2] ^= damage == "flipped"
        body = body[:-1] if damage == "short" else body + b"x" * (damage == "long")
        store.put(key, body, cache=CachePolicy.NONE)
    if (name, damage) == ("data-000001", "long"):  # What follows the last chunk is not looked at.
        fetch_snapshot(Place(store), 3, digest, tmp_path / "states", anything)
        return
    with pytest.raises(StateTransferError):
        fetch_snapshot(Place(store), 3, digest, tmp_path / "states", anything)


def test_what_is_larger_than_expected_is_refused_before_it_is_fetched(tmp_path: Path) -> None:
    digest, _ = stored(tmp_path)
    with pytest.raises(StateTransferError, match="at most 1000 bytes"):
        fetch_snapshot(Place(folder(tmp_path)), 3, digest, tmp_path / "states", lambda _: Expectation(max_bytes=1000))


def run_of(path: Path, count: int) -> list[Replica]:

    return [Replica(settings_of(folder(path), config=replace(FAST, snapshot_rounds=2))) for _ in range(count)]


def rounds(replicas: list[Replica], count: int) -> None:
    for _ in range(count):
        together({str(number): each.take_part_and_keep for number, each in enumerate(replicas)})


def test_every_so_many_rounds_one_member_stores_the_state_and_old_rounds_go(tmp_path: Path) -> None:
    replicas = run_of(tmp_path, 3)
    rounds(replicas, 8)
    place = Place(folder(tmp_path))
    found = replicas[0].keeping.snapshots(7, most=2)
    assert len(found) == 2
    newest = max(found)
    snapshot = fetch_snapshot(place, newest, found[newest], tmp_path / "states", anything)
    assert snapshot.meta["round_index"] == newest + 1
    vouched = replicas[0].keeping.vouched(newest)
    assert vouched.state_digest == replicas[0].digests[newest + 1]
    assert place.agreed_rounds() == list(range(8))
    kept = {int(info.key.split("/")[1]) for info in folder(tmp_path).list("rounds/") if "contribution" in info.key}
    assert min(kept) > 0
    assert kept >= set(range(newest, 8))


def test_a_full_bucket_is_not_filled_up_with_parts_of_snapshots(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    is_full = True

    def fail(name: str, key: str) -> None:
        if is_full and name == "put" and "/data-" in key:
            raise StoreFullError("No space left on device")

    settings = settings_of(Interposed(folder(tmp_path), fail), config=replace(FAST, snapshot_rounds=1))
    replica = Replica(settings)
    rounds([replica], 3)
    assert not Place(folder(tmp_path)).snapshots()
    assert caplog.text.count("is not stored for newcomers: No space left on device") == 3
    is_full = False
    rounds([replica], 2)
    assert replica.keeping.snapshots(4)


def test_two_liars_of_seven_have_no_false_state_believed(tmp_path: Path) -> None:
    replicas = run_of(tmp_path, 7)
    liars = replicas[:2]
    for each in liars:
        each.packed = lambda: ({"round_index": 99}, {"anchor": torch.full((10,), 7.0)})  # type: ignore[method-assign]
    rounds(replicas, 4)
    store = folder(tmp_path)
    forged, pages = describe_chunks({"round_index": 99}, {"anchor": torch.zeros(4)})
    for round_index in (1, 3, 900):
        put_snapshot(Place(store), round_index, forged, pages, {"anchor": torch.zeros(4)})
    for round_index, digest in replicas[2].keeping.snapshots(3, most=4).items():
        assert replicas[2].keeping.vouched(round_index).state_digest == replicas[2].digests[round_index + 1]
        assert digest != forged.digest


def test_a_wish_has_the_state_stored_sooner_and_a_forged_one_does_not(tmp_path: Path) -> None:

    config = replace(FAST, snapshot_rounds=1000)
    replicas = [Replica(settings_of(folder(tmp_path), config=config)) for _ in range(2)]
    rounds(replicas, 1)
    stranger = settings_of(folder(tmp_path))
    wish = Wish(run_id="test", member=stranger.own_id)
    folder(tmp_path).put(wish_key(stranger.own_id), wish.wire(), cache=CachePolicy.NONE)  # Not signed.
    rounds(replicas, 1)
    assert replicas[0].keeping.snapshots(1) == {}
    replicas[0].keeping.clock.observe(Place(folder(tmp_path)).round(1).newest_at)
    replicas[1].keeping.clock.observe(Place(folder(tmp_path)).round(1).newest_at)
    signed = wish.signed(stranger.identity)
    folder(tmp_path).put(wish_key(stranger.own_id), signed.wire(), cache=CachePolicy.NONE)
    rounds(replicas, 2)
    assert len(replicas[0].keeping.snapshots(3)) == 1

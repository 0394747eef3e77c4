"""Cached shards held against the manifest, and batches recomputed for peers."""

import shutil

import pytest
import torch

from loader import GenesisDataset, get_assigned_shards
from loader.replay import batch_sha256
from tests.support.small_store import copy_small_store, segment_of, write_segment

SHARDS = get_assigned_shards("n", 23)
STREAM = ("--seq-len", "100", "--batch-size", "4", "--seed", "3", "--count", "3")


def damage(path, position=-100):
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


def test_sound_shards_are_told_from_absent_and_damaged_ones(loader, here):
    here("fetch", "--node-id", "n", "--shards", "4")
    text = here("verify", "--node-id", "n")[0].splitlines()
    assert text[0].startswith("4 of 4 cached shards sound; 70.3 kB read in ")
    assert text[1].startswith("not in the cache: ")
    flipped, cut = (next(loader.cache.glob(f"shard_{shard}-*.pt")) for shard in SHARDS[1:3])
    damage(flipped)
    cut.write_bytes(cut.read_bytes()[:-1])
    before = {path: path.stat().st_mtime_ns for path in loader.cache.glob("*.pt")}
    found = here.json("verify", "--node-id", "n", expect=1)
    assert {path: path.stat().st_mtime_ns for path in loader.cache.glob("*.pt")} == before
    conditions = {shard["shard_id"]: shard["condition"] for shard in found["shards"]}
    assert [conditions[shard] for shard in SHARDS] == ["sound", "damaged", "damaged", "sound"] + ["absent"] * 6
    text = here("verify", "--node-id", "n", expect=1)[0]
    assert f"problem: shard {SHARDS[1]}: " in text and "expected sha256" in text
    assert f"problem: shard {SHARDS[2]}: " in text and "bytes, found" in text
    here("fetch", "--node-id", "n")
    assert here("verify", "--node-id", "n")[0].startswith("10 of 10 cached shards sound")


def test_all_checks_what_the_cache_has_of_this_store_alone(loader, here):
    assert here("verify", "--all")[0].startswith("0 of 0 cached shards sound")
    here("fetch", "--node-id", "n", "--shards", "2")
    here("fetch", "--node-id", "m", "--shards", "2")
    expected = loader.cached()
    damage(next(loader.cache.glob("*.pt")).rename(loader.cache / f"shard_5-{'0' * 16}.pt"))
    (loader.cache / f"shard_99-{'0' * 16}.pt").write_bytes(b"another store's")
    found = here.json("verify", "--all")
    assert len(found["shards"]) == len(expected) - 1
    assert {shard["condition"] for shard in found["shards"]} == {"sound"}
    assert {shard["shard_id"] for shard in found["shards"]} < expected


def test_ids_beyond_the_vocabulary_are_the_stores_fault(here, tmp_path):
    store = copy_small_store(tmp_path / "store")
    options = ("--store", store.url, "--node-id", "n")
    here("fetch", *options, "--shards", "1")
    segment = segment_of(tmp_path / "store")
    shards = tuple(entry.model_copy(update={"next_merge_id": 270}) for entry in segment.shards)
    write_segment(tmp_path / "store", segment.model_copy(update={"shards": shards}))
    shutil.rmtree(tmp_path / "cache" / "stores")
    [finding, *_] = here.json("verify", *options, expect=1)["shards"]
    assert finding["condition"] == "refused"
    assert "expected ids of 0 to 269" in finding["problem"]


@pytest.fixture
def dataset(loader):
    made = GenesisDataset(
        loader.store, "n", seq_len=100, batch_size=4, seed=3, count=3, cache_dir=loader.cache, plateau="off"
    )
    yield made
    made.close()


@pytest.mark.slow
def test_a_peer_finds_the_digest_of_the_batch_that_was_trained_on(loader, here, dataset):
    digests = [batch_sha256(batch) for batch, _ in zip(dataset, range(20), strict=False)]
    assert len(set(digests)) == 20
    assert loader("verify", "--node-id", "n", "--replay", "17", *STREAM).stdout == f"{digests[17]}\n"
    said, _ = here("verify", "--node-id", "n", "--replay", "17", "--claim", digests[17].upper(), *STREAM)
    assert said == f"n, step 17: the claim holds: {digests[17]}\n"
    wrong = here.json("verify", "--node-id", "n", "--replay", "16", "--claim", digests[17], *STREAM, expect=1)
    assert (wrong["ok"], wrong["sha256"], wrong["claim"]) == (False, digests[16], digests[17])


def test_a_shard_left_early_is_replayed_as_it_was_left(here, dataset):
    expected = batch_sha256(dataset.replay("n", 9, rotations=[2, 5]))
    assert expected != batch_sha256(dataset.replay("n", 9))
    found = here("verify", "--node-id", "n", "--replay", "9", "--rotations", "2, 5", *STREAM)[0]
    assert found == f"{expected}\n"


def test_a_run_that_took_a_grown_store_is_replayed_with_its_pins(here, dataset):
    pins = [[(0, 9), (1, 17), (4, 23)]]
    for step in ("0", "60", "400"):
        expected = batch_sha256(dataset.replay("n", int(step), pins=pins))
        found = here("verify", "--node-id", "n", "--replay", step, "--pins", "0:9, 1:17,4:23", *STREAM)[0]
        assert found == f"{expected}\n"
    told = here.json("verify", "--node-id", "n", "--replay", "400", "--pins", "0:9,1:17,4:23", *STREAM)
    assert told["pins"] == [[[0, 9], [1, 17], [4, 23]]]
    assert here.json("verify", "--node-id", "n", "--replay", "4", *STREAM)["pins"] == [[[0, 23]]]
    assert here.json("verify", "--node-id", "n", "--replay", "4", "--total-shards", "7", *STREAM)["pins"] == [[[0, 7]]]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--pins", "0:9"], "--replay STEP beside them"),
        (["--replay", "3", "--pins", "9"], "expected EPOCH:SHARDS between commas"),
        (["--replay", "3", "--pins", "0:9:1"], "expected whole numbers"),
        (["--replay", "3", "--pins", "1:9"], "from epoch 0"),
        (["--replay", "3", "--pins", "0:9,2:9"], "ever later epochs and more shards"),
        (["--replay", "3", "--pins", "0:99"], "1 to 23 shards"),
        (["--replay", "3", "--pins", "0:9", "--pins", "0:9"], "those of 1 lanes"),
        (["--replay", "3", "--pins", "0:9", "--total-shards", "9"], "found both"),
        (["--replay", str(2**40)], "2**40"),
    ],
)
def test_replays_that_cannot_be(here, arguments, expected):
    assert expected in here("verify", "--node-id", "n", *arguments, *STREAM, expect=2)[1]


def test_a_batch_is_digested_as_inputs_then_labels_in_little_endian_words():
    import hashlib

    inputs, labels = torch.tensor([[1, 2], [3, 4]]), torch.tensor([[2, 3], [4, 5]])
    expected = hashlib.sha256(b"".join(id_.to_bytes(8, "little") for id_ in (1, 2, 3, 4, 2, 3, 4, 5))).hexdigest()
    assert batch_sha256({"labels": labels, "input_ids": inputs, "positions": inputs}) == expected
    turned = {"input_ids": inputs.T.contiguous().T.to(torch.int32), "labels": labels}
    assert batch_sha256(turned) == expected


@pytest.mark.parametrize("batch", [{}, {"input_ids": torch.zeros(1, 1), "labels": torch.zeros(1, 1)}])
def test_what_is_no_batch_of_ids_has_no_digest(batch):
    from loader import LoaderUsageError

    with pytest.raises(LoaderUsageError, match="input_ids"):
        batch_sha256(batch)

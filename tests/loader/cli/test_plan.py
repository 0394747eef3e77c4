"""Whose shards are which; cached shards held against the manifest, and batches recomputed for peers."""

import hashlib
import json
import os

import pytest
import torch

from loader import GenesisDataset, LoaderUsageError, get_assigned_shards, rendezvous_shards
from loader.cli.output import runs
from loader.cli.plan import in_reading_order
from loader.fetch.catalog import Catalog
from loader.options import StoreOptions, StreamOptions
from loader.plan import Pin, plan_lane
from loader.replay import batch_sha256
from loader.session import Session
from tests.support.small_store import segment_of

TOTAL = 23
SHARDS = get_assigned_shards("n", TOTAL)
STREAM = ("--seq-len", "100", "--batch-size", "4", "--seed", "3", "--count", "3")


@pytest.fixture
def catalog(store, tmp_path) -> Catalog:
    return Session.open(StoreOptions(mirrors=(str(store),), cache_dir=tmp_path / "other")).catalog


@pytest.mark.slow
def test_a_node_is_shown_its_shards_with_what_the_index_says_of_them(loader, store):
    found = loader.json("plan", "--node-id", "gpu-7")
    expected = get_assigned_shards("gpu-7", TOTAL)
    assert found["nodes"] == [{"node_id": "gpu-7", "shards": expected}]
    assert (found["store"], found["total_shards"], found["assignment"]) == (str(store), TOTAL, "modulo")
    entries = segment_of(store).shards
    assert [shard["id"] for shard in found["shards"]] == expected
    for shard in found["shards"]:
        entry = entries[shard["id"]]
        assert (shard["source"], shard["size_bytes"]) == (entry.source, entry.size_bytes)
        assert shard["packed_bytes"] == entry.packed.size_bytes
        assert shard["cached"] is False


@pytest.mark.slow
def test_text_says_the_same_knows_what_is_cached_and_cannot_speak_to_the_terminal(loader, here):
    here("fetch", "--node-id", "gpu-7", "--shards", "3")
    expected = get_assigned_shards("gpu-7", TOTAL)
    first, header, *rows, last = loader("plan", "--node-id", "gpu-7").stdout.splitlines()
    assert first.startswith(f"gpu-7: 10 of 23 shards of {loader.store}")
    assert header.split() == ["shard", "source", "size", "packed", "cached"]
    assert [int(row.split()[0]) for row in rows] == expected
    assert [row.split()[-1] for row in rows] == ["yes"] * 3 + ["no"] * 7
    assert last.startswith("20,000 tokens, 175.8 kB in the cache; 7 shards to fetch, ")
    done = loader("plan", "--nodes-from", "-", stdin="b\x1b[2J\na\n")
    assert "\x1b" not in done.stdout and "b\\x1b[2J" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("2 nodes cover ")


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        (["--count", "40"], {"count": 40}),
        (["--assignment", "rendezvous"], {"assignment": "rendezvous"}),
        (["--source", "beta"], {"sources": (("beta", 1.0),)}),
        (["--source", "beta=0.7", "--source", "alpha=0.3"], {"sources": (("beta", 0.7), ("alpha", 0.3))}),
        (["--shares", "beta=0.7, alpha=0.3"], {"sources": (("beta", 0.7), ("alpha", 0.3))}),
        (["--holdout", "3"], {"holdout": 3}),
        (["--holdout", "3", "--split", "holdout"], {"holdout": 3, "split": "holdout"}),
    ],
)
def test_every_option_gives_the_shards_that_the_dataset_reads(here, catalog, arguments, options):
    stream = StreamOptions(node_id="n", **options)
    lanes = [plan_lane(catalog, stream, number, Pin(0, TOTAL)).lane for number in range(stream.num_lanes)]
    expected = [shard for lane in lanes for shard in lane.shards]
    assert here.json("plan", "--node-id", "n", *arguments)["nodes"] == [{"node_id": "n", "shards": expected}]


def test_shares_from_a_sources_file(here, tmp_path):
    sources = [
        {"name": "beta", "share": 0.5},
        {"name": "alpha", "share": 2},
        {"name": "c", "share": 1, "enabled": False},
    ]
    path = tmp_path / "sources.json"
    path.write_text(json.dumps({"sources": [*sources, {"name": "d"}]}))
    found = here("verify", "--node-id", "n", *STREAM, "--replay", "6", "--shares", path)
    given = ("--source", "beta=0.5", "--source", "alpha=2")
    assert found == here("verify", "--node-id", "n", *STREAM, "--replay", "6", *given)
    assert found != here("verify", "--node-id", "n", *STREAM, "--replay", "6", *given, "--mixture", "weyl")
    store, cache_dir = os.environ["GENESIS_STORE"], tmp_path / "cache"
    dataset = GenesisDataset(store, "n", sources=path, cache_dir=cache_dir)
    assert dataset.options.sources == (("beta", 0.5), ("alpha", 2.0))
    path.write_text(json.dumps({"sources": [{"name": "beta"}]}))
    with pytest.raises(LoaderUsageError, match="expected enabled sources with a 'share', found none"):
        GenesisDataset(store, "n", sources=str(path), cache_dir=cache_dir)


def test_runs_that_began_smaller_and_files_that_are_not_utf8(here, tmp_path):
    found = here.json("plan", "--node-id", "n", "--total-shards", "15", "--assignment", "rendezvous")
    assert found["nodes"][0]["shards"] == rendezvous_shards("n", 15)
    assert found["coverage"]["num_shards"] == 15
    (tmp_path / "nodes").write_bytes(b"a\n\xff\n")
    assert "byte 2" in here("plan", "--nodes-from", tmp_path / "nodes", expect=2)[1]


def test_coverage_of_several_nodes_counts_every_shard(here, tmp_path):
    names = [f"node-{number}" for number in range(5)]
    (tmp_path / "nodes").write_text("node-3\n\n  node-4  \nnode-0\n")
    found = here.json(
        "plan", *(f"--node-id={name}" for name in names[:3]), "--nodes-from", str(tmp_path / "nodes"), "--count=4"
    )
    assert sorted(node["node_id"] for node in found["nodes"]) == names
    assert "shards" not in found
    having = [sum(shard in get_assigned_shards(name, TOTAL, 4) for name in names) for shard in range(TOTAL)]
    covered = sum(nodes > 0 for nodes in having)
    assert found["coverage"] == {
        "num_nodes": 5,
        "num_shards": TOTAL,
        "covered": covered,
        "shared": sum(nodes > 1 for nodes in having),
        "most_nodes": max(having),
        "mean_nodes": pytest.approx(20 / covered),
    }


@pytest.mark.parametrize("assignment", ["modulo", "rendezvous"])
def test_a_claim_is_held_against_the_assignment(here, assignment):
    assign = get_assigned_shards if assignment == "modulo" else rendezvous_shards
    right = ",".join(map(str, assign("n", TOTAL, 3)))
    options = ("--node-id", "n", "--count", "3", "--assignment", assignment)
    assert "the claim holds" in here("plan", *options, "--verify", right)[0]
    assert here.json("plan", *options, "--verify", right)["ok"] is True
    said, _ = here("plan", *options, "--verify", "0,1", expect=1)
    assert "does not hold" in said and "found 0-1" in said
    assert here.json("plan", *options, "--verify", f"{right},0", expect=1)["ok"] is False


def test_shards_are_fetched_in_the_order_they_are_read_and_runs_keep_it():
    assert in_reading_order([(5, 6, 7), (1, 2), (6, 8)]) == [5, 1, 6, 2, 8, 7]
    assert in_reading_order([(5, 6, 7), (1, 2)], 1) == [5, 1]
    assert [runs(shards) for shards in ([], [4], [12, 13, 0, 1, 2], [3, 2, 1])] == ["-", "4", "12-13, 0-2", "3, 2, 1"]


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


def test_a_replay_knows_shards_left_early_and_pins(here, dataset):
    expected = batch_sha256(dataset.replay("n", 9, rotations=[2, 5]))
    assert expected != batch_sha256(dataset.replay("n", 9))
    found = here("verify", "--node-id", "n", "--replay", "9", "--rotations", "2, 5", *STREAM)[0]
    assert found == f"{expected}\n"
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
        (["--replay", "3", "--pins", "0:99"], "1 to 23 shards"),
        (["--replay", str(2**40)], "2**40"),
    ],
)
def test_replays_that_cannot_be(here, arguments, expected):
    assert expected in here("verify", "--node-id", "n", *arguments, *STREAM, expect=2)[1]


def test_a_batch_is_digested_as_inputs_then_labels_in_little_endian_words():
    inputs, labels = torch.tensor([[1, 2], [3, 4]]), torch.tensor([[2, 3], [4, 5]])
    expected = hashlib.sha256(b"".join(id_.to_bytes(8, "little") for id_ in (1, 2, 3, 4, 2, 3, 4, 5))).hexdigest()
    assert batch_sha256({"labels": labels, "input_ids": inputs, "positions": inputs}) == expected
    turned = {"input_ids": inputs.T.contiguous().T.to(torch.int32), "labels": labels}
    assert batch_sha256(turned) == expected
    for batch in ({}, {"input_ids": torch.zeros(1, 1), "labels": torch.zeros(1, 1)}):
        with pytest.raises(LoaderUsageError, match="input_ids"):
            batch_sha256(batch)

"""Whose shards are which, and what several nodes make of a store together."""

import pytest

from loader import get_assigned_shards, rendezvous_shards
from loader.cli.output import runs
from loader.cli.plan import in_reading_order
from loader.fetch.catalog import Catalog
from loader.options import StoreOptions, StreamOptions
from loader.plan import Pin, plan_lane
from loader.session import Session
from tests.support.small_store import segment_of

TOTAL = 23


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
def test_text_says_the_same_and_knows_what_is_cached(loader, here):
    here("fetch", "--node-id", "gpu-7", "--shards", "3")
    expected = get_assigned_shards("gpu-7", TOTAL)
    first, header, *rows, last = loader("plan", "--node-id", "gpu-7").stdout.splitlines()
    assert first.startswith(f"gpu-7: 10 of 23 shards of {loader.store}")
    assert header.split() == ["shard", "source", "size", "packed", "cached"]
    assert [int(row.split()[0]) for row in rows] == expected
    assert [row.split()[-1] for row in rows] == ["yes"] * 3 + ["no"] * 7
    assert last.startswith("20,000 tokens, 175.8 kB in the cache; 7 shards to fetch, ")


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        (["--count", "40"], {"count": 40}),
        (["--assignment", "rendezvous"], {"assignment": "rendezvous"}),
        (["--source", "beta"], {"sources": (("beta", 1.0),)}),
        (["--source", "beta=0.7", "--source", "alpha=0.3"], {"sources": (("beta", 0.7), ("alpha", 0.3))}),
        (["--holdout", "3"], {"holdout": 3}),
        (["--holdout", "3", "--split", "holdout"], {"holdout": 3, "split": "holdout"}),
    ],
)
def test_every_option_gives_the_shards_that_the_dataset_reads(here, catalog, arguments, options):
    stream = StreamOptions(node_id="n", **options)
    lanes = [plan_lane(catalog, stream, number, Pin(0, TOTAL)).lane for number in range(stream.num_lanes)]
    expected = [shard for lane in lanes for shard in lane.shards]
    assert here.json("plan", "--node-id", "n", *arguments)["nodes"] == [{"node_id": "n", "shards": expected}]


def test_a_run_that_began_with_fewer_shards_is_shown_as_it_was_pinned(here):
    found = here.json("plan", "--node-id", "n", "--total-shards", "15", "--assignment", "rendezvous")
    assert found["nodes"][0]["shards"] == rendezvous_shards("n", 15)
    assert found["coverage"]["num_shards"] == 15


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


@pytest.mark.slow
def test_nodes_come_from_standard_input_and_cannot_speak_to_the_terminal(loader):
    done = loader("plan", "--nodes-from", "-", stdin="b\x1b[2J\na\n")
    assert "\x1b" not in done.stdout and "b\\x1b[2J" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("2 nodes cover ")


def test_a_file_that_is_not_utf8_is_refused(here, tmp_path):
    (tmp_path / "nodes").write_bytes(b"a\n\xff\n")
    assert "byte 2" in here("plan", "--nodes-from", tmp_path / "nodes", expect=2)[1]


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


def test_shards_are_fetched_in_the_order_they_are_read():
    assert in_reading_order([(5, 6, 7), (1, 2), (6, 8)]) == [5, 1, 6, 2, 8, 7]
    assert in_reading_order([(5, 6, 7), (1, 2)], 1) == [5, 1]


@pytest.mark.parametrize(
    ("shards", "text"), [([], "-"), ([4], "4"), ([12, 13, 0, 1, 2], "12-13, 0-2"), ([3, 2, 1], "3, 2, 1")]
)
def test_runs_keep_the_order(shards, text):
    assert runs(shards) == text

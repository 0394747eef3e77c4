"""A segment is replaced when the next of its number is written."""

from datetime import UTC, datetime

from genesis.populate.commit_log import replaced_at
from genesis.store import ObjectInfo


def segment(key, at):
    moment = datetime.fromtimestamp(at, UTC) if at is not None else None
    return ObjectInfo(key=f"index/segment_{key}.json", size_bytes=1, etag="e", modified_at=moment)


def test_each_counts_from_its_successor():
    found = [segment("00000-c", 30), segment("00000-a", 10), segment("00001-x", 40), segment("00000-b", 20)]
    assert replaced_at(found, now=99.0) == {
        "index/segment_00000-a.json": 20.0,
        "index/segment_00000-b.json": 30.0,
        "index/segment_00000-c.json": 30.0,
        "index/segment_00001-x.json": 40.0,
    }


def test_a_store_that_tells_no_times_keeps_everything_for_now():
    assert replaced_at([segment("00000-a", None)], now=5.0) == {"index/segment_00000-a.json": 5.0}
    assert replaced_at([], now=5.0) == {}

"""Names of stages, workers and micro-batches; distinct numbers of workers; stages dealt over keys of a DHT."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.errors import DiscoveryError, TrainerUsageError
from trainer.model.config import stage_names
from trainer.network.discovery import DiscoveryConfig
from trainer.network.discovery.announcement import Announcement
from trainer.network.discovery.stage_report import (
    FIRST_NUMBER,
    LAST_NUMBER,
    StagePartitions,
    StageReport,
    StageUid,
    dht_key,
    free_number,
    partition_of,
    settled_uid,
    workers_of,
)
from trainer.pipeline.protocol.work import MicroBatchId

COUNTS = st.integers(0, 10**9 - 1)
NO_UIDS = ("", "head.0", "head.0.0", "body.0.4", "body0.0.4", "body-1.0.4", "head.1.42", "tail.0.04", "head.0.42\n")
NO_IDS = ("", "e0.s1", "e00.s1.r1", "e0.s1.r-1", "e0.s1.r1 ", "E0.S1.R1", "e0.s1.r99999999999")


def test_a_run_s_stages_have_a_head_and_a_tail() -> None:
    assert stage_names(2) == ("head", "tail")
    assert stage_names(4) == ("head", "body-1", "body-2", "tail")
    with pytest.raises(TrainerUsageError, match="2 or more, found 1"):
        stage_names(1)


@given(st.sampled_from(stage_names(7)), st.integers(1, 999_999))
def test_a_worker_s_name_says_stage_and_number(stage: str, number: int) -> None:
    uid = StageUid(stage, number)
    assert StageUid.parse(str(uid)) == uid
    assert str(uid).startswith(stage.replace("-", "") + ".0.")


@given(COUNTS, COUNTS, COUNTS)
def test_a_micro_batch_has_one_spelling(epoch: int, shard: int, row: int) -> None:
    found = MicroBatchId(epoch, shard, row)
    assert MicroBatchId.parse(str(found)) == found


@pytest.mark.parametrize("text", NO_UIDS + NO_IDS)
def test_other_spellings_are_none(text: str) -> None:
    with pytest.raises(TrainerUsageError, match=r"such as body3\.0\.55"):
        StageUid.parse(text)
    with pytest.raises(TrainerUsageError, match=r"such as e0\.s17\.r4096"):
        MicroBatchId.parse(text)


@given(st.integers(0, 2**64), st.sets(st.integers(FIRST_NUMBER, FIRST_NUMBER + 20)))
def test_a_free_number_is_one_nobody_has(seed: int, taken: set[int]) -> None:
    number = free_number(seed, taken)
    assert number not in taken
    assert FIRST_NUMBER <= number <= LAST_NUMBER
    usual = set(range(FIRST_NUMBER, LAST_NUMBER + 1))
    assert (free_number(seed, usual), free_number(seed, usual | {LAST_NUMBER + 1})) == (
        LAST_NUMBER + 1,
        LAST_NUMBER + 2,
    )


def _said(peer_id: str, uid: StageUid | None) -> Announcement:
    report = None if uid is None else StageReport(uid=str(uid), incarnation="0" * 16, status="serving")
    return Announcement(peer_id=peer_id, node_id=peer_id[-4:], run_id="run", address="h:1", stage=report)


def _peer_id(number: int, same_start: bool) -> str:
    """Keys that begin alike look for a free number from the same place on."""
    return f"{number:064x}" if same_start else f"{number:04x}".ljust(64, "0")


_peer_ids = st.booleans().flatmap(
    lambda same_start: st.lists(st.integers(0, 65_535), min_size=2, max_size=9, unique=True).map(
        lambda numbers: [_peer_id(number, same_start) for number in numbers]
    )
)


@pytest.mark.slow
@settings(max_examples=200)
@given(peer_ids=_peer_ids, data=st.data())
def test_concurrent_joiners_end_with_distinct_numbers_and_keep_them(peer_ids: list[str], data: st.DataObject) -> None:
    uids: dict[str, StageUid | None] = dict.fromkeys(peer_ids)
    views: dict[str, dict[str, Announcement]] = {peer_id: {} for peer_id in peer_ids}
    # Anyone, in any order, having heard of whomever, maybe long ago; some have a number of before.
    for peer_id in data.draw(st.lists(st.sampled_from(peer_ids), unique=True)):
        uids[peer_id] = StageUid("body-1", data.draw(st.integers(FIRST_NUMBER, FIRST_NUMBER + 2)))
    for actor, heard in data.draw(
        st.lists(st.tuples(st.sampled_from(peer_ids), st.lists(st.sampled_from(peer_ids), unique=True)), max_size=12)
    ):
        views[actor] |= {other: _said(other, uids[other]) for other in heard if other != actor}
        uids[actor] = settled_uid("body-1", actor, uids[actor], views[actor].values())
    # Then all hear of all, and all look at the same moment: nobody has an advantage.
    for _ in peer_ids:
        everyone = [_said(peer_id, uid) for peer_id, uid in uids.items()]
        uids = {peer_id: settled_uid("body-1", peer_id, uid, everyone) for peer_id, uid in uids.items()}
    assert len(set(uids.values())) == len(peer_ids)
    everyone = [_said(peer_id, uid) for peer_id, uid in uids.items()]
    for peer_id, uid in uids.items():
        assert settled_uid("body-1", peer_id, uid, everyone) == uid


def test_the_smaller_key_keeps_its_number_and_only_workers_of_the_stage_take_its_numbers() -> None:
    small, large = _peer_id(1, False), _peer_id(2, False)
    uid = StageUid("head", 42)
    others = [_said(small, uid), _said(_peer_id(3, False), None)]
    assert settled_uid("head", small, uid, [_said(large, uid)]) == uid
    moved = settled_uid("head", large, uid, others)
    assert moved.stage == "head" and moved.number != 42
    tail = StageUid("tail", 42)
    assert settled_uid("tail", large, tail, others) == tail
    assert (workers_of("head", others), workers_of("tail", others)) == ({small: 42}, {})
    # A restarted worker may find its own earlier announcement.
    assert settled_uid("tail", large, tail, [_said(large, tail)]) == tail


def test_a_worker_that_changes_its_stage_takes_a_new_name_also_where_all_are_taken() -> None:
    taken = [StageUid("head", number) for number in range(FIRST_NUMBER, LAST_NUMBER + 1)]
    others = [_said(_peer_id(index, False), uid) for index, uid in enumerate(taken, 1)]
    found = settled_uid("head", _peer_id(0, True), StageUid("tail", FIRST_NUMBER), others[:1])
    assert found == StageUid("head", FIRST_NUMBER + 1)
    assert settled_uid("head", _peer_id(5000, False), None, others) == StageUid("head", LAST_NUMBER + 1)


@given(num_stages=st.integers(2, 200), data=st.data())
def test_every_partition_has_neighbours_and_as_many_as_any_other_or_one_less(
    num_stages: int, data: st.DataObject
) -> None:
    num_partitions = data.draw(st.integers(1, num_stages))
    dealt = [partition_of(stage, num_stages, num_partitions) for stage in range(num_stages)]
    sizes = Counter(dealt)
    assert dealt == sorted(dealt)
    assert set(sizes) == set(range(num_partitions))
    assert max(sizes.values()) - min(sizes.values()) <= 1
    partitions = StagePartitions(stage_names(num_stages), num_partitions)
    assert len(partitions.labels()) == 1 + num_partitions


def test_neighbouring_stages_share_a_partition() -> None:
    """32 stages over 4: stages 0 to 7 in the first, 8 to 15 in the second; over as many, each has its own."""
    assert [partition_of(stage, 32, 4) for stage in (0, 7, 8, 15, 16, 31)] == [0, 0, 1, 1, 2, 3]
    partitions = StagePartitions(stage_names(32), 4)
    assert partitions.labels() == ("", "head.0", "body8.0", "body16.0", "body24.0")
    assert partitions.label("tail") == "body24.0"
    assert partitions.labels(["body-9", "body-8"]) == ("", "body8.0")
    assert StagePartitions(stage_names(4)).labels() == ("", "head.0", "body1.0", "body2.0", "tail.0")
    assert StagePartitions(stage_names(4)).labels(["body-2"]) == ("", "body2.0")
    assert StagePartitions().labels() == StagePartitions().labels(["body-1"]) == ("",)
    assert StagePartitions().label("body-1") == ""
    assert (dht_key("run"), dht_key("run", "body8.0")) == ("run.peers", "run.body8.0")


def test_mistakes_are_told() -> None:
    with pytest.raises(TrainerUsageError, match=r"num_partitions: expected at most the number of stages, 3, found 4"):
        StagePartitions(stage_names(3), 4)
    with pytest.raises(DiscoveryError, match=r"expected one of the run's stages head, body-1, tail, found 'body-2'"):
        StagePartitions(stage_names(3)).label("body-2")
    with pytest.raises(TrainerUsageError, match="num_partitions: expected 0 without partition_by_stage"):
        DiscoveryConfig(num_partitions=2)

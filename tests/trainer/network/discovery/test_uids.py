"""Workers that join at the same moment, seeing little of each other, end with distinct numbers."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.network.discovery.announcement import Announcement
from trainer.network.discovery.stage_report import FIRST_NUMBER, LAST_NUMBER, StageReport, StageUid
from trainer.network.discovery.uids import settled_uid, workers_of


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


def test_the_smaller_key_keeps_its_number() -> None:
    small, large = _peer_id(1, False), _peer_id(2, False)
    uid = StageUid("head", 42)
    assert settled_uid("head", small, uid, [_said(large, uid)]) == uid
    moved = settled_uid("head", large, uid, [_said(small, uid)])
    assert moved.stage == "head" and moved.number != 42


def test_only_workers_of_the_stage_take_its_numbers() -> None:
    peer_id = _peer_id(9, False)
    uid = StageUid("tail", 42)
    others = [_said(_peer_id(1, False), StageUid("head", 42)), _said(_peer_id(2, False), None)]
    assert settled_uid("tail", peer_id, uid, others) == uid
    assert workers_of("head", others) == {_peer_id(1, False): 42}
    assert workers_of("tail", others) == {}


def test_what_is_heard_of_itself_does_not_move_a_worker() -> None:
    """A restarted worker may find its own announcement of before."""
    peer_id = _peer_id(9, False)
    uid = StageUid("tail", 42)
    assert settled_uid("tail", peer_id, uid, [_said(peer_id, uid)]) == uid


def test_a_worker_that_changes_its_stage_takes_a_new_name() -> None:
    other = _said(_peer_id(3, True), StageUid("head", FIRST_NUMBER))
    found = settled_uid("head", _peer_id(0, True), StageUid("tail", FIRST_NUMBER), [other])
    assert found == StageUid("head", FIRST_NUMBER + 1)


def test_all_numbers_of_002_may_be_taken() -> None:
    others = [
        _said(_peer_id(index, False), StageUid("head", number))
        for index, number in enumerate(range(FIRST_NUMBER, LAST_NUMBER + 1))
    ]
    assert settled_uid("head", _peer_id(5000, False), None, others) == StageUid("head", LAST_NUMBER + 1)

"""When a round closes by its quorum, what late work weighs, and what a member that lies about either can do."""

from __future__ import annotations

import asyncio
import math
import time
from contextlib import nullcontext

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.round_actor import PEER_IDS, agreement_of, join_request, settings_of
from trainer.aggregation import contribution_weight
from trainer.bucket_rounds.config import BucketConfig
from trainer.collective import CollectiveConfig
from trainer.collective.latecomers import LatecomerBackoff
from trainer.collective.membership import MembershipGathering
from trainer.collective.messages import Agreement, ClaimedWork, InviteReply, Member
from trainer.collective.planning import check_agreement
from trainer.collective.quorum import (
    MAX_LAG,
    ArrivalGaps,
    AttendanceCall,
    QuorumHistory,
    QuorumWatch,
    RoundLags,
    check_lags,
    check_workers,
    freshness,
    members_needed,
)
from trainer.errors import RefusedError, TrainerUsageError
from trainer.network.rpc import Peer
from trainer.run.config import RunConfig

FAST, EVEN, SLOW = sorted(PEER_IDS[:3])


def agreed(round_index: int, **weights: float) -> Agreement:
    """Of three members; of weight 1 and lag 0, but where told."""
    by_name = {"fast": FAST, "even": EVEN, "slow": SLOW}
    told = {by_name[name]: weight for name, weight in weights.items()}
    agreement = agreement_of(3, 100_000)
    members = tuple(each.model_copy(update={"weight": told.get(each.peer_id, 1.0)}) for each in agreement.members)
    return agreement.model_copy(update={"round_index": round_index, "members": members})


@pytest.mark.parametrize(("quorum", "before", "needed"), [(2, 9, 2), (0.5, 9, 5), (0.5, 8, 4), (0.01, 3, 1), (7, 3, 7)])
def test_a_quorum_is_a_number_of_members_or_a_share_of_those_before(quorum: float, before: int, needed: int) -> None:
    assert members_needed(quorum, before) == needed


def test_work_weighs_less_by_the_rounds_it_missed_and_never_less_than_a_quarter() -> None:
    assert [freshness(lag) for lag in (0, 3, MAX_LAG, 10**9)] == [1.0, 0.5, 0.25, 0.25]


@pytest.mark.parametrize(("batches", "steps", "weight"), [(20, 20, 20.0), (40, 20, 80.0), (8, 0, 8.0), (0, 5, 0.0)])
def test_pace_weighs_what_was_done_times_what_was_done_in_a_step(batches: int, steps: int, weight: float) -> None:
    assert contribution_weight(batches, 0.0, "pace", steps) == weight
    assert math.isfinite(contribution_weight(10**400, 0.0, "pace", 1))


def test_everybody_counts_the_rounds_that_a_member_came_to_without_work() -> None:
    lags = RoundLags()
    for round_index in range(3):
        lags.committed(agreed(round_index, slow=0.0))
    assert lags.observed(3) == {FAST: 0, EVEN: 0, SLOW: 3}
    lags.committed(agreed(3))
    assert lags.observed(4)[SLOW] == 0
    lags.committed(agreed(4, slow=0.0))
    assert lags.observed(6) == {}, "who missed round 5 does not know who brought work there"
    fragments = RoundLags(cycle=2)
    fragments.committed(agreed(0, slow=0.0))
    fragments.committed(agreed(1))
    assert (fragments.observed(2)[SLOW], fragments.observed(3)[SLOW]) == (1, 0), "each fragment has its own"


def test_an_agreement_that_has_late_work_fresher_than_it_is_is_refused() -> None:
    lags = RoundLags()
    lags.committed(agreed(0, slow=0.0))
    check_lags(agreed(1, slow=0.0), lags.observed(1))
    with pytest.raises(RefusedError, match="missed 1 rounds or more, found 0"):
        check_lags(agreed(1), lags.observed(1))
    older = [each.model_copy(update={"lag": 1 if each.peer_id == SLOW else 0}) for each in agreed(1).members]
    check_lags(agreed(1).model_copy(update={"members": tuple(older)}), lags.observed(1))


def test_where_rounds_have_no_quorum_nobody_is_weighed_down_by_a_lag() -> None:
    check_lags(agreed(1), None)
    late = tuple(each.model_copy(update={"lag": 15 if each.peer_id == SLOW else 0}) for each in agreed(1).members)
    with pytest.raises(RefusedError, match="expected no lags"):
        check_lags(agreed(1).model_copy(update={"members": late}), None)


@pytest.mark.parametrize(
    ("quorum", "weights", "known", "is_replaced", "problem"),
    [
        (2, {"slow": 0.0}, {FAST, EVEN, SLOW}, False, ""),
        (2, {"slow": 0.0, "even": 0.0}, {FAST, EVEN, SLOW}, False, "work of 2 known nodes"),
        (2, {"slow": 0.0}, {FAST, SLOW}, False, "found that of 1"),  # A key that nobody knows is nobody's work.
        (0.6, {"slow": 0.0}, {FAST, EVEN, SLOW}, False, ""),
        (3, {"slow": 0.0}, {FAST, EVEN, SLOW}, True, ""),  # One of three has gone since.
        (3, {"slow": 0.0, "even": 0.0}, {FAST, EVEN, SLOW}, True, "work of 2 known nodes"),
    ],
)
def test_nobody_attends_a_round_for_the_work_of_too_few(quorum, weights, known, is_replaced, problem) -> None:
    with pytest.raises(RefusedError, match=problem) if problem else nullcontext():
        check_workers(agreed(1, **weights), quorum, 3, known, is_replaced=is_replaced)


def test_after_the_longest_gathering_a_round_closes_with_whoever_is_there() -> None:
    history = QuorumHistory()
    assert history.may_close_with_few(60.0, 0.0), "nothing is known of rounds before"
    history.committed(agreed(0), 100.0)
    assert [history.may_close_with_few(60.0, now_s) for now_s in (110.0, 161.0)] == [False, True]


def test_a_member_without_lag_travels_as_in_releases_that_know_none() -> None:
    member = Member(peer_id=FAST, address="127.0.0.1:1", certificate=None, weight=1.0)
    assert "lag" not in member.model_dump(mode="json")
    assert "work" not in join_request().model_dump(mode="json")
    late = join_request(work=ClaimedWork(num_steps=8, lag=2))
    assert type(late).model_validate(late.model_dump()) == late and (late.num_steps, late.lag) == (8, 2)


@pytest.mark.parametrize(
    ("lag", "weight", "problem"),
    [
        (3, 4.0, ""),  # Eight batches in eight steps, half as fresh.
        (0, 8.0, ""),
        (3, 8.0, "weighs more than it may"),  # As the fresh ones: four times what the median may, unaged.
        (3, 1.0, "weighs less than its batches"),
    ],
)
def test_a_late_members_weight_follows_from_its_work_and_lag(lag: int, weight: float, problem: str) -> None:
    own = PEER_IDS.index(SLOW)
    request = join_request(
        round_index=3, state_digest="0" * 64, num_values=100_000, num_batches=8, work=ClaimedWork(num_steps=8, lag=lag)
    )
    members = [
        each.model_copy(update={"weight": weight, "lag": lag} if each.peer_id == PEER_IDS[own] else {"weight": 5.0})
        for each in agreed(3).members
    ]
    agreement = agreed(3).model_copy(update={"members": tuple(members)})
    options = {"own_id": SLOW, "values_per_part": 1 << 18, "max_weight_ratio": 3.0, "weighing": "pace"}
    if not problem:
        check_agreement(agreement, request, **options)  # type: ignore[arg-type]
        return
    with pytest.raises(RefusedError, match=problem):
        check_agreement(agreement, request, **options)  # type: ignore[arg-type]


@given(
    st.lists(st.floats(0, 3), min_size=3, max_size=20),
    st.integers(0, 9),
    st.floats(0, 1e6),
)
def test_a_minority_that_comes_as_late_as_it_can_does_not_stretch_the_window(
    honest: list[float], liars: int, late_s: float
) -> None:
    longest_s = 4.0
    alone, attacked = ArrivalGaps(), ArrivalGaps()
    for number, gap_s in enumerate(honest):
        alone.note(f"honest {number}", gap_s)
        attacked.note(f"honest {number}", gap_s)
    for number in range(min(liars, len(honest) - 1)):
        for _ in range(20):
            attacked.note(f"liar {number}", late_s)
    assert attacked.window_s(longest_s) <= min(longest_s, 1.25 * max(honest) + 1e-9)
    assert alone.window_s(longest_s) <= longest_s


def test_the_window_is_long_until_arrivals_were_seen_and_short_where_nobody_can_be_caught() -> None:
    gaps = ArrivalGaps()
    assert gaps.window_s(4.0) == 4.0
    gaps.note("far behind", 60.0)
    assert gaps.window_s(4.0) == 0.5
    gaps.note("close", 2.0)
    assert gaps.window_s(4.0) == 2.5


def test_a_round_closes_a_window_after_its_quorum_whatever_comes_in_it() -> None:
    history = QuorumHistory()
    for round_index in range(4):
        history.committed(agreed(round_index), now_s=16.0 * round_index)
    watch = QuorumWatch(2, 5.0, history, num_known=3)
    watch.came(FAST, 0, 60.0)
    assert watch.closes_at_s is None
    watch.came(EVEN, 0, 63.0)
    assert watch.closes_at_s == 65.0, "an eighth of the 16 s between rounds, which is less than the option allows"
    watch.came(SLOW, 0, 64.0)
    watch.came(SLOW, 0, 64.9)
    assert watch.closes_at_s == 65.0 and not watch.is_over(64.9) and watch.is_over(65.0)
    assert history.gaps.window_s(2.0) == 1.25
    watch.left(FAST)
    watch.left(EVEN)
    assert watch.closes_at_s is None


def test_a_call_is_heard_by_a_thread_that_attends_or_by_a_node_that_is_on_its_way() -> None:
    call = AttendanceCall()
    assert not call.call(3) and call.wait(0.0) is None
    call.open()
    assert call.call(3) and call.wait(0.0) == 3 and call.wait(0.0) is None
    call.close()
    assert call.call(4), "it ends attendance to come with its own work"
    call.comes_for(0.0)
    assert not call.call(4)


REQUEST = join_request(round_index=4, work=ClaimedWork(num_steps=10, lag=0))
WITHOUT_WORK = REQUEST.model_copy(update={"num_batches": 0})


class Meeting:
    """A gathering of three, whose slow member attends when it is asked to, or only says so."""

    def __init__(self, quorum: float, *, attends: bool = True) -> None:
        peers = {peer_id: Peer(peer_id, "203.0.113.7:1") for peer_id in (EVEN, SLOW)}
        settings = settings_of(FAST, peers, quorum=quorum, max_grace_s=0.2, stall_timeout_s=2.0, gather_timeout_s=20.0)
        self._attends = attends
        self._coming: list[asyncio.Task[Agreement]] = []
        self.gathering = MembershipGathering(
            4, settings, LatecomerBackoff(), self._invite, QuorumHistory(), self._ask_to_attend
        )

    async def agreed(self, *joining: str) -> Agreement:
        joins = [asyncio.create_task(self.gathering.join(each, REQUEST)) for each in joining]
        try:
            return (await asyncio.gather(*joins))[0]
        finally:
            self.gathering.close()
            for each in self._coming:
                each.cancel()
            await asyncio.gather(*self._coming, return_exceptions=True)

    async def _invite(self, _peer_id: str, _round_index: int, _after_s: float) -> InviteReply:
        return InviteReply(coming=True, next_round=4)

    async def _ask_to_attend(self, peer_id: str, _round_index: int, _after_s: float) -> InviteReply:
        if self._attends:
            self._coming.append(asyncio.create_task(self.gathering.join(peer_id, WITHOUT_WORK)))
        return InviteReply(coming=True, next_round=4)


def test_who_is_not_there_with_its_work_attends_without_weight() -> None:
    async def scenario() -> None:
        agreement = await Meeting(2).agreed(FAST, EVEN)
        weights = {member.peer_id: member.weight for member in agreement.members}
        assert weights == {FAST: 10.0**0.5, EVEN: 10.0**0.5, SLOW: 0.0}

    asyncio.run(scenario())


def test_one_that_says_it_attends_and_does_not_costs_some_seconds_once() -> None:
    async def scenario() -> None:
        began_s = time.monotonic()
        agreement = await Meeting(2, attends=False).agreed(FAST, EVEN)
        assert agreement.peer_ids == (FAST, EVEN)
        assert time.monotonic() - began_s < 10.0

    asyncio.run(scenario())


def test_work_on_another_state_makes_no_quorum() -> None:
    async def scenario() -> None:
        meeting = Meeting(2)
        own = asyncio.create_task(meeting.gathering.join(FAST, REQUEST))
        forked = REQUEST.model_copy(update={"state_digest": "c" * 64})
        other = asyncio.create_task(meeting.gathering.join(EVEN, forked))
        await asyncio.sleep(0.6)
        assert not meeting.gathering.over
        last = asyncio.create_task(meeting.gathering.join(SLOW, REQUEST))
        assert (await own).peer_ids == tuple(sorted((FAST, SLOW)))
        meeting.gathering.close()
        await asyncio.gather(other, last, return_exceptions=True)

    asyncio.run(scenario())


def test_a_round_with_few_of_the_nodes_waits_for_more_whatever_its_quorum() -> None:
    async def scenario() -> None:
        meeting = Meeting(1, attends=False)
        own = asyncio.create_task(meeting.gathering.join(FAST, REQUEST))
        await asyncio.sleep(1.5)
        assert not meeting.gathering.over, "one of three is no majority"
        other = asyncio.create_task(meeting.gathering.join(EVEN, WITHOUT_WORK))
        assert (await own).peer_ids == tuple(sorted((FAST, EVEN)))
        meeting.gathering.close()
        await asyncio.gather(other, return_exceptions=True)

    asyncio.run(scenario())


def test_strangers_and_members_without_work_make_no_quorum() -> None:
    async def scenario() -> None:
        meeting = Meeting(2)
        stranger = asyncio.create_task(meeting.gathering.join("f" * 64, REQUEST))
        idle = asyncio.create_task(meeting.gathering.join(EVEN, WITHOUT_WORK))
        own = asyncio.create_task(meeting.gathering.join(FAST, REQUEST))
        await asyncio.sleep(0.6)
        assert not meeting.gathering.over
        last = asyncio.create_task(meeting.gathering.join(SLOW, REQUEST))
        agreement = await own
        assert agreement.peer_ids == tuple(sorted({FAST, EVEN, SLOW, "f" * 64}))
        meeting.gathering.close()
        await asyncio.gather(stranger, idle, last, return_exceptions=True)

    asyncio.run(scenario())


@pytest.mark.parametrize("quorum", [-1, 1.5, 49, math.nan, math.inf])
def test_a_quorum_that_is_none_is_refused(quorum: float) -> None:
    with pytest.raises(TrainerUsageError, match=r"collective\.quorum: expected a share"):
        CollectiveConfig(quorum=quorum)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"strategy": "grad"}, "waits for nobody"),
        ({"strategy": "async_sparta"}, "averages parameters"),
        ({"engine": "torch"}, "its ranks reduce together"),
        ({"pipeline": "swarm"}, "give slower workers less"),
    ],
)
def test_what_a_quorum_cannot_mean_is_refused_with_the_reason(options: dict[str, str], reason: str) -> None:
    with pytest.raises(TrainerUsageError, match=reason):
        RunConfig(collective=CollectiveConfig(quorum=2), **options)  # type: ignore[arg-type]
    with pytest.raises(TrainerUsageError, match=r"bucket\.quorum"):
        RunConfig(collective=CollectiveConfig(quorum=2), bucket=BucketConfig(url="/nowhere"))

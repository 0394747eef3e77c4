"""Which nodes a round waits for, and for how long."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from tests.support.round_actor import KnownPeers, join_request, settings_of
from trainer.collective.config import CollectiveConfig
from trainer.collective.latecomers import LatecomerBackoff
from trainer.collective.membership import MembershipGathering
from trainer.collective.messages import Agreement, InviteReply
from trainer.errors import RefusedError
from trainer.network.rpc import Peer

OWN, OTHER, LATE = "0" * 64, "1" * 64, "2" * 64


def peer(number: int, host: str = "203.0.113.7") -> Peer:
    return Peer(f"{number:064x}", f"{host}:{4000 + number}")


def rounds_waited(latecomers: LatecomerBackoff, who: Peer, last_round: int) -> list[int]:
    """Rounds in which it says that it comes, and does not."""
    waited = []
    for round_index in range(last_round + 1):
        if latecomers.may_wait(who, round_index):
            latecomers.missed(round_index, [who])
            waited.append(round_index)
    return waited


def test_one_that_never_comes_is_waited_for_ever_more_rarely_unless_it_comes_after_all() -> None:
    assert rounds_waited(LatecomerBackoff(), peer(1), 100) == [0, 2, 5, 10, 19, 36, 69]
    latecomers = LatecomerBackoff()
    latecomers.joined([peer(3).peer_id])
    assert rounds_waited(latecomers, peer(3), 6) == [0, 1, 3, 6], "whoever has been there may miss one"
    latecomers.joined([peer(3).peer_id])
    assert latecomers.may_wait(peer(3), 7)


def test_new_identities_of_one_host_share_its_patience_and_members_have_their_own() -> None:
    latecomers = LatecomerBackoff()
    latecomers.joined([peer(7).peer_id])
    waited = 0
    for round_index in range(100):
        who = peer(1000 + round_index)
        waited += latecomers.may_wait(who, round_index)
        latecomers.missed(round_index, [who] if latecomers.may_wait(who, round_index) else [])
    assert waited == 7
    assert latecomers.may_wait(peer(7), 99), "behind the same address, but known to come"
    assert latecomers.may_wait(peer(8, "198.51.100.9"), 99)


REQUEST = join_request(round_index=4)
CATCHING_UP = InviteReply(coming=False, next_round=-1, catching_up=True)


class Meeting(LatecomerBackoff):
    """A gathering of three nodes, one of which comes after some invitations; strangers of another state join first."""

    def __init__(self, fetched_after: int, waits: bool, gather_timeout_s=30.0, says=CATCHING_UP, strangers=0) -> None:
        self._says = says
        self._strangers = [f"{number:064x}" for number in range(5, 5 + strangers)]
        self.in_vain: list[str | None] = []
        self._waits = waits
        self._fetched_after = fetched_after
        self._invited = 0
        self._coming: set[asyncio.Task[Agreement]] = set()
        peers = {peer_id: Peer(peer_id, "203.0.113.7:1") for peer_id in (OTHER, LATE)}
        settings = settings_of(OWN, peers, invite_after_s=0.0, gather_timeout_s=gather_timeout_s, stall_timeout_s=2.0)
        self._gathering = MembershipGathering(4, settings, self, self._invite)

    def may_wait(self, peer: Peer, round_index: int) -> bool:
        return self._waits

    def missed(self, round_index: int, peers: Iterable[Peer]) -> None:
        self.in_vain.extend(peer.peer_id for peer in peers)

    async def members(self) -> tuple[str, ...]:
        """Of the first agreement."""
        other_state = REQUEST.model_copy(update={"state_digest": "b" * 64})
        strangers = [asyncio.create_task(self._gathering.join(each, other_state)) for each in self._strangers]
        await asyncio.sleep(0)
        others = asyncio.create_task(self._gathering.join(OTHER, REQUEST))
        agreement = await self._gathering.join(OWN, REQUEST)
        self._gathering.close()
        await asyncio.gather(others, *self._coming)
        assert all(isinstance(each, RefusedError) for each in await asyncio.gather(*strangers, return_exceptions=True))
        return agreement.peer_ids

    async def _invite(self, peer_id: str, _round_index: int, _after_s: float) -> InviteReply:
        if peer_id != LATE:
            return InviteReply(coming=True, next_round=4)
        self._invited += 1
        if self._invited <= self._fetched_after:
            return self._says
        self._coming.add(asyncio.create_task(self._gathering.join(LATE, REQUEST)))
        return InviteReply(coming=True, next_round=4)


COMING = InviteReply(coming=True, next_round=4)
ELSEWHERE = InviteReply(coming=False, next_round=4, coordinator="e" * 64)
NEVER, ALL, BOTH = 1000, (OWN, OTHER, LATE), (OWN, OTHER)


@pytest.mark.parametrize(
    ("options", "members", "in_vain"),
    [
        ({"fetched_after": 2, "waits": True}, ALL, []),  # It waits for one that is fetching the state, and then comes.
        ({"fetched_after": NEVER, "waits": True, "gather_timeout_s": 1.0}, BOTH, [LATE]),
        ({"fetched_after": NEVER, "waits": False}, BOTH, []),  # One whose host has spent its patience.
        ({"fetched_after": NEVER, "waits": True, "gather_timeout_s": 0.6, "says": COMING}, BOTH, [LATE]),
        ({"fetched_after": NEVER, "waits": False, "says": COMING}, BOTH, []),
        ({"fetched_after": NEVER, "waits": True, "says": ELSEWHERE}, BOTH, []),  # It does not speak for itself.
    ],
)
def test_whom_a_round_waits_for(options: dict[str, Any], members: tuple[str, ...], in_vain: list[str]) -> None:
    meeting = Meeting(**options)
    assert asyncio.run(meeting.members()) == members
    assert meeting.in_vain == in_vain


@pytest.mark.parametrize("strangers", [3, CollectiveConfig().max_members])
def test_nodes_that_discovery_does_not_know_neither_fill_a_round_nor_choose_its_state(strangers: int) -> None:
    meeting = Meeting(fetched_after=0, waits=True, strangers=strangers)
    assert asyncio.run(meeting.members()) == (OWN, OTHER, LATE)


@pytest.mark.parametrize(
    ("ahead", "gone", "gather_timeout_s", "min_members", "reason"),
    [
        ({OTHER, LATE}, set(), 600.0, 2, "late"),
        ({OTHER, LATE}, set(), 600.0, 1, "late"),  # Nor does it make that round alone.
        ({LATE}, set(), 0.5, 2, "few"),
        ({OTHER, LATE}, {OTHER, LATE}, 0.5, 2, "few"),  # Who has gone since says nothing any more.
    ],
)
def test_nobody_waits_in_a_round_that_most_others_have_left_behind(
    monkeypatch: pytest.MonkeyPatch,
    ahead: set[str],
    gone: set[str],
    gather_timeout_s: float,
    min_members: int,
    reason: str,
) -> None:
    """It would hold up the others' next one, which it says that it comes to as well."""
    monkeypatch.setattr("trainer.collective.membership._LEFT_BEHIND_AFTER_S", 0.3)
    latecomers = LatecomerBackoff()
    known = KnownPeers({peer_id: Peer(peer_id, "203.0.113.7:1") for peer_id in (OTHER, LATE)})

    async def invite(peer_id: str, _round_index: int, _after_s: float) -> InviteReply:
        if peer_id in gone:
            known.known.pop(peer_id, None)
        if peer_id in ahead:
            return InviteReply(coming=False, next_round=5)
        return InviteReply(coming=False, next_round=-1, catching_up=True)

    async def run() -> MembershipGathering:
        settings = settings_of(OWN, min_members=min_members, invite_after_s=0.0, gather_timeout_s=gather_timeout_s)
        gathering = MembershipGathering(4, replace(settings, directory=known), latecomers, invite)
        with pytest.raises(RefusedError) as refused:
            await gathering.join(OWN, REQUEST)
        gathering.close()
        assert refused.value.reason == reason
        return gathering

    gathering = asyncio.run(run())
    assert gathering.left_behind == (reason == "late")
    if gathering.left_behind:
        assert all(latecomers.may_wait(peer, 5) for peer in known.peers().values()), "nobody was waited for"


def test_of_states_that_equally_many_hold_the_coordinators_own_is_the_rounds() -> None:
    """Whoever brings one with a low digest would send the coordinator itself to fetch it."""

    async def run() -> None:
        settings = settings_of(OWN, {OTHER: Peer(OTHER, "203.0.113.7:1")}, gather_timeout_s=30.0)
        gathering = MembershipGathering(4, settings, LatecomerBackoff(), lambda *_: asyncio.sleep(0, None))
        own = asyncio.create_task(gathering.join(OWN, REQUEST))
        await asyncio.sleep(0)
        with pytest.raises(RefusedError, match="fetch theirs"):
            await gathering.join(OTHER, REQUEST.model_copy(update={"state_digest": "0" * 64}))
        assert (await own).peer_ids == (OWN,)
        gathering.close()

    asyncio.run(run())

"""The exchange's messages: what one lacks is told, and nothing that does not fit its head is read."""

from __future__ import annotations

import asyncio
import random
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.announcements import announce
from tests.support.event_loop import on_event_loop
from trainer.errors import RefusedError
from trainer.network.discovery.announcement import verify_announcement
from trainer.network.discovery.exchange import (
    PeerExchangeReply,
    PeerExchangeRequest,
    StrangerQueue,
    pack_request,
    records_for,
    split_records,
    unpack_request,
)
from trainer.network.discovery.peer_table import KnownPeer
from trainer.network.rpc.identity import Identity


@pytest.fixture
def known() -> list[KnownPeer]:
    wires = [announce(Identity.create()) for _ in range(4)]
    return [KnownPeer(verify_announcement(wire, now=time.time(), max_clock_skew_s=10), wire) for wire in wires]


def test_a_request_is_read_back(known: list[KnownPeer]) -> None:
    own, has = unpack_request(*pack_request(b"own record", known))
    assert own == b"own record"
    assert has == {peer.announcement.peer_id: peer.announcement.sent_at for peer in known}


def test_only_what_the_asker_lacks_is_told_within_the_length_of_a_message(known: list[KnownPeer]) -> None:
    has = {known[0].announcement.peer_id: known[0].announcement.sent_at}
    has[known[1].announcement.peer_id] = known[1].announcement.sent_at - 1
    asker = known[2].announcement.peer_id
    told = split_records(*records_for(asker, has, known, random.Random(0)))
    assert set(told) == {known[1].wire, known[3].wire}
    nonsense = {peer.announcement.peer_id: float("nan") for peer in known}
    assert len(records_for("asker", nonsense, known, random.Random(0))[0].sizes) == len(known)
    long = KnownPeer(known[0].announcement, b"x" * 16_000)
    body, payload = records_for("asker", {}, [long] * 200, random.Random(0))
    assert sum(body.sizes) == len(payload) <= 1 << 20
    assert len(body.sizes) == (1 << 20) // 16_000


@given(own_bytes=st.integers(0, 100), payload=st.binary(max_size=200))
def test_a_payload_that_does_not_fit_its_head_is_refused(own_bytes: int, payload: bytes) -> None:
    body = PeerExchangeRequest(own_bytes=own_bytes)
    if len(payload) >= own_bytes and (len(payload) - own_bytes) % 40 == 0:
        assert unpack_request(body, payload)[0] == payload[:own_bytes]
    else:
        with pytest.raises(RefusedError, match="expected a record"):
            unpack_request(body, payload)


def test_an_answer_that_does_not_fit_its_head_is_refused() -> None:
    with pytest.raises(RefusedError, match="expected records of 5 bytes"):
        split_records(PeerExchangeReply(sizes=(2, 3)), b"abcd")


@pytest.mark.slow
@on_event_loop
async def test_a_crowd_at_one_address_is_answered_at_a_pace_and_keeps_no_other_address_waiting() -> None:
    """64 at once, then three a second; sixteen wait, for four seconds at most, and the rest are refused at once."""
    queue = StrangerQueue(2.0, random.Random(0))

    async def is_answered(address: str) -> bool:
        try:
            await queue.wait(address)
        except RefusedError as error:
            assert error.reason == "busy"
            return False
        return True

    begun_s = time.monotonic()
    crowd = [asyncio.create_task(is_answered("192.0.2.1")) for _ in range(120)]
    cut = crowd.pop()
    await asyncio.sleep(0)
    assert await is_answered("192.0.2.2"), "of another address"
    cut.cancel()
    num_answered = sum(await asyncio.gather(*crowd))
    assert 64 <= num_answered <= 64 + 3 * (time.monotonic() - begun_s)
    assert num_answered <= 64 + 16
    async with asyncio.timeout(10):
        while queue._waiting or queue.tasks:
            await asyncio.sleep(0.1)
    await asyncio.sleep(0.4)
    assert await is_answered("192.0.2.1"), "once the crowd is gone"

"""Endpoints of a run that names an authority: who is served and called, what is shown, and who is out at once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import nullcontext

import pytest

from tests.support.authority import endpoint_with, eventually
from tests.support.rpc_node import RUN_ID, Answer, Question, ask, fast_config, refused, register_test_methods
from tests.support.rpc_node import Clock as FakeClock
from trainer.errors import PeerUnavailableError, RefusedError
from trainer.network.rpc import Admission, Credential, Endpoint, Identity, Peer, Reply, Request, RevokedPeers, Stream
from trainer.network.rpc.credential import Role

_AUTHORITY = Identity.create()


def _revoked(number: int, *peers: Endpoint, by: Identity = _AUTHORITY, now: float | None = None) -> RevokedPeers:
    return RevokedPeers.issue(by, RUN_ID, number, [peer.peer_id for peer in peers], time.time() if now is None else now)


def _admission(endpoint: Endpoint) -> Admission:
    assert endpoint.admission is not None
    return endpoint.admission


async def test_members_know_each_other_after_one_call() -> None:
    async with endpoint_with(_AUTHORITY) as caller, endpoint_with(_AUTHORITY, role="driver") as callee:
        for _ in range(3):
            await ask(caller, callee.peer, "hello")
        await ask(callee, caller.peer)
        for endpoint, other in ((caller, callee), (callee, caller)):
            known = _admission(endpoint).known(other.peer_id)
            assert known is not None
            assert known.role == ("driver" if other is callee else "worker")
            assert _admission(endpoint).num_verified == 1, "each is verified once, however many calls there are"


async def test_a_credential_is_shown_once_on_a_connection_and_again_when_it_is_forgotten() -> None:
    async with endpoint_with(_AUTHORITY) as caller, endpoint_with(_AUTHORITY) as callee:
        await ask(caller, callee.peer)
        before = caller.counters.sent_bytes
        await ask(caller, callee.peer)
        assert _admission(callee).num_verified == 1
        _admission(callee)._known.clear()  # As a node that restarted, or knows too many.
        await ask(caller, callee.peer)
        assert _admission(callee).num_verified == 2
        assert callee.counters.refused == {"credential": 1}
        assert caller.counters.sent_bytes > before


async def test_a_stream_shows_it_whatever_the_other_side_remembers() -> None:
    async with endpoint_with(_AUTHORITY) as caller, endpoint_with(_AUTHORITY) as callee:
        await ask(caller, callee.peer)
        _admission(callee)._known.clear()
        async with caller.open_stream(callee.peer, "test/mirror", Question(), timeout_s=20) as stream:
            await stream.send(7, b"payload")
            frame = await stream.receive()
            assert frame is not None
            assert (frame.index, bytes(frame.payload)) == (7, b"payload")


async def test_strangers_are_neither_served_nor_believed() -> None:
    other = Identity.create()
    async with (
        endpoint_with(_AUTHORITY) as member,
        endpoint_with(other) as of_another,
        endpoint_with(_AUTHORITY, life_s=1.0, clock=lambda: 1_000_000.0) as expired,
    ):
        stranger = Endpoint(Identity.create(), RUN_ID, fast_config())
        register_test_methods(stranger)
        await stranger.start()
        try:
            with refused("credential", "found none"):
                await ask(stranger, member.peer)
            with refused("credential", "authority that the run names"):
                await ask(of_another, member.peer)
            with refused("credential", "expired"):
                await ask(expired, member.peer)
            with pytest.raises(PeerUnavailableError, match="credential"):
                await ask(member, stranger.peer)
            with refused("credential"):
                await ask(member, of_another.peer)
            with pytest.raises(PeerUnavailableError, match="credential"):
                await ask(member, Peer(None, stranger.address))
        finally:
            await stranger.stop()


async def test_what_joiners_have_to_read_is_answered_to_strangers_but_not_to_the_revoked() -> None:
    async def tell(_request: Request[Question]) -> Reply[Answer]:
        return Reply(Answer(text="the run"))

    async with endpoint_with(_AUTHORITY) as member, endpoint_with(_AUTHORITY) as other:
        member.register("test/open", Question, tell, any_recipient=True, needs_credential=False)
        stranger = Endpoint(Identity.create(), RUN_ID, fast_config())
        for peer in (member.peer, Peer(None, member.address)):
            reply = await stranger.call(peer, "test/open", Question(), Answer, timeout_s=20)
            assert (reply.body.text, reply.sender) == ("the run", member.peer_id)
        with refused("credential", "found none"):  # It is no member by that.
            await ask(stranger, member.peer)
        assert not _admission(member).is_member(stranger.peer_id)
        await other.call(member.peer, "test/open", Question(), Answer, timeout_s=20)
        _admission(member).revoke(_revoked(1, other))
        with refused("revoked"):
            await other.call(member.peer, "test/open", Question(), Answer, timeout_s=20)
        await stranger.stop()


@pytest.mark.parametrize(("role", "is_served"), [("worker", True), ("driver", False), ("monitor", False)])
async def test_a_method_is_answered_to_members_of_its_roles(role: Role, is_served: bool) -> None:
    async def answer(_request: Request[Question]) -> Reply[Answer]:
        return Reply(Answer())

    async def drain(_request: Request[Question], stream: Stream) -> None:
        while await stream.receive() is not None:
            pass

    async with endpoint_with(_AUTHORITY, role=role) as caller, endpoint_with(_AUTHORITY) as callee:
        callee.register("test/round", Question, answer, roles=("node", "worker"))
        callee.register_stream("test/reduction", Question, drain, roles=("node", "worker"))
        for _ in range(2):  # When the credential is shown, and when it is known.
            with nullcontext() if is_served else refused("role", f"found that of a {role}"):
                await caller.call(callee.peer, "test/round", Question(), Answer, timeout_s=20)
            with nullcontext() if is_served else refused("role"):
                async with caller.open_stream(callee.peer, "test/reduction", Question(), timeout_s=20) as stream:
                    await stream.end()
                    assert await stream.receive() is None
        await ask(caller, callee.peer)


async def test_the_credential_of_another_is_of_no_use() -> None:
    async with endpoint_with(_AUTHORITY) as member, endpoint_with(_AUTHORITY) as callee:
        thief = Endpoint(Identity.create(), RUN_ID, fast_config(), Admission(RUN_ID, [_AUTHORITY.peer_id]))
        _admission(thief)._own_wire = _admission(member).own_wire
        with refused("credential", "expected the credential of"):
            await ask(thief, callee.peer)
        await thief.stop()


async def test_the_authority_itself_needs_none() -> None:
    async with endpoint_with(_AUTHORITY) as member:
        authority = Endpoint(_AUTHORITY, RUN_ID, fast_config())
        assert (await ask(authority, member.peer)).sender == member.peer_id
        await authority.stop()


async def test_a_revoked_peer_is_out_at_once_in_both_directions_and_on_open_streams() -> None:
    async with endpoint_with(_AUTHORITY) as bad, endpoint_with(_AUTHORITY) as good:
        await ask(bad, good.peer)
        await ask(good, bad.peer)
        async with asyncio.timeout(20):
            with pytest.raises((RefusedError, PeerUnavailableError)):
                async with bad.open_stream(good.peer, "test/mirror", Question(), timeout_s=60) as stream:
                    await stream.send(0, b"")
                    assert await stream.receive() is not None
                    assert _admission(good).revoke(_revoked(1, bad))
                    await stream.receive()  # The guard ends it within a second.
        with refused("revoked"):
            await ask(bad, good.peer)
        with pytest.raises(PeerUnavailableError, match="revoked"):
            await ask(good, bad.peer)
        assert good.counters.refused["revoked"] >= 2


async def test_what_a_node_streams_to_a_peer_ends_when_that_is_revoked() -> None:
    async with endpoint_with(_AUTHORITY) as good, endpoint_with(_AUTHORITY) as bad, asyncio.timeout(20):
        with pytest.raises((RefusedError, PeerUnavailableError)):
            async with good.open_stream(bad.peer, "test/mirror", Question(), timeout_s=60) as stream:
                await stream.send(0, b"")
                assert await stream.receive() is not None
                _admission(good).revoke(_revoked(1, bad))
                await stream.receive()


async def test_only_newer_lists_of_the_authorities_count() -> None:
    async with endpoint_with(_AUTHORITY) as one, endpoint_with(_AUTHORITY) as other:
        admission = _admission(one)
        assert admission.revoke(_revoked(5, other))
        assert not admission.revoke(_revoked(5))
        assert not admission.revoke(_revoked(4))
        assert admission.is_revoked(other.peer_id)
        with refused("credential", "authority that the run names"):
            admission.revoke(_revoked(6, by=Identity.create()))
        forged = _revoked(7).model_copy(update={"number": 8})
        with refused("credential", "signature"):
            admission.revoke(forged)
        assert admission.revoke(_revoked(6))
        assert not admission.is_revoked(other.peer_id)
        assert admission.numbers() == {_AUTHORITY.peer_id: 6}


def _issued(peer: Identity, clock: Callable[[], float], life_s: float) -> Credential:
    return Credential.issue(_AUTHORITY, RUN_ID, peer.peer_id, "worker", None, clock(), life_s)


def test_a_credential_outlives_an_authority_that_is_away_for_an_hour() -> None:
    """With the default life, whenever the hour begins: a node renews at half of it, and the others believe it on."""
    from trainer.run.authority.service import LIFE_S
    from trainer.run.node.admission import RENEW_AT

    clock, peer = FakeClock(), Identity.create()
    began_s = clock.now_s
    for away_from_s in range(0, int(LIFE_S * RENEW_AT) + 1, 600):
        clock.now_s = began_s
        admission = Admission(RUN_ID, [_AUTHORITY.peer_id], clock)
        credential = _issued(peer, clock, LIFE_S)
        admission.admit(admission.screen(peer.peer_id, credential.wire()))
        clock.now_s = began_s + away_from_s + 3600.0
        assert admission.is_member(peer.peer_id)
    clock.now_s = began_s + LIFE_S + 121.0
    assert not admission.is_member(peer.peer_id)


def test_an_older_credential_takes_nothing_back_and_what_is_known_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, peer = FakeClock(), Identity.create()
    admission = Admission(RUN_ID, [_AUTHORITY.peer_id], clock)
    old, new = _issued(peer, clock, 100.0), _issued(peer, clock, 1000.0)
    for credential in (new, old):
        admission.admit(admission.screen(peer.peer_id, credential.wire()))
    clock.now_s += 500.0
    assert admission.is_member(peer.peer_id)
    monkeypatch.setattr("trainer.network.rpc.admission.MAX_KNOWN", 4)
    for _ in range(10):
        other = Identity.create()
        admission.admit(admission.screen(other.peer_id, _issued(other, clock, 100.0).wire()))
    assert len(admission._known) == 4


async def test_a_renewed_credential_is_shown_on_connections_that_are_open() -> None:
    clock = FakeClock()
    async with endpoint_with(_AUTHORITY, clock=clock) as caller, endpoint_with(_AUTHORITY, clock=clock) as callee:
        await ask(caller, callee.peer)
        clock.now_s += 3000.0
        for endpoint in (caller, callee):
            _admission(endpoint).take_own(_issued(endpoint.identity, clock, 3600.0))
        await ask(caller, callee.peer)
        clock.now_s += 3000.0
        await ask(caller, callee.peer)
        assert callee.counters.refused == {}
        await eventually(lambda: _admission(callee).num_verified == 2)
        reply = await caller.call(callee.peer, "test/cancelled", Question(), Answer, timeout_s=20)
        assert reply.sender == callee.peer_id

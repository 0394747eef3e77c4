"""From one reachable address each node learns of all by exchange, and goes on knowing what is true."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import random
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.announcements import announce, announcement
from trainer.errors import RefusedError
from trainer.network.discovery import PeerWatchdog, verify_announcement
from trainer.network.discovery.config import DiscoveryConfig
from trainer.network.discovery.exchange import (
    EXCHANGE_METHOD,
    PRESENT_METHOD,
    PeerExchangeReply,
    PeerExchangeRequest,
    PresentReply,
    pack_request,
    records_for,
    split_records,
    unpack_request,
)
from trainer.network.discovery.peer_table import KnownPeer
from trainer.network.discovery.static import AddressBackoff, StaticDiscovery
from trainer.network.rpc.config import RpcConfig
from trainer.network.rpc.endpoint import Endpoint
from trainer.network.rpc.identity import Identity
from trainer.network.rpc.messages import Peer, Reply, Request

_TIMES = {"poll_interval_s": 0.1, "announce_interval_s": 0.5, "max_retry_interval_s": 0.5, "request_timeout_s": 5.0}
_QUICK = DiscoveryConfig(announcement_lifetime_s=2.5, **_TIMES)
_WITHIN_S = 60.0


@dataclass
class _Node:
    endpoint: Endpoint
    discovery: StaticDiscovery

    @property
    def address(self) -> str:
        return self.endpoint.address

    async def knows(self) -> set[str]:
        return {announcement.node_id for announcement in await self.discovery.peers()}

    async def stop(self) -> None:
        await self.discovery.close()
        await self.endpoint.stop()


@asynccontextmanager
async def _node(
    name: str,
    *addresses: str,
    identity: Identity | None = None,
    run_id: str = "run",
    config: DiscoveryConfig = _QUICK,
    **options: Any,
) -> AsyncIterator[_Node]:
    endpoint = _stranger(identity, run_id, **options)
    await endpoint.start()
    node = _Node(endpoint, StaticDiscovery(endpoint, addresses, config))
    try:
        await node.discovery.start()
        own = {"node_id": name, "run_id": run_id, "address": endpoint.address}
        certificate = (endpoint.certificate or b"").decode()
        await node.discovery.announce(announcement(endpoint.identity, certificate_pem=certificate, **own))
        yield node
    finally:
        await node.stop()


def _stranger(identity: Identity | None = None, run_id: str = "run", **options: Any) -> Endpoint:
    return Endpoint(identity or Identity.create(), run_id, RpcConfig(host="127.0.0.1", stop_grace_s=0.1, **options))


async def _send(endpoint: Endpoint, peer: Peer, record: bytes, own_bytes: int | None = None) -> None:
    """Sends a record as the own one of an endpoint."""
    body = PeerExchangeRequest(own_bytes=len(record) if own_bytes is None else own_bytes)
    await endpoint.call(peer, EXCHANGE_METHOD, body, PeerExchangeReply, payload=record, timeout_s=5)


async def _announce_at(node: _Node, **fields: object) -> None:
    """Announces a node that does not listen."""
    endpoint = _stranger()
    await _send(endpoint, node.endpoint.peer, announce(endpoint.identity, **fields))
    await endpoint.stop()


async def _until(condition: Callable[[], object], what: str = "") -> None:
    deadline = asyncio.get_running_loop().time() + _WITHIN_S
    while True:
        result = condition()
        if await result if asyncio.iscoroutine(result) else result:
            return
        assert asyncio.get_running_loop().time() < deadline, f"not within {_WITHIN_S:g} s: {what}"
        await asyncio.sleep(0.05)


async def _knows(node: _Node, *names: str, others: bool = False) -> bool:
    known = await node.knows()
    return set(names) <= known and (others or known == set(names))


async def _until_known(node: _Node, *names: str, others: bool = False) -> None:
    await _until(lambda: _knows(node, *names, others=others), f"{names} known")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.parametrize("tls", [True, False])
async def test_one_address_is_enough_to_learn_of_all_and_news_travel(tls: bool) -> None:
    # c knows b only; a hears of c, and c of a, through b.
    async with _node("a", tls=tls) as a, _node("b", a.address, tls=tls) as b, _node("c", b.address, tls=tls) as c:
        await _until_known(a, "b", "c")
        await _until_known(b, "a", "c")
        await _until_known(c, "a", "b")
        [found] = [said for said in await a.discovery.peers() if said.node_id == "c"]
        assert found.peer() == c.endpoint.peer
        await c.discovery.announce(found.model_copy(update={"outer_step": 7}))

        async def is_heard() -> bool:
            return any(said.outer_step == 7 for said in await a.discovery.peers())

        await _until(is_heard, "a hears of c's step")


@pytest.mark.slow
async def test_a_node_that_returns_elsewhere_or_with_another_certificate_is_found_again() -> None:
    identity, listed = Identity.create(), Identity.create()
    async with _node("a", identity=listed) as a, _node("b", a.address) as b:
        async with _node("c", a.address, identity=identity) as c:
            await _until_known(b, "a", "c")
            before = c.endpoint.peer
        async with _node("c again", a.address, identity=identity) as c:
            await _until_known(b, "a", "c again")
            [found] = [said for said in await b.discovery.peers() if said.peer_id == identity.peer_id]
            assert found.peer() == c.endpoint.peer != before
            await _until_known(c, "a", "b")
        await a.stop()
        async with _node("a again", identity=listed, port=int(a.address.rpartition(":")[2])) as again:
            await _until_known(b, "a again")
            await _until_known(again, "b")


def _levels(address: str, caplog: pytest.LogCaptureFixture) -> list[str]:
    """Levels of what was logged of an address, debug left out."""
    said = [it for it in caplog.records if it.name == "trainer.network.discovery.static" and address in it.getMessage()]
    return [it.levelname for it in said if it.levelname != "DEBUG"]


@pytest.mark.slow
async def test_an_address_that_stays_silent_is_reported_once_and_one_that_is_late_is_not(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("trainer.network.discovery.static._REPORT_AFTER_S", 1.0)
    caplog.set_level("DEBUG")
    late, dead = f"127.0.0.1:{(port := _free_port())}", "127.0.0.1:9"

    def num_attempts() -> int:
        return sum(f"{late} does not answer" in it.getMessage() for it in caplog.records)

    # Long-lived: on a busy machine the late one is not forgotten before an attempt shows that it is gone.
    async with _node("b", late, dead, config=dataclasses.replace(_QUICK, announcement_lifetime_s=60.0)) as b:
        await _until(lambda: _levels(late, caplog), "the first attempt")
        assert await b.knows() == set()
        async with _node("a", late, b.address, port=port) as a:
            await _until_known(b, "a")
            await _until_known(a, "b")
            await _until(lambda: "WARNING" in _levels(dead, caplog), "a report")
            await asyncio.sleep(1.2)
        before = num_attempts()
        await _until(lambda: num_attempts() > before, "that it is gone")
    assert _levels(late, caplog) == ["INFO"]
    assert _levels(dead, caplog) == ["INFO", "WARNING"]


async def test_lies_are_dropped_and_counted_and_another_run_is_not_heard() -> None:
    async with _node("a") as a, AsyncExitStack() as stack, _node("b", a.address, run_id="other") as b:
        liar = _stranger()
        await liar.start()
        stack.push_async_callback(liar.stop)
        for record in (
            announce(Identity.create()),  # True, but not the liar's to say as its own.
            announce(liar.identity).replace(b":4100", b":4101"),
            b"junk",
            announce(liar.identity, lifetime_s=4000.0),
            announce(liar.identity, run_id="other"),
        ):
            await _send(liar, a.endpoint.peer, record)
        assert await a.knows() == set()
        assert a.discovery.refused == {"subkey": 1, "signature": 1, "malformed": 1, "lifetime": 1, "run": 1}
        with pytest.raises(RefusedError, match="expected a record of 5 bytes"):
            await _send(liar, a.endpoint.peer, b"x", own_bytes=5)
        await _until(lambda: a.endpoint.counters.refused["run"], "a call of another run")
        assert await b.knows() == set()


async def test_an_announcement_nobody_can_use_harms_nobody_and_goes_no_further() -> None:
    async with _node("a") as a, _node("b", a.address) as b:
        await _until_known(b, "a")
        for name, address in {
            "no certificate": "127.0.0.1:4100",
            "no host": "no.such.host.invalid:4100",
            "somebody else's": b.address,
            "own": a.address,
            "a service": "127.0.0.1:22",
            "private": "10.1.2.3:4100",
        }.items():
            await _announce_at(a, node_id=name, address=address, certificate_pem="none")
        await _until(lambda: a.discovery.refused["unreachable"] == 3, "all were tried")
        assert a.discovery.refused["address"] == 3
        async with _node("c", a.address) as c:
            await _until_known(c, "a", "b")
            assert await b.knows() <= {"a", "c"}
            assert "unreachable" not in b.discovery.refused


@pytest.mark.slow
async def test_an_address_that_many_announce_gets_one_knock() -> None:
    knocks: list[object] = []

    def accept(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        knocks.append(writer)
        writer.close()

    victim = await asyncio.start_server(accept, "127.0.0.1", 0)
    address = f"127.0.0.1:{victim.sockets[0].getsockname()[1]}"
    async with _node("a") as a, _node("b", a.address) as b:
        for number in range(20):
            certificate = (b.endpoint.certificate or b"").decode() if number % 2 else ""
            await _announce_at(a, address=address, node_id=f"s{number}", certificate_pem=certificate)
        await _until(lambda: a.discovery.refused["unreachable"] == 20, "all were looked at")
    victim.close()
    assert len(knocks) == 1


@pytest.mark.slow
async def test_sybils_neither_push_out_nor_keep_out_nor_get_about() -> None:
    """Three times as many as the table holds: dead ones, and real nodes that tell of further dead ones."""
    small = dataclasses.replace(_QUICK, max_peers=8, announcement_lifetime_s=20.0)
    dead = [announce(Identity.create(), address=f"127.0.0.1:{20_000 + it}", node_id="dead") for it in range(24)]
    async with _node("a", config=small) as a, _node("b", a.address, config=small) as b, AsyncExitStack() as stack:
        await _until_known(a, "b")
        await _until_known(b, "a")
        a.discovery._table.used(b.endpoint.peer_id)
        b.discovery._table.used(a.endpoint.peer_id)
        for number in range(24):
            liar = _stranger()
            stack.push_async_callback(liar.stop)
            if number % 2:
                await _pretend(liar, dead)
            address = liar.address if number % 2 else f"127.0.0.1:{21_000 + number}"
            record = announce(liar.identity, address=address, lifetime_s=3600.0, node_id="sybil")
            await _send(liar, a.endpoint.peer, record)
        await _until(lambda: a.discovery.refused["full"] >= 4, "the table is contested")
        assert "b" in await a.knows() <= {"b", "sybil"}
        async with _node("c", a.address, config=small) as c:
            await _until_known(a, "c", others=True)
            a.discovery._table.used(c.endpoint.peer_id)
            await _until_known(b, "c", others=True)
            await _until_known(c, "b", others=True)
            for node in (a, b, c):
                assert "dead" not in await node.knows()
                assert len(await node.discovery.peers()) <= 8


async def _pretend(endpoint: Endpoint, told: list[bytes], num_busy: int = 0) -> list[int]:
    """Answers what discovery asks, at first that it is busy, and passes on ``told``; the calls, as they come."""
    calls: list[int] = []

    async def exchange(_: Request[PeerExchangeRequest]) -> Reply[PeerExchangeReply]:
        return Reply(PeerExchangeReply(sizes=tuple(map(len, told))), b"".join(told))

    async def present(_: Request[PeerExchangeRequest]) -> Reply[PresentReply]:
        calls.append(len(calls))
        if calls[-1] < num_busy:
            raise RefusedError("busy", "later")
        return Reply(PresentReply())

    endpoint.register(EXCHANGE_METHOD, PeerExchangeRequest, exchange, any_recipient=True)
    endpoint.register(PRESENT_METHOD, PeerExchangeRequest, present)
    await endpoint.start()
    return calls


async def test_a_node_that_is_busy_when_it_is_first_called_is_called_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.network.discovery.base._RETRY_S", 0.1)
    other = _stranger()
    calls = await _pretend(other, [], num_busy=2)
    async with _node("a") as a:
        certificate = (other.certificate or b"").decode()
        record = announce(other.identity, address=other.address, node_id="b", certificate_pem=certificate)
        await _send(other, a.endpoint.peer, record)
        await _until_known(a, "b")
    await other.stop()
    assert len(calls) == 3


async def test_a_node_announced_for_anothers_address_does_not_keep_that_one_out() -> None:
    """A record with a wrong address leads to a refusal there, not to a mix-up."""
    async with _node("a") as a, _node("late") as late:
        await _announce_at(a, address=late.address, certificate_pem="x")
        await _until(lambda: a.discovery.refused["unreachable"] == 1, "the liar was tried")
        async with _node("b", a.address, late.address) as b:
            await _until_known(a, "b", "late")
            with pytest.raises(RefusedError):
                await _send(b.endpoint, Peer(Identity.create().peer_id, a.address, a.endpoint.certificate), b"")


async def test_a_lack_of_peers_is_reported_when_it_has_lasted_and_again_every_minute(
    caplog: pytest.LogCaptureFixture,
) -> None:
    first, second = f"127.0.0.1:{_free_port()}", f"127.0.0.1:{_free_port()}"
    now_s = 1000.0
    async with _node("a", first, second) as a:
        watchdog = PeerWatchdog(a.discovery, "worker of any stage", 30.0, clock=lambda: now_s)
        await _until(lambda: {first, second} <= set(a.discovery.no_peers_reason().replace(",", " ").split()))
        for seconds, num_others in ((0, 0), (29, 0), (2, 0), (58, 0), (3, 0), (500, 3), (29, 0)):
            now_s += seconds
            watchdog.look(num_others)
    said = [it.getMessage() for it in caplog.records if it.name == "trainer.network.discovery.base"]
    assert said == 2 * [f"nobody answers at {first}, {second}: no worker of any stage has been heard of"]


async def test_a_node_that_only_knows_its_own_address_misses_nobody() -> None:
    """The first of a run, with the list of addresses that all have."""
    own = f"127.0.0.1:{(port := _free_port())}"
    async with _node("a", own, port=port) as a:
        await _until(lambda: not a.discovery._addresses)
        assert a.discovery.no_peers_reason() == ""


def test_pauses_double_up_to_a_bound_and_end_with_an_answer() -> None:
    backoff = AddressBackoff(first_pause_s=1, max_pause_s=5)
    now = 0.0
    for pause_s in (1, 2, 4, 5, 5):
        assert backoff.is_due("a:1", now)
        silence = backoff.failed("a:1", now)
        assert (silence.since_s, silence.pause_s) == (0.0, pause_s)
        assert not backoff.is_due("a:1", now + pause_s - 0.01)
        now += pause_s
    assert "a:1" in backoff.silent
    backoff.answered("a:1")
    assert backoff.is_due("a:1", now)
    assert not backoff.silent
    assert (backoff.failed("a:1", now).since_s, backoff.silent["a:1"].pause_s) == (now, 1)
    backoff = AddressBackoff(first_pause_s=1, max_pause_s=5, max_addresses=7)
    for number in range(200):
        backoff.failed(str(number % 50), float(number))
    assert len(backoff.silent) == 7


def test_only_what_the_asker_lacks_is_told_within_the_length_of_a_message() -> None:
    wires = [announce(Identity.create()) for _ in range(4)]
    known = [KnownPeer(verify_announcement(wire, now=time.time(), max_clock_skew_s=10), wire) for wire in wires]
    own, has = unpack_request(*pack_request(b"own record", known))
    assert own == b"own record"
    assert has == {peer.announcement.peer_id: peer.announcement.sent_at for peer in known}
    has[known[1].announcement.peer_id] -= 1
    del has[known[3].announcement.peer_id]
    asker = known[2].announcement.peer_id
    told = split_records(*records_for(asker, has, known, random.Random(0)))
    assert set(told) == {known[1].wire, known[3].wire}
    nonsense = {peer_id: float("nan") for peer_id in has}
    assert len(records_for("asker", nonsense, known, random.Random(0))[0].sizes) == len(known)
    long = KnownPeer(known[0].announcement, b"x" * 16_000)
    body, payload = records_for("asker", {}, [long] * 200, random.Random(0))
    assert sum(body.sizes) == len(payload) <= 1 << 20
    assert len(body.sizes) == (1 << 20) // 16_000
    with pytest.raises(RefusedError, match="expected records of 5 bytes"):
        split_records(PeerExchangeReply(sizes=(2, 3)), b"abcd")


@given(own_bytes=st.integers(0, 100), payload=st.binary(max_size=200))
def test_a_payload_that_does_not_fit_its_head_is_refused(own_bytes: int, payload: bytes) -> None:
    body = PeerExchangeRequest(own_bytes=own_bytes)
    if len(payload) >= own_bytes and (len(payload) - own_bytes) % 40 == 0:
        assert unpack_request(body, payload)[0] == payload[:own_bytes]
    else:
        with pytest.raises(RefusedError, match="expected a record"):
            unpack_request(body, payload)


@pytest.mark.slow
async def test_a_crowd_at_one_address_is_answered_at_a_pace_and_keeps_no_other_address_waiting() -> None:
    """64 at once, then three a second; sixteen wait, for four seconds at most, and the rest are refused at once."""
    discovery = StaticDiscovery(_stranger(), ["127.0.0.1:1"], DiscoveryConfig(poll_interval_s=2.0))
    queue, handlers = discovery._strangers, itertools.cycle((discovery._exchange, discovery._present))

    async def is_answered(address: str) -> bool:
        request = Request(Identity.create().peer_id, PeerExchangeRequest(own_bytes=0), b"", address)
        try:
            await next(handlers)(request)
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
        while queue._waiting or queue.admitting:
            await asyncio.sleep(0.1)
    await asyncio.sleep(0.4)
    assert await is_answered("192.0.2.1"), "once the crowd is gone"
    await discovery.close()

"""From one reachable address each node learns of all, and goes on knowing what is true."""

from __future__ import annotations

import asyncio
import dataclasses
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import pytest

from trainer.errors import RefusedError
from trainer.network.discovery.announcement import Announcement
from trainer.network.discovery.config import DiscoveryConfig
from trainer.network.discovery.exchange import (
    EXCHANGE_METHOD,
    PRESENT_METHOD,
    ExchangeReply,
    ExchangeRequest,
    PresentReply,
)
from trainer.network.discovery.static import StaticDiscovery
from trainer.network.rpc.config import RpcConfig
from trainer.network.rpc.endpoint import Endpoint
from trainer.network.rpc.identity import Identity
from trainer.network.rpc.messages import Peer, Reply, Request

_QUICK = DiscoveryConfig(
    poll_interval_s=0.1,
    announce_interval_s=0.5,
    announcement_lifetime_s=2.5,
    max_retry_interval_s=0.5,
    request_timeout_s=5.0,
)
_WITHIN_S = 20.0


@dataclass
class _Node:
    endpoint: Endpoint
    discovery: StaticDiscovery

    async def knows(self) -> set[str]:
        return {announcement.node_id for announcement in await self.discovery.peers()}


@asynccontextmanager
async def _node(
    name: str,
    *addresses: str,
    identity: Identity | None = None,
    port: int = 0,
    run_id: str = "run",
    tls: bool = True,
    config: DiscoveryConfig = _QUICK,
) -> AsyncIterator[_Node]:
    identity = identity or Identity.create()
    endpoint = Endpoint(identity, run_id, RpcConfig(host="127.0.0.1", port=port, tls=tls, stop_grace_s=0.1))
    await endpoint.start()
    discovery = StaticDiscovery(endpoint, addresses, config)
    try:
        await discovery.start()
        certificate = (endpoint.certificate or b"").decode()
        await discovery.announce(
            Announcement(
                peer_id=identity.peer_id,
                node_id=name,
                run_id=run_id,
                address=endpoint.address,
                certificate_pem=certificate,
            )
        )
        yield _Node(endpoint, discovery)
    finally:
        await discovery.close()
        await endpoint.stop()


async def _until(condition: Callable[[], object], what: str) -> None:
    deadline = asyncio.get_running_loop().time() + _WITHIN_S
    while True:
        result = condition()
        if await result if asyncio.iscoroutine(result) else result:
            return
        if asyncio.get_running_loop().time() > deadline:
            raise AssertionError(f"not within {_WITHIN_S:g} s: {what}")
        await asyncio.sleep(0.05)


async def _until_known(node: _Node, *names: str) -> None:
    async def is_so() -> bool:
        return await node.knows() == set(names)

    await _until(is_so, f"{names} known")


@pytest.mark.parametrize("tls", [True, False])
def test_one_address_is_enough_to_learn_of_all(tls: bool) -> None:
    async def scenario() -> None:
        # c knows b only; a hears of c, and c of a, through b.
        async with (
            _node("a", tls=tls) as a,
            _node("b", a.endpoint.address, tls=tls) as b,
            _node("c", b.endpoint.address, tls=tls) as c,
        ):
            await _until_known(a, "b", "c")
            await _until_known(b, "a", "c")
            await _until_known(c, "a", "b")
            [found] = [said for said in await a.discovery.peers() if said.node_id == "c"]
            assert found.peer() == c.endpoint.peer

    asyncio.run(scenario())


def test_news_travel() -> None:
    async def scenario() -> None:
        async with _node("a") as a, _node("b", a.endpoint.address) as b, _node("c", a.endpoint.address) as c:
            await _until_known(c, "a", "b")
            [own] = [said for said in await c.discovery.peers() if said.node_id == "b"]
            await b.discovery.announce(own.model_copy(update={"outer_step": 7}))

            async def heard() -> bool:
                return any(said.outer_step == 7 for said in await c.discovery.peers())

            await _until(heard, "c hears of b's step")

    asyncio.run(scenario())


@pytest.mark.slow
def test_a_node_that_comes_back_elsewhere_is_found_again() -> None:
    async def scenario() -> None:
        identity = Identity.create()
        async with _node("a") as a, _node("b", a.endpoint.address) as b:
            async with _node("c", a.endpoint.address, identity=identity) as c:
                await _until_known(b, "a", "c")
                before = c.endpoint.peer
            async with _node("c again", a.endpoint.address, identity=identity) as c:
                await _until_known(b, "a", "c again")
                [found] = [said for said in await b.discovery.peers() if said.peer_id == identity.peer_id]
                assert found.peer() == c.endpoint.peer != before
                await _until_known(c, "a", "b")

    asyncio.run(scenario())


def test_the_listed_node_comes_back_at_its_address_with_another_certificate() -> None:
    async def scenario() -> None:
        identity = Identity.create()
        async with _node("a", identity=identity) as a:
            port = int(a.endpoint.address.rpartition(":")[2])
            async with _node("b", a.endpoint.address) as b:
                await _until_known(b, "a")
                await a.discovery.close()
                await a.endpoint.stop()
                async with _node("a again", identity=identity, port=port) as again:
                    await _until_known(b, "a again")
                    await _until_known(again, "b")

    asyncio.run(scenario())


def test_addresses_may_be_dead_for_a_while_and_include_the_own() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        free = probe.getsockname()[1]

    async def scenario() -> None:
        async with _node("b", f"127.0.0.1:{free}", "127.0.0.1:9") as b:
            await asyncio.sleep(0.5)
            assert await b.knows() == set()
            listed = f"127.0.0.1:{free}"
            async with _node("a", listed, b.endpoint.address, port=free) as a:
                await _until_known(b, "a")
                await _until_known(a, "b")

    asyncio.run(scenario())


def told_of(address: str, caplog: pytest.LogCaptureFixture) -> list[str]:
    said = [it for it in caplog.records if it.name == "trainer.network.discovery.static" and address in it.getMessage()]
    return [it.levelname for it in said if it.levelname != "DEBUG"]


@pytest.mark.slow
def test_an_address_that_stays_silent_is_reported_once_and_one_that_is_late_is_not(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("trainer.network.discovery.static._REPORT_AFTER_S", 1.0)
    caplog.set_level("DEBUG")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        late = f"127.0.0.1:{probe.getsockname()[1]}"
    dead = "127.0.0.1:9"

    def num_attempts() -> int:
        return sum(f"{late} does not answer" in it.getMessage() for it in caplog.records)

    async def scenario() -> None:
        async with _node("b", late, dead) as b:
            await _until(lambda: told_of(late, caplog), "the first attempt")
            async with _node("a", port=int(late.rpartition(":")[2])):
                await _until_known(b, "a")
                await _until(lambda: "WARNING" in told_of(dead, caplog), "a report")
                await asyncio.sleep(1.2)
            before = num_attempts()
            await _until(lambda: num_attempts() > before, "that it is gone")

    asyncio.run(scenario())
    assert told_of(late, caplog) == ["INFO"]
    assert told_of(dead, caplog) == ["INFO", "WARNING"]


@pytest.mark.slow
def test_a_listed_node_that_ends_is_no_news(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")

    async def scenario() -> str:
        async with _node("a") as a, _node("b", a.endpoint.address) as b:
            await _until_known(b, "a")
            await a.discovery.close()
            await a.endpoint.stop()
            await _until(lambda: f"{a.endpoint.address} does not answer" in caplog.text, "an attempt in vain")
            return a.endpoint.address

    assert told_of(asyncio.run(scenario()), caplog) == []


@pytest.mark.slow
def test_a_node_that_is_gone_is_forgotten() -> None:
    async def scenario() -> None:
        async with _node("a") as a:
            async with _node("b", a.endpoint.address):
                await _until_known(a, "b")
            await _until_known(a)

    asyncio.run(scenario())


def test_another_run_is_not_heard() -> None:
    async def scenario() -> None:
        async with _node("a") as a, _node("b", a.endpoint.address, run_id="other") as b:
            async with _node("c", a.endpoint.address):
                await _until_known(a, "c")
            assert await b.knows() == set()
            assert a.endpoint.counters.refused["run"] > 0

    asyncio.run(scenario())


def test_lies_are_dropped_and_counted(announce: Callable[..., bytes]) -> None:
    async def scenario() -> None:
        async with _node("a") as a:
            liar = Endpoint(Identity.create(), "run", RpcConfig(host="127.0.0.1", stop_grace_s=0.1))
            victim = Identity.create()
            records = [
                announce(victim),  # True, but not the liar's to say as its own.
                announce(liar.identity).replace(b":4100", b":4101"),
                b"junk",
                announce(liar.identity, lifetime_s=4000.0),
                announce(liar.identity, run_id="other"),
            ]
            try:
                await liar.start()
                for record in records:
                    body = ExchangeRequest(own_bytes=len(record))
                    await liar.call(a.endpoint.peer, EXCHANGE_METHOD, body, ExchangeReply, payload=record, timeout_s=5)
                assert await a.knows() == set()
                assert a.discovery.refused == {"subkey": 1, "signature": 1, "malformed": 1, "lifetime": 1, "run": 1}
                with pytest.raises(RefusedError, match="expected a record of 5 bytes"):
                    await liar.call(
                        a.endpoint.peer,
                        EXCHANGE_METHOD,
                        ExchangeRequest(own_bytes=5),
                        ExchangeReply,
                        payload=b"x",
                        timeout_s=5,
                    )
            finally:
                await liar.stop()

    asyncio.run(scenario())


def test_an_announcement_nobody_can_use_harms_nobody_and_goes_no_further(announce: Callable[..., bytes]) -> None:
    async def scenario() -> None:
        async with _node("a") as a, _node("b", a.endpoint.address) as b:
            await _until_known(b, "a")
            odd = {
                "no certificate": "127.0.0.1:4100",
                "no host": "no.such.host.invalid:4100",
                "somebody else's": b.endpoint.address,
                "own": a.endpoint.address,
                "a service": "127.0.0.1:22",
                "private": "10.1.2.3:4100",
            }
            for name, address in odd.items():
                identity = Identity.create()
                record = announce(identity, node_id=name, address=address, certificate_pem="none")
                liar = Endpoint(identity, "run", RpcConfig(host="127.0.0.1", stop_grace_s=0.1))
                body = ExchangeRequest(own_bytes=len(record))
                await liar.call(a.endpoint.peer, EXCHANGE_METHOD, body, ExchangeReply, payload=record, timeout_s=5)
                await liar.stop()
            await _until(lambda: a.discovery.refused["unreachable"] == 3, "all were tried")
            assert a.discovery.refused["address"] == 3
            async with _node("c", a.endpoint.address) as c:
                await _until_known(c, "a", "b")
            assert await b.knows() <= {"a", "c"}
            assert "unreachable" not in b.discovery.refused

    asyncio.run(scenario())


@pytest.mark.slow
def test_an_address_that_many_announce_gets_one_knock(announce: Callable[..., bytes]) -> None:
    knocks: list[object] = []

    async def scenario() -> None:
        def accept(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            knocks.append(writer)
            writer.close()

        victim = await asyncio.start_server(accept, "127.0.0.1", 0)
        address = f"127.0.0.1:{victim.sockets[0].getsockname()[1]}"
        async with _node("a") as a, _node("b", a.endpoint.address) as b:
            for number in range(20):
                identity = Identity.create()
                certificate = (b.endpoint.certificate or b"").decode() if number % 2 else ""
                record = announce(identity, address=address, node_id=f"s{number}", certificate_pem=certificate)
                liar = Endpoint(identity, "run", RpcConfig(host="127.0.0.1", stop_grace_s=0.1))
                body = ExchangeRequest(own_bytes=len(record))
                await liar.call(a.endpoint.peer, EXCHANGE_METHOD, body, ExchangeReply, payload=record, timeout_s=5)
                await liar.stop()
            await _until(lambda: a.discovery.refused["unreachable"] == 20, "all were looked at")
        victim.close()

    asyncio.run(scenario())
    assert len(knocks) == 1


@pytest.mark.slow
def test_sybils_neither_push_out_nor_keep_out_nor_get_about(announce: Callable[..., bytes]) -> None:
    """Three times as many as the table holds: dead ones, and real nodes that tell of further dead ones."""
    small = dataclasses.replace(_QUICK, max_peers=8, announcement_lifetime_s=20.0)

    async def scenario() -> None:
        async with (
            _node("a", config=small) as a,
            _node("b", a.endpoint.address, config=small) as b,
            AsyncExitStack() as stack,
        ):
            await _until_known(a, "b")
            await _until_known(b, "a")
            a.discovery._table.used(b.endpoint.peer_id)
            b.discovery._table.used(a.endpoint.peer_id)
            dead = [announce(Identity.create(), address=f"127.0.0.1:{20_000 + it}", node_id="dead") for it in range(24)]
            for number in range(24):
                liar = Endpoint(Identity.create(), "run", RpcConfig(host="127.0.0.1", stop_grace_s=0.1))
                stack.push_async_callback(liar.stop)
                if number % 2:
                    await _pretend(liar, dead)
                address = liar.address if number % 2 else f"127.0.0.1:{21_000 + number}"
                record = announce(liar.identity, address=address, lifetime_s=3600.0, node_id="sybil")
                body = ExchangeRequest(own_bytes=len(record))
                await liar.call(a.endpoint.peer, EXCHANGE_METHOD, body, ExchangeReply, payload=record, timeout_s=5)
            await _until(lambda: a.discovery.refused["full"] >= 4, "the table is contested")
            assert "b" in await a.knows() <= {"b", "sybil"}
            async with _node("c", a.endpoint.address, config=small) as c:
                await _until(lambda: _has(a, "c"), "a knows c")
                a.discovery._table.used(c.endpoint.peer_id)
                await _until(lambda: _has(b, "c"), "b knows c")
                await _until(lambda: _has(c, "b"), "c knows b")
                for node in (a, b, c):
                    assert "dead" not in await node.knows()
                    assert len(await node.discovery.peers()) <= 8

    asyncio.run(scenario())


def test_who_is_busy_when_it_is_first_called_is_called_again(
    announce: Callable[..., bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.network.discovery.verifying._RETRY_S", 0.1)
    num_calls = 0

    async def present(_: Request[ExchangeRequest]) -> Reply[PresentReply]:
        nonlocal num_calls
        num_calls += 1
        if num_calls < 3:
            raise RefusedError("busy", "later")
        return Reply(PresentReply())

    async def scenario() -> None:
        other = Endpoint(Identity.create(), "run", RpcConfig(host="127.0.0.1", stop_grace_s=0.1))
        other.register(PRESENT_METHOD, ExchangeRequest, present)
        await other.start()
        async with _node("a") as a:
            certificate = (other.certificate or b"").decode()
            record = announce(other.identity, address=other.address, node_id="b", certificate_pem=certificate)
            body = ExchangeRequest(own_bytes=len(record))
            await other.call(a.endpoint.peer, EXCHANGE_METHOD, body, ExchangeReply, payload=record, timeout_s=5)
            await _until_known(a, "b")
        await other.stop()

    asyncio.run(scenario())
    assert num_calls == 3


@pytest.mark.slow
def test_a_crowd_at_one_address_is_answered_at_a_pace_and_keeps_no_other_address_waiting() -> None:
    """64 at once, then three a second; sixteen wait, for four seconds at most, and the rest are refused at once."""
    endpoint = Endpoint(Identity.create(), "run", RpcConfig(host="127.0.0.1"))
    answers = StaticDiscovery(endpoint, ["127.0.0.1:1"], DiscoveryConfig(poll_interval_s=2.0))._answers

    async def asked(address: str) -> bool:
        request = Request(Identity.create().peer_id, ExchangeRequest(own_bytes=0), memoryview(b""), address)
        try:
            await answers._answer(request)
        except RefusedError as error:
            assert error.reason == "busy"
            return False
        return True

    async def scenario() -> None:
        begun_s = time.monotonic()
        crowd = [asyncio.create_task(asked("192.0.2.1")) for _ in range(120)]
        cut = crowd.pop()
        await asyncio.sleep(0)
        assert await asked("192.0.2.2"), "of another address"
        cut.cancel()
        num_answered = sum(await asyncio.gather(*crowd))
        assert 64 <= num_answered <= 64 + 3 * (time.monotonic() - begun_s)
        assert num_answered <= 64 + 16
        async with asyncio.timeout(10):
            while answers._waiting or answers._letting_in:
                await asyncio.sleep(0.1)
        await asyncio.sleep(0.4)
        assert await asked("192.0.2.1"), "once the crowd is gone"
        await answers.close()

    asyncio.run(scenario())


async def _has(node: _Node, name: str) -> bool:
    return name in await node.knows()


async def _pretend(endpoint: Endpoint, told: list[bytes]) -> None:
    """Answers what discovery asks, and passes on ``told``."""

    async def exchange(_: Request[ExchangeRequest]) -> Reply[ExchangeReply]:
        return Reply(ExchangeReply(sizes=tuple(map(len, told))), b"".join(told))

    async def present(_: Request[ExchangeRequest]) -> Reply[PresentReply]:
        return Reply(PresentReply())

    endpoint.register(EXCHANGE_METHOD, ExchangeRequest, exchange, any_recipient=True)
    endpoint.register(PRESENT_METHOD, ExchangeRequest, present)
    await endpoint.start()


def test_who_is_announced_for_anothers_address_does_not_keep_that_one_out(announce: Callable[..., bytes]) -> None:
    async def scenario() -> None:
        async with _node("a") as a, _node("late") as late:
            liar = Endpoint(Identity.create(), "run", RpcConfig(host="127.0.0.1", stop_grace_s=0.1))
            record = announce(liar.identity, address=late.endpoint.address, certificate_pem="x")
            body = ExchangeRequest(own_bytes=len(record))
            await liar.call(a.endpoint.peer, EXCHANGE_METHOD, body, ExchangeReply, payload=record, timeout_s=5)
            await liar.stop()
            await _until(lambda: a.discovery.refused["unreachable"] == 1, "the liar was tried")
            async with _node("b", a.endpoint.address, late.endpoint.address):
                await _until_known(a, "b", "late")

    asyncio.run(scenario())


def test_peers_are_addressed_by_who_they_are(announce: Callable[..., bytes]) -> None:
    """A record with a wrong address leads to a refusal there, not to a mix-up."""

    async def scenario() -> None:
        async with _node("a") as a, _node("b", a.endpoint.address) as b:
            await _until_known(b, "a")
            wrong = Peer(Identity.create().peer_id, a.endpoint.address, a.endpoint.certificate)
            with pytest.raises(RefusedError):
                await b.endpoint.call(wrong, EXCHANGE_METHOD, ExchangeRequest(own_bytes=0), ExchangeReply, timeout_s=5)

    asyncio.run(scenario())

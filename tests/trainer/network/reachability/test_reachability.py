"""A node connects to who asks for it and to nobody else, and says what it found there; addresses have rations."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tests.support.rpc_node import RUN_ID, fast_config
from trainer.errors import RefusedError
from trainer.network.reachability import (
    DIAL_BACK_METHOD,
    HELLO_METHOD,
    RELAY_CHECK_METHOD,
    DialBackReply,
    DialBackRequest,
    Hello,
    HelloReply,
    ReachabilityService,
    RelayCheckRequest,
    measure_bandwidth,
)
from trainer.network.reachability.messages import BANDWIDTH_METHOD, BandwidthReply, BandwidthRequest
from trainer.network.relay import Relay, RelayConfig
from trainer.network.rpc import Endpoint, Identity, Peer

TIMEOUT_S = 20.0


@asynccontextmanager
async def node(run_id: str = RUN_ID, *, tls: bool = True, port: int = 0) -> AsyncIterator[Endpoint]:
    endpoint = Endpoint(Identity.create(), run_id, fast_config(tls=tls, port=port, stall_timeout_s=5.0))
    service = ReachabilityService(endpoint, tls=tls)
    service.register()
    await endpoint.start()
    try:
        yield endpoint
    finally:
        await service.close()
        await endpoint.stop()


def by_address(endpoint: Endpoint) -> Peer:
    return Peer(None, endpoint.address)


async def dialled(asker: Endpoint, other: Endpoint, port: int, host: str = "") -> DialBackReply:
    body = DialBackRequest(port=port, host=host)
    return (await asker.call(by_address(other), DIAL_BACK_METHOD, body, DialBackReply, timeout_s=TIMEOUT_S)).body


def port_of(endpoint: Endpoint) -> int:
    return int(endpoint.address.rpartition(":")[2])


@pytest.mark.parametrize("tls", [True, False])
def test_who_listens_is_reached(tls: bool) -> None:
    async def ask() -> None:
        async with node(tls=tls) as asker, node(tls=tls) as other:
            found = await dialled(asker, other, port_of(asker))
            assert (found.outcome, found.address) == ("reached", asker.address)

    asyncio.run(ask())


def test_what_is_found_in_place_of_the_asker_is_told() -> None:
    async def ask() -> None:
        with socket.create_server(("127.0.0.1", 0)) as closed:
            closed_port = closed.getsockname()[1]
        silent = socket.create_server(("127.0.0.1", 0))
        async with node() as asker, node() as other, node() as third, node("another-run") as stranger:
            assert (await dialled(asker, other, closed_port)).outcome == "refused"
            assert (await dialled(asker, other, port_of(third))).outcome == "another"
            assert (await dialled(asker, other, port_of(stranger))).outcome == "another"
            with silent:
                assert (await dialled(asker, other, silent.getsockname()[1])).outcome == "tls"

    asyncio.run(ask())


@pytest.mark.parametrize("host", ["127.0.0.2", "192.0.2.7", "10.0.0.1", "::1", "2001:db8::1"])
def test_no_third_party_is_dialled(host: str) -> None:
    async def ask() -> None:
        async with node() as asker, node() as other:
            with pytest.raises(RefusedError) as refused:
                await dialled(asker, other, 4100, host)
            assert refused.value.reason == "address"

    asyncio.run(ask())


def test_dial_backs_and_bytes_of_an_address_are_rationed_whoever_asks() -> None:
    async def ask() -> None:
        async with node() as other:
            reasons = []
            for _ in range(10):
                async with node() as asker:
                    try:
                        reasons.append((await dialled(asker, other, port_of(asker))).outcome)
                    except RefusedError as error:
                        reasons.append(error.reason)
            assert reasons[:6] == ["reached"] * 6
            assert set(reasons[6:]) == {"rate"}

            most = 1 << 20
            async with node() as asker:
                taken = 0
                with pytest.raises(RefusedError) as refused:
                    for _ in range(200):
                        reply = await asker.call(
                            by_address(other),
                            BANDWIDTH_METHOD,
                            BandwidthRequest(answer_bytes=most),
                            BandwidthReply,
                            timeout_s=TIMEOUT_S,
                        )
                        assert len(reply.payload) == most
                        taken += most
                assert refused.value.reason == "rate"
                assert 40 << 20 <= taken <= 64 << 20

    asyncio.run(ask())


def test_bandwidth_and_clock_are_measured() -> None:
    async def ask() -> None:
        async with node() as asker, node() as other:
            hello = await asker.call(by_address(other), HELLO_METHOD, Hello(), HelloReply, timeout_s=TIMEOUT_S)
            assert hello.body.seen_host == "127.0.0.1"
            assert hello.sender == other.peer_id
            found = await measure_bandwidth(asker, by_address(other))
            assert found.up_bytes_per_s > 1e5 and found.down_bytes_per_s > 1e5
            assert 0 < found.round_trip_s < TIMEOUT_S

    asyncio.run(ask())


def test_a_relay_is_checked_at_the_askers_own_address_alone_and_counts_as_a_dial_back() -> None:
    async def checked(asker: Endpoint, other: Endpoint, port: int, ticket: str, host: str = "") -> str:
        body = RelayCheckRequest(port=port, host=host, ticket=ticket)
        try:
            reply = await asker.call(by_address(other), RELAY_CHECK_METHOD, body, DialBackReply, timeout_s=TIMEOUT_S)
        except RefusedError as error:
            return error.reason
        return reply.body.outcome

    async def ask() -> None:
        async with node() as asker, node() as other:
            relay = Relay(RelayConfig(host="127.0.0.1"), identity=asker.identity)
            await relay.start()
            assert await checked(asker, other, relay.port, relay.new_ticket()) == "reached"
            anothers = Relay(RelayConfig(host="127.0.0.1"), identity=other.identity)
            await anothers.start()
            assert await checked(asker, other, anothers.port, anothers.new_ticket()) == "another"
            await anothers.stop()
            assert await checked(asker, other, relay.port, relay.new_ticket(), "127.0.0.2") == "address"
            assert await checked(asker, other, 1023, relay.new_ticket()) == "address"
            closed_port = relay.port
            await relay.stop()
            assert await checked(asker, other, closed_port, relay.new_ticket()) == "refused"
            found = [await checked(asker, other, closed_port, relay.new_ticket()) for _ in range(6)]
            assert "rate" in found, found

    asyncio.run(ask())

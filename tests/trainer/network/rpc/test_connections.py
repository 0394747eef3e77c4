"""Connections beyond what an address may have are closed, and those of proven peers are not."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tests.support.event_loop import on_event_loop
from tests.support.rpc_node import Answer, Question
from tests.support.rpc_pair import running_endpoint
from trainer.network.rpc import Endpoint
from trainer.network.rpc.accepted_sockets import AcceptedSockets
from trainer.network.rpc.connections import Connection, Connections, worst_connections
from trainer.network.rpc.standing import MIN_GOOD_CALLS, MIN_TENURE_S, Standing


def _connection(number: int, address: str = "192.0.2.1", **options: object) -> Connection:
    return Connection(f"ipv4:{address}:{number}", address, float(number), **options)  # type: ignore[arg-type]


def _closed(connections: list[Connection], max_total: int) -> list[str]:
    worst = worst_connections(connections, lambda it: it.peer_id.startswith("proven"), max_total)
    return [connection.grpc_peer for connection in worst]


def test_an_address_keeps_its_share_and_the_longest_idle_go_first() -> None:
    connections = [_connection(number) for number in range(30)]
    connections[0].peer_id = "known"
    connections[1].num_calls = 1
    connections += [_connection(number, "192.0.2.2") for number in range(20)]
    assert _closed(connections, 80) == [f"ipv4:192.0.2.1:{number}" for number in range(2, 12)]


def test_near_the_limit_the_address_with_most_gives_way() -> None:
    connections = [_connection(number, f"192.0.2.{number}") for number in range(40)]
    connections += [_connection(100 + number, "198.51.100.7") for number in range(20)]
    assert _closed(connections, 80) == []
    connections += [_connection(200 + number, f"203.0.113.{number}") for number in range(10)]
    assert _closed(connections, 80) == [f"ipv4:198.51.100.7:{100 + number}" for number in range(10)]


def test_proven_peers_keep_theirs_but_not_any_number() -> None:
    connections = [_connection(number, peer_id=f"proven {number}") for number in range(60)]
    assert _closed(connections, 64) == []
    connections = [_connection(number, peer_id="proven") for number in range(60)]
    assert _closed(connections, 64) == [f"ipv4:192.0.2.1:{number}" for number in range(36)]


def test_a_peer_is_proven_by_calls_in_good_order_for_a_while_on_one_connection() -> None:
    clock_s = 0.0
    standing = Standing(lambda: clock_s)
    connections = Connections(16, standing, lambda: clock_s)

    def call(peer_id: str) -> None:
        with connections.in_use("ipv4:192.0.2.1:5") as connection:
            connections.identified(connection, peer_id)
            connections.ended_well(connection, peer_id)

    for _ in range(3 * MIN_GOOD_CALLS):
        call("quick")
    assert not standing.is_proven("quick")
    clock_s += MIN_TENURE_S + 1
    call("other")
    call("quick")
    assert not len(standing), "another's call in between begins it anew"
    for _ in range(MIN_GOOD_CALLS):
        clock_s += MIN_TENURE_S / 4
        call("steady")
    assert standing.is_proven("steady")
    assert len(standing) == 1


@asynccontextmanager
async def _idle_connections(endpoint: Endpoint, number: int) -> AsyncIterator[list[asyncio.StreamReader]]:
    """With a whole TLS handshake, where the endpoint has TLS, and nothing after it."""
    host, _, port = endpoint.address.rpartition(":")
    context = None
    if endpoint.certificate is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        context.set_alpn_protocols(["h2"])
    opened = [await asyncio.open_connection(host, int(port), ssl=context) for _ in range(number)]
    try:
        yield [reader for reader, _ in opened]
    finally:
        for _, writer in opened:
            writer.transport.abort()


async def _drained(reader: asyncio.StreamReader) -> None:
    while await reader.read(1 << 16):
        pass


@pytest.mark.slow
@pytest.mark.skipif(not AcceptedSockets.are_visible(), reason="no /proc/self/fd here")
@pytest.mark.parametrize("tls", [False, True])
@on_event_loop
async def test_idle_connections_of_one_host_keep_nobody_out(tls: bool) -> None:
    # A stall time-out that no test waits for: gRPC's pings would end connections that do not answer.
    options = {"tls": tls, "stall_timeout_s": 60.0}
    async with (
        running_endpoint(**options, max_connections=32) as endpoint,
        running_endpoint(**options) as proven,
        running_endpoint(**options) as newcomer,
    ):
        await endpoint.call(proven.peer, "test/echo", Question(), Answer, timeout_s=20)
        await proven.call(endpoint.peer, "test/echo", Question(), Answer, timeout_s=20)
        busy = asyncio.create_task(
            proven.call(endpoint.peer, "test/echo", Question(text="still", sleep_s=3.0), Answer, timeout_s=30)
        )
        async with _idle_connections(endpoint, 31) as readers:
            reading = [asyncio.create_task(_drained(reader)) for reader in readers]
            async with asyncio.timeout(20):
                while sum(task.done() for task in reading) < 15:
                    await asyncio.sleep(0.05)
            reply = await newcomer.call(endpoint.peer, "test/echo", Question(text="in"), Answer, timeout_s=20)
            assert reply.body.text == "in"
            assert (await busy).body.text == "still"
            for task in reading:
                task.cancel()


@pytest.mark.skipif(not AcceptedSockets.are_visible(), reason="no /proc/self/fd here")
@on_event_loop
async def test_a_guard_sees_and_shuts_accepted_connections_only() -> None:
    async with running_endpoint() as endpoint, running_endpoint() as other:
        await other.call(endpoint.peer, "test/echo", Question(), Answer, timeout_s=20)
        sockets = AcceptedSockets(int(endpoint.address.rpartition(":")[2]))
        [peer] = sockets.scan()
        assert peer.startswith("ipv4:127.0.0.1:")
        assert not AcceptedSockets(int(other.address.rpartition(":")[2])).scan()
        assert not sockets.shut("ipv4:127.0.0.1:1")
        assert sockets.shut(peer)
        async with asyncio.timeout(20):
            while sockets.scan():
                await asyncio.sleep(0.02)
        await other.call(endpoint.peer, "test/echo", Question(), Answer, timeout_s=20)

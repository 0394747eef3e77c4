"""Which peers have a share of their own, and which connections are closed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tests.support.raw_http2 import any_certificate
from tests.support.rpc_pair import Clock, ask, running_endpoint, until
from trainer.network.rpc import Endpoint
from trainer.network.rpc.connections import AcceptedSockets, Connection, Connections, worst_connections
from trainer.network.rpc.limits import (
    KEPT_S,
    MAX_PER_ADDRESS,
    MAX_PROVEN,
    MIN_GOOD_CALLS,
    MIN_TENURE_S,
    Share,
    Standing,
)

_where_visible = pytest.mark.skipif(not AcceptedSockets.are_visible(), reason="no /proc/self/fd here")


def test_an_address_has_so_many_proven_peers_and_the_first_stay() -> None:
    clock = Clock()
    standing = Standing(clock)
    for number in range(2 * MAX_PER_ADDRESS):
        clock.now_s += 1.0
        standing.prove("first", "192.0.2.1")
        standing.prove(str(number), "192.0.2.1")
    assert len(standing) == MAX_PER_ADDRESS
    assert standing.is_proven("first")
    standing.prove("elsewhere", "192.0.2.2")
    assert standing.share("elsewhere", "192.0.2.2") == Share("elsewhere", True)
    for _ in range(2):
        standing.disprove("elsewhere")
    assert standing.share("elsewhere", "192.0.2.2") == Share("192.0.2.2", False)
    clock.now_s += KEPT_S - 10.0
    standing.prove("first", "192.0.2.1")
    clock.now_s += 11.0
    standing.prove("later", "192.0.2.1")
    assert standing.is_proven("first") and standing.is_proven("later")
    assert len(standing) == 2


def test_proven_and_greylisted_ones_are_bounded_in_all() -> None:
    standing = Standing(Clock())
    for number in range(MAX_PROVEN + 10):
        standing.prove(str(number), f"192.0.{number // 50}.{number % 50}")
    assert len(standing) == MAX_PROVEN
    for number in range(20_000):
        standing.let_stall(f"192.{number >> 16}.{number >> 8 & 255}.{number & 255}")
    assert len(standing._stalls) <= 4096


def test_an_address_is_greylisted_for_a_minute_after_its_strangers_let_answers_stall() -> None:
    clock = Clock()
    standing = Standing(clock)
    for _ in range(3):
        standing.let_stall("192.0.2.1")
    assert not standing.is_greylisted("192.0.2.1")
    clock.now_s += 61.0
    standing.let_stall("192.0.2.1")
    assert not standing.is_greylisted("192.0.2.1")  # Those before are forgotten.
    for _ in range(3):
        standing.let_stall("192.0.2.1")
    assert standing.is_greylisted("192.0.2.1") and not standing.is_greylisted("192.0.2.2")
    clock.now_s += 60.0
    assert not standing.is_greylisted("192.0.2.1")


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


def test_near_the_limit_the_address_with_most_gives_way_and_proven_peers_keep_theirs_but_not_any_number() -> None:
    connections = [_connection(number, f"192.0.2.{number}") for number in range(40)]
    connections += [_connection(100 + number, "198.51.100.7") for number in range(20)]
    assert _closed(connections, 80) == []
    connections += [_connection(200 + number, f"203.0.113.{number}") for number in range(10)]
    assert _closed(connections, 80) == [f"ipv4:198.51.100.7:{100 + number}" for number in range(10)]
    connections = [_connection(number, peer_id=f"proven {number}") for number in range(60)]
    assert _closed(connections, 64) == []
    connections = [_connection(number, peer_id="proven") for number in range(60)]
    assert _closed(connections, 64) == [f"ipv4:192.0.2.1:{number}" for number in range(36)]


def test_a_peer_is_proven_by_calls_in_good_order_for_a_while_on_one_connection() -> None:
    clock = Clock()
    standing = Standing(clock)
    connections = Connections(16, standing, clock)

    def call(peer_id: str) -> None:
        with connections.in_use("ipv4:192.0.2.1:5") as connection:
            connections.identified(connection, peer_id)
            connections.ended_well(connection, peer_id)

    for _ in range(3 * MIN_GOOD_CALLS):
        call("quick")
    assert not standing.is_proven("quick")
    clock.now_s += MIN_TENURE_S + 1
    call("other")
    call("quick")
    assert not len(standing), "another's call in between begins it anew"
    for _ in range(MIN_GOOD_CALLS):
        clock.now_s += MIN_TENURE_S / 4
        call("steady")
    assert standing.is_proven("steady")
    assert len(standing) == 1


@asynccontextmanager
async def _idle_connections(endpoint: Endpoint, number: int) -> AsyncIterator[list[asyncio.StreamReader]]:
    """With a whole TLS handshake, where the endpoint has TLS, and nothing after it."""
    host, _, port = endpoint.address.rpartition(":")
    context = any_certificate() if endpoint.certificate is not None else None
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
@_where_visible
@pytest.mark.parametrize("tls", [False, True])
async def test_idle_connections_of_one_host_keep_nobody_out(tls: bool) -> None:
    # A stall time-out that no test waits for: gRPC's pings would end connections that do not answer.
    options = {"tls": tls, "stall_timeout_s": 60.0}
    async with (
        running_endpoint(**options, max_connections=32) as endpoint,
        running_endpoint(**options) as proven,
        running_endpoint(**options) as newcomer,
    ):
        await ask(endpoint, proven.peer)
        await ask(proven, endpoint.peer)
        busy = asyncio.create_task(ask(proven, endpoint.peer, "still", 3.0, timeout_s=30))
        async with _idle_connections(endpoint, 31) as readers:
            reading = [asyncio.create_task(_drained(reader)) for reader in readers]
            await until(lambda: sum(task.done() for task in reading) >= 15)
            await ask(newcomer, endpoint.peer, "in")
            await busy
            for task in reading:
                task.cancel()


@_where_visible
async def test_a_guard_sees_and_shuts_accepted_connections_only() -> None:
    async with running_endpoint() as endpoint, running_endpoint() as other:
        await ask(other, endpoint.peer)
        sockets = AcceptedSockets(int(endpoint.address.rpartition(":")[2]))
        [peer] = sockets.scan()
        assert peer.startswith("ipv4:127.0.0.1:")
        assert not AcceptedSockets(int(other.address.rpartition(":")[2])).scan()
        assert not sockets.shut("ipv4:127.0.0.1:1")
        assert sockets.shut(peer)
        await until(lambda: not sockets.scan())
        await ask(other, endpoint.peer)

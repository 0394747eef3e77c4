"""A relay and the nodes it lends ports to, over real sockets: what gets through, what is bounded, what is refused."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.rpc_node import FAST, RUN_ID, ask, endpoint_pair, register_test_methods, running_endpoint
from tests.support.waiting import until
from trainer.errors import PeerUnavailableError, RefusedError, TrainerUsageError
from trainer.network.reachability import DIAL_BACK_METHOD, DialBackReply, DialBackRequest, ReachabilityService
from trainer.network.relay import Relay, RelayConfig, RelayedReach
from trainer.network.relay.carrying import FairShares
from trainer.network.relay.protocol import COPY_BYTES, MAX_LINE_BYTES, end, proof_text
from trainer.network.rpc import Endpoint, Identity, Peer, RpcConfig

_OWN_HOST = "127.0.0.2"
"""Relays see connections come from 127.0.0.1: a node that listens here cannot be reached where they come from."""


@asynccontextmanager
async def _relay(**options: object) -> AsyncIterator[Relay]:
    relay = Relay(RelayConfig(host="127.0.0.1", **options))  # type: ignore[arg-type]
    await relay.start()
    try:
        yield relay
    finally:
        await relay.stop()


@asynccontextmanager
async def _relayed(
    *relays: Relay, host: str = _OWN_HOST, identity: Identity | None = None, is_dialling_back: bool = False
) -> AsyncIterator[Endpoint]:
    through = tuple(f"127.0.0.1:{relay.port}" for relay in relays)
    reach = RelayedReach(RelayConfig(through=through, wait_s=10.0))
    config = RpcConfig(**{**FAST, "host": host})  # type: ignore[arg-type]
    endpoint = Endpoint(identity or Identity.create(), RUN_ID, config, reach=reach)
    register_test_methods(endpoint)
    service = ReachabilityService(endpoint)
    if is_dialling_back:
        service.register()
    await endpoint.start()
    try:
        yield endpoint
    finally:
        await service.close()
        await endpoint.stop()


async def test_a_node_that_cannot_be_reached_answers_by_way_of_a_relay() -> None:
    async with _relay() as relay, _relayed(relay) as node, running_endpoint(tls=True) as caller:
        assert node.address.startswith("127.0.0.1:")
        assert not node.address.endswith(f":{node.port}")
        payload = secrets.token_bytes(1 << 20)
        reply = await ask(caller, node.peer, text="å", payload=payload)
        assert (reply.body.text, reply.payload, reply.sender) == ("å", payload, node.peer_id)
        sent, received = node.relayed_bytes
        assert sent > 1 << 20
        assert received > 1 << 20
        assert relay.carried_bytes == sent + received


async def test_two_relayed_nodes_call_each_other() -> None:
    async with _relay() as relay, _relayed(relay) as one, _relayed(relay, host="127.0.0.3") as other:
        for caller, callee in ((one, other), (other, one)):
            assert (await ask(caller, callee.peer, text="here")).sender == callee.peer_id


async def test_a_stranger_behind_a_relay_cannot_have_a_node_try_ports_of_its_own_machine() -> None:
    async with (
        _relay() as relay,
        _relayed(relay, is_dialling_back=True) as node,
        running_endpoint(tls=True) as caller,
    ):
        # The call comes from a loopback address of the node's own machine, at which all that listens there answers.
        with pytest.raises(RefusedError, match="by way of a relay"):
            body = DialBackRequest(port=relay.port)
            await caller.call(node.peer, DIAL_BACK_METHOD, body, DialBackReply, timeout_s=20.0)
        direct = Peer(node.peer_id, f"{_OWN_HOST}:{node.port}", node.certificate)
        port = int(caller.address.rpartition(":")[2])
        reply = await caller.call(direct, DIAL_BACK_METHOD, DialBackRequest(port=port), DialBackReply, timeout_s=20.0)
        assert reply.body.address == f"127.0.0.1:{port}"  # A direct caller is dialled.


async def test_a_node_that_answers_where_it_comes_from_announces_its_own_address() -> None:
    async with _relay() as relay, _relayed(relay, host="127.0.0.1") as node:
        assert node.address == f"127.0.0.1:{node.port}"


async def test_the_second_relay_carries_on_when_the_first_is_lost() -> None:
    async with _relay() as second, running_endpoint(tls=True) as caller:
        first = Relay(RelayConfig(host="127.0.0.1"))
        await first.start()
        async with _relayed(first, second) as node:
            await until(lambda: second.num_nodes == 1)
            before = node.address
            assert (await ask(caller, node.peer, text="a")).sender == node.peer_id
            await first.stop()
            await until(lambda: node.address != before and node.address != "")
            assert (await ask(caller, node.peer, text="b")).sender == node.peer_id


async def test_a_node_that_restarts_takes_its_place_again() -> None:
    identity = Identity.create()
    async with (
        _relay(max_nodes=1) as relay,
        _relayed(relay, identity=identity),
        running_endpoint(tls=True) as caller,
        _relayed(relay, host="127.0.0.3", identity=identity) as again,
    ):
        assert (await ask(caller, again.peer, text="again")).sender == identity.peer_id
        assert relay.num_nodes == 1


async def test_without_a_relay_the_node_starts_and_keeps_trying() -> None:
    relay = Relay(RelayConfig(host="127.0.0.1"))
    await relay.start()
    port = relay.port
    await relay.stop()
    reach = RelayedReach(RelayConfig(through=(f"127.0.0.1:{port}",), wait_s=0.2))
    endpoint = Endpoint(Identity.create(), RUN_ID, RpcConfig(**{**FAST, "host": _OWN_HOST}), reach=reach)  # type: ignore[arg-type]
    await endpoint.start()
    try:
        assert endpoint.address == f"{_OWN_HOST}:{endpoint.port}"
        async with _relay(port=port):
            await until(lambda: endpoint.address.startswith("127.0.0.1:"))
    finally:
        await endpoint.stop()


async def _said(relay: Relay, *lines: bytes) -> list[dict[str, object]]:
    """Sends lines as they are, and returns what the relay answers until it closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", relay.port, limit=COPY_BYTES)
    answers = []
    try:
        for line in lines:
            writer.write(line)
        with contextlib.suppress(OSError):
            await writer.drain()
            while line := await reader.readline():
                answers.append(json.loads(line))
        return answers
    finally:
        await end(writer)


def _register(**changes: object) -> bytes:
    said = {"kind": "register", "version": 1, "peer_id": Identity.create().peer_id, "listen_port": 4100, **changes}
    return json.dumps(said).encode() + b"\n"


@pytest.mark.parametrize(
    "line",
    [
        b"\n",
        b"GET / HTTP/1.1\r\n",
        b"\x00" * 64 + b"\n",
        b"[" * 2000 + b"\n",
        b"a" * MAX_LINE_BYTES + b"\n",
        b"a" * 300_000,
        b'{"kind": "accept", "token": "' + b"0" * 32 + b'"}\n',
        b'{"kind": "accept", "token": "../../etc/passwd"}\n',
        _register(listen_port=0),
        _register(peer_id="f" * 63),
        _register(extra=1),
        _register(listen_port=1e400),
    ],
)
async def test_what_is_no_registration_ends_its_own_connection_only(line: bytes) -> None:
    async with _relay() as relay, _relayed(relay) as node, running_endpoint(tls=True) as caller:
        assert await _said(relay, line) == []
        assert (await ask(caller, node.peer, text="still")).sender == node.peer_id


@pytest.mark.parametrize(
    "fault", ["another key", "another nonce", "another relay", "another relay's host", "another version"]
)
async def test_nobody_registers_without_the_nodes_own_key(fault: str) -> None:
    identity, other = Identity.create(), Identity.create()
    async with _relay(public_host="relay.example") as relay:
        reader, writer = await asyncio.open_connection("127.0.0.1", relay.port)
        writer.write(_register(peer_id=identity.peer_id, version=2 if fault == "another version" else 1))
        answer = json.loads(await reader.readline())
        if answer["kind"] == "challenge":
            nonce = "0" * 32 if fault == "another nonce" else answer["nonce"]
            host = "203.0.113.5" if fault == "another relay's host" else "relay.example"
            name = f"{host}:{relay.port + 1 if fault == 'another relay' else relay.port}"
            text = proof_text(nonce, name, identity.peer_id)
            signer = other if fault == "another key" else identity
            writer.write(
                json.dumps({"kind": "proof", "relay": name, "signature": signer.sign(text).hex()}).encode() + b"\n"
            )
            answer = json.loads(await reader.readline())
        assert answer["kind"] == "refusal"
        assert "expected" in str(answer["text"])
        assert relay.num_nodes == 0
        writer.close()


@pytest.mark.parametrize("name", ["127.0.0.1", "relay.example"])
async def test_a_relay_with_a_public_host_takes_nodes_that_call_it_so_or_by_its_own_address(name: str) -> None:
    async with _relay(public_host="relay.example") as relay:
        _, writer = await _registered(relay, name)
        assert relay.num_nodes == 1
        await end(writer)


@pytest.mark.parametrize(
    "said",
    [
        {"public_host": "a:b%c"},
        {"public_host": "under_score"},
        {"public_host": "fe80::1%eth0"},
        {"seen_host": "", "is_direct": True},
        {"seen_host": "::::", "is_direct": True},
    ],
)
async def test_a_relay_cannot_have_a_node_announce_what_is_no_address(said: dict[str, object]) -> None:
    async def lie(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        lent = {"kind": "lent", "port": 4100, "public_host": "", "seen_host": "127.0.0.1", "is_direct": False, **said}
        writer.write(json.dumps(lent).encode() + b"\n")
        await reader.read()
        await end(writer)

    async with await asyncio.start_server(lie, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        reach = RelayedReach(RelayConfig(through=(f"127.0.0.1:{port}",), wait_s=0.5))
        node = Endpoint(Identity.create(), RUN_ID, RpcConfig(**{**FAST, "host": _OWN_HOST}), reach=reach)  # type: ignore[arg-type]
        await node.start()
        assert node.address == f"{_OWN_HOST}:{node.port}"
        await node.stop()


async def test_nodes_of_one_host_and_in_all_are_bounded() -> None:
    async with _relay(max_nodes_per_host=1) as relay, _relayed(relay):
        reach = RelayedReach(RelayConfig(through=(f"127.0.0.1:{relay.port}",), wait_s=0.5))
        second = Endpoint(Identity.create(), RUN_ID, RpcConfig(**{**FAST, "host": "127.0.0.4"}), reach=reach)  # type: ignore[arg-type]
        await second.start()
        assert relay.num_nodes == 1
        assert second.address.startswith("127.0.0.4:")
        await second.stop()


async def test_connections_from_one_host_are_bounded() -> None:
    async with _relay(max_connections_per_host=2) as relay, _relayed(relay) as node:
        host, _, port = node.address.rpartition(":")
        opened = [await asyncio.open_connection(host, int(port)) for _ in range(5)]
        async with asyncio.timeout(10):
            ended = [asyncio.create_task(reader.read(1)) for reader, _ in opened]
            while sum(task.done() for task in ended) < 3:
                await asyncio.sleep(0.01)
        assert sum(task.done() for task in ended) == 3
        for task, (_, writer) in zip(ended, opened, strict=True):
            task.cancel()
            await end(writer)
        await asyncio.gather(*ended, return_exceptions=True)


async def test_silent_connections_do_not_keep_nodes_out() -> None:
    async with _relay() as relay:
        silent = [
            await asyncio.open_connection("127.0.0.1", relay.port, local_addr=("127.0.0.9", 0)) for _ in range(40)
        ]
        async with _relayed(relay) as node, running_endpoint(tls=True) as caller:
            assert (await ask(caller, node.peer, text="in")).sender == node.peer_id
        for _, writer in silent:
            await end(writer)


async def test_connections_in_all_are_bounded_over_nodes() -> None:
    async with _relay(max_connections=2) as relay, _relayed(relay) as one, _relayed(relay, host="127.0.0.3") as other:
        opened = []
        for node in (one, one, one, other, other):
            host, _, port = node.address.rpartition(":")
            opened.append(await asyncio.open_connection(host, int(port)))
        ended = [asyncio.create_task(reader.read(1)) for reader, _ in opened]
        async with asyncio.timeout(10):
            while sum(task.done() for task in ended) < 3:
                await asyncio.sleep(0.01)
        assert relay.num_connections == 2
        for task, (_, writer) in zip(ended, opened, strict=True):
            task.cancel()
            await end(writer)
        await asyncio.gather(*ended, return_exceptions=True)


async def _registered(relay: Relay, host: str = "127.0.0.1") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection whose node has proven its key and has a port."""
    identity = Identity.create()
    reader, writer = await asyncio.open_connection("127.0.0.1", relay.port)
    writer.write(_register(peer_id=identity.peer_id, listen_port=1))
    nonce = json.loads(await reader.readline())["nonce"]
    name = f"{host}:{relay.port}"
    signature = identity.sign(proof_text(nonce, name, identity.peer_id)).hex()
    writer.write(json.dumps({"kind": "proof", "relay": name, "signature": signature}).encode() + b"\n")
    assert json.loads(await reader.readline())["kind"] == "lent"
    return reader, writer


async def test_a_node_that_floods_its_relay_loses_its_port() -> None:
    async with _relay() as relay:
        reader, writer = await _registered(relay)
        assert relay.num_nodes == 1
        writer.write(b'{"kind": "ping"}\n' * 1000)
        with contextlib.suppress(OSError):
            async with asyncio.timeout(10):
                answers = (await reader.read(-1)).count(b"pong")
            assert answers < 100
        await until(lambda: relay.num_nodes == 0)
        await end(writer)


async def test_strangers_that_prove_nothing_do_not_keep_a_registered_host_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.network.relay.server._MAX_UNPROVEN", 4)
    async with _relay() as relay, _relayed(relay) as node, running_endpoint(tls=True) as caller:
        silent = []
        for number in range(6):  # Half of them begin to register, and never answer the challenge.
            streams = await asyncio.open_connection("127.0.0.1", relay.port, local_addr=(f"127.0.1.{number + 1}", 0))
            if number % 2:
                streams[1].write(_register())
            silent.append(streams)
        refused = [asyncio.create_task(reader.read(-1)) for reader, _ in silent]
        await until(lambda: sum(task.done() for task in refused) == 2)
        assert (await ask(caller, node.peer, text="in")).sender == node.peer_id
        for task, (_, writer) in zip(refused, silent, strict=True):
            task.cancel()
            await end(writer)
        await asyncio.gather(*refused, return_exceptions=True)


async def test_a_relay_that_lies_about_its_node_is_found_out() -> None:
    """It can lead callers to another node of its own: that has not the certificate that the node has announced."""
    async with _relay() as relay, _relayed(relay) as node, endpoint_pair(tls=True) as (caller, impostor):
        led_astray = Peer(node.peer_id, impostor.address, node.certificate)
        with pytest.raises(PeerUnavailableError, match="another TLS certificate"):
            await ask(caller, led_astray, text="secret")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"through": ("a:1", "b:1", "c:1")}, "2 relays at most"),
        ({"through": ("nowhere",)}, "expected an address"),
        ({"port": 70_000}, "0 to 65535"),
        ({"first_port": 80}, "1024 to"),
        ({"bytes_per_s": float("nan")}, "0 or more"),
        ({"max_nodes": 0}, "1 or more"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, object], expected: str) -> None:
    with pytest.raises(TrainerUsageError, match=expected):
        RelayConfig(**options)  # type: ignore[arg-type]


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 1 << 16)), min_size=1, max_size=200))
def test_a_bandwidth_is_never_exceeded_and_shared_evenly(transfers: list[tuple[str, int]]) -> None:
    now_s = 0.0
    shares = FairShares(1e6, lambda: now_s)
    ends = {"a": 0.0, "b": 0.0, "c": 0.0}
    sizes = {"a": 0, "b": 0, "c": 0}
    for user, size_bytes in transfers:
        wait_s = shares.owed_s(user, size_bytes)
        assert wait_s >= 0
        ends[user], sizes[user] = wait_s, sizes[user] + size_bytes
    # All asked at once: nobody's last transfer may begin before what it had passed on by then has taken its time.
    last = dict(reversed(transfers))
    for user in sizes:
        if sizes[user]:
            final = next(size for name, size in reversed(transfers) if name == user)
            assert ends[user] >= (sizes[user] - final) / 1e6 - 1e-9
    assert set(last) <= set(sizes)

"""Nodes that look for relays themselves, and nodes that offer one: in one process, over the loopback interface.

A relay sees these nodes come from 127.0.0.1; one that listens at 127.0.0.2 is not reached where it comes from.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.authority import running_authority
from tests.support.rpc_node import FAST, RUN_ID, ask, register_test_methods
from tests.support.s3_servers import free_port
from tests.support.waiting import until
from trainer.errors import TrainerUsageError
from trainer.network.discovery import Announcement, Discovery, DiscoveryConfig, StaticDiscovery
from trainer.network.reachability import ReachabilityService
from trainer.network.relay import Relay, RelayConfig, RelayedReach
from trainer.network.relay.client import LinkState
from trainer.network.rpc import Endpoint, Identity, RpcConfig
from trainer.network.rpc.admission import Admission
from trainer.run.config import RunConfig, from_mapping
from trainer.run.config.admission import AdmissionConfig
from trainer.run.node import relaying
from trainer.run.node.admission import AdmissionClient, join_reachably, reach_of
from trainer.run.node.relaying import RelayFinder, ServedRelay, announced_relays, named_relays

FAST_DISCOVERY: dict[str, Any] = {"poll_interval_s": 0.1, "allow_private": True}


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value_s in (
        ("_GRACE_S", 0.0),
        ("_LOOK_S", 0.05),
        ("_FIRST_CHECK_S", 0.2),
        ("_CHECK_AGAIN_S", 0.5),
        ("_FAILED_S", 0.5),
    ):
        monkeypatch.setattr(relaying, name, value_s)


class _Node:
    def __init__(self, host: str, relay: RelayConfig, initial_peers: tuple[str, ...]) -> None:
        self.config = relay
        self.options = DiscoveryConfig(initial_peers=initial_peers, **FAST_DISCOVERY)
        self.reach = RelayedReach(relay)
        rpc = RpcConfig(**{**FAST, "host": host})  # type: ignore[arg-type]
        self.endpoint = Endpoint(Identity.create(), RUN_ID, rpc, reach=self.reach)
        register_test_methods(self.endpoint)
        self.discovery: Discovery = StaticDiscovery(self.endpoint, initial_peers, self.options)
        self.finder = RelayFinder(relay, self.options, self.endpoint, self.reach, self.discovery)
        self.served: ServedRelay | None = None
        self.tasks: list[asyncio.Task[None]] = []

    async def announce(self) -> None:
        endpoint = self.endpoint
        said = Announcement(
            peer_id=endpoint.peer_id,
            node_id=endpoint.peer_id[:8],
            run_id=RUN_ID,
            address=endpoint.address,
            certificate_pem=(endpoint.certificate or b"").decode(),
            relay_port=0 if self.served is None else self.served.announced_port,
        )
        await self.discovery.announce(said)

    async def announce_forever(self) -> None:
        while True:
            await self.announce()
            await asyncio.sleep(0.1)


@asynccontextmanager
async def _node(listens_at: str = "127.0.0.1", *initial_peers: str, **relay: Any) -> AsyncIterator[_Node]:
    node = _Node(listens_at, RelayConfig(**{"host": "127.0.0.1", **relay}), initial_peers)
    service = ReachabilityService(node.endpoint)
    service.register()
    async with AsyncExitStack() as stack:
        await node.endpoint.start()
        stack.push_async_callback(node.endpoint.stop)
        await node.discovery.start()
        stack.push_async_callback(node.discovery.close)
        stack.push_async_callback(service.close)
        if node.reach.relay is not None:
            node.served = ServedRelay(node.reach.relay, node.endpoint, node.discovery)
            node.tasks.append(asyncio.create_task(node.served.run(lambda: None)))
        node.tasks += [asyncio.create_task(node.finder.run()), asyncio.create_task(node.announce_forever())]
        try:
            yield node
        finally:
            for task in node.tasks:
                task.cancel()
            await asyncio.gather(*node.tasks, return_exceptions=True)


def _as_behind_a_router(node: _Node) -> None:
    """Makes a node one that nobody connects to, as far as it knows: here all addresses of the machine are reached."""
    node.endpoint.contacts.when_served.clear()
    node.finder._called_s.clear()


async def test_a_node_that_is_reached_serves_and_one_that_is_not_finds_it() -> None:
    port = free_port()
    async with (
        _node(serve=True, port=port) as serving,
        _node("127.0.0.1", serving.endpoint.address) as other,
        _node("127.0.0.2", serving.endpoint.address) as hidden,
    ):
        del other
        await until(lambda: serving.served is not None and serving.served.announced_port == port)
        _as_behind_a_router(hidden)
        await until(lambda: hidden.reach.address)
        assert hidden.endpoint.address.startswith("127.0.0.1:")
        assert serving.reach.relay is not None
        assert serving.reach.relay.num_nodes == 1
        reply = await ask(serving.endpoint, hidden.endpoint.peer, text="by way of itself")
        assert reply.sender == hidden.endpoint.peer_id
        assert sum(hidden.reach.relayed_bytes) > 0
        assert len(hidden.reach.states()) == 1


async def test_a_node_that_others_connect_to_looks_for_no_relay() -> None:
    port = free_port()
    async with _node(serve=True, port=port) as serving, _node("127.0.0.2", serving.endpoint.address) as other:
        await until(lambda: serving.served is not None and serving.served.announced_port)
        await until(lambda: other.finder._called_s)
        await asyncio.sleep(0.3)
        assert other.endpoint.address.startswith("127.0.0.2:")


async def test_a_relay_that_peers_do_not_reach_is_not_announced_and_takes_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The first time nobody may be known yet who could say, and that somebody has connected counts.
    monkeypatch.setattr(relaying, "_CHECKED_EVERY_S", 0.5)
    port = free_port()
    # Others see this node come from 127.0.0.1, and its relay listens elsewhere: as if a firewall closed its port.
    async with (
        _node(serve=True, port=port, host="127.0.0.3") as serving,
        _node("127.0.0.1", serving.endpoint.address),
    ):
        relay = serving.reach.relay
        assert relay is not None
        await until(lambda: relay.paused)
        assert serving.served is not None
        assert serving.served.announced_port == 0
        reach = RelayedReach(RelayConfig(through=(f"127.0.0.3:{port}",), wait_s=0.5))
        rpc = RpcConfig(**{**FAST, "host": "127.0.0.2"})  # type: ignore[arg-type]
        refused = Endpoint(Identity.create(), RUN_ID, rpc, reach=reach)
        await refused.start()
        await until(lambda: reach.states()[0].failure)
        assert "they do not reach this one" in reach.states()[0].failure
        await refused.stop()


class _Lent:
    """A relay that says it has lent a port, at which nobody listens."""

    def __init__(self) -> None:
        self.port = 0
        self.num_asked = 0

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_asked += 1
        await reader.readline()
        writer.write(
            b'{"kind":"lent","port":%d,"public_host":"","seen_host":"127.0.0.1","is_direct":false}\n' % free_port()
        )
        await reader.read()
        writer.transport.abort()


async def test_a_relay_whose_lent_ports_are_closed_is_none_and_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    lie = _Lent()
    async with await asyncio.start_server(lie.answer, "127.0.0.1", 0) as server, _node() as other:
        monkeypatch.setattr(relaying, "DEFAULT_PORT", server.sockets[0].getsockname()[1])
        async with _node("127.0.0.2", other.endpoint.address) as hidden:
            _as_behind_a_router(hidden)
            await until(lambda: lie.num_asked)
            await until(lambda: not hidden.reach.states())
            assert hidden.endpoint.address.startswith("127.0.0.2:")
            asked = lie.num_asked
            await asyncio.sleep(0.5)
            assert lie.num_asked == asked  # For ten minutes.


async def test_a_relay_at_a_named_host_is_found_without_any_announcement(monkeypatch: pytest.MonkeyPatch) -> None:
    relay = Relay(RelayConfig(host="127.0.0.1"))
    await relay.start()
    monkeypatch.setattr(relaying, "DEFAULT_PORT", relay.port)
    try:
        async with _node() as other, _node("127.0.0.2", other.endpoint.address) as hidden:
            _as_behind_a_router(hidden)
            await until(lambda: hidden.reach.address)
            assert relay.num_nodes == 1
    finally:
        await relay.stop()


async def test_who_wants_no_relay_uses_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relaying, "DEFAULT_PORT", free_port())
    async with _node() as other, _node("127.0.0.2", other.endpoint.address, auto=False) as hidden:
        assert hidden.tasks[0].done() or not hidden.reach.states()
        await asyncio.sleep(0.3)
        assert not hidden.reach.states()


async def test_a_newcomer_that_the_authority_does_not_reach_joins_by_a_relay_at_a_named_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_authority(tmp_path) as authority:
        relay = Relay(RelayConfig(host="127.0.0.1"), Admission(RUN_ID, [authority.key]))
        await relay.start()
        monkeypatch.setattr(relaying, "DEFAULT_PORT", relay.port)
        options = {"run_id": RUN_ID, "discovery": {"initial_peers": ["127.0.0.1:4100"]}}
        config = from_mapping(RunConfig, options)
        admission = AdmissionConfig(authorities=(authority.key,), urls=(authority.url,), token=authority.invite())
        identity = Identity.create()
        client = AdmissionClient(admission, identity, RUN_ID, "worker", tmp_path / "own.json")
        reach = reach_of(config, client)
        nobody_listens_at = f"127.0.0.1:{free_port()}"
        rpc = RpcConfig(**{**FAST, "host": "127.0.0.2", "tls": False, "public_address": nobody_listens_at})  # type: ignore[arg-type]
        endpoint = Endpoint(identity, RUN_ID, rpc, client.admission, reach)
        client.register(endpoint)
        await endpoint.start()
        try:
            assert endpoint.address == nobody_listens_at
            credential = await join_reachably(client, endpoint, reach, config)
            assert credential.peer_id == endpoint.peer_id
            assert endpoint.address != nobody_listens_at
            assert (relay.num_nodes, authority.register.members()[0].is_reached) == (1, True)
        finally:
            await endpoint.stop()
            await relay.stop()


def test_where_relays_are_looked_for() -> None:
    seeds = DiscoveryConfig(initial_peers=("/ip4/203.0.113.7/tcp/4001/p2p/" + "Qm" + "a" * 44,))
    assert named_relays(seeds) == ("203.0.113.7:4002",)
    nodes = DiscoveryConfig(initial_peers=("[2001:db8::1]:4100", "a.example:4100", "a.example:4101"))
    assert named_relays(nodes) == ("[2001:db8::1]:4002", "a.example:4002")
    said = Announcement(peer_id="a" * 64, node_id="n", run_id="r", address="[2001:db8::1]:4100", relay_port=4002)
    assert announced_relays([said, said.model_copy(update={"relay_port": 0})]) == ("[2001:db8::1]:4002",)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"relay": {"serve": True, "through": ["a:1"]}}, "relay.serve: expected a node that others reach"),
        ({"relay": {"serve": True}, "pipeline": "swarm"}, "expected relay.serve false at a driver"),
        ({"relay": {"serve": True}, "engine": "torch"}, "no relay"),
    ],
)
def test_nodes_that_cannot_serve_are_refused(options: dict[str, Any], expected: str) -> None:
    with pytest.raises(TrainerUsageError, match=expected):
        from_mapping(RunConfig, options)


class _Reach(RelayedReach):
    """A node's two relays, of which the first is announced."""

    def __init__(self, *names: str) -> None:
        super().__init__(RelayConfig())
        self.names = list(names)

    @property
    def address(self) -> str:
        return f"{self.names[0]}:5000"

    def states(self) -> tuple[LinkState, ...]:
        return tuple(LinkState(f"{name}:4002", f"{name}:5000", "", "", 0.0) for name in self.names)

    async def leave(self, relay: str) -> None:
        self.names.remove(relay.partition(":")[0])

    def use(self, relay: str) -> None:
        raise AssertionError(f"expected no other relay, found {relay}")


async def test_a_relay_by_which_nobody_comes_is_left_for_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 10.0
    async with _node() as other, _node("127.0.0.2", other.endpoint.address) as node:
        await until(lambda: node.discovery.heard())
        monkeypatch.setattr(node.endpoint, "may_be_relayed", lambda _host: True)
        monkeypatch.setattr(node.finder, "_is_wanted", False)
        reach = _Reach("127.0.0.8", "127.0.0.9")
        finder = RelayFinder(node.config, DiscoveryConfig(), node.endpoint, reach, node.discovery, lambda: now_s)
        node.endpoint.contacts.when_served.clear()
        now_s += 800.0
        await finder.look()
        finder._served(other.endpoint.peer_id, "127.7.7.7", "round/begin")
        now_s += 800.0
        await finder.look()
        assert len(reach.names) == 2
        now_s += 200.0
        await finder.look()
        assert reach.names == ["127.0.0.9"]
        now_s += 5000.0
        await finder.look()
        assert reach.names == ["127.0.0.9"]  # The only one is kept.

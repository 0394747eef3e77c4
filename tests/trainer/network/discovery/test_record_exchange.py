"""Records reach every node, whoever was told first; what has no place is refused, and who brings it gains nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from tests.support.announcements import dht_settings
from tests.support.event_loop import on_event_loop
from tests.support.signed_runs import OWNER, chain_of, run_file, wire_of
from trainer.errors import RefusedError
from trainer.network.discovery.base import Discovery
from trainer.network.discovery.config import DiscoveryConfig
from trainer.network.discovery.dht import DhtDiscovery
from trainer.network.discovery.dht_client import DhtProcess
from trainer.network.discovery.exchange import RECORDS_METHOD
from trainer.network.discovery.record_exchange import RecordExchange, RecordsReply, RecordsRequest
from trainer.network.discovery.static import StaticDiscovery
from trainer.network.rpc import Endpoint, Identity, Peer, RpcConfig
from trainer.run.signed import ChangeChain

FILE = run_file()
WAIT_S = 20.0


class Node:
    def __init__(self, chain: ChangeChain | None = None) -> None:
        config = RpcConfig(host="127.0.0.1", tls=False, heartbeat_s=0.2, stall_timeout_s=5.0, stop_grace_s=0.1)
        self.chain = chain or ChangeChain(FILE)
        self.endpoint = Endpoint(Identity.create(), FILE.name, config)
        self.peers: list[Peer] = []
        self.exchange = RecordExchange(self.endpoint, self.chain, lambda: self.peers)
        self.exchange.register()


@asynccontextmanager
async def nodes(*given: Node) -> AsyncIterator[None]:
    async with AsyncExitStack() as stack:
        for node in given:
            await node.endpoint.start()
            stack.push_async_callback(node.endpoint.stop)
            stack.push_async_callback(node.exchange.close)
        yield


async def until_all_know(given: Sequence[Node], newest: int) -> None:
    async with asyncio.timeout(WAIT_S):
        while any(node.chain.newest < newest for node in given):
            await asyncio.sleep(0.02)


@on_event_loop
async def test_what_one_node_hears_the_others_hear_from_it_and_from_each_other() -> None:
    given = [Node() for _ in range(6)]
    async with nodes(*given):
        for number, node in enumerate(given):  # A ring: each knows the next alone.
            node.peers = [given[(number + 1) % 6].endpoint.peer]
            node.exchange.start()
        teller = Node(chain_of(FILE, 3, 4))
        async with nodes(teller):
            assert not await teller.exchange.exchange(given[2].endpoint.peer, teller.chain.newer_than({}))
        await until_all_know(given, 2)
    assert len({node.chain.previous_digest() for node in given}) == 1


@on_event_loop
async def test_a_latecomer_fetches_the_whole_chain_in_as_many_calls_as_it_takes() -> None:
    old, late = Node(chain_of(FILE, *range(150))), Node()
    async with nodes(old, late):
        assert await late.exchange.pull(old.endpoint.peer)
    assert late.chain.changes == old.chain.changes
    assert late.chain.newest == 150


@pytest.mark.parametrize("further", [0, 1])
@on_event_loop
async def test_two_changes_of_one_number_are_found_out_by_asking(
    caplog: pytest.LogCaptureFixture, further: int
) -> None:
    one, two = Node(chain_of(FILE, 3)), Node(chain_of(FILE, *[4] * (1 + further)))
    before = two.chain.changes, one.chain.changes
    async with nodes(one, two):
        await one.exchange.pull(two.endpoint.peer)
        await two.exchange.pull(one.endpoint.peer)
        lines = [record.message for record in caplog.records if "has signed TWO changes 1" in record.message]
        assert lines, caplog.text
        assert all("\n" not in line for line in lines)
        caplog.clear()
        await one.exchange.pull(one.endpoint.peer)
        assert not caplog.records, "a change is no fork of itself"
    assert (two.chain.changes, one.chain.changes) == before


@on_event_loop
async def test_a_node_that_is_not_there_is_no_error() -> None:
    node = Node()
    async with nodes(node):
        assert not await node.exchange.pull(Peer(None, "127.0.0.1:9"))


@on_event_loop
async def test_wrong_records_are_refused_with_a_line_and_change_nothing(caplog: pytest.LogCaptureFixture) -> None:
    node, liar, other = Node(chain_of(FILE, 3)), Node(), run_file(Identity.create())
    stranger = Identity.create()
    wrong = {
        "signer": wire_of(FILE, node.chain, stranger),
        "order": wire_of(FILE, node.chain, number=3),
        "fork": wire_of(FILE, node.chain, number=1, settings={"inner.lr": 1.0}),
        "other": wire_of(FILE, node.chain, previous=other.digest()),
        "round": wire_of(FILE, node.chain, at_round=2),
        "settings": wire_of(FILE, node.chain, settings={"seed": 7}),
        "run": wire_of(FILE, node.chain, run_id="another"),
        "malformed": b"{}",
    }
    async with nodes(node, liar):
        for reason, wire in wrong.items():
            refused = await liar.exchange.exchange(node.endpoint.peer, [wire])
            assert refused.startswith(f"{reason}: "), (reason, refused)
            assert "\n" not in refused
        # The first of several that is refused is named, and the right one among them is taken.
        good = wire_of(FILE, node.chain, at_round=9)
        assert (await liar.exchange.exchange(node.endpoint.peer, [wrong["signer"], good])).startswith("signer: ")
    assert node.chain.newest == 2
    lines = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert 0 < len(lines) <= 3, "a warning costs a token"
    assert all("\n" not in line for line in lines)


@on_event_loop
async def test_heads_and_payloads_that_do_not_fit_are_refused() -> None:
    node, liar = Node(), Node()
    async with nodes(node, liar):
        for body, payload, reason in (
            (RecordsRequest(kind="run-change", has=(), sizes=(5,)), b"abc", "payload"),
            (RecordsRequest(kind="something-else", has=()), b"", "kind"),
        ):
            with pytest.raises(RefusedError) as refused:
                await liar.endpoint.call(
                    node.endpoint.peer, RECORDS_METHOD, body, RecordsReply, payload=payload, timeout_s=5
                )
            assert refused.value.reason == reason


@on_event_loop
async def test_telling_and_asking_make_no_peer_one_of_use() -> None:
    node, stranger = Node(), Node()
    discovery = StaticDiscovery(node.endpoint, (), DiscoveryConfig(allow_private=True))
    async with nodes(node, stranger):
        await discovery.start()
        try:
            await stranger.exchange.pull(node.endpoint.peer)
            await node.exchange.pull(stranger.endpoint.peer)
            assert not discovery._table.is_of_use(stranger.endpoint.peer_id)
        finally:
            await discovery.close()


async def _known(discovery: Discovery, chain: ChangeChain, endpoint: Endpoint, newest: int) -> None:
    exchange = RecordExchange(endpoint, chain, lambda: (), discovery)
    async with asyncio.timeout(WAIT_S):
        while chain.newest < newest:
            await exchange._look_up(discovery)
            await asyncio.sleep(0.2)


@pytest.mark.slow
@on_event_loop
async def test_changes_are_kept_in_the_dht_and_nothing_forged_is(tmp_path: Path) -> None:
    seed = DhtProcess(dht_settings(identity_path=str(tmp_path / "seed.id")))
    seed.start()
    try:
        await seed.wait_ready(80.0)
        [address] = (await seed.status(5.0)).addresses
        config = DiscoveryConfig(initial_peers=(address,), dht_host="127.0.0.1", poll_interval_s=0.3)
        one, two = Node(chain_of(FILE, 3, 4)), Node()
        async with nodes(one, two):
            found = [DhtDiscovery(node.endpoint, config) for node in (one, two)]
            try:
                for discovery in found:
                    await discovery.start()
                    await discovery.process.wait_ready(80.0)
                async with asyncio.timeout(WAIT_S):  # Until the two are in one DHT.
                    while two.chain.newest < 2:
                        await RecordExchange(one.endpoint, one.chain, lambda: (), found[0])._look_up(found[0])
                        await RecordExchange(two.endpoint, two.chain, lambda: (), found[1])._look_up(found[1])
                        await asyncio.sleep(0.2)
                key = f"{FILE.name}.run-change"
                stored = await found[1].stored_records(key)
                assert sorted(subkey for subkey, _ in stored) == [f"{OWNER.peer_id}.{number}" for number in (1, 2)]
                forged = stored[0][1].replace(b'"at_round":3', b'"at_round":1')
                with pytest.raises(Exception, match="no DHT node took the record"):
                    await found[0].process.store(key, f"{OWNER.peer_id}.9", forged.decode(), 4e9, 5.0)
                assert len(await found[1].stored_records(key)) == 2
            finally:
                for discovery in found:
                    await discovery.close()
    finally:
        await seed.close()

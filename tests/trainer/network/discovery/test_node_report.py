"""Reports on a node: what is signed is what is read, and nothing else is believed; how they spread."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.announcements import announcement, running_dht
from tests.support.waiting import until
from trainer.errors import DiscoveryError, RefusedError
from trainer.network.discovery.config import DiscoveryConfig
from trainer.network.discovery.dht import DhtDiscovery
from trainer.network.discovery.node_report import (
    MAX_REPORT_BYTES,
    NodeReport,
    ReportedRound,
    ReportRefusedError,
    report_key,
    sign_report,
    verify_report,
)
from trainer.network.discovery.report_exchange import (
    REPORTS_METHOD,
    ReportExchange,
    ReportsAsk,
    ReportsReply,
    split_reports,
)
from trainer.network.discovery.static import StaticDiscovery
from trainer.network.rpc.config import RpcConfig
from trainer.network.rpc.endpoint import Endpoint
from trainer.network.rpc.identity import Identity

OWN = Identity.create()
FAST = DiscoveryConfig(announce_interval_s=1.0, poll_interval_s=0.2, allow_private=True)


def report(identity: Identity = OWN, **fields: object) -> NodeReport:
    content = {"peer_id": identity.peer_id, "node_id": "node", "run_id": "run", "role": "worker"}
    return NodeReport.model_validate(content | {"incarnation": "0" * 16} | fields)


def signed(identity: Identity = OWN, *, now: float = 1000.0, lifetime_s: float = 180.0, **fields: object) -> bytes:
    return sign_report(report(identity, **fields).stamped(now, lifetime_s), identity).wire


def check(wire: bytes, **options: object) -> NodeReport:
    given = {"now": 1000.0, "max_clock_skew_s": 120.0, "run_id": "run", "subkey": OWN.peer_id}
    return verify_report(wire, **(given | options))  # type: ignore[arg-type]


FIGURES = st.fixed_dictionaries(
    {},
    optional={
        "flops": st.floats(0, 1e29),
        "num_tokens": st.integers(0, 2**53 - 1),
        "active_s": st.floats(0, 1e10),
        "loss": st.none() | st.floats(allow_nan=False, allow_infinity=False),
        "is_called": st.none() | st.booleans(),
        "checkpoint_problem": st.text(max_size=80),
        "rounds": st.lists(
            st.builds(ReportedRound, round_index=st.integers(0, 2**50), ended_at=st.floats(0, 1e10)), max_size=4
        ).map(tuple),
    },
)


@given(FIGURES)
def test_what_was_signed_is_read(figures: dict[str, object]) -> None:
    assert check(signed(**figures)) == report(**figures).stamped(1000.0, 180.0)


def test_the_longest_report_fits() -> None:
    rounds = tuple(
        ReportedRound(
            round_index=2**53 - 1,
            ended_at=12345678901.123456,
            seconds=12345678.123456789,
            agree_s=12345678.123456789,
            reduce_s=12345678.123456789,
            vote_s=12345678.123456789,
            completeness=0.12345678901234567,
            num_members=65_536,
            num_dropped=65_536,
            sent_bytes=2**53 - 1,
            received_bytes=2**53 - 1,
            error="é" * 80,
        )
        for _ in range(4)
    )
    wire = signed(node_id="n" * 128, rounds=rounds, software="9" * 64, checkpoint_problem="é" * 80, stage="body-1234")
    assert len(wire) <= MAX_REPORT_BYTES
    assert len(signed(rounds=rounds[:2])) < 2048


@pytest.mark.parametrize(
    ("reason", "change"),
    [
        ("oversized", lambda wire: wire + b" " * MAX_REPORT_BYTES),
        ("malformed", lambda wire: wire.replace(b'"flops"', b'"flips"')),
        ("malformed", lambda wire: wire.replace(b":", b": ", 1)),
        ("malformed", lambda wire: wire.replace(b'"flops":0.0', b'"flops":1e31')),
        ("malformed", lambda wire: b"\xff" + wire),
        ("signature", lambda wire: wire.replace(b'"flops":0.0', b'"flops":9.0')),
        ("signature", lambda wire: wire[:-4] + (b"0" if wire[-4:-3] != b"0" else b"1") + wire[-3:]),
    ],
)
def test_a_changed_report_is_refused(reason: str, change: object) -> None:
    with pytest.raises(ReportRefusedError) as caught:
        check(change(signed()))  # type: ignore[operator]
    assert caught.value.reason == reason


@pytest.mark.parametrize(
    ("reason", "options"),
    [
        ("expired", {"now": 1181.0}),
        ("future", {"now": 870.0}),
        ("run", {"run_id": "another"}),
        ("subkey", {"subkey": Identity.create().peer_id}),
    ],
)
def test_a_report_out_of_place_is_refused(reason: str, options: dict[str, object]) -> None:
    with pytest.raises(ReportRefusedError) as caught:
        check(signed(), **options)
    assert caught.value.reason == reason


def test_nobody_signs_for_another_and_none_lives_for_ever() -> None:
    with pytest.raises(DiscoveryError):
        sign_report(report(Identity.create()), OWN)
    with pytest.raises(ReportRefusedError) as caught:
        check(signed(lifetime_s=10_000.0))
    assert caught.value.reason == "lifetime"


@given(st.binary(max_size=300))
def test_nothing_else_is_a_report(wire: bytes) -> None:
    for form in (wire, b'{"report":' + wire + b"}", signed()[: len(wire)] + wire):
        with pytest.raises(ReportRefusedError):
            check(form)


# -- how they spread ---------------------------------------------------------------------------------------------------


class Node:
    """An endpoint that reports on itself and, without a DHT, finds the others by addresses."""

    def __init__(self, endpoint: Endpoint, discovery: StaticDiscovery | DhtDiscovery, exchange: ReportExchange) -> None:
        self.endpoint = endpoint
        self.discovery = discovery
        self.exchange = exchange


@asynccontextmanager
async def node(*addresses: str, seed: str = "", reports: bool = True, announced: bool = True) -> AsyncIterator[Node]:
    endpoint = Endpoint(Identity.create(), "run", RpcConfig(host="127.0.0.1", stop_grace_s=0.1))
    discovery: StaticDiscovery | DhtDiscovery
    if seed:
        config = DiscoveryConfig(
            initial_peers=(seed,), poll_interval_s=0.2, allow_private=True, dht_host="127.0.0.1", request_timeout_s=5.0
        )
        discovery = DhtDiscovery(endpoint, config)
    else:
        discovery = StaticDiscovery(endpoint, addresses, FAST)
    exchange = ReportExchange(
        endpoint, discovery, lambda: report(endpoint.identity, flops=3e15), interval_s=0.5 if reports else 60.0
    )
    async with AsyncExitStack() as stack:
        exchange.register()
        await endpoint.start()
        stack.push_async_callback(endpoint.stop)
        await discovery.start()
        stack.push_async_callback(discovery.close)
        if announced:
            await discovery.announce(announcement(endpoint.identity, address=endpoint.address))
        task = asyncio.create_task(exchange.run())
        stack.callback(task.cancel)
        yield Node(endpoint, discovery, exchange)


async def asked(by: Node, of: Node) -> list[NodeReport]:
    reply = await by.endpoint.call(of.endpoint.peer, REPORTS_METHOD, ReportsAsk(), ReportsReply, timeout_s=5.0)
    assert abs(reply.body.now - time.time()) < 5.0
    return [
        verify_report(wire, now=time.time(), max_clock_skew_s=1.0, run_id="run")
        for wire in split_reports(reply.body, bytes(reply.payload))
    ]


async def test_a_node_answers_with_its_report_and_those_it_was_told() -> None:
    async with node() as first, node(first.endpoint.address) as second, node(announced=False) as monitor:
        await until(lambda: bool(first.exchange.told()))
        found = await asked(monitor, first)
        assert {it.peer_id for it in found} == {first.endpoint.peer_id, second.endpoint.peer_id}
        assert all(it.flops == 3e15 for it in found)
        # Who only asks is told of by nobody.
        assert monitor.endpoint.peer_id not in {it.peer_id for it in await asked(monitor, second)}


async def test_what_is_told_has_to_be_of_who_tells_it() -> None:
    async with node() as first, node(announced=False, reports=False) as liar:
        for wire in (signed(OWN, now=time.time()), b"{}", signed(liar.endpoint.identity, now=time.time(), run_id="x")):
            with pytest.raises(RefusedError) as caught:
                await liar.endpoint.call(
                    first.endpoint.peer, REPORTS_METHOD, ReportsAsk(), ReportsReply, payload=wire, timeout_s=5.0
                )
            assert caught.value.reason == "report"
        assert not first.exchange.told()
        assert first.exchange.refused.total() == 3


async def test_who_asks_too_often_is_refused() -> None:
    async with node() as first, node(announced=False, reports=False) as asker:
        with pytest.raises(RefusedError) as caught:
            for _ in range(100):
                await asked(asker, first)
        assert caught.value.reason == "busy"


@pytest.mark.slow
async def test_through_a_dht_reports_are_looked_up_and_requests_counted() -> None:
    async with running_dht() as seed_process:
        [address] = (await seed_process.status(5.0)).addresses
        async with node(seed=address) as first, node(seed=address, announced=False, reports=False) as monitor:

            async def stored() -> set[str]:
                try:
                    return {peer_id for peer_id, _ in await monitor.discovery.stored_records(report_key("run"))}
                except DiscoveryError:
                    return set()

            deadline = time.monotonic() + 40.0
            while first.endpoint.peer_id not in await stored():
                assert time.monotonic() < deadline, "expected the report in the DHT"
                await asyncio.sleep(0.2)
            [wire] = [
                wire
                for key, wire in await monitor.discovery.stored_records(report_key("run"))
                if key == first.endpoint.peer_id
            ]
            found = verify_report(wire, now=time.time(), max_clock_skew_s=1.0, subkey=first.endpoint.peer_id)
            assert found.flops == 3e15
            traffic = (await seed_process.status(5.0)).traffic
            assert traffic.stores > 0
            assert traffic.finds > 0
            assert traffic.records > 0


def test_a_rounds_stage_is_told_and_a_report_without_one_reads_as_before() -> None:
    """Earlier releases refuse fields that they do not know."""
    rounds = (ReportedRound(round_index=4, ended_at=900.0, stage="tail"), ReportedRound(round_index=5, ended_at=901.0))
    wire = signed(role="node", rounds=rounds)
    assert [it.stage for it in check(wire).rounds] == ["tail", ""]
    assert wire.count(b'"stage"') == 2  # The report's own, and of the round that has one.

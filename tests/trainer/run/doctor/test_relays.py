"""What the doctor finds of relays, over real sockets: one that takes the node, ones that do not, and none."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from genesis.doctor import Finding
from tests.support.rpc_node import FAST, RUN_ID
from tests.support.waiting import until
from trainer.network.relay import Relay, RelayConfig, RelayedReach
from trainer.network.rpc import Endpoint, Identity, RpcConfig
from trainer.network.rpc.admission import Admission
from trainer.run.doctor.relays import named_findings, relay_finding, try_relays, with_relay


@asynccontextmanager
async def _relay(admission: Admission | None = None, **options: int) -> AsyncIterator[str]:
    relay = Relay(RelayConfig(host="127.0.0.1", **options), admission)
    await relay.start()
    try:
        yield f"127.0.0.1:{relay.port}"
    finally:
        await relay.stop()


@asynccontextmanager
async def _hidden(*through: str) -> AsyncIterator[tuple[Endpoint, RelayedReach]]:
    """A node that relays see come from elsewhere than it listens."""
    reach = RelayedReach(RelayConfig(through=through, wait_s=0.5))
    endpoint = Endpoint(Identity.create(), RUN_ID, RpcConfig(**{**FAST, "host": "127.0.0.2"}), reach=reach)  # type: ignore[arg-type]
    await endpoint.start()
    try:
        yield endpoint, reach
    finally:
        await endpoint.stop()


async def _until_answered(hidden: tuple[Endpoint, RelayedReach]) -> None:
    _, reach = hidden
    await until(lambda: all(it.failure or it.lent_address or it.direct_address for it in reach.states()))


_UNREACHED = Finding.failed("network", "reachable", "nothing answered", "the router: forward the port")


async def test_a_relay_that_takes_the_node_is_named_with_the_option() -> None:
    strange = Admission("another-run", [Identity.create().peer_id])
    async with _relay() as good, _relay(strange) as members_only, _hidden() as (_, reach):
        tried = await try_relays(reach, (members_only, good, "127.0.0.1:1024"))
        assert [each.relay for each in tried] == [good]
        assert len(reach.states()) == 1  # It stays in use: the node may join by it.
        finding = relay_finding(tried)
        assert (finding.status, finding.check) == ("ok", "relay")
        assert f"{good} accepts a reservation" in finding.found
        shown = with_relay(_UNREACHED, tried)
        assert shown.status == "warning"
        assert shown.cure.startswith(f"give --relay {good} ")
        assert shown.cure.endswith("forward the port")


async def test_relays_that_do_not_take_the_node_are_told_with_their_reasons() -> None:
    strange = Admission("another-run", [Identity.create().peer_id])
    async with _relay(strange) as members_only, _hidden() as (_, reach):
        tried = await try_relays(reach, (members_only, "127.0.0.1:1025"))
        finding = relay_finding(tried)
        assert finding.status == "failed"
        assert "members of run 'another-run' only" in finding.found
        assert "127.0.0.1:1025: cannot be reached" in finding.found
        assert "seed --relay" in finding.cure
        assert with_relay(_UNREACHED, tried) == _UNREACHED
        assert not reach.states()


def test_where_there_is_none_to_try_the_doctor_says_so() -> None:
    finding = relay_finding(())
    assert finding.status == "failed"
    assert "no node announces one" in finding.found


@pytest.mark.parametrize("serves", [True, False])
async def test_relays_that_were_given_are_judged_by_what_they_do(serves: bool) -> None:
    async with _relay(max_nodes_per_host=1) as relay, AsyncExitStack() as stack:
        if not serves:  # Another node of this host has its only place.
            await _until_answered(await stack.enter_async_context(_hidden(relay)))
        node, reach = await stack.enter_async_context(_hidden(relay))
        await _until_answered((node, reach))
        findings = named_findings(reach.states())
        if serves:
            assert [(it.check, it.status) for it in findings] == [("reachable", "ok")]
            assert f"by way of relay {relay}, at {node.address}" in findings[0].found
        else:
            assert [(it.check, it.status) for it in findings] == [("relay", "failed")]
            assert "expected fewer than 1 nodes" in findings[0].found

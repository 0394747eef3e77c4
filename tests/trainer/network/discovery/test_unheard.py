"""That nobody is heard of is said with the addresses, when it has lasted, now and then, and not where all is well."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

import pytest

from tests.support.rpc_pair import running_endpoint
from trainer.network.discovery import DiscoveryConfig, PeerWatchdog, StaticDiscovery
from trainer.network.rpc.identity import Identity

_CONFIG = DiscoveryConfig(poll_interval_s=0.05, max_retry_interval_s=0.1)


def _free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


async def _until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.02)


def test_it_is_said_when_it_has_lasted_and_again_every_minute(caplog: pytest.LogCaptureFixture) -> None:
    first, second = _free_address(), _free_address()
    now_s = 1000.0

    async def scenario() -> None:
        nonlocal now_s
        async with running_endpoint(Identity.create()) as endpoint:
            discovery = StaticDiscovery(endpoint, [first, second], _CONFIG)
            unheard = PeerWatchdog(discovery, "worker of any stage", 30.0, clock=lambda: now_s)
            await discovery.start()
            try:
                await _until(lambda: second in discovery.silence() and first in discovery.silence())
                for seconds, num_others in ((0, 0), (29, 0), (2, 0), (58, 0), (3, 0), (500, 3), (29, 0)):
                    now_s += seconds
                    unheard.look(num_others)
            finally:
                await discovery.close()

    asyncio.run(scenario())
    said = [it.getMessage() for it in caplog.records if it.name == "trainer.network.discovery.opening"]
    assert said == 2 * [f"nobody answers at {first}, {second}: no worker of any stage has been heard of"]


def test_a_node_that_only_knows_its_own_address_misses_nobody(caplog: pytest.LogCaptureFixture) -> None:
    """The first of a run, with the list of addresses that all have."""

    async def scenario() -> None:
        async with running_endpoint(Identity.create()) as endpoint:
            discovery = StaticDiscovery(endpoint, [endpoint.address], _CONFIG)
            unheard = PeerWatchdog(discovery, "worker", 0.0)
            await discovery.start()
            try:
                await _until(lambda: not discovery._addresses)
                for _ in range(3):
                    unheard.look(0)
                assert discovery.silence() == ""
            finally:
                await discovery.close()

    asyncio.run(scenario())
    assert not [it for it in caplog.records if it.name == "trainer.network.discovery.opening"]

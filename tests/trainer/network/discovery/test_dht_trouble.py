"""A DHT that does not answer for a moment is no news; one that stays away is told once, and once when it is back."""

from __future__ import annotations

import asyncio
import logging

import pytest

from trainer.errors import DiscoveryError
from trainer.network.discovery.config import DiscoveryConfig
from trainer.network.discovery.dht import DhtDiscovery
from trainer.network.rpc.config import RpcConfig
from trainer.network.rpc.endpoint import Endpoint
from trainer.network.rpc.identity import Identity

_SEED = "/ip4/127.0.0.1/tcp/1/p2p/12D3KooWGm9bJVTBVuZrZ3EXuGJEBWVTcKpWUWRjxEGbWwsXQW41"


class Faulty:
    """Stands for `DhtProcess`: its look-ups fail while they are told to."""

    def __init__(self) -> None:
        self.fails = False
        self.num_failed = self.num_answered = 0

    def start(self) -> None: ...

    async def close(self) -> None: ...

    async def wait_ready(self, timeout_s: float, *, first_start_only: bool = False) -> None: ...

    async def get(self, _key: str, _timeout_s: float) -> tuple[tuple[()], int]:
        if self.fails:
            self.num_failed += 1
            raise DiscoveryError("the DHT get did not work: no answer")
        self.num_answered += 1
        return (), 0


async def _more(count: str, process: Faulty) -> None:
    before = getattr(process, count)
    async with asyncio.timeout(20):
        while getattr(process, count) < before + 3:
            await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    ("lifetime_s", "said"),
    [(60.0, []), (1.0, ["the DHT get did not work: no answer; trying on", "the DHT works again"])],
)
def test_what_lasts_is_told_and_what_does_not_is_not(
    lifetime_s: float, said: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        config = DiscoveryConfig(
            initial_peers=(_SEED,), announcement_lifetime_s=lifetime_s, announce_interval_s=0.5, poll_interval_s=0.05
        )
        discovery = DhtDiscovery(Endpoint(Identity.create(), "run", RpcConfig(host="127.0.0.1")), config)
        discovery.process = process = Faulty()
        await discovery.start()
        try:
            await _more("num_answered", process)
            process.fails = True
            await _more("num_failed", process)
            async with asyncio.timeout(20):
                while said and said[0] not in caplog.text:
                    await _more("num_failed", process)
            process.fails = False
            await _more("num_answered", process)
        finally:
            await discovery.close()

    with caplog.at_level(logging.INFO, "trainer.network.discovery"):
        asyncio.run(scenario())
    assert [record.getMessage() for record in caplog.records if record.name == "trainer.network.discovery.dht"] == said

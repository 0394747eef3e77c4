"""Whom a newcomer stays with: not judged by the first it hears of, nor by how many keys a stranger has."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack

import pytest

from tests.support.event_loop import on_event_loop
from tests.support.rpc_pair import running_endpoint
from tests.support.text_store import text_store
from trainer.config import RunConfig, from_mapping
from trainer.discovery import Announcement
from trainer.errors import IncompatiblePeerError
from trainer.node.strangers import register_terms
from trainer.rpc import Endpoint
from trainer.swarm.shape import DRIVER, SwarmShape, shape_of
from trainer.swarm.strangers import SwarmTerms, check_fit


def shape_with(**changes: object) -> SwarmShape:
    content = {
        "data": {"store": str(text_store())},
        "model": {"preset": "tiny"},
        "swarm": {"num_stages": 3},
    }
    return shape_of(from_mapping(RunConfig, {**content, **changes}))


@pytest.fixture(scope="module")
def ours() -> SwarmShape:
    return shape_with()


@pytest.fixture(scope="module")
def theirs() -> SwarmShape:
    return shape_with(seed=77)


async def a_driver(stack: AsyncExitStack, shape: SwarmShape, name: str) -> Announcement:
    """One that answers what it drives."""
    endpoint = await stack.enter_async_context(running_endpoint())
    register_terms(endpoint, shape.terms(DRIVER))
    digest = shape.terms(DRIVER).digest()
    return Announcement(
        peer_id=endpoint.peer_id, node_id=name, run_id="r", address=endpoint.address, terms_digest=digest
    )


def gone(said: Announcement) -> Announcement:
    """The same of another key, at an address where nobody listens."""
    return said.model_copy(update={"peer_id": "f" * 64, "address": "127.0.0.1:9"})


async def meet(endpoint: Endpoint, shape: SwarmShape, heard: Sequence[Sequence[Announcement]]) -> list[Announcement]:
    """Hears these, one list after the other; returns whom it had heard of when it went on."""
    rest = list(heard)

    def others() -> Sequence[Announcement]:
        return rest.pop(0) if len(rest) > 1 else rest[0]

    async with asyncio.timeout(30):
        await check_fit(endpoint, SwarmTerms(shape), others, "r", wait_s=5.0)
    return list(rest[0])


@on_event_loop
async def test_a_stranger_is_heard_of_first_and_those_that_fit_behind_it(ours: SwarmShape, theirs: SwarmShape) -> None:
    async with AsyncExitStack() as stack, running_endpoint() as own:
        stranger = await a_driver(stack, theirs, "stranger")
        resident = await a_driver(stack, ours, "resident")
        assert await meet(own, ours, [[], [], *[[stranger]] * 5, [stranger, resident]]) == [stranger, resident]


@on_event_loop
async def test_one_that_fits_is_company_enough_however_many_keys_a_stranger_has(
    ours: SwarmShape, theirs: SwarmShape, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.swarm.strangers._SETTLE_S", 0.2)
    async with AsyncExitStack() as stack, running_endpoint() as own:
        strangers = [await a_driver(stack, theirs, f"stranger-{number}") for number in range(4)]
        resident = await a_driver(stack, ours, "resident")
        assert resident in await meet(own, ours, [[*strangers, resident]])


@on_event_loop
async def test_an_announcement_that_outlives_its_process_is_no_company(
    ours: SwarmShape, theirs: SwarmShape, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.swarm.strangers._SETTLE_S", 0.2)
    async with AsyncExitStack() as stack, running_endpoint() as own:
        strangers = [await a_driver(stack, theirs, f"stranger-{number}") for number in range(2)]
        former = gone(await a_driver(stack, ours, "former"))
        with pytest.raises(IncompatiblePeerError, match="seed 77"):
            await meet(own, ours, [[*strangers, former]])

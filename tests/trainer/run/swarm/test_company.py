"""Whom a newcomer stays with: not judged by the first it hears of, nor by how many keys a stranger has."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack

import pytest

from tests.support.event_loop import on_event_loop
from tests.support.rpc_pair import running_endpoint
from tests.support.text_store import text_store
from trainer.collective import Terms
from trainer.errors import IncompatiblePeerError, RefusedError
from trainer.network.discovery import Announcement
from trainer.network.rpc import Endpoint, Reply, Request
from trainer.run.config import RunConfig, from_mapping
from trainer.run.node.compatibility import TERMS, register_terms
from trainer.run.swarm.compatibility import SwarmTerms, check_fit
from trainer.run.swarm.shape import DRIVER, SwarmShape, shape_of


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
        await check_fit(SwarmTerms(shape).fit_check(endpoint, others, "r"), others, wait_s=5.0)
    return list(rest[0])


@pytest.mark.slow
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
    monkeypatch.setattr("trainer.run.node.compatibility._SETTLE_S", 0.2)
    async with AsyncExitStack() as stack, running_endpoint() as own:
        strangers = [await a_driver(stack, theirs, f"stranger-{number}") for number in range(4)]
        resident = await a_driver(stack, ours, "resident")
        assert resident in await meet(own, ours, [[*strangers, resident]])


@pytest.mark.slow
@on_event_loop
async def test_an_announcement_that_outlives_its_process_is_no_company(
    ours: SwarmShape, theirs: SwarmShape, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.run.node.compatibility._SETTLE_S", 0.2)
    async with AsyncExitStack() as stack, running_endpoint() as own:
        strangers = [await a_driver(stack, theirs, f"stranger-{number}") for number in range(2)]
        former = gone(await a_driver(stack, ours, "former"))
        with pytest.raises(IncompatiblePeerError, match="seed 77"):
            await meet(own, ours, [[*strangers, former]])


@pytest.mark.slow
@on_event_loop
@pytest.mark.parametrize("like", ["the newcomer", "the others"])
async def test_the_dead_count_for_nothing_and_those_alive_are_asked_whenever_they_are_heard_of(
    like: str, ours: SwarmShape, theirs: SwarmShape, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a misfit that hears first of dead ones alone, and of the run itself while it works."""
    for name in ("_SETTLE_S", "_STANDS_S", "_AGAIN_S"):
        monkeypatch.setattr(f"trainer.run.node.compatibility.{name}", 0.05)
    async with AsyncExitStack() as stack, running_endpoint() as own:
        residents = [await a_driver(stack, theirs, f"resident-{number}") for number in range(2)]
        of = ours if like == "the newcomer" else theirs
        dead = gone(await a_driver(stack, of, "dead"))
        more = [dead.model_copy(update={"peer_id": f"{number:064x}"}) for number in range(40)]
        heard = [dead, *more]
        check = SwarmTerms(ours).fit_check(own, lambda: heard, "r")
        async with asyncio.timeout(30):
            await check.begin()
            assert check.is_open
            going_on = asyncio.create_task(check.go_on())
            await asyncio.sleep(0.2)
            assert not going_on.done()
            heard += residents
            with pytest.raises(IncompatiblePeerError, match="seed 77"):
                await going_on


@on_event_loop
async def test_the_answer_of_one_that_fits_ends_the_question(
    ours: SwarmShape, theirs: SwarmShape, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("_SETTLE_S", "_STANDS_S", "_AGAIN_S"):
        monkeypatch.setattr(f"trainer.run.node.compatibility.{name}", 0.05)
    async with AsyncExitStack() as stack, running_endpoint() as own:
        resident = await a_driver(stack, ours, "resident")
        heard = [gone(resident)]
        check = SwarmTerms(ours).fit_check(own, lambda: heard, "r")
        async with asyncio.timeout(30):
            await check.begin()
            assert check.is_open
            heard += [resident, *[await a_driver(stack, theirs, f"stranger-{number}") for number in range(3)]]
            await check.go_on()
        assert not check.is_open


@on_event_loop
async def test_the_first_of_a_run_is_not_judged_by_who_comes_later(ours: SwarmShape, theirs: SwarmShape) -> None:
    async with AsyncExitStack() as stack, running_endpoint() as own:
        heard: list[Announcement] = []
        check = SwarmTerms(ours).fit_check(own, lambda: heard, "r")
        await check.begin()
        heard += [await a_driver(stack, theirs, f"newcomer-{number}") for number in range(2)]
        async with asyncio.timeout(30):
            await check.go_on()


@on_event_loop
async def test_a_refusal_that_says_nothing_of_terms_is_no_difference(ours: SwarmShape, theirs: SwarmShape) -> None:
    """Such as that a limit is reached."""
    async with AsyncExitStack() as stack, running_endpoint() as own:
        busy = await stack.enter_async_context(running_endpoint())

        async def answer(_request: Request[Terms]) -> Reply[Terms]:
            raise RefusedError("busy", "come again later")

        busy.register(TERMS, Terms, answer)
        said = gone(await a_driver(stack, theirs, "busy")).model_copy(
            update={"peer_id": busy.peer_id, "address": busy.address}
        )
        check = SwarmTerms(ours).fit_check(own, lambda: [said], "r")
        async with asyncio.timeout(30):
            await check.begin()
        assert check.is_open

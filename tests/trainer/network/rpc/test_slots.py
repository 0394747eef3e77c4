"""Slots of a live endpoint under callers that take them and leave them lying: others get in."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest

from tests.support.event_loop import on_event_loop
from tests.support.raw_http2 import NoWindow, no_window_connection
from tests.support.rpc_node import RUN_ID, Answer, Question
from tests.support.rpc_pair import running_endpoint
from trainer.network.rpc import Endpoint, Identity

_LIMITS = {"max_calls": 8, "max_calls_per_peer": 2, "max_streams": 8, "max_streams_per_peer": 2}


async def _held(
    stack: AsyncExitStack, victim: Endpoint, num_connections: int, *, kind: str, tls: bool
) -> list[NoWindow]:
    """Connections with a call each, of which no answer can be sent; each under an identity of its own."""
    method, payload = ("test/echo", b"x" * 1000) if kind == "request" else ("test/pour", b"")
    connections = []
    for _ in range(num_connections):
        connection = await stack.enter_async_context(no_window_connection(victim.peer, RUN_ID, tls=tls))
        connection.call(method, {}, identity=Identity.create(), kind=kind, payload=payload)
        connections.append(connection)
    return connections


async def _until(condition: object, within_s: float = 20.0) -> None:
    async with asyncio.timeout(within_s):
        while not condition():  # type: ignore[operator]
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("tls", [False, True])
@on_event_loop
async def test_a_call_whose_answer_nobody_takes_ends_with_its_connection(tls: bool) -> None:
    async with running_endpoint(tls=tls) as victim, AsyncExitStack() as stack:
        [connection] = await _held(stack, victim, 1, kind="request", tls=tls)
        calls = victim._serving._limits.calls
        await _until(lambda: len(calls) == 1)
        await _until(lambda: not len(calls))
        await _until(lambda: connection.is_closed)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["request", "open"])
@on_event_loop
async def test_a_newcomer_gets_the_place_of_what_stands_still(kind: str) -> None:
    """Also from the same address, and long before the stall time-out."""
    async with (
        running_endpoint(stall_timeout_s=60.0, **_LIMITS) as victim,
        running_endpoint() as newcomer,
        AsyncExitStack() as stack,
    ):
        connections = await _held(stack, victim, 4, kind=kind, tls=False)
        limits = victim._serving._limits
        slots = limits.calls if kind == "request" else limits.streams
        await _until(lambda: len(slots.stalled(asyncio.get_running_loop().time() - 0.3)) == 4)
        assert not victim.counters.refused
        if kind == "request":
            reply = await newcomer.call(victim.peer, "test/echo", Question(text="in"), Answer, timeout_s=20)
            assert reply.body.text == "in"
        else:
            async with newcomer.open_stream(victim.peer, "test/mirror", Question(), timeout_s=20) as stream:
                await stream.send(0, b"in")
                await stream.end()
                frame = await stream.receive()
                assert frame is not None and bytes(frame.payload) == b"in"
                assert await stream.receive() is None
        # One had to give way, and half of all slots is what they could have at most.
        await _until(lambda: sum(connection.is_closed for connection in connections) == 1)
        await _until(lambda: len(slots) == 3)


@on_event_loop
async def test_a_peer_that_has_answered_has_slots_of_its_own() -> None:
    """Calls in good order fill the address's share: a newcomer is told so, a proven peer is not."""
    async with running_endpoint(**_LIMITS) as victim, running_endpoint() as proven, running_endpoint() as newcomer:
        await victim.call(proven.peer, "test/echo", Question(), Answer, timeout_s=20)
        async with running_endpoint() as first, running_endpoint() as second, asyncio.TaskGroup() as tasks:
            long_ones = [
                tasks.create_task(caller.call(victim.peer, "test/echo", Question(sleep_s=60), Answer, timeout_s=90))
                for caller in (first, first, second, second)
            ]
            await _until(lambda: len(victim._serving._limits.calls) == 4)
            with pytest.raises(Exception, match="of one address") as caught:
                await newcomer.call(victim.peer, "test/echo", Question(), Answer, timeout_s=20)
            assert caught.value.reason == "busy"  # type: ignore[attr-defined]
            await proven.call(victim.peer, "test/echo", Question(), Answer, timeout_s=20)
            for task in long_ones:
                task.cancel()


@pytest.mark.slow
@on_event_loop
async def test_a_proven_peer_that_takes_no_answer_loses_its_own_slots() -> None:
    async with running_endpoint() as victim, AsyncExitStack() as stack:
        standing = victim._serving._standing
        connection = await stack.enter_async_context(no_window_connection(victim.peer, RUN_ID))
        identity = Identity.create()
        standing.prove(identity.peer_id, "127.0.0.1")
        connection.call("test/echo", {}, identity=identity)
        await _until(lambda: not standing.is_proven(identity.peer_id))


@on_event_loop
async def test_a_greylisted_address_has_one_call_of_a_connection_served_at_a_time() -> None:
    """What 32 calls of one connection cost is what one does, and a newcomer of the same address gets in at once."""
    async with running_endpoint() as victim, running_endpoint() as newcomer, AsyncExitStack() as stack:
        serving = victim._serving
        for _ in range(4):
            serving._standing.let_stall("127.0.0.1")
        connections = [await stack.enter_async_context(no_window_connection(victim.peer, RUN_ID)) for _ in range(2)]
        for connection in connections:
            for _ in range(32):
                connection.call("test/echo", {}, identity=Identity.create())
        limits = serving._limits
        await _until(lambda: len(limits.greylisted) == 62 and len(limits.calls) == 2)
        reply = await newcomer.call(victim.peer, "test/echo", Question(text="in"), Answer, timeout_s=20)
        assert reply.body.text == "in"
        assert not victim.counters.refused
        await _until(lambda: all(connection.is_closed for connection in connections))
        await _until(lambda: not len(limits.greylisted) and not len(limits.calls) and not len(limits.waiting))
        # Calls in good order end one after the other, each in its turn.
        replies = [
            newcomer.call(victim.peer, "test/echo", Question(text=str(it)), Answer, timeout_s=20) for it in "abc"
        ]
        assert [reply.body.text for reply in await asyncio.gather(*replies)] == ["a", "b", "c"]

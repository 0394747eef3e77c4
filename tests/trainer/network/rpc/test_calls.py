"""Calls between endpoints over real sockets."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from tests.support.event_loop import on_event_loop
from tests.support.rpc_node import Answer, Question
from tests.support.rpc_pair import endpoint_pair, running_endpoint
from trainer.errors import MalformedAnswerError, PeerUnavailableError, RefusedError, TrainerUsageError
from trainer.network.rpc import Endpoint, Identity, Message, Peer, Reply, Request

_ECHO = "test/echo"


class _Other(Message):
    something: int


@pytest.mark.parametrize("tls", [False, True])
@on_event_loop
async def test_a_call_carries_body_and_payload_both_ways(tls: bool) -> None:
    async with endpoint_pair(tls=tls) as (caller, callee):
        for payload in (b"", b"p", bytes(range(256)) * 4096):
            reply = await caller.call(
                callee.peer, _ECHO, Question(text="å", numbers=(1, -2)), Answer, payload=payload, timeout_s=10
            )
            assert (reply.body.text, reply.payload, reply.sender) == ("å", payload, callee.peer_id)
        assert caller.counters.sent_bytes == callee.counters.received_bytes
        assert caller.counters.received_bytes == callee.counters.sent_bytes > 1 << 20
        assert not caller.counters.refused
        assert not callee.counters.refused


@pytest.mark.slow
@on_event_loop
async def test_a_slow_handler_is_waited_for_far_beyond_the_stall_timeout() -> None:
    async with endpoint_pair(heartbeat_s=0.05, stall_timeout_s=0.3) as (caller, callee):
        reply = await caller.call(callee.peer, _ECHO, Question(text="slow", sleep_s=1.0), Answer, timeout_s=10)
        assert reply.body.text == "slow"


@pytest.mark.slow
@on_event_loop
async def test_the_deadline_ends_call_and_handler() -> None:
    async with endpoint_pair() as (caller, callee):
        with pytest.raises(PeerUnavailableError, match=r"within 0\.3 s"):
            await caller.call(callee.peer, _ECHO, Question(sleep_s=30), Answer, timeout_s=0.3)
        await _until_cancelled(caller, callee, 1)


@pytest.mark.slow
@on_event_loop
async def test_cancelling_a_call_cancels_its_handler() -> None:
    async with endpoint_pair() as (caller, callee):
        call = asyncio.create_task(caller.call(callee.peer, _ECHO, Question(sleep_s=30), Answer, timeout_s=60))
        await asyncio.sleep(0.2)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await _until_cancelled(caller, callee, 1)


@pytest.mark.slow
@on_event_loop
async def test_this_nodes_own_limit_ends_a_handler_too() -> None:
    async with running_endpoint() as caller, running_endpoint(max_call_s=0.2) as callee:
        assert await _refusal(caller, callee.peer, body=Question(sleep_s=30)) == "timeout"


@on_event_loop
async def test_calls_run_side_by_side_on_one_connection() -> None:
    async with endpoint_pair() as (caller, callee):
        calls = [
            caller.call(callee.peer, _ECHO, Question(text=str(number), sleep_s=0.2), Answer, timeout_s=20)
            for number in range(20)
        ]
        assert [reply.body.text for reply in await asyncio.gather(*calls)] == [str(number) for number in range(20)]


@on_event_loop
async def test_what_the_callee_refuses_comes_with_its_reason() -> None:
    async with running_endpoint() as caller, running_endpoint() as callee:
        there = callee.peer
        assert await _refusal(caller, there, method="test/nothing") == "method"
        assert await _refusal(caller, there, method="test/mirror") == "method"
        assert await _refusal(caller, there, body=_Other(something=1)) == "body"
        assert await _refusal(caller, Peer(caller.peer_id, callee.address)) == "recipient"
        assert callee.counters.refused == {"method": 2, "body": 1, "recipient": 1}


@pytest.mark.slow
@on_event_loop
async def test_another_run_is_refused() -> None:
    async with running_endpoint(run_id="run-a") as caller, running_endpoint(run_id="run-b") as callee:
        with pytest.raises(RefusedError, match=r"run 'run-b', found one for 'run-a'") as caught:
            await caller.call(callee.peer, _ECHO, Question(), Answer, timeout_s=10)
        assert caught.value.reason == "run"


@on_event_loop
async def test_only_nodes_of_the_allow_list_may_call() -> None:
    friend = Identity.create()
    async with (
        running_endpoint(friend) as welcome,
        running_endpoint() as stranger,
        running_endpoint(allowed_peers=(friend.peer_id,)) as callee,
    ):
        assert (await welcome.call(callee.peer, _ECHO, Question(), Answer, timeout_s=10)).sender == callee.peer_id
        assert await _refusal(stranger, callee.peer) == "sender"


@on_event_loop
async def test_a_wrong_clock_is_told_by_how_much(monkeypatch: pytest.MonkeyPatch) -> None:
    async with endpoint_pair() as (caller, callee):
        behind = time.time() - 500

        class _Behind:
            time = staticmethod(lambda: behind)

        monkeypatch.setattr("trainer.network.rpc.exchange.time", _Behind)
        with pytest.raises(RefusedError, match=r"at most 120 s apart, found yours 50\d\.\d s behind") as caught:
            await caller.call(callee.peer, _ECHO, Question(), Answer, timeout_s=10)
        assert caught.value.reason == "clock"


@on_event_loop
async def test_a_peer_known_by_address_only_says_who_it_is() -> None:
    async with endpoint_pair() as (caller, callee):
        reply = await caller.call(Peer(None, callee.address), _ECHO, Question(text="who"), Answer, timeout_s=10)
        assert (reply.sender, reply.body.text) == (callee.peer_id, "who")
        assert await _refusal(caller, Peer(None, callee.address), method="test/cancelled") == "recipient"


@on_event_loop
async def test_an_answer_by_another_node_is_none() -> None:
    """A node that answers what is addressed to another one: here, one registered under the other's address."""
    impostor = Identity.create()
    async with running_endpoint() as caller, running_endpoint(impostor) as callee:
        wanted = Peer(Identity.create().peer_id, callee.address)
        # The impostor takes the request for its own, as a hostile node would.
        callee._serving._identity = Identity(wanted.peer_id, impostor._key)
        with pytest.raises(PeerUnavailableError, match="fails a check"):
            await caller.call(wanted, _ECHO, Question(), Answer, timeout_s=10)
        assert sum(caller.counters.refused.values()) == 1


@on_event_loop
async def test_a_handlers_refusal_travels_and_its_failure_says_nothing_of_its_inside(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def refuse(_request: Request[Question]) -> Reply[Answer]:
        raise RefusedError("not_in_round", "expected round 7,\nfound 8")

    async def fail(_request: Request[Question]) -> Reply[Answer]:
        raise KeyError("secret path")

    async def overflow(_request: Request[Question]) -> Reply[Answer]:
        return Reply(Answer(text="x" * 70_000))

    async with endpoint_pair() as (caller, callee):
        for name, handler in (("refuse", refuse), ("fail", fail), ("overflow", overflow)):
            callee.register(name, Question, handler)
        with pytest.raises(RefusedError, match=r"expected round 7, found 8") as caught:
            await caller.call(callee.peer, "refuse", Question(), Answer, timeout_s=10)
        assert caught.value.reason == "not_in_round"
        for name in ("fail", "overflow"):
            with pytest.raises(RefusedError) as caught:
                await caller.call(callee.peer, name, Question(), Answer, timeout_s=10)
            assert caught.value.reason == "internal"
            assert "secret" not in str(caught.value)
        assert "secret path" in caplog.text
        assert callee.counters.refused == {"not_in_round": 1, "internal": 2}


@on_event_loop
async def test_an_answer_of_the_wrong_form_is_none() -> None:
    async with endpoint_pair() as (caller, callee):
        with pytest.raises(MalformedAnswerError, match=r"fails a check \(body\)"):
            await caller.call(callee.peer, _ECHO, Question(), _Other, timeout_s=10)
        assert caller.counters.refused == {"body": 1}


@on_event_loop
async def test_what_cannot_be_sent_is_the_callers_mistake() -> None:
    async with endpoint_pair() as (caller, callee):
        for options in ({"payload": bytes((1 << 20) + 1)}, {"body": Question(text="x" * 70_000)}):
            with pytest.raises(TrainerUsageError):
                await _call(caller, callee.peer, **options)  # type: ignore[arg-type]
        with pytest.raises(TrainerUsageError, match="address"):
            await _call(caller, Peer(callee.peer_id, "nowhere"))
        assert (await _call(caller, callee.peer)).sender == callee.peer_id


@on_event_loop
async def test_a_payload_over_the_methods_bound_is_refused() -> None:
    async def handle(_request: Request[Question]) -> Reply[Answer]:
        return Reply(Answer())

    async with endpoint_pair() as (caller, callee):
        callee.register("small", Question, handle, max_payload_bytes=10)
        assert await _refusal(caller, callee.peer, method="small", payload=bytes(11)) == "payload_size"
        await _call(caller, callee.peer, method="small", payload=bytes(10))


@pytest.mark.slow
@on_event_loop
async def test_calls_at_once_are_bounded() -> None:
    async with running_endpoint() as caller, running_endpoint(max_calls_per_peer=3) as callee:
        running = [asyncio.create_task(_call(caller, callee.peer, body=Question(sleep_s=1.0))) for _ in range(3)]
        await asyncio.sleep(0.3)
        assert await _refusal(caller, callee.peer) == "busy"
        await asyncio.gather(*running)
        await _call(caller, callee.peer)


@on_event_loop
async def test_calls_beyond_what_is_remembered_are_refused() -> None:
    async with running_endpoint() as caller, running_endpoint(max_remembered_per_peer=5) as callee:
        for _ in range(5):
            await _call(caller, callee.peer)
        assert await _refusal(caller, callee.peer) == "rate"


@on_event_loop
async def test_nobody_there_is_told_at_once() -> None:
    async with running_endpoint() as caller:
        for tls_certificate in (None, b"no certificate"):
            with pytest.raises(PeerUnavailableError):
                await _call(caller, Peer(Identity.create().peer_id, "127.0.0.1:1", tls_certificate))


@on_event_loop
async def test_a_peer_that_comes_back_is_found_by_the_next_call() -> None:
    async with running_endpoint() as caller:
        async with running_endpoint() as callee:
            peer = callee.peer
            await _call(caller, peer)
            identity = callee.identity
        for _ in range(3):
            with pytest.raises(PeerUnavailableError):
                await _call(caller, peer)
        async with running_endpoint(identity, port=int(peer.address.rpartition(":")[2])):
            assert (await _call(caller, peer)).sender == peer.peer_id


@on_event_loop
async def test_a_port_that_is_taken_is_a_usage_error() -> None:
    async with running_endpoint() as first:
        with pytest.raises(TrainerUsageError, match="choose another port"):
            async with running_endpoint(port=int(first.address.rpartition(":")[2])):
                pass


@on_event_loop
async def test_a_method_has_one_handler() -> None:
    async with running_endpoint() as endpoint:
        with pytest.raises(TrainerUsageError, match="test/echo"):
            endpoint.register("test/echo", Question, lambda _request: None)  # type: ignore[arg-type, return-value]


@pytest.mark.slow
@on_event_loop
async def test_stopping_ends_calls_in_both_directions_and_leaves_no_thread() -> None:
    before = {thread.name for thread in threading.enumerate()}
    async with running_endpoint() as caller, running_endpoint() as callee:
        await _call(caller, callee.peer, payload=bytes(1 << 20))
        waiting = asyncio.create_task(_call(caller, callee.peer, body=Question(sleep_s=30)))
        served = asyncio.create_task(_call(callee, caller.peer, body=Question(sleep_s=30)))
        await asyncio.sleep(0.2)
        await callee.stop()
        for call in (waiting, served):
            with pytest.raises(PeerUnavailableError):
                await call
        await callee.stop()
        with pytest.raises(PeerUnavailableError):
            await _call(callee, caller.peer)
    left = {thread.name for thread in threading.enumerate()} - before
    assert not [name for name in left if "genesis" in name]


async def _call(
    caller: Endpoint,
    peer: Peer,
    *,
    method: str = _ECHO,
    body: Message | None = None,
    payload: bytes = b"",
) -> Reply[Answer]:
    return await caller.call(peer, method, body or Question(), Answer, payload=payload, timeout_s=20)


async def _refusal(
    caller: Endpoint, peer: Peer, *, method: str = _ECHO, body: Message | None = None, payload: bytes = b""
) -> str:
    with pytest.raises(RefusedError) as caught:
        await _call(caller, peer, method=method, body=body, payload=payload)
    return caught.value.reason


async def _until_cancelled(caller: Endpoint, callee: Endpoint, expected: int) -> None:
    """The callee hears of it after the caller has gone on."""
    while True:
        reply = await caller.call(callee.peer, "test/cancelled", Question(), Answer, timeout_s=10)
        if reply.body.cancelled >= expected:
            return
        await asyncio.sleep(0.02)

"""Calls between endpoints over real sockets; peers that are killed, stopped, or come back, by real signals."""

from __future__ import annotations

import asyncio
import socket
import threading
import time

import pytest

from tests.support.rpc_node import RUN_ID, Answer, Question, ask, endpoint_pair, refused, rpc_node, running_endpoint
from tests.support.waiting import until
from trainer.errors import PeerUnavailableError, RefusedError, TrainerUsageError
from trainer.network.rpc import Identity, Message, Peer, Reply, Request, Stream

_ECHO = "test/echo"
_LONG_S = 120.0
"""A deadline no test waits for: what ends earlier was noticed."""


class _Other(Message):
    something: int


@pytest.mark.parametrize("tls", [False, True])
async def test_a_call_carries_body_and_payload_both_ways(tls: bool) -> None:
    async with endpoint_pair(tls=tls) as (caller, callee):
        for payload in (b"", b"p", bytes(range(256)) * 4096):
            question = Question(text="å", numbers=(1, -2))
            reply = await caller.call(callee.peer, _ECHO, question, Answer, payload=payload, timeout_s=10)
            assert (reply.body.text, reply.payload, reply.sender) == ("å", payload, callee.peer_id)
        assert caller.counters.sent_bytes == callee.counters.received_bytes
        assert caller.counters.received_bytes == callee.counters.sent_bytes > 1 << 20
        assert not caller.counters.refused
        assert not callee.counters.refused


@pytest.mark.slow
@pytest.mark.parametrize("ended_by", ["deadline", "cancellation", "the callee's own limit"])
async def test_the_end_of_a_call_cancels_its_handler(ended_by: str) -> None:
    max_call_s = 0.2 if ended_by == "the callee's own limit" else 3600.0
    async with running_endpoint() as caller, running_endpoint(max_call_s=max_call_s) as callee:
        if ended_by == "deadline":
            with pytest.raises(PeerUnavailableError, match=r"within 0\.3 s"):
                await ask(caller, callee.peer, sleep_s=30, timeout_s=0.3)
        elif ended_by == "cancellation":
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.2):
                    await ask(caller, callee.peer, sleep_s=30, timeout_s=60)
        else:
            with refused("timeout"):
                await ask(caller, callee.peer, sleep_s=30)
        while True:  # The callee hears of it after the caller has gone on.
            answer = await caller.call(callee.peer, "test/cancelled", Question(), Answer, timeout_s=10)
            if answer.body.cancelled:
                break
            await asyncio.sleep(0.02)


async def test_calls_run_side_by_side_and_are_waited_for_beyond_the_stall_timeout() -> None:
    async with endpoint_pair() as (caller, callee):
        await asyncio.gather(*(ask(caller, callee.peer, str(number), 2.0) for number in range(20)))


async def test_what_the_callee_refuses_comes_with_its_reason() -> None:
    async def handle(_request: Request[Question]) -> Reply[Answer]:
        return Reply(Answer())

    async with running_endpoint() as caller, running_endpoint(max_remembered_per_peer=3) as callee:
        callee.register("small", Question, handle, max_payload_bytes=10)
        for reason, peer, method, body, num_bytes in (
            ("method", callee.peer, "test/nothing", Question(), 0),
            ("method", callee.peer, "test/mirror", Question(), 0),
            ("body", callee.peer, _ECHO, _Other(something=1), 0),
            ("recipient", Peer(caller.peer_id, callee.address), _ECHO, Question(), 0),
            ("payload_size", callee.peer, "small", Question(), 11),
        ):
            with refused(reason):
                await caller.call(peer, method, body, Answer, payload=bytes(num_bytes), timeout_s=20)
        for _ in range(2):  # The refused body counts among those that are remembered.
            await caller.call(callee.peer, "small", Question(), Answer, payload=bytes(10), timeout_s=20)
        with refused("rate"):
            await ask(caller, callee.peer)
        assert callee.counters.refused == {"method": 2, "body": 1, "recipient": 1, "payload_size": 1, "rate": 1}


async def test_only_nodes_of_the_run_and_the_allow_list_may_call() -> None:
    friend = Identity.create()
    async with (
        running_endpoint(friend) as welcome,
        running_endpoint() as stranger,
        running_endpoint(run_id="run-a") as other,
        running_endpoint(allowed_peers=(friend.peer_id,)) as callee,
    ):
        assert (await ask(welcome, callee.peer)).sender == callee.peer_id
        with refused("sender"):
            await ask(stranger, callee.peer)
        with refused("run", rf"run '{RUN_ID}', found one with 'run-a'"):
            await ask(other, callee.peer)


async def test_a_peer_known_by_address_only_says_who_it_is() -> None:
    async with endpoint_pair() as (caller, callee):
        anyone = Peer(None, callee.address)
        assert (await ask(caller, anyone, "who")).sender == callee.peer_id
        with refused("recipient"):
            await caller.call(anyone, "test/cancelled", Question(), Answer, timeout_s=20)


async def test_a_handlers_refusal_travels_and_its_failure_says_nothing_of_its_inside(caplog) -> None:
    async def refuse(_request: Request[Question]) -> Reply[Answer]:
        raise RefusedError("not_in_round", "expected round 7,\nfound 8")

    async def fail(_request: Request[Question]) -> Reply[Answer]:
        raise KeyError("secret path")

    async def overflow(_request: Request[Question]) -> Reply[Answer]:
        return Reply(Answer(text="x" * 70_000))

    async with endpoint_pair() as (caller, callee):
        for handler, reason, match in (
            (refuse, "not_in_round", "expected round 7, found 8"),
            (fail, "internal", "^((?!secret).)*$"),
            (overflow, "internal", "^((?!secret).)*$"),
        ):
            callee.register(handler.__name__, Question, handler)
            with refused(reason, match):
                await caller.call(callee.peer, handler.__name__, Question(), Answer, timeout_s=10)
        assert "secret path" in caplog.text
        assert callee.counters.refused == {"not_in_round": 1, "internal": 2}


async def test_a_peer_that_is_not_there_is_told_at_once_and_found_by_the_next_call_once_it_is() -> None:
    async with running_endpoint() as caller:
        for certificate in (None, b"no certificate"):
            with pytest.raises(PeerUnavailableError):
                await ask(caller, Peer(Identity.create().peer_id, "127.0.0.1:1", certificate))
        async with running_endpoint() as callee:
            peer = callee.peer
            await ask(caller, peer)
        for _ in range(3):
            with pytest.raises(PeerUnavailableError):
                await ask(caller, peer)
        async with running_endpoint(callee.identity, port=int(peer.address.rpartition(":")[2])):
            assert (await ask(caller, peer)).sender == peer.peer_id


async def test_a_port_is_taken_once() -> None:
    async with running_endpoint() as first:
        with pytest.raises(TrainerUsageError, match="choose another port"):
            async with running_endpoint(port=int(first.address.rpartition(":")[2])):
                pass


@pytest.mark.slow
async def test_stopping_ends_calls_in_both_directions_and_leaves_no_thread() -> None:
    before = {thread.name for thread in threading.enumerate()}
    async with running_endpoint() as caller, running_endpoint() as callee:
        await ask(caller, callee.peer, payload=bytes(1 << 20))
        waiting = asyncio.create_task(ask(caller, callee.peer, sleep_s=30))
        served = asyncio.create_task(ask(callee, caller.peer, sleep_s=30))
        await asyncio.sleep(0.2)
        await callee.stop()
        for call in (waiting, served):
            with pytest.raises(PeerUnavailableError):
                await call
        await callee.stop()
        with pytest.raises(PeerUnavailableError):
            await ask(callee, caller.peer)
    left = {thread.name for thread in threading.enumerate()} - before
    assert not [name for name in left if "genesis" in name]


@pytest.mark.slow
@pytest.mark.parametrize("tls", [False, True])
async def test_a_stopped_peer_is_noticed_by_its_silence(tls: bool) -> None:
    with rpc_node(tls=tls) as node:
        async with running_endpoint(tls=tls) as caller:
            await ask(caller, node.peer)
            working = asyncio.create_task(ask(caller, node.peer, sleep_s=60, timeout_s=_LONG_S))
            await asyncio.sleep(0.5)
            node.stop()
            with pytest.raises(PeerUnavailableError, match=r"fell silent.* 1 s"):
                await working
            with pytest.raises(PeerUnavailableError, match="silent"):
                await ask(caller, node.peer, timeout_s=_LONG_S, stall_timeout_s=0.3)
            node.resume()
            await ask(caller, node.peer)


async def _send_for_ever(stream: Stream) -> None:
    index = 0
    while True:
        await stream.send(index, bytes(1 << 20))
        index += 1


async def _receive_for_ever(stream: Stream) -> None:
    while await stream.receive() is not None:
        pass


@pytest.mark.parametrize("signal_name", ["stop", "kill"])
@pytest.mark.parametrize("method", ["test/mirror", "test/pour", "test/deaf"])
async def test_both_halves_of_a_stream_hear_of_a_peers_end(method: str, signal_name: str) -> None:
    """While frames are in full flow (mirror, pour), and while the peer takes none (deaf); of its death at once."""
    options = {"stall_timeout_s": 60.0} if signal_name == "kill" else {}
    with rpc_node(**options) as node:
        async with running_endpoint(**options) as caller, asyncio.timeout(30):
            async with caller.open_stream(node.peer, method, Question(sleep_s=60), timeout_s=_LONG_S) as stream:
                halves = [asyncio.create_task(_receive_for_ever(stream)), asyncio.create_task(_send_for_ever(stream))]
                await asyncio.sleep(0.5)
                assert not any(half.done() for half in halves)
                getattr(node, signal_name)()
                for outcome in await asyncio.gather(*halves, return_exceptions=True):
                    assert isinstance(outcome, PeerUnavailableError)
            assert caller._serving.budget.total_bytes == 0


@pytest.mark.slow
@pytest.mark.parametrize("signal_name", ["stop", "kill"])
async def test_a_handler_hears_of_its_callers_end(signal_name: str) -> None:
    """The caller is the one that dies here: the node process opens a stream to this one."""
    heard: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
    began = asyncio.Event()

    async def listen(_request: object, stream: Stream) -> None:
        began.set()
        try:
            await _receive_for_ever(stream)
        except BaseException as error:
            heard.set_result(error)
            raise

    with rpc_node() as node:
        async with running_endpoint() as callee:
            callee.register_stream("test/listen", Question, listen)
            ask = Question(text=callee.address)
            asking = asyncio.create_task(callee.call(node.peer, "test/dial", ask, Answer, timeout_s=_LONG_S))
            await began.wait()
            await asyncio.sleep(0.3)
            getattr(node, signal_name)()
            error = await heard
            # When the connection breaks, gRPC cancels the handler, unless reading has failed before.
            expected = (PeerUnavailableError, asyncio.CancelledError) if signal_name == "kill" else PeerUnavailableError
            assert isinstance(error, expected)
            with pytest.raises(PeerUnavailableError):
                await asking
            await until(lambda: not len(callee._serving.streams))


@pytest.mark.slow
@pytest.mark.parametrize("is_noticed", [True, False])
async def test_a_node_killed_and_restarted_is_the_same_peer_with_a_new_certificate(is_noticed, tmp_path) -> None:
    """A restart that was not noticed costs one call at most."""
    identity_path = str(tmp_path / "node.pem")
    async with running_endpoint(tls=True) as caller:
        with rpc_node(tls=True, identity_path=identity_path) as first:
            unpinned = Peer(first.peer.peer_id, first.peer.address)
            for peer in (first.peer, unpinned) if is_noticed else (unpinned,):
                await ask(caller, peer)
            first.kill()
        if is_noticed:
            with pytest.raises(PeerUnavailableError):
                await ask(caller, unpinned)
        port = int(first.peer.address.rpartition(":")[2])
        with rpc_node(tls=True, identity_path=identity_path, port=port) as second:
            assert second.peer.peer_id == first.peer.peer_id
            assert second.peer.certificate != first.peer.certificate
            try:
                await ask(caller, unpinned)
            except PeerUnavailableError:
                assert not is_noticed
                await ask(caller, unpinned)
            await ask(caller, second.peer)
            # What was announced is what counts: the old announcement leads nowhere.
            with pytest.raises(PeerUnavailableError):
                await ask(caller, first.peer)


@pytest.mark.slow
async def test_a_port_that_accepts_and_says_nothing_is_given_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        peer = Peer(Identity.create().peer_id, f"127.0.0.1:{mute.getsockname()[1]}")
        async with running_endpoint(connect_timeout_s=0.5) as caller:
            started = time.monotonic()
            with pytest.raises(PeerUnavailableError):
                await ask(caller, peer, timeout_s=_LONG_S)
            assert time.monotonic() - started < _LONG_S / 2

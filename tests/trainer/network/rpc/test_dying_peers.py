"""Peers that are killed, stopped, or come back: real processes, real signals."""

from __future__ import annotations

import asyncio
import socket
import time
from pathlib import Path

import pytest

from tests.support.event_loop import on_event_loop
from tests.support.rpc_node import Answer, Question, rpc_node
from tests.support.rpc_pair import ask, running_endpoint, until
from trainer.errors import PeerUnavailableError
from trainer.network.rpc import Identity, Peer, Stream

_LONG_S = 120.0
"""A deadline no test waits for: what ends earlier was noticed."""


@pytest.mark.slow
@pytest.mark.parametrize("tls", [False, True])
@on_event_loop
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


@pytest.mark.slow
@on_event_loop
async def test_a_killed_peer_is_noticed_at_once() -> None:
    with rpc_node(stall_timeout_s=60.0) as node:
        async with running_endpoint(stall_timeout_s=60.0) as caller:
            working = asyncio.create_task(ask(caller, node.peer, sleep_s=60, timeout_s=_LONG_S))
            await asyncio.sleep(0.5)
            node.kill()
            async with asyncio.timeout(20):
                with pytest.raises(PeerUnavailableError):
                    await working
                with pytest.raises(PeerUnavailableError):
                    await ask(caller, node.peer, timeout_s=_LONG_S)


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
@on_event_loop
async def test_both_halves_of_a_stream_hear_of_a_peers_end(method: str, signal_name: str) -> None:
    """While frames are in full flow (mirror, pour), and while the peer takes none of them (deaf)."""
    with rpc_node() as node:
        async with running_endpoint() as caller:
            async with caller.open_stream(node.peer, method, Question(sleep_s=60), timeout_s=_LONG_S) as stream:
                halves = [
                    asyncio.create_task(_receive_for_ever(stream)),
                    asyncio.create_task(_send_for_ever(stream)),
                ]
                await asyncio.sleep(0.5)
                assert not any(half.done() for half in halves)
                getattr(node, signal_name)()
                for outcome in await asyncio.gather(*halves, return_exceptions=True):
                    assert isinstance(outcome, PeerUnavailableError)
            assert caller._serving.budget.total_bytes == 0


@pytest.mark.slow
@pytest.mark.parametrize("signal_name", ["stop", "kill"])
@on_event_loop
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
@on_event_loop
async def test_a_node_killed_and_restarted_is_the_same_peer_with_a_new_certificate(
    is_noticed: bool, tmp_path: Path
) -> None:
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
@pytest.mark.parametrize("tls", [False, True])
@on_event_loop
async def test_a_port_that_accepts_and_says_nothing_is_given_up(tls: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        peer = Peer(Identity.create().peer_id, f"127.0.0.1:{mute.getsockname()[1]}")
        async with running_endpoint(tls=tls, connect_timeout_s=0.5) as caller:
            started = time.monotonic()
            with pytest.raises(PeerUnavailableError):
                await ask(caller, peer, timeout_s=_LONG_S)
            assert time.monotonic() - started < _LONG_S / 2

"""Streams between endpoints over real sockets."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.event_loop import on_event_loop
from tests.support.rpc_node import Answer, Question, endpoint_pair, open_stream, refused, running_endpoint
from trainer.errors import PeerUnavailableError, RefusedError, TrainerUsageError
from trainer.network.rpc import Reply, Request, Stream
from trainer.network.rpc.channels import WINDOW_BYTES
from trainer.network.rpc.envelope import HEARTBEAT

_MIB = 1 << 20


async def _drain(stream: Stream) -> list[tuple[int, bytes]]:
    frames = []
    while (frame := await stream.receive()) is not None:
        frames.append((frame.index, bytes(frame.payload)))
    return frames


async def _fill(stream: Stream, seconds: float) -> int:
    """Sends frames to a side that takes none; returns how many were taken off before the time was up."""
    sent = 0
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(seconds):
            while True:
                await stream.send(sent, bytes(_MIB))
                sent += 1
    return sent


async def _expect(stream: Stream, *indices: int) -> None:
    for index in indices:
        frame = await stream.receive()
        assert frame is not None
        assert frame.index == index


async def _send_all(stream: Stream, frames: list[tuple[int, bytes]]) -> None:
    for index, payload in frames:
        await stream.send(index, payload)
    await stream.end()


async def _pour(stream: Stream, size_bytes: int) -> None:
    for index in range(10_000):
        await stream.send(index, bytes(size_bytes))


@pytest.mark.parametrize("tls", [False, True])
async def test_frames_go_both_ways_at_once_in_order(tls: bool) -> None:
    frames = [(2 * number, bytes([number]) * (number * 40_000)) for number in range(24)]
    async with endpoint_pair(tls=tls) as (caller, callee):
        async with caller.open_stream(callee.peer, "test/mirror", Question(), timeout_s=30) as stream:
            sending = asyncio.create_task(_send_all(stream, frames))
            assert await _drain(stream) == frames
            await sending
            assert await stream.receive() is None
        # Heartbeats that were on their way when the callee stopped reading are not received.
        unread_bytes = caller.counters.sent_bytes - callee.counters.received_bytes
        assert unread_bytes in range(0, 10 * len(HEARTBEAT), len(HEARTBEAT))
        assert callee.counters.received_bytes > sum(len(body) for _, body in frames)


@pytest.mark.slow
@settings(max_examples=8, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2**53 - 1), st.binary(max_size=3000)), max_size=12))
def test_any_frames_come_as_they_were_sent(frames: list[tuple[int, bytes]]) -> None:
    @on_event_loop
    async def scenario() -> None:
        async with open_stream() as (stream, _, _):
            _, received = await asyncio.gather(_send_all(stream, frames), _drain(stream))
            assert received == frames

    scenario()


async def test_sends_from_several_tasks_are_put_in_one_order_and_a_payload_may_be_changed_once_it_was_sent() -> None:
    async with open_stream() as (stream, _, _):
        await asyncio.gather(*(stream.send(index, bytes(300_000)) for index in range(12)))
        buffer = bytearray(_MIB)
        for number in range(4):
            buffer[:] = bytes([number]) * _MIB
            await stream.send(12 + number, buffer)
        await stream.end()
        frames = await _drain(stream)
        assert sorted(index for index, _ in frames) == list(range(16))
        assert frames[12:] == [(12 + number, bytes([number]) * _MIB) for number in range(4)]


@pytest.mark.slow
async def test_a_peer_that_does_not_read_is_not_sent_more_than_a_little() -> None:
    """Backpressure: the queue and a few windows, however long the sender goes on and however busy the machine is."""
    async with open_stream("test/deaf", sleep_s=20, stall_timeout_s=5.0) as (stream, _, callee):
        sent = await _fill(stream, 2.0)
        assert 4 <= sent <= 7 + 3 * WINDOW_BYTES // _MIB
        assert callee.counters.received_bytes <= 7 * _MIB


@pytest.mark.slow
async def test_a_reader_who_takes_a_pause_longer_than_the_stall_timeout_loses_nothing() -> None:
    async with open_stream("test/pour", timeout_s=60, stall_timeout_s=0.4) as (stream, _, _):
        for index in range(10):
            if index % 4 == 0:
                await asyncio.sleep(0.8)
            await _expect(stream, index)


@pytest.mark.slow
async def test_silence_of_both_is_bridged_by_heartbeats_and_a_cancelled_receive_loses_no_frame() -> None:
    async with open_stream(stall_timeout_s=0.4) as (stream, _, _):
        for _ in range(3):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(stream.receive(), 0.4)
        await _send_all(stream, [(7, b"after")])
        await asyncio.sleep(0.8)
        assert await _drain(stream) == [(7, b"after")]


@pytest.mark.slow
async def test_a_cancelled_send_leaves_no_gap() -> None:
    """Cancelled while it waits, nothing was sent; what is sent later follows on."""
    got: list[int] = []

    async def late(_request: Request[Question], stream: Stream) -> None:
        await asyncio.sleep(1.0)
        while (frame := await stream.receive()) is not None:
            got.append(frame.index)

    async with open_stream(handler=late, stall_timeout_s=5.0) as (stream, _, _):
        sent = await _fill(stream, 0.6)
        await stream.send(sent, b"after")
        await stream.end()
        assert await stream.receive() is None
    assert got == list(range(sent + 1))


async def test_nothing_can_be_sent_after_the_end() -> None:
    async with open_stream() as (stream, _, _):
        with pytest.raises(TrainerUsageError, match="index"):
            await stream.send(-1, b"")
        with pytest.raises(TrainerUsageError, match="split it"):
            await stream.send(0, bytes(_MIB + 1))
        await stream.end()
        await stream.end()
        with pytest.raises(TrainerUsageError, match="after the end"):
            await stream.send(0, b"x")
        assert await _drain(stream) == []


@pytest.mark.slow
async def test_a_refusal_is_told_though_heartbeats_and_frames_are_in_flight() -> None:
    """gRPC cannot send a status while a write is in flight; heartbeats every half millisecond see to it that one is."""

    async def refuse_call(_request: Request[Question]) -> Reply[Answer]:
        await asyncio.sleep(0.003)
        raise RefusedError("busy", "later")

    async def refuse_stream(_request: Request[Question], stream: Stream) -> None:
        await stream.send(0, bytes(_MIB))
        raise RefusedError("busy", "later")

    async with running_endpoint() as caller, running_endpoint(heartbeat_s=0.0005) as callee:
        callee.register("test/refuse", Question, refuse_call)
        callee.register_stream("test/refuse-stream", Question, refuse_stream)
        for _ in range(60):
            with refused("busy", "later"):
                await caller.call(callee.peer, "test/refuse", Question(), Answer, timeout_s=20)
        for _ in range(20):
            async with caller.open_stream(callee.peer, "test/refuse-stream", Question(), timeout_s=20) as stream:
                await _expect(stream, 0)
                with refused("busy", "later"):
                    await stream.receive()


@pytest.mark.slow
@pytest.mark.parametrize("reader_s", [0.0, 0.5])
@pytest.mark.parametrize("reason", ["not_in_round", "internal"])
async def test_a_sender_in_full_flow_hears_the_error_and_what_came_before_it(reason, reader_s, caplog) -> None:
    """Also where the answers are read only after sending has failed."""

    async def refuse(_request: Request[Question], stream: Stream) -> None:
        for index in range(3):
            await stream.send(index, b"before")
        raise ValueError("inside") if reason == "internal" else RefusedError(reason, "another round")

    async with endpoint_pair() as (caller, callee):
        callee.register_stream("test/refuse", Question, refuse)
        for _ in range(8):
            async with caller.open_stream(callee.peer, "test/refuse", Question(), timeout_s=30) as stream:
                pouring = asyncio.create_task(_pour(stream, 200_000))
                await asyncio.sleep(reader_s / 8)
                await _expect(stream, 0, 1, 2)
                for outcome in (stream.receive(), pouring):
                    with refused(reason):
                        await outcome
        assert callee.counters.refused == {reason: 8}
        assert ("inside" in caplog.text) == (reason == "internal")


@pytest.mark.slow
async def test_a_callee_that_ends_early_leaves_its_answer_to_a_caller_still_sending() -> None:
    async def answer(_request: Request[Question], stream: Stream) -> None:
        for index in range(6):
            await stream.send(index, bytes(1000))

    for _ in range(2):
        async with open_stream(handler=answer) as (stream, _, _):
            with pytest.raises(PeerUnavailableError):
                await _pour(stream, 200_000)
            assert [index for index, _ in await _drain(stream)] == list(range(6))


async def test_a_callee_that_does_not_wait_for_the_end_is_no_error() -> None:
    async def glance(_request: Request[Question], stream: Stream) -> None:
        await stream.receive()

    for pause_s in (0.0, 0.001, 0.01, 0.1):
        async with open_stream(handler=glance) as (stream, _, _):
            await stream.send(0, b"x")
            await asyncio.sleep(pause_s)
            await stream.end()
            assert await stream.receive() is None


async def test_a_budget_too_small_for_all_streams_stops_none_of_them() -> None:
    """Each stream may hold one frame, so that streams that wait for each other do not do so for ever."""
    options = {"max_queued_bytes": 1, "max_queued_bytes_per_peer": 1}
    async with running_endpoint() as caller, running_endpoint(**options) as callee:

        async def mirror(number: int) -> None:
            frames = [(index, bytes([number]) * 100_000) for index in range(8)]
            async with caller.open_stream(callee.peer, "test/mirror", Question(), timeout_s=30) as stream:
                _, received = await asyncio.gather(_send_all(stream, frames), _drain(stream))
                assert received == frames

        await asyncio.gather(*(mirror(number) for number in range(6)))
        assert callee._serving.budget.total_bytes == 0


@pytest.mark.slow
async def test_the_deadline_ends_a_stream() -> None:
    async with open_stream(timeout_s=0.5) as (stream, _, _):
        for half in (stream.receive(), stream.send(0, b"x")):
            with pytest.raises(PeerUnavailableError, match="deadline"):
                await half

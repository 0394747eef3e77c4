"""Several services of one kind at one endpoint: each is answered by its own, and has its bytes counted by itself."""

from __future__ import annotations

import pytest

from tests.support.rpc_node import RUN_ID, Answer, Question, fast_config
from trainer.errors import RefusedError, TrainerUsageError
from trainer.network.rpc import Endpoint, Identity, Reply, Request, Stream, scoped_endpoint
from trainer.network.rpc.messages import Counters


def answer_as(endpoint: Endpoint, scope: str) -> None:
    """Registers an answer, and a stream, that tell whose they are."""
    service = scoped_endpoint(endpoint, scope)

    async def tell(request: Request[Question]) -> Reply[Answer]:
        return Reply(Answer(text=f"{scope} {request.body.text}"), request.payload)

    async def pour(_request: Request[Question], stream: Stream) -> None:
        while (frame := await stream.receive()) is not None:
            await stream.send(frame.index, f"{scope}".encode() + frame.payload)

    service.register("test/tell", Question, tell)
    service.register_stream("test/pour", Question, pour)


async def test_scopes_share_an_endpoint_and_no_message() -> None:
    callee = Endpoint(Identity.create(), RUN_ID, fast_config())
    for scope in ("head", "body-1", ""):
        answer_as(callee, scope)
    with pytest.raises(TrainerUsageError):
        answer_as(callee, "head")
    caller = Endpoint(Identity.create(), RUN_ID, fast_config())
    head, body, plain = (scoped_endpoint(caller, scope) for scope in ("head", "body-1", ""))
    assert plain is caller
    assert (head.peer_id, body.certificate) == (caller.peer_id, caller.certificate)
    await callee.start()
    await caller.start()
    try:
        for service, said in ((head, "head hello"), (body, "body-1 hello"), (plain, " hello")):
            reply = await service.call(callee.peer, "test/tell", Question(text="hello"), Answer, timeout_s=10)
            assert reply.body.text == said
        before = body.counters.sent_bytes, body.counters.received_bytes
        async with head.open_stream(callee.peer, "test/pour", Question(), timeout_s=10) as stream:
            await stream.send(0, bytes((1 << 20) - 8))
            frame = await stream.receive()
            assert frame is not None and frame.payload[:5] == b"head\0"
            await stream.end()
        with pytest.raises(RefusedError):
            await scoped_endpoint(caller, "tail").call(callee.peer, "test/tell", Question(), Answer, timeout_s=10)
        assert (body.counters.sent_bytes, body.counters.received_bytes) == before
        assert min(head.counters.sent_bytes, head.counters.received_bytes) >= 1 << 20
        for direction in ("sent_bytes", "received_bytes"):
            scoped = sum(getattr(each.counters, direction) for each in (head, body))
            assert 0 < scoped < getattr(caller.counters, direction)
            opposite = "received_bytes" if direction == "sent_bytes" else "sent_bytes"
            for name, service in (("head", head), ("body-1", body)):
                # But for heartbeats and ends of streams that one side had sent when the other hung up.
                there = getattr(callee.counters.by_scope[name], opposite)
                assert there == pytest.approx(getattr(service.counters, direction), abs=4096)
    finally:
        await caller.stop()
        await callee.stop()


async def test_a_service_counts_its_own_bytes_within_a_scope_and_without() -> None:
    callee = Endpoint(Identity.create(), RUN_ID, fast_config())
    for scope in ("", "head"):
        answer_as(callee, scope)
    caller = Endpoint(Identity.create(), RUN_ID, fast_config())
    head = scoped_endpoint(caller, "head")
    own, of_head = caller.counters.of_scope("test"), head.counters.of_scope("test")
    other = head.counters.of_scope("round")
    await callee.start()
    await caller.start()
    try:
        await caller.call(callee.peer, "test/tell", Question(text="hello"), Answer, timeout_s=10)
        assert min(own.sent_bytes, own.received_bytes) > 0
        assert of_head == Counters()
        before = own.sent_bytes
        await head.call(callee.peer, "test/tell", Question(text="hello"), Answer, timeout_s=10)
        assert (of_head.sent_bytes, of_head.received_bytes) == (head.counters.sent_bytes, head.counters.received_bytes)
        assert of_head.sent_bytes > 0
        assert (own.sent_bytes, other) == (before, Counters())
    finally:
        await caller.stop()
        await callee.stop()

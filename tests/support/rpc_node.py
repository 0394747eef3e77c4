"""A node that only answers, as a process of its own that tests can stop, continue and kill; and what it answers."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import pytest

from tests.support.child import Child, input_ended, say
from trainer.errors import RefusedError
from trainer.network.rpc import Endpoint, Identity, Message, Peer, Reply, Request, RpcConfig, Stream
from trainer.network.rpc.identity import load_or_create_identity

RUN_ID = "test-run"
FAST = {"host": "127.0.0.1", "heartbeat_s": 0.1, "stall_timeout_s": 1.0, "stop_grace_s": 0.2}
"""Times short enough for tests: a heartbeat may be 0.9 s late before a peer is given up."""


class Question(Message):
    text: str = ""
    numbers: tuple[int, ...] = ()
    sleep_s: float = 0.0


class Answer(Message):
    text: str = ""
    cancelled: int = 0


def fast_config(**options: object) -> RpcConfig:
    return RpcConfig(**{**FAST, "tls": False, **options})  # type: ignore[arg-type]


def register_test_methods(endpoint: Endpoint) -> None:
    """What every test node answers.

    ``echo``; ``cancelled``, how many echoes were cancelled; ``refused``, the counters; ``dial``, opens
    ``listen`` at the asker, whose address is the text, and says nothing; ``mirror``, frames back;
    ``pour``, numbered frames until told otherwise; ``deaf``, a stream that reads nothing.
    """
    cancelled = 0

    async def echo(request: Request[Question]) -> Reply[Answer]:
        nonlocal cancelled
        try:
            await asyncio.sleep(request.body.sleep_s)
        except asyncio.CancelledError:
            cancelled += 1
            raise
        return Reply(Answer(text=request.body.text), request.payload)

    async def count(_request: Request[Question]) -> Reply[Answer]:
        return Reply(Answer(cancelled=cancelled))

    async def refused(_request: Request[Question]) -> Reply[Answer]:
        return Reply(Answer(text=json.dumps(endpoint.counters.refused)))

    async def dial(request: Request[Question]) -> Reply[Answer]:
        sender = Peer(request.sender, request.body.text)
        async with endpoint.open_stream(sender, "test/listen", Question(), timeout_s=600) as stream:
            await stream.receive()
        return Reply(Answer())

    async def mirror(_request: Request[Question], stream: Stream) -> None:
        while (frame := await stream.receive()) is not None:
            await stream.send(frame.index, frame.payload)

    async def pour(_request: Request[Question], stream: Stream) -> None:
        for index in range(10**6):
            await stream.send(index, bytes(1 << 20))

    async def deaf(request: Request[Question], _stream: Stream) -> None:
        await asyncio.sleep(request.body.sleep_s)

    endpoint.register("test/echo", Question, echo, any_recipient=True)
    endpoint.register("test/cancelled", Question, count)
    endpoint.register("test/dial", Question, dial)
    endpoint.register("test/refused", Question, refused)
    endpoint.register_stream("test/mirror", Question, mirror)
    endpoint.register_stream("test/pour", Question, pour)
    endpoint.register_stream("test/deaf", Question, deaf)


class RpcNode(Child):
    def __init__(self, identity_path: str, options: dict[str, object]) -> None:
        super().__init__("rpc_node", identity_path, json.dumps(options))
        peer_id, address, certificate = self.hear()
        self.peer = Peer(peer_id, address, certificate.encode() or None)


def rpc_node(*, identity_path: str = "", **options: object) -> RpcNode:
    return RpcNode(identity_path, options)


async def _serve(identity_path: str, options: dict[str, object]) -> None:
    identity = load_or_create_identity(identity_path) if identity_path else Identity.create()
    endpoint = Endpoint(identity, RUN_ID, fast_config(**options))
    register_test_methods(endpoint)
    await endpoint.start()
    say([endpoint.peer_id, endpoint.address, (endpoint.certificate or b"").decode()])
    await input_ended()
    await endpoint.stop()


class Clock:
    now_s = 1_000_000.0

    def __call__(self) -> float:
        return self.now_s


@asynccontextmanager
async def running_endpoint(
    identity: Identity | None = None, run_id: str = RUN_ID, **options: object
) -> AsyncIterator[Endpoint]:
    endpoint = Endpoint(identity or Identity.create(), run_id, fast_config(**options))
    register_test_methods(endpoint)
    await endpoint.start()
    try:
        yield endpoint
    finally:
        await endpoint.stop()


@asynccontextmanager
async def endpoint_pair(**options: object) -> AsyncIterator[tuple[Endpoint, Endpoint]]:
    async with running_endpoint(**options) as caller, running_endpoint(**options) as callee:
        yield caller, callee


@asynccontextmanager
async def open_stream(
    method: str = "test/mirror",
    sleep_s: float = 0.0,
    timeout_s: float = 30.0,
    *,
    handler: Callable[[Request[Question], Stream], Awaitable[None]] | None = None,
    **options: object,
) -> AsyncIterator[tuple[Stream, Endpoint, Endpoint]]:
    """A stream between a caller and a callee, and both of them; ``handler``: of the stream instead of ``method``."""
    async with endpoint_pair(**options) as (caller, callee):
        if handler is not None:
            method = "test/handler"
            callee.register_stream(method, Question, handler)
        question = Question(sleep_s=sleep_s)
        async with caller.open_stream(callee.peer, method, question, timeout_s=timeout_s) as stream:
            yield stream, caller, callee


async def ask(
    caller: Endpoint, peer: Peer, text: str = "", sleep_s: float = 0.0, *, timeout_s: float = 20.0, **options: Any
) -> Reply[Answer]:
    """Calls ``test/echo``, with a payload and ``stall_timeout_s`` as `Endpoint.call`; the reply is what was asked."""
    question = Question(text=text, sleep_s=sleep_s)
    reply = await caller.call(peer, "test/echo", question, Answer, timeout_s=timeout_s, **options)
    assert reply.body.text == text
    return reply


@contextmanager
def refused(reason: str, match: str | None = None) -> Iterator[None]:
    with pytest.raises(RefusedError, match=match) as caught:
        yield
    assert caught.value.reason == reason


if __name__ == "__main__":
    asyncio.run(_serve(sys.argv[1], json.loads(sys.argv[2])))

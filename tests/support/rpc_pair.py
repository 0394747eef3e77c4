"""Endpoints in this process, on real sockets, stopped at the end of the block; and how tests talk to them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import pytest

from tests.support.rpc_node import RUN_ID, Answer, Question, fast_config, register_test_methods
from trainer.errors import RefusedError
from trainer.network.rpc import Endpoint, Identity, Peer, Reply, Request, Stream


class Clock:
    """Tells the seconds that a test sets."""

    now_s = 1_000_000.0

    def __call__(self) -> float:
        return self.now_s


@asynccontextmanager
async def running_endpoint(
    identity: Identity | None = None, run_id: str = RUN_ID, **options: object
) -> AsyncIterator[Endpoint]:
    """One that answers the test methods."""
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
    """Expects a refusal for ``reason``."""
    with pytest.raises(RefusedError, match=match) as caught:
        yield
    assert caught.value.reason == reason

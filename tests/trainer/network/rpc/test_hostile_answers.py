"""What a hostile peer answers is never taken for an answer, and never ends the caller."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from grpc import aio

from tests.support.rpc_node import Question
from tests.support.rpc_pair import ask, refused, running_endpoint
from trainer.errors import MalformedAnswerError, PeerUnavailableError, RefusedError
from trainer.network.rpc import Identity, Peer
from trainer.network.rpc.channels import generic_handler
from trainer.network.rpc.envelope import HEARTBEAT, EnvelopeHeader, parse_header, seal

Context = aio.ServicerContext[bytes, bytes]
Script = Callable[[EnvelopeHeader, Context], Awaitable[None]]

_CALLEE, _OTHER = Identity.create(), Identity.create()


@asynccontextmanager
async def hostile_callee(script: Script) -> AsyncIterator[Peer]:
    """Listens in plain on loopback as `_CALLEE`, and answers every call by ``script``."""

    async def answer(_requests: object, context: Context) -> None:
        frame = parse_header(await context.read())
        assert frame is not None
        try:
            await script(frame.header, context)
        except aio.AbortError:
            raise
        except aio.BaseError:
            pass  # The caller has ended the call while this wrote.

    server = aio.server(options=[("grpc.max_send_message_length", -1)])
    server.add_generic_rpc_handlers((generic_handler(answer),))
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        yield Peer(_CALLEE.peer_id, address)
    finally:
        await server.stop(None)
        await asyncio.sleep(0)


def _answer(
    request: EnvelopeHeader,
    *,
    payload: bytes = b"",
    identity: Identity = _CALLEE,
    damage: Callable[[bytes], bytes] = bytes,
    **changes: object,
) -> bytes:
    """The reply an honest node would give, but for the changes."""
    fields = request.model_dump(exclude={"sender", "payload_blake3"})
    fields |= {"kind": "reply", "origin": "callee", "recipient": request.sender, "body": {}, **changes}
    return damage(seal(identity, fields, payload))


def _answering(*frames: dict[str, Any] | bytes) -> Script:
    """Answers with these frames: changes of the honest one, or bytes."""

    async def script(request: EnvelopeHeader, context: Context) -> None:
        for frame in frames:
            await context.write(frame if isinstance(frame, bytes) else _answer(request, **frame))

    return script


def _unsigned(raw: bytes) -> bytes:
    return raw[:16] + bytes(64) + raw[80:]


_DATA = {"kind": "data", "body": None}


@pytest.mark.parametrize(
    ("is_stream", "reason", "frames"),
    [
        (False, "signature", [{"damage": _unsigned}]),
        (False, "sender", [{"identity": _OTHER}]),
        (False, "recipient", [{"recipient": _OTHER.peer_id}]),
        (False, "recipient", [{"recipient": ""}]),
        (False, "run", [{"run_id": "other"}]),
        (False, "method", [{"method": "test/other"}]),
        (False, "certificate", [{"certificate_sha256": "0" * 64}]),
        (False, "sequence", [{"nonce": "0" * 32}]),
        (False, "sequence", [{"sequence": 1}]),
        (False, "kind", [{"origin": "caller"}]),
        (False, "kind", [{"kind": "request"}]),
        (False, "kind", [{"kind": "data"}]),
        (False, "kind", [{"kind": "end"}]),
        (False, "kind", [{}, {"sequence": 1}]),
        (False, "digest", [{"payload": b"aa", "damage": lambda raw: raw[:-1] + b"b"}]),
        (False, "size", [{"damage": lambda raw: raw[:-1]}]),
        (False, "magic", [b"noise" * 100]),
        (False, "head", [{"extra": 1}]),
        (True, "sequence", [{**_DATA, "sequence": 1}]),
        (True, "sequence", [_DATA, _DATA]),
        (True, "signature", [_DATA, {**_DATA, "sequence": 1, "damage": _unsigned}]),
        (True, "kind", [_DATA, {**_DATA, "sequence": 1, "kind": "end"}, {**_DATA, "sequence": 2}]),
        (True, "kind", [{"body": None}]),
        (True, "sender", [{**_DATA, "identity": _OTHER}]),
    ],
)
async def test_an_answer_that_fails_a_check_is_none(is_stream: bool, reason: str, frames: list[Any]) -> None:
    async with running_endpoint() as caller, hostile_callee(_answering(*frames)) as callee:
        with pytest.raises(PeerUnavailableError, match=rf"fails a check \({reason}\)"):
            if is_stream:
                async with caller.open_stream(callee, "test/mirror", Question(), timeout_s=20) as stream:
                    while await stream.receive() is not None:
                        pass
                    await stream.end()
            else:
                await ask(caller, callee)
        assert caller.counters.refused == {reason: 1}


@pytest.mark.parametrize("body", [None, {"text": 1}, {"text": "a", "more": [[[{}]]]}, {"text": 2**62}])
async def test_a_signed_answer_that_is_none_to_the_question_is_the_peers_doing(body: dict[str, object] | None) -> None:
    async with running_endpoint() as caller, hostile_callee(_answering({"body": body})) as callee:
        with pytest.raises(MalformedAnswerError, match=r"fails a check \(body\)"):
            await ask(caller, callee)
        assert caller.counters.refused == {"body": 1}


async def test_a_captured_answer_does_not_fit_a_second_call() -> None:
    captured: list[bytes] = []

    async def script(request: EnvelopeHeader, context: Context) -> None:
        captured.append(_answer(request))
        await context.write(captured[0])

    async with running_endpoint() as caller, hostile_callee(script) as callee:
        await ask(caller, callee)
        with pytest.raises(PeerUnavailableError, match="sequence"):
            await ask(caller, callee)


@pytest.mark.slow
async def test_heartbeats_alone_go_on_to_the_deadline_only() -> None:
    async def script(_request: EnvelopeHeader, context: Context) -> None:
        while True:
            await context.write(HEARTBEAT)

    async with running_endpoint() as caller, hostile_callee(script) as callee:
        with pytest.raises(PeerUnavailableError, match=r"within 0\.5 s"):
            await ask(caller, callee, timeout_s=0.5)


async def test_an_answer_too_large_to_be_one_is_not_read() -> None:
    async with running_endpoint() as caller, hostile_callee(_answering(bytes(64 << 20))) as callee:
        with refused("size"):
            await ask(caller, callee)


@pytest.mark.parametrize("frames", [[], [HEARTBEAT]])
async def test_an_end_without_an_answer_is_none(frames: list[bytes]) -> None:
    async with running_endpoint() as caller, hostile_callee(_answering(*frames)) as callee:
        with pytest.raises(PeerUnavailableError, match="expected a reply"):
            await ask(caller, callee)
        async with caller.open_stream(callee, "test/mirror", Question(), timeout_s=20) as stream:
            with pytest.raises(PeerUnavailableError, match="before the end"):
                await stream.receive()


@pytest.mark.parametrize(
    ("reason", "text", "expected_reason"),
    [
        ("x" * 5000, "short", None),
        ("UPPER CASE", "text", "refused"),
        ("odd_one", "line\x1b[31m\r\nbreak" + "y" * 5000, "odd_one"),
    ],
)
async def test_what_a_refusal_says_is_made_harmless(reason: str, text: str, expected_reason: str | None) -> None:
    async def script(_request: EnvelopeHeader, context: Context) -> None:
        await context.abort(grpc.StatusCode.ABORTED, text, (("genesis-reason", reason),))

    async with running_endpoint() as caller, hostile_callee(script) as callee:
        with pytest.raises((RefusedError, PeerUnavailableError)) as caught:
            await ask(caller, callee)
        said = str(caught.value)
        assert len(said) < 700 and said.isprintable()
        if expected_reason is not None:
            assert isinstance(caught.value, RefusedError) and caught.value.reason == expected_reason


async def test_whoever_answers_at_an_address_must_go_on_answering() -> None:
    """Of a peer known by address only, the first signed frame says who it is, and binds the rest."""
    script = _answering(_DATA, {**_DATA, "sequence": 1, "identity": _OTHER})
    async with running_endpoint() as caller, hostile_callee(script) as callee:
        anyone = Peer(None, callee.address)
        async with caller.open_stream(anyone, "test/mirror", Question(), timeout_s=20) as stream:
            assert await stream.receive() is not None
            with pytest.raises(PeerUnavailableError, match=r"fails a check \(sender\)"):
                await stream.receive()

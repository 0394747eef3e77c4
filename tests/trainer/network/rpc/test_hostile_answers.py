"""What a hostile peer answers is never taken for an answer, and never ends the caller."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import grpc
import pytest
from grpc import aio

from tests.support.event_loop import on_event_loop
from tests.support.rpc_node import Question
from tests.support.rpc_pair import ask, refused, running_endpoint
from trainer.errors import MalformedAnswerError, PeerUnavailableError, RefusedError
from trainer.network.rpc import Identity, Peer
from trainer.network.rpc.channels import generic_handler
from trainer.network.rpc.envelope import HEARTBEAT, EnvelopeHeader, parse_header, seal

Context = aio.ServicerContext[bytes, bytes]
Script = Callable[["HostileCallee", EnvelopeHeader, Context], Awaitable[None]]
Make = Callable[["HostileCallee", EnvelopeHeader], list[bytes]]


@dataclass
class HostileCallee:
    """Answers every call by ``script``."""

    script: Script
    identity: Identity = field(default_factory=Identity.create)
    address: str = ""

    @property
    def peer(self) -> Peer:
        """How it is called."""
        return Peer(self.identity.peer_id, self.address)

    def answer(
        self, request: EnvelopeHeader, *, payload: bytes = b"", identity: Identity | None = None, **changes: object
    ) -> bytes:
        """The reply an honest node would give, but for ``changes``."""
        fields = {
            **request.model_dump(exclude={"sender", "payload_blake3"}),
            "kind": "reply",
            "origin": "callee",
            "recipient": request.sender,
            "body": {},
            **changes,
        }
        return seal(identity or self.identity, fields, payload)

    async def _answer_call(self, _requests: object, context: Context) -> None:
        frame = parse_header(await context.read())
        assert frame is not None
        await self.script(self, frame.header, context)


@asynccontextmanager
async def hostile_callee(script: Script) -> AsyncIterator[HostileCallee]:
    """Listens in plain on loopback."""
    callee = HostileCallee(script)
    server = aio.server(options=[("grpc.max_send_message_length", -1)])
    server.add_generic_rpc_handlers((generic_handler(callee._answer_call),))
    callee.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        yield callee
    finally:
        await server.stop(None)
        await asyncio.sleep(0)


def _answering(make: Make) -> Script:
    async def script(callee: HostileCallee, request: EnvelopeHeader, context: Context) -> None:
        for raw in make(callee, request):
            await context.write(raw)

    return script


def _unsigned(raw: bytes) -> bytes:
    return raw[:16] + bytes(64) + raw[80:]


_OTHER = Identity.create()


@pytest.mark.parametrize(
    ("reason", "make"),
    [
        ("signature", lambda callee, header: [_unsigned(callee.answer(header))]),
        ("sender", lambda callee, header: [callee.answer(header, identity=_OTHER)]),
        ("recipient", lambda callee, header: [callee.answer(header, recipient=_OTHER.peer_id)]),
        ("recipient", lambda callee, header: [callee.answer(header, recipient="")]),
        ("run", lambda callee, header: [callee.answer(header, run_id="other")]),
        ("method", lambda callee, header: [callee.answer(header, method="test/other")]),
        ("certificate", lambda callee, header: [callee.answer(header, certificate_sha256="0" * 64)]),
        ("sequence", lambda callee, header: [callee.answer(header, nonce="0" * 32)]),
        ("sequence", lambda callee, header: [callee.answer(header, sequence=1)]),
        ("kind", lambda callee, header: [callee.answer(header, origin="caller")]),
        ("kind", lambda callee, header: [callee.answer(header, kind="request")]),
        ("kind", lambda callee, header: [callee.answer(header, kind="data")]),
        ("kind", lambda callee, header: [callee.answer(header, kind="end")]),
        ("kind", lambda callee, header: [callee.answer(header), callee.answer(header, sequence=1)]),
        ("digest", lambda callee, header: [callee.answer(header, payload=b"aa")[:-1] + b"b"]),
        ("size", lambda callee, header: [callee.answer(header)[:-1]]),
        ("magic", lambda _callee, _header: [b"noise" * 100]),
        ("head", lambda callee, header: [callee.answer(header, extra=1)]),
    ],
)
@on_event_loop
async def test_an_answer_that_fails_a_check_is_none(reason: str, make: Make) -> None:
    async with running_endpoint() as caller, hostile_callee(_answering(make)) as callee:
        with pytest.raises(PeerUnavailableError, match=rf"fails a check \({reason}\)"):
            await ask(caller, callee.peer)
        assert caller.counters.refused == {reason: 1}


@pytest.mark.parametrize("body", [None, {"text": 1}, {"text": "a", "more": [[[{}]]]}, {"text": 2**62}])
@on_event_loop
async def test_a_signed_answer_that_is_none_to_the_question_is_the_peers_doing(body: dict[str, object] | None) -> None:
    script = _answering(lambda callee, header: [callee.answer(header, body=body)])
    async with running_endpoint() as caller, hostile_callee(script) as callee:
        with pytest.raises(MalformedAnswerError, match=r"fails a check \(body\)"):
            await ask(caller, callee.peer)
        assert caller.counters.refused == {"body": 1}


@on_event_loop
async def test_an_answer_to_another_call_is_none() -> None:
    """A captured answer does not fit a second call: its nonce is another."""
    captured: list[bytes] = []

    def make(callee: HostileCallee, header: EnvelopeHeader) -> list[bytes]:
        captured.append(callee.answer(header))
        return captured[:1]

    async with running_endpoint() as caller, hostile_callee(_answering(make)) as callee:
        await ask(caller, callee.peer)
        with pytest.raises(PeerUnavailableError, match="sequence"):
            await ask(caller, callee.peer)


@pytest.mark.slow
@on_event_loop
async def test_heartbeats_alone_go_on_to_the_deadline_only() -> None:
    async def script(_callee: HostileCallee, _request: EnvelopeHeader, context: Context) -> None:
        while True:
            await context.write(HEARTBEAT)

    async with running_endpoint() as caller, hostile_callee(script) as callee:
        with pytest.raises(PeerUnavailableError, match=r"within 0\.5 s"):
            await ask(caller, callee.peer, timeout_s=0.5)


@on_event_loop
async def test_an_answer_too_large_to_be_one_is_not_read() -> None:
    script = _answering(lambda _callee, _header: [bytes(64 << 20)])
    async with running_endpoint() as caller, hostile_callee(script) as callee:
        with refused("size"):
            await ask(caller, callee.peer)


@pytest.mark.parametrize("frames", [[], [HEARTBEAT]])
@on_event_loop
async def test_an_end_without_an_answer_is_none(frames: list[bytes]) -> None:
    async with running_endpoint() as caller, hostile_callee(_answering(lambda *_: frames)) as callee:
        with pytest.raises(PeerUnavailableError, match="expected a reply"):
            await ask(caller, callee.peer)
        async with caller.open_stream(callee.peer, "test/mirror", Question(), timeout_s=20) as stream:
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
@on_event_loop
async def test_what_a_refusal_says_is_made_harmless(reason: str, text: str, expected_reason: str | None) -> None:
    async def script(_callee: HostileCallee, _request: EnvelopeHeader, context: Context) -> None:
        await context.abort(grpc.StatusCode.ABORTED, text, (("genesis-reason", reason),))

    async with running_endpoint() as caller, hostile_callee(script) as callee:
        with pytest.raises((RefusedError, PeerUnavailableError)) as caught:
            await ask(caller, callee.peer)
        said = str(caught.value)
        assert len(said) < 700
        assert said.isprintable()
        if expected_reason is not None:
            assert isinstance(caught.value, RefusedError) and caught.value.reason == expected_reason


@pytest.mark.parametrize(
    ("reason", "changes"),
    [
        ("sequence", [{"sequence": 1}]),
        ("sequence", [{"sequence": 0}, {"sequence": 0}]),
        ("signature", [{"sequence": 0}, {"sequence": 1, "unsigned": True}]),
        ("kind", [{"sequence": 0}, {"sequence": 1, "kind": "end"}, {"sequence": 2}]),
        ("kind", [{"sequence": 0, "kind": "reply"}]),
        ("sender", [{"sequence": 0, "identity": _OTHER}]),
    ],
)
@on_event_loop
async def test_frames_of_a_stream_that_fail_a_check_end_it(reason: str, changes: list[dict[str, object]]) -> None:
    def make(callee: HostileCallee, header: EnvelopeHeader) -> list[bytes]:
        frames = []
        for change in changes:
            options = {"kind": "data", "body": None, **change}
            unsigned = options.pop("unsigned", False)
            raw = callee.answer(header, **options)  # type: ignore[arg-type]
            frames.append(_unsigned(raw) if unsigned else raw)
        return frames

    async with running_endpoint() as caller, hostile_callee(_answering(make)) as callee:
        with pytest.raises(PeerUnavailableError, match="fails a check"):
            async with caller.open_stream(callee.peer, "test/mirror", Question(), timeout_s=20) as stream:
                while await stream.receive() is not None:
                    pass
                await stream.end()
        assert caller.counters.refused == {reason: 1}


@on_event_loop
async def test_whoever_answers_at_an_address_must_go_on_answering() -> None:
    """Of a peer known by address only, the first signed frame says who it is, and binds the rest."""

    def make(callee: HostileCallee, header: EnvelopeHeader) -> list[bytes]:
        first = callee.answer(header, kind="data", body=None)
        return [first, callee.answer(header, kind="data", body=None, sequence=1, identity=_OTHER)]

    async with running_endpoint() as caller, hostile_callee(_answering(make)) as callee:
        anyone = Peer(None, callee.address)
        async with caller.open_stream(anyone, "test/mirror", Question(), timeout_s=20) as stream:
            assert await stream.receive() is not None
            with pytest.raises(PeerUnavailableError, match=r"fails a check \(sender\)"):
                await stream.receive()

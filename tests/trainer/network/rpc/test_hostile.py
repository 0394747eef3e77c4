"""What a hostile peer sends or answers is refused with its reason, counted, without crash or memory; never believed."""

from __future__ import annotations

import asyncio
import json
import random
import struct
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc import aio

from tests.support.attacks import Target
from tests.support.hostile_caller import HostileCaller, header_fields, hostile_caller
from tests.support.rpc_node import RUN_ID, Answer, Question, ask, refused, rpc_node, running_endpoint
from tests.support.waiting import until
from trainer.errors import MalformedAnswerError, PeerUnavailableError, RefusedError, RpcError
from trainer.network.discovery.exchange import EXCHANGE_METHOD, PeerExchangeRequest
from trainer.network.rpc import Endpoint, Identity, Peer, Reason, Reply, Request
from trainer.network.rpc.channels import METHOD_PATH, generic_handler
from trainer.network.rpc.envelope import HEARTBEAT, MAX_FRAME_BYTES, EnvelopeHeader, parse_header, seal

_NEVER_OF_A_FRAME = {"busy", "stopping", "payload_size", "rate", "stalled", "timeout", "internal"}


async def _check(endpoint: Endpoint, hostile: HostileCaller, cases: dict[str, tuple[list[bytes], str]]) -> None:
    """Sends every case, compares reasons and counters, and calls as an honest node afterwards."""
    found = {name: await hostile.send(*frames) for name, (frames, _) in cases.items()}
    assert found == {name: reason for name, (_, reason) in cases.items()}
    counted = [reason for _, reason in cases.values() if reason != "accepted"]
    assert endpoint.counters.refused == {reason: counted.count(reason) for reason in counted}
    async with running_endpoint() as honest:
        await ask(honest, endpoint.peer, "still here")


@pytest.mark.slow
async def test_first_frames() -> None:
    async with running_endpoint() as endpoint, hostile_caller(endpoint.peer) as hostile:
        frame = hostile.frame
        good = frame()
        victim = Identity.create()
        names = (hostile.identity.peer_id.encode(), victim.peer_id.encode())
        stolen = seal(victim, header_fields(endpoint.peer_id, nonce="f" * 32))
        cases: dict[str, tuple[list[bytes], str]] = {
            "nothing": ([], "no_request"),
            "only heartbeats": ([HEARTBEAT] * 50, "no_request"),
            "another protocol": ([b"GET / HTTP/1.1\r\n\r\n" * 10], "magic"),
            "deep lists": ([_raw(hostile.identity, b'{"body":' + b"[" * 60_000)], "head"),
            "claims 4 GiB": ([good[:8] + struct.pack("<II", 2**32 - 1, 2**32 - 1) + good[16:]], "size"),
            "accepted": ([good], "accepted"),
            "replayed": ([good], "replayed"),
            "replayed with another body": ([frame(nonce=f"{1:032x}", body={"text": "y"})], "replayed"),
            "unsigned": ([_unsigned(frame())], "signature"),
            "replayed in another's name": ([frame().replace(*names)], "signature"),
            "for anybody": ([frame(recipient="", method="test/cancelled")], "recipient"),
            "for another certificate": ([frame(certificate_sha256="0" * 64)], "certificate"),
            "from the past": ([frame(sent_at=time.time() - 121)], "clock"),
            "a reply first": ([frame(kind="reply")], "kind"),
            "a callee's frame": ([frame(origin="callee")], "kind"),
            "not the first": ([frame(sequence=1)], "kind"),
            "payload swapped": ([frame(payload=b"a" * 100)[:-1] + b"b"], "digest"),
            "signed by the victim of a replay": ([stolen], "accepted"),
            "and once more": ([stolen], "replayed"),
        }
        await _check(endpoint, hostile, cases)


@pytest.mark.slow
async def test_frames_of_a_stream() -> None:
    async with running_endpoint() as endpoint, hostile_caller(endpoint.peer) as hostile:
        nonces = (f"{number:032x}" for number in range(10**6, 10**7))

        def begun(*frames: dict[str, object]) -> list[bytes]:
            """A stream of its own; frames are the first after its opening, unless they say otherwise."""
            call = {"method": "test/mirror", "nonce": next(nonces)}
            fields: dict[str, object] = {"kind": "data", "sequence": 1, "body": None, **call}
            return [hostile.frame(kind="open", **call), *(hostile.frame(**(fields | frame)) for frame in frames)]

        good = begun({}, {"sequence": 2, "kind": "end"})
        # The mirror would have ended by the time the last one comes; this handler is still at work.
        after_the_end = [
            hostile.frame(method="test/deaf", nonce=nonce, **frame)
            for nonce in [next(nonces)]
            for frame in (
                {"kind": "open", "body": {"sleep_s": 0.5}},
                {"kind": "end", "sequence": 1},
                {"kind": "data", "sequence": 2},
            )
        ]
        foreign = Identity.create()
        cases = {
            "good": (good, "accepted"),
            "all of it again": (good, "replayed"),
            "gap": (begun({"sequence": 2}), "sequence"),
            "repeated": (begun({}, {}), "sequence"),
            "of another stream": ([begun()[0], good[1]], "sequence"),
            "after the end": (after_the_end, "kind"),
            "opened twice": ([*begun(), *begun()], "kind"),
            "turned back at its sender": (begun({"origin": "callee"}), "kind"),
            "by another": (begun({"identity": foreign}), "sender"),
            "unsigned": (_last(begun({}), _unsigned), "signature"),
            "payload swapped": (_last(begun({"payload": b"xx"}), lambda raw: raw[:-1] + b"y"), "digest"),
        }
        await _check(endpoint, hostile, cases)


@pytest.mark.slow
async def test_what_grpc_itself_refuses() -> None:
    async with running_endpoint() as endpoint, hostile_caller(endpoint.peer) as hostile:
        for size_bytes in (MAX_FRAME_BYTES + 1, 64 << 20):
            assert await hostile.send(bytes(size_bytes)) == "status resource_exhausted"
        assert await hostile.send(hostile.frame(), path="/other/Method") == "status unimplemented"
        assert await hostile.send(hostile.frame()) == "accepted"


@pytest.mark.slow
async def test_a_caller_that_opens_and_says_nothing_is_cut_off() -> None:
    async with running_endpoint(request_timeout_s=0.3) as endpoint, hostile_caller(endpoint.peer) as hostile:
        call = hostile.channel.stream_stream(METHOD_PATH)(timeout=20)
        with pytest.raises(grpc.aio.AioRpcError, match=r"within 0\.3 s"):
            while True:
                await call.read()
        assert endpoint.counters.refused == {"no_request": 1}


async def test_calls_without_a_sender_are_bounded_by_their_address() -> None:
    async with running_endpoint(max_waiting_per_host=5) as endpoint, hostile_caller(endpoint.peer) as hostile:
        calls = [hostile.channel.stream_stream(METHOD_PATH)(timeout=20) for _ in range(40)]
        reading = [asyncio.create_task(call.read()) for call in calls]
        await until(lambda: endpoint.counters.refused["busy"] >= 35)
        for call in calls:
            call.cancel()
        await asyncio.gather(*reading, return_exceptions=True)
        async with asyncio.timeout(10):
            while await hostile.send(hostile.frame()) != "accepted":
                await asyncio.sleep(0.02)


async def test_connections_are_bounded() -> None:
    async with running_endpoint(max_connections=3) as endpoint:
        host, _, port = endpoint.address.rpartition(":")
        connections = [await asyncio.open_connection(host, int(port)) for _ in range(6)]
        # HTTP/2 servers speak first; a connection that is not taken is closed without a word.
        greetings = await asyncio.gather(*(reader.read(8) for reader, _ in connections))
        assert sum(bool(greeting) for greeting in greetings) == 3
        for _, writer in connections:
            writer.transport.abort()
        async with running_endpoint() as honest:
            await _gets_in(honest, endpoint)


def _mutated(source: random.Random, valid: bytes) -> bytes:
    """A valid frame with bits flipped, cut off, cut out, grown, or not valid from the start."""
    raw = bytearray(valid)
    start = source.randrange(len(raw))
    match source.randrange(6):
        case 0:
            for _ in range(source.randint(1, 8)):
                raw[source.randrange(len(raw))] ^= 1 << source.randrange(8)
        case 1:
            del raw[start:]
        case 2:
            del raw[start : start + source.randint(1, 64)]
        case 3:
            raw[start:start] = source.randbytes(source.randint(1, 64))
        case 4:
            raw[16 + source.randrange(64)] ^= 1 << source.randrange(8)
        case _:
            raw[:] = source.randbytes(source.randint(0, 2000))
    return bytes(raw)


async def _flood(hostile: HostileCaller, source: random.Random, num_frames: int) -> Counter[str]:
    """Sends mutated frames, 32 exchanges at once; how often each reason came back."""
    reasons: Counter[str] = Counter()
    for _ in range(num_frames // 32):
        size_bytes = source.choice((0, 10, 1000, 200_000))
        frames = [_mutated(source, hostile.frame(payload=bytes(size_bytes))) for _ in range(32)]
        reasons.update(await asyncio.gather(*map(hostile.send, frames)))
    return reasons


@pytest.mark.parametrize(
    "num_frames", [pytest.param(3000, marks=pytest.mark.slow), pytest.param(30_000, marks=pytest.mark.long)]
)
async def test_memory_stays_where_it_was_under_hostile_frames(num_frames: int) -> None:
    with rpc_node() as node:
        async with running_endpoint() as honest, hostile_caller(node.peer) as hostile:
            source = random.Random(4)
            await _flood(hostile, source, 1000)
            before = node.resident_bytes()
            reasons = await _flood(hostile, source, num_frames)
            assert set(reasons) <= set(Reason) - _NEVER_OF_A_FRAME
            assert len(reasons) >= 5
            growth = node.resident_bytes() - before
            assert growth < 32 << 20, f"{growth >> 20} MiB after {num_frames} frames"
            reply = await honest.call(node.peer, "test/refused", Question(), Answer, timeout_s=20)
            counted = json.loads(reply.body.text)
            assert sum(counted.values()) >= reasons.total()
            assert set(reasons) <= set(counted)


@pytest.mark.slow
async def test_a_message_that_would_decompress_to_much_more_is_not_decompressed() -> None:
    with rpc_node() as node:
        async with running_endpoint() as honest, hostile_caller(node.peer) as hostile:
            await ask(honest, node.peer)
            before = node.resident_bytes()
            peak = before
            sending = asyncio.create_task(hostile.send(bytes(256 << 20), compression=grpc.Compression.Gzip))
            while not sending.done():
                await asyncio.sleep(0.01)
                peak = max(peak, node.resident_bytes())
            assert await sending != "accepted"
            assert peak - before < 64 << 20
            await ask(honest, node.peer)


_TLS_OPTIONS = {"tls": True, "heartbeat_s": 1.0, "stall_timeout_s": 6.0, "max_connections": 256}
_ATTACK_S = 10.0
_IN_WITHIN_S = 10.0


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", ["no_window", "idle_connections"])
async def test_newcomers_and_proven_peers_get_in_under_attack(name: str, tmp_path: Path) -> None:
    """Few connections of an attack, beside newcomers of the same address; a swarm's is in tests/trainer/attacks."""

    async def answer(_request: Request[PeerExchangeRequest]) -> Reply[Answer]:
        return Reply(Answer())

    async with running_endpoint(**_TLS_OPTIONS) as victim, running_endpoint(**_TLS_OPTIONS) as proven:
        victim.register(EXCHANGE_METHOD, PeerExchangeRequest, answer, any_recipient=True)
        await ask(victim, proven.peer)
        (tmp_path / "run.yaml").write_text(f"run_id: {RUN_ID}\n", encoding="utf-8")
        target = Target(
            run_file=str(tmp_path / "run.yaml"),
            addresses={"driver-1": victim.address},
            peer_ids={"driver-1": victim.peer_id},
            apis={},
            seconds=_ATTACK_S,
            source_host="127.0.0.1",
            niceness=0,  # Beside other tests a nice attack would hardly begin.
        )
        target.save(tmp_path / "target.json")
        command = ["-m", "tests.support.attacks", name, str(tmp_path / "target.json")]
        attack = await asyncio.create_subprocess_exec(sys.executable, *command, stdout=asyncio.subprocess.PIPE)
        ended = asyncio.create_task(attack.communicate())
        loop = asyncio.get_running_loop()
        waits_s, refused = [], 0
        while not ended.done():
            begun_s = loop.time()
            async with running_endpoint(**_TLS_OPTIONS) as newcomer:
                await _gets_in(newcomer, victim)
            waits_s.append(loop.time() - begun_s)
            for _ in range(5):
                refused += not await _is_answered(proven, victim)
            await asyncio.sleep(0.1)
        said, _ = await ended
        assert attack.returncode == 0
        assert max(waits_s) <= _IN_WITHIN_S, (waits_s, said)
        assert not refused, (refused, waits_s, said)


async def _is_answered(caller: Endpoint, victim: Endpoint) -> bool:
    try:
        await ask(caller, victim.peer)
    except RpcError:
        return False
    return True


async def _gets_in(newcomer: Endpoint, victim: Endpoint) -> None:
    async with asyncio.timeout(30.0):
        while not await _is_answered(newcomer, victim):
            await asyncio.sleep(0.1)


def _raw(identity: Identity, head: bytes) -> bytes:
    """A signed frame with any head at all."""
    prefix = HEARTBEAT[:8] + struct.pack("<II", len(head), 0)
    return prefix + identity.sign(prefix + head) + head


def _unsigned(raw: bytes) -> bytes:
    return raw[:16] + bytes(64) + raw[80:]


def _last(frames: list[bytes], change: object) -> list[bytes]:
    return [*frames[:-1], change(frames[-1])]  # type: ignore[operator]


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


_DATA = {"kind": "data", "body": None}


@pytest.mark.parametrize(
    ("is_stream", "reason", "frames"),
    [
        (False, "signature", [{"damage": _unsigned}]),
        (False, "sender", [{"identity": _OTHER}]),
        (False, "recipient", [{"recipient": _OTHER.peer_id}]),
        (False, "run", [{"run_id": "other"}]),
        (False, "method", [{"method": "test/other"}]),
        (False, "certificate", [{"certificate_sha256": "0" * 64}]),
        (False, "sequence", [{"nonce": "0" * 32}]),
        (False, "sequence", [{"sequence": 1}]),
        (False, "kind", [{"origin": "caller"}]),
        (False, "kind", [{"kind": "data"}]),
        (False, "kind", [{"kind": "end"}]),
        (False, "kind", [{}, {"sequence": 1}]),
        (False, "digest", [{"payload": b"aa", "damage": lambda raw: raw[:-1] + b"b"}]),
        (False, "size", [{"damage": lambda raw: raw[:-1]}]),
        (False, "magic", [b"noise" * 100]),
        (False, "head", [{"extra": 1}]),
        (True, "sequence", [{**_DATA, "sequence": 1}]),
        (True, "sequence", [_DATA, _DATA]),
        (True, "kind", [_DATA, {**_DATA, "sequence": 1, "kind": "end"}, {**_DATA, "sequence": 2}]),
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

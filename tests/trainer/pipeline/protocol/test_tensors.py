"""Tensors beside messages, over real connections."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.support.event_loop import on_event_loop
from tests.support.rpc_node import running_endpoint
from trainer.errors import MalformedAnswerError, PeerUnavailableError, RefusedError
from trainer.network.rpc import Endpoint, PeerId, Reply, Request, Stream
from trainer.network.transfer.descriptor import TensorSpec
from trainer.pipeline.protocol.tensors import Admit, Parcel, TensorAnswer, TensorService, ask_tensors, size_bytes_of

MIB = 1 << 20
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.int32, torch.int64, torch.bool)


class Ask(Parcel):
    factor: int = 1


class Told(Parcel):
    num_values: int


@dataclass
class Mirror:
    """Gives back what it gets, as often as it is asked to; remembers how often it was asked."""

    asked: int = 0

    async def __call__(self, sender: PeerId, ask: Ask, tensors: dict[str, Tensor]) -> TensorAnswer[Told]:
        self.asked += 1
        answer = {name: torch.cat([it] * ask.factor) if ask.factor > 1 else it for name, it in tensors.items()}
        return TensorAnswer(Told(num_values=sum(tensor.numel() for tensor in answer.values())), answer)


@asynccontextmanager
async def pair(
    mirror: Mirror, max_bytes: int = 64 * MIB, admit: Admit[Ask] | None = None
) -> AsyncIterator[tuple[Endpoint, Endpoint]]:
    async with running_endpoint() as caller, running_endpoint() as callee:
        TensorService(callee).register("test/tensors", Ask, mirror, max_bytes=max_bytes, timeout_s=20.0, admit=admit)
        yield caller, callee


async def mirrored(
    caller: Endpoint, callee: Endpoint, tensors: dict[str, Tensor], answer_bytes: int, factor: int = 1
) -> TensorAnswer[Told]:
    options, ask = {"answer_bytes": answer_bytes, "timeout_s": 20.0}, Ask(factor=factor)
    return await ask_tensors(caller, callee.peer, "test/tensors", ask, tensors, Told, **options)


def random_tensor(draw: st.DrawFn, dtype: torch.dtype) -> Tensor:
    shape = draw(st.lists(st.integers(0, 7), max_size=4))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    return (torch.randn(shape, generator=generator) * 50).to(dtype)


@st.composite
def some_tensors(draw: st.DrawFn) -> dict[str, Tensor]:
    names = draw(st.lists(st.text("abc.", min_size=1, max_size=4), max_size=8, unique=True))
    return {name: random_tensor(draw, draw(st.sampled_from(DTYPES))) for name in names}


def equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return found.keys() == expected.keys() and all(
        found[name].dtype == tensor.dtype and torch.equal(found[name], tensor) for name, tensor in expected.items()
    )


@settings(max_examples=12, deadline=None)
@given(some_tensors())
def test_whatever_is_sent_comes_back(tensors: dict[str, Tensor]) -> None:
    @on_event_loop
    async def exchanged() -> None:
        async with pair(Mirror()) as (caller, callee):
            for answer_bytes in (size_bytes_of(tensors), 2 * MIB):  # As a call, and as a stream.
                answer = await mirrored(caller, callee, tensors, answer_bytes)
                assert equal(dict(answer.tensors), tensors)
        assert size_bytes_of(tensors) == sum(tensor.nbytes for tensor in tensors.values())

    exchanged()


async def test_more_than_is_allowed_is_refused_before_it_is_read_and_a_larger_answer_than_expected_is_none() -> None:
    mirror = Mirror()
    async with pair(mirror, max_bytes=MIB) as (caller, callee):
        for num_values in (300_000, 3_000_000):
            with pytest.raises(RefusedError, match="at most 1048576 bytes") as refused:
                await mirrored(caller, callee, {"h": torch.zeros(num_values)}, 4 * num_values)
            assert refused.value.reason == "size"
        assert mirror.asked == 0
        for num_values, limit in ((8, 32), (MIB // 4, 2 * MIB)):
            with pytest.raises(MalformedAnswerError, match=f"at most {limit} bytes"):
                await mirrored(caller, callee, {"h": torch.zeros(num_values)}, limit, factor=16)


@pytest.mark.slow
async def test_calls_and_streams_are_let_in_by_what_their_message_names_and_held_until_they_are_answered() -> None:
    mirror, held = Mirror(), list[tuple[str, int, int]]()

    @contextmanager
    def admit(sender: PeerId, ask: Ask) -> Iterator[None]:
        asked, size_bytes = mirror.asked, sum(spec.size_bytes for spec in ask.tensors)
        if size_bytes == 12:
            raise RefusedError("busy", "no room for twelve bytes")
        yield
        held.append((sender, size_bytes, mirror.asked - asked))

    async with pair(mirror, admit=admit) as (caller, callee):
        for num_values in (4, 700_001):  # The stream's frames end within values.
            values, ids = torch.arange(num_values, dtype=torch.float32).view(-1, 1), torch.arange(4, dtype=torch.int8)
            answer = await mirrored(caller, callee, {"h": values, "ids": ids}, 8 * MIB, factor=2)
            assert equal(dict(answer.tensors), {"h": torch.cat([values, values]), "ids": torch.cat([ids, ids])})
            assert answer.body.num_values == 2 * (num_values + 4)
        assert held == [(caller.peer_id, 20, 1), (caller.peer_id, 4 * 700_001 + 4, 1)]
        for answer_bytes in (12, 2 * MIB):
            with pytest.raises(RefusedError, match="no room for twelve bytes"):
                await mirrored(caller, callee, {"h": torch.zeros(3)}, answer_bytes)
        assert mirror.asked == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("specs", "payload", "said"),
    [
        ((("b", (2,)), ("a", (2,))), 16, "by name, each once"),
        ((("a", (4,)),), 8, "expected 16 bytes of tensors, found 8"),
        ((), 8, "expected 0 bytes of tensors, found 8"),
    ],
)
async def test_what_is_announced_is_what_must_come(specs, payload, said):
    mirror = Mirror()
    ask = Ask(tensors=tuple(TensorSpec(name=name, dtype="float32", shape=shape) for name, shape in specs))
    async with pair(mirror) as (caller, callee):
        with pytest.raises(RefusedError, match=said) as error:
            await caller.call(callee.peer, "test/tensors", ask, Told, payload=bytes(payload), timeout_s=10.0)
        assert error.value.reason == "malformed"
        assert mirror.asked == 0


@pytest.mark.parametrize("frames", [(), (MIB,), (MIB, MIB), (100, MIB), (MIB, 99), (MIB, 100, 1)])
async def test_a_stream_has_the_announced_bytes_in_frames_of_a_mebibyte(frames: tuple[int, ...]) -> None:
    mirror = Mirror()
    ask = Ask(tensors=(TensorSpec(name="a", dtype="uint8", shape=(MIB + 100,)),))
    async with pair(mirror) as (caller, callee):
        with pytest.raises((RefusedError, PeerUnavailableError)) as error:
            async with caller.open_stream(callee.peer, "test/tensors/stream", ask, timeout_s=10.0) as stream:
                for index, size in enumerate(frames, start=1):
                    await stream.send(index, bytes(size))
                await stream.end()
                assert await stream.receive() is None
        assert mirror.asked == 0
        assert not isinstance(error.value, RefusedError) or error.value.reason == "malformed"


@pytest.mark.slow
@pytest.mark.parametrize(
    "first",
    [
        b"{}",
        b'{"num_values": 1, "tensors": [{"name": "a", "dtype": "object", "shape": [1]}]}',
        b'{"num_values": 1, "tensors": [{"name": "a", "dtype": "float32", "shape": [281474976710655]}]}',
        b'{"num_values": 1, "tensors": [{"name": "a", "dtype": "float32", "shape": [2]}]}',
    ],
)
async def test_a_malformed_answer_is_called_so(first: bytes) -> None:
    async def lie(request: Request[Ask], stream: Stream) -> None:
        while await stream.receive() is not None:
            pass
        await stream.send(0, first)
        await stream.send(1, b"1234")

    async def unused(request: Request[Ask]) -> Reply[Told]:
        raise AssertionError("the answer would fit into one message, but was not asked for so")

    async with running_endpoint() as caller, running_endpoint() as callee:
        callee.register("test/tensors", Ask, unused)
        callee.register_stream("test/tensors/stream", Ask, lie)
        with pytest.raises(MalformedAnswerError):
            await mirrored(caller, callee, {"a": torch.zeros(1)}, 2 * MIB)

"""Tensors beside a message, in request and answer: one call where both fit into 1 MiB, else a stream of 1 MiB frames.

    TensorService(endpoint).register("stage/forward", ForwardAsk, answer, max_bytes=64 << 20)
    reply = await ask_tensors(endpoint, peer, "stage/forward", ask, {"input": x}, StageAnswer, answer_bytes=..., ...)

What a message says of its tensors bounds what is read of them, and is bounded itself before a byte is stored. The
handler checks whether these are the right ones. A stream's tensors are gathered before the handler begins.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Generic, TypeVar

import numpy as np
from pydantic import Field, ValidationError
from torch import Tensor

from trainer.errors import MalformedAnswerError, PeerUnavailableError, RefusedError, RpcError
from trainer.network.rpc import Endpoint, Peer, PeerId, Reply, Request, Stream
from trainer.network.rpc.config import MAX_PAYLOAD_BYTES
from trainer.network.rpc.envelope import peer_boundary
from trainer.network.rpc.messages import Message, Payload
from trainer.network.transfer.descriptor import TensorSpec, chunks_of, payload_of, specs_of, tensors_in

MAX_TENSORS = 8

_STREAM = "/stream"
_Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]


class Parcel(Message):
    """A message with tensors beside it."""

    tensors: Annotated[tuple[TensorSpec, ...], Field(max_length=MAX_TENSORS)] = ()  # Filled in by the sender.


AskT = TypeVar("AskT", bound=Parcel)
AnswerT = TypeVar("AnswerT", bound=Parcel)


@dataclass(frozen=True, slots=True)
class TensorAnswer(Generic[AnswerT]):
    """An answer with its tensors."""

    body: AnswerT
    tensors: Mapping[str, Tensor]  # CPU tensors by name.


TensorHandler = Callable[[PeerId, AskT, dict[str, Tensor]], Awaitable[TensorAnswer[AnswerT]]]
"""Takes the caller, its message and its tensors."""

Admit = Callable[[PeerId, AskT], AbstractContextManager[None]]
"""Takes the caller and its message: reserves memory for the tensors it names, or refuses."""


class _LateError(PeerUnavailableError):
    """Not all tensors arrived in time, over a connection that stands."""


def size_bytes_of(tensors: Mapping[str, Tensor]) -> int:
    """Returns the bytes of their values."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


class TensorService:
    """Registers methods that take and give tensors at an endpoint that is not started yet."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint

    def register(
        self,
        method: str,
        ask: type[AskT],
        handler: TensorHandler[AskT, AnswerT],
        *,
        max_bytes: int,
        timeout_s: float = 600.0,
        within_s: Callable[[AskT], float] | None = None,
        admit: Admit[AskT] | None = None,
    ) -> None:
        """Registers a method, as a call and as a stream.

        ``handler`` is called when all tensors have arrived, and cancelled when the caller gives up. Of tensors of a
        request more than ``max_bytes`` are refused before any of it is read; they are received for ``timeout_s`` at
        most, or what ``within_s`` says of the message if that is less. ``admit`` is entered before a stream's tensors
        are read, or with those of a call, and left when it is answered.
        """

        def admitted(request: Request[AskT]) -> AbstractContextManager[None]:
            return nullcontext() if admit is None else admit(request.sender, request.body)

        async def answer_call(request: Request[AskT]) -> Reply[Any]:
            specs = _checked(request.body, max_bytes)
            with admitted(request):
                answer = await handler(request.sender, request.body, _unpacked(specs, request.payload))
                payload = payload_of(answer.tensors)
            if len(payload) > MAX_PAYLOAD_BYTES:
                raise RefusedError("answer-size", f"the answer has {len(payload)} bytes of tensors; ask by stream")
            return Reply(_with_specs(answer.body, answer.tensors), payload)

        async def answer_stream(request: Request[AskT], stream: Stream) -> None:
            specs = _checked(request.body, max_bytes)
            left_s = timeout_s if within_s is None else min(timeout_s, within_s(request.body))
            with admitted(request):
                try:
                    data = await _receive(stream, specs, left_s, "the caller")
                except _LateError as error:
                    raise RefusedError("expired", f"{error}; nothing was done") from error
                answer = await handler(request.sender, request.body, tensors_in(data, specs))
                await stream.send(0, _with_specs(answer.body, answer.tensors).model_dump_json().encode())
                await _send(stream, answer.tensors)

        self._endpoint.register(method, ask, answer_call)
        self._endpoint.register_stream(method + _STREAM, ask, answer_stream)


async def ask_tensors(
    endpoint: Endpoint,
    peer: Peer,
    method: str,
    ask: AskT,
    tensors: Mapping[str, Tensor],
    answer: type[AnswerT],
    *,
    answer_bytes: int,
    timeout_s: float,
) -> TensorAnswer[AnswerT]:
    """Sends a request to ``peer``, once: nothing is retried; raises RpcError.

    ``tensors`` are at most 8, on the CPU; all of the answer, ``answer_bytes`` of tensors at most, must have arrived
    within ``timeout_s``.
    """
    labelled = _with_specs(ask, tensors)
    if max(answer_bytes, size_bytes_of(tensors)) <= MAX_PAYLOAD_BYTES:
        payload = payload_of(tensors)
        reply = await endpoint.call(peer, method, labelled, answer, payload=payload, timeout_s=timeout_s)
        with peer_boundary(peer.address):
            try:
                return TensorAnswer(reply.body, _unpacked(_checked(reply.body, answer_bytes), reply.payload))
            except RefusedError as error:
                raise MalformedAnswerError(f"{peer.address}: {error}") from error
    deadline_s = time.monotonic() + timeout_s
    async with endpoint.open_stream(peer, method + _STREAM, labelled, timeout_s=timeout_s) as stream:
        await _send(stream, tensors)
        await stream.end()
        frame = await _receive_frame(stream, deadline_s, peer.address)
        if frame is None:
            raise MalformedAnswerError(f"{peer.address} ended the stream without an answer")
        with peer_boundary(peer.address):
            try:
                body = answer.model_validate_json(bytes(frame))
                specs = _checked(body, answer_bytes)
            except (ValidationError, RefusedError) as error:
                raise MalformedAnswerError(f"{peer.address} sent a malformed answer: {str(error)[:200]}") from error
        data = await _receive(stream, specs, deadline_s - time.monotonic(), peer.address, MalformedAnswerError)
    with peer_boundary(peer.address):
        return TensorAnswer(body, tensors_in(data, specs))


def _with_specs(body: AskT, tensors: Mapping[str, Tensor]) -> AskT:
    return body.model_copy(update={"tensors": specs_of(tensors)})


def _checked(body: Parcel, max_bytes: int) -> tuple[TensorSpec, ...]:
    """Returns the announced tensors; raises RefusedError if they are too much, or not in order."""
    size_bytes = sum(spec.size_bytes for spec in body.tensors)
    if size_bytes > max_bytes:
        raise RefusedError("size", f"expected at most {max_bytes} bytes of tensors, found {size_bytes}")
    names = [spec.name for spec in body.tensors]
    if names != sorted(set(names)):
        raise RefusedError("malformed", "expected tensors by name, each once")
    return body.tensors


def _unpacked(specs: tuple[TensorSpec, ...], payload: Payload) -> dict[str, Tensor]:
    size_bytes = sum(spec.size_bytes for spec in specs)
    if len(payload) != size_bytes:
        raise RefusedError("malformed", f"expected {size_bytes} bytes of tensors, found {len(payload)}")
    return tensors_in(np.frombuffer(payload, np.uint8).copy(), specs)


async def _send(stream: Stream, tensors: Mapping[str, Tensor]) -> None:
    for index, chunk in enumerate(chunks_of(tensors), start=1):
        await stream.send(index, chunk)


async def _receive(
    stream: Stream,
    specs: tuple[TensorSpec, ...],
    timeout_s: float,
    who: str,
    malformed: Callable[[str], RpcError] = partial(RefusedError, "malformed"),
) -> _Bytes:
    """Receives all announced bytes; raises what ``malformed`` makes if they are more or fewer.

    Memory is taken as they arrive, so an announcement alone costs nothing.
    """
    expected = sum(spec.size_bytes for spec in specs)
    data: _Bytes = np.empty(expected, np.uint8)  # Pages are given by the kernel when they are written to.
    deadline_s, position = time.monotonic() + timeout_s, 0
    while position < expected:
        frame = await _receive_frame(stream, deadline_s, who)
        if frame is None or len(frame) != min(MAX_PAYLOAD_BYTES, expected - position):
            found = "the end" if frame is None else f"{len(frame)} bytes"
            raise malformed(f"{who}: expected {expected} bytes in frames of 1 MiB, found {found} at {position}")
        data[position : position + len(frame)] = np.frombuffer(frame, np.uint8)
        position += len(frame)
    if await _receive_frame(stream, deadline_s, who) is not None:
        raise malformed(f"{who}: expected {expected} bytes, found more")
    return data


async def _receive_frame(stream: Stream, deadline_s: float, who: str) -> memoryview | None:
    left_s = deadline_s - time.monotonic()
    try:
        if math.isnan(left_s) or left_s <= 0:
            raise TimeoutError
        async with asyncio.timeout(left_s):
            frame = await stream.receive()
    except TimeoutError:
        raise _LateError(f"{who} did not send all tensors in time") from None
    return None if frame is None else frame.payload

"""`ScopedEndpoint`: an endpoint whose methods have names of their own, so that one node offers a service several times.

A node that takes part in the rounds of several stages has a round service and a state donor for each. All of them share
its one key, port and limits; only the names differ: ``head/round/join`` beside ``tail/round/join``. So no service need
know of the others, and a message for one cannot be read as one for another: the method is signed with each frame.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol, TypeVar

from pydantic import BaseModel
from typing_extensions import Buffer

from trainer.network.rpc.config import MAX_PAYLOAD_BYTES
from trainer.network.rpc.credential import Role
from trainer.network.rpc.endpoint import Endpoint
from trainer.network.rpc.messages import Counters, Peer, PeerId, Reply, Request
from trainer.network.rpc.stream import Stream

BodyT = TypeVar("BodyT", bound=BaseModel)
ReplyT = TypeVar("ReplyT", bound=BaseModel)


class CallEndpoint(Protocol):
    """What a service needs of an endpoint: to answer, to call, and to say where it is; see `Endpoint`."""

    @property
    def counters(self) -> Counters:
        """Bytes to and from others."""

    @property
    def peer_id(self) -> PeerId:
        """This node."""

    @property
    def peer(self) -> Peer:
        """How to call this node."""

    @property
    def address(self) -> str:
        """Where others call it."""

    @property
    def certificate(self) -> bytes | None:
        """PEM; None without TLS."""

    def register(
        self,
        method: str,
        body_model: type[BodyT],
        handler: Callable[[Request[BodyT]], Awaitable[Reply[Any]]],
        *,
        max_payload_bytes: int = MAX_PAYLOAD_BYTES,
        any_recipient: bool = False,
        needs_credential: bool = True,
        roles: Collection[Role] | None = None,
    ) -> None:
        """See `Endpoint.register`."""

    def register_stream(
        self,
        method: str,
        body_model: type[BodyT],
        handler: Callable[[Request[BodyT], Stream], Awaitable[None]],
        *,
        max_payload_bytes: int = MAX_PAYLOAD_BYTES,
        any_recipient: bool = False,
        roles: Collection[Role] | None = None,
    ) -> None:
        """See `Endpoint.register_stream`."""

    async def call(
        self,
        peer: Peer,
        method: str,
        body: BaseModel,
        reply_model: type[ReplyT],
        *,
        payload: Buffer = b"",
        timeout_s: float,
        stall_timeout_s: float | None = None,
    ) -> Reply[ReplyT]:
        """See `Endpoint.call`."""
        ...

    def open_stream(
        self, peer: Peer, method: str, body: BaseModel, *, timeout_s: float, stall_timeout_s: float | None = None
    ) -> AbstractAsyncContextManager[Stream]:
        """See `Endpoint.open_stream`."""
        ...


class ScopedEndpoint:
    """A `CallEndpoint` over another, whose methods are those of ``scope``; it is started and stopped with the other."""

    def __init__(self, endpoint: Endpoint, scope: str) -> None:
        self._endpoint = endpoint
        self._scope = scope
        self._counters = endpoint.counters.of_scope(scope)

    @property
    def counters(self) -> Counters:
        """See `CallEndpoint`; bytes of this scope's calls alone, of which several may be under way."""
        return self._counters

    @property
    def peer_id(self) -> PeerId:
        """See `CallEndpoint`."""
        return self._endpoint.peer_id

    @property
    def peer(self) -> Peer:
        """See `CallEndpoint`."""
        return self._endpoint.peer

    @property
    def address(self) -> str:
        """See `CallEndpoint`."""
        return self._endpoint.address

    @property
    def certificate(self) -> bytes | None:
        """See `CallEndpoint`."""
        return self._endpoint.certificate

    def register(
        self,
        method: str,
        body_model: type[BodyT],
        handler: Callable[[Request[BodyT]], Awaitable[Reply[Any]]],
        *,
        max_payload_bytes: int = MAX_PAYLOAD_BYTES,
        any_recipient: bool = False,
        needs_credential: bool = True,
        roles: Collection[Role] | None = None,
    ) -> None:
        """See `CallEndpoint`."""
        self._endpoint.register(
            self._scoped(method),
            body_model,
            handler,
            max_payload_bytes=max_payload_bytes,
            any_recipient=any_recipient,
            needs_credential=needs_credential,
            roles=roles,
        )

    def register_stream(
        self,
        method: str,
        body_model: type[BodyT],
        handler: Callable[[Request[BodyT], Stream], Awaitable[None]],
        *,
        max_payload_bytes: int = MAX_PAYLOAD_BYTES,
        any_recipient: bool = False,
        roles: Collection[Role] | None = None,
    ) -> None:
        """See `CallEndpoint`."""
        self._endpoint.register_stream(
            self._scoped(method),
            body_model,
            handler,
            max_payload_bytes=max_payload_bytes,
            any_recipient=any_recipient,
            roles=roles,
        )

    async def call(
        self,
        peer: Peer,
        method: str,
        body: BaseModel,
        reply_model: type[ReplyT],
        *,
        payload: Buffer = b"",
        timeout_s: float,
        stall_timeout_s: float | None = None,
    ) -> Reply[ReplyT]:
        """See `CallEndpoint`."""
        return await self._endpoint.call(
            peer,
            self._scoped(method),
            body,
            reply_model,
            payload=payload,
            timeout_s=timeout_s,
            stall_timeout_s=stall_timeout_s,
        )

    def open_stream(
        self, peer: Peer, method: str, body: BaseModel, *, timeout_s: float, stall_timeout_s: float | None = None
    ) -> AbstractAsyncContextManager[Stream]:
        """See `CallEndpoint`."""
        return self._endpoint.open_stream(
            peer, self._scoped(method), body, timeout_s=timeout_s, stall_timeout_s=stall_timeout_s
        )

    def _scoped(self, method: str) -> str:
        return f"{self._scope}/{method}"


def scoped_endpoint(endpoint: Endpoint, scope: str) -> CallEndpoint:
    """Returns the endpoint as a service of this scope sees it; an empty scope has the methods' own names."""
    return ScopedEndpoint(endpoint, scope) if scope else endpoint

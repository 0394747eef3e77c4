"""Asks the authorities of a run over HTTP, one after the other until one answers; answers are bounded and typed."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import Callable, Sequence
from functools import cache
from typing import Final, TypeVar

import httpx
from pydantic import BaseModel, ValidationError

from trainer.errors import PeerUnavailableError, RefusedError, RpcError
from trainer.network.rpc.credential import MAX_LIST_BYTES, RevokedPeers
from trainer.network.rpc.messages import Reason
from trainer.run.authority.messages import Refusal

TEMPORARY: Final = frozenset({Reason.BUSY, Reason.RATE, Reason.INTERNAL, "unreachable"})
"""Refusals that may pass by themselves: ``unreachable`` too, since a port may be opened meanwhile."""
_MAX_REPLY_BYTES: Final = MAX_LIST_BYTES + (64 << 10)

ReplyT = TypeVar("ReplyT", bound=BaseModel)


class AuthorityClient:
    """The authorities at ``urls``; ``hear`` gets the lists of revoked peers that come with refusals."""

    def __init__(self, urls: Sequence[str], hear: Callable[[RevokedPeers], None]) -> None:
        self._urls = tuple(urls)
        self._hear = hear

    async def ask_any(self, path: str, request: Callable[[], bytes], reply: type[ReplyT], timeout_s: float) -> ReplyT:
        """Posts to the authorities in turn until one answers; a refusal that may pass has the next one asked too."""
        failure: RpcError = PeerUnavailableError("expected the address of an authority (--authority URL), found none")
        for url in self._urls:
            try:
                return await self.ask(url, "POST", path, request(), reply, timeout_s)
            except PeerUnavailableError as error:
                failure = error
            except RefusedError as error:
                if error.reason not in TEMPORARY:
                    raise
                failure = error
        raise failure

    async def ask(self, url: str, method: str, path: str, body: bytes, reply: type[ReplyT], timeout_s: float) -> ReplyT:
        """Asks one authority; raises RefusedError, or PeerUnavailableError where it does not answer as one does."""
        who = f"the authority at {url}"
        try:
            async with (
                httpx.AsyncClient(timeout=timeout_s, follow_redirects=False, verify=_tls()) as client,
                asyncio.timeout(timeout_s),
            ):
                headers = {"content-type": "application/json"}
                async with client.stream(method, url.rstrip("/") + path, content=body, headers=headers) as response:
                    answer = bytearray()
                    async for chunk in response.aiter_bytes():
                        answer += chunk
                        if len(answer) > _MAX_REPLY_BYTES:
                            raise PeerUnavailableError(f"{who} answered with more than {_MAX_REPLY_BYTES} bytes")
        except (httpx.HTTPError, OSError) as error:
            reason = str(error) or type(error).__name__
            raise PeerUnavailableError(f"{who} does not answer ({reason})") from None
        try:
            if response.status_code == httpx.codes.OK:
                return reply.model_validate_json(bytes(answer))
            refusal = Refusal.model_validate_json(bytes(answer))
        except ValidationError:
            raise PeerUnavailableError(f"{who} answered as none does (HTTP {response.status_code})") from None
        if refusal.revoked is not None:
            with contextlib.suppress(RefusedError):  # A forged one is no reason to stop.
                self._hear(refusal.revoked)
        raise RefusedError(refusal.reason, refusal.text)


@cache
def _tls() -> ssl.SSLContext:
    """Reading the certificates of all authorities of the web takes 20 ms."""
    return httpx.create_ssl_context()

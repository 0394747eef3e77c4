"""The authority over HTTP: four addresses, JSON in and out, and the process that serves them until it is stopped.

Each refusal is one JSON object, `Refusal`, with a status of its own. Connections are bounded as in `genesis serve`. A
request counts against its address before its body is read, and the body has to come within seconds: whoever sends heads
without bodies holds few places, each for a moment. Behind a proxy that ends TLS, the requester's address is the last
one of X-Forwarded-For, which is believed from the proxy named alone: limits count by it.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Final

import uvicorn
from fastapi import FastAPI, Request
from pydantic import BaseModel
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response

from genesis.serve import ServeLimits
from genesis.serve.connections import Uncounted, bounded_connections, expire_connections
from trainer.errors import RefusedError, TrainerError
from trainer.network.rpc.credential import RevokedPeers
from trainer.network.rpc.messages import Reason
from trainer.run.authority.messages import (
    ADDRESSES_PATH,
    CHECK_PATH,
    INFO_PATH,
    JOIN_PATH,
    MAX_REQUEST_BYTES,
    RELAY_PATH,
    Refusal,
)
from trainer.run.authority.service import AuthorityService

logger = logging.getLogger(__name__)

_LIMITS = ServeLimits(max_connections=256, idle_timeout_s=10.0, stall_timeout_s=15.0, grace_s=2.0)
_STATUS: Final[dict[str, int]] = {
    "malformed": 400,
    "address": 400,
    "stage": 400,
    Reason.CLOCK: 400,
    Reason.SIGNATURE: 401,
    Reason.RUN: 409,
    Reason.REPLAYED: 409,
    "unreachable": 424,
    Reason.RATE: 429,
    Reason.BUSY: 503,
    Reason.INTERNAL: 503,
}
"""Of refusals by reason; all others are 403."""
_BODY_TIMEOUT_S = 5.0
_TICK_S = 0.2


def create_app(service: AuthorityService) -> FastAPI:
    """Returns the ASGI application of an authority."""
    app = FastAPI(title="Genesis run authority", version="1", docs_url=None, redoc_url=None, openapi_url=None)

    @app.exception_handler(RefusedError)
    async def refused(_request: Request, error: RefusedError) -> Response:
        newest = await service.revoked() if error.reason == Reason.REVOKED else None
        return _refusal(error.reason, str(error), newest)

    @app.exception_handler(TrainerError)
    async def failed(_request: Request, error: TrainerError) -> Response:
        logger.error("%s", error)
        return _refusal(Reason.INTERNAL, "the authority cannot read or write its file now; try again later")

    @app.post(JOIN_PATH)
    async def join(request: Request) -> Response:
        return _json(await service.join(await _body(service, request), _remote_host(request)))

    @app.post(CHECK_PATH)
    async def check(request: Request) -> Response:
        return _json(await service.check_in(await _body(service, request), _remote_host(request)))

    @app.post(ADDRESSES_PATH)
    async def addresses(request: Request) -> Response:
        return _json(await service.addresses(await _body(service, request), _remote_host(request)))

    @app.post(RELAY_PATH)
    async def relay_pass(request: Request) -> Response:
        return _json(await service.relay_pass(await _body(service, request), _remote_host(request)))

    @app.get(INFO_PATH)
    async def info(request: Request) -> Response:
        service.take_request(_remote_host(request))
        return _json(service.info())

    return app


async def serve(
    service: AuthorityService, listener: socket.socket, stop: Callable[[], bool], trusted_proxy: str = ""
) -> None:
    """Serves until ``stop`` says so; ``trusted_proxy`` is whose X-Forwarded-For is believed."""
    config = uvicorn.Config(
        create_app(service),
        http=bounded_connections(_LIMITS, Uncounted()),
        loop="asyncio",
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="error",
        access_log=False,
        proxy_headers=bool(trusted_proxy),
        forwarded_allow_ips=trusted_proxy or None,
        server_header=False,
        timeout_keep_alive=round(_LIMITS.idle_timeout_s),
        timeout_graceful_shutdown=round(_LIMITS.grace_s),
    )
    server = _Server(config)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        while not stop() and not serving.done():
            await asyncio.wait({serving}, timeout=_TICK_S)
        server.should_exit = True
        await serving
    finally:
        serving.cancel()
        await service.close()


class _Server(uvicorn.Server):
    """uvicorn's server without its signal handlers; it ends connections whose clients take too long."""

    async def on_tick(self, counter: int) -> bool:
        """Runs ten times a second."""
        if counter % 5 == 0:
            expire_connections(self.server_state.connections)
        return await super().on_tick(counter)

    def capture_signals(self) -> AbstractContextManager[None]:  # type: ignore[override]
        return nullcontext()


async def _body(service: AuthorityService, request: Request) -> bytes:
    """Returns the body of a request that its address may make, as much of it as may be read."""
    service.take_request(_remote_host(request))
    parts = bytearray()
    try:
        async with asyncio.timeout(_BODY_TIMEOUT_S):
            async for chunk in request.stream():
                parts += chunk
                if len(parts) > MAX_REQUEST_BYTES:
                    raise RefusedError("malformed", f"expected at most {MAX_REQUEST_BYTES} bytes, found more")
    except TimeoutError:
        raise RefusedError(
            "malformed", f"expected the body within {_BODY_TIMEOUT_S:g} s, found {len(parts)} bytes"
        ) from None
    except ClientDisconnect:
        raise RefusedError("malformed", "expected the body, found the end of the connection") from None
    return bytes(parts)


def _remote_host(request: Request) -> str:
    return request.client.host if request.client is not None else "unknown"


def _json(model: BaseModel) -> Response:
    return Response(model.model_dump_json(), media_type="application/json", headers={"cache-control": "no-store"})


def _refusal(reason: str, text: str, revoked: RevokedPeers | None = None) -> Response:
    printable = "".join(char if char.isprintable() else " " for char in text[:1000])
    content = Refusal(reason=reason, text=printable, revoked=revoked).model_dump(mode="json")
    headers = {"cache-control": "no-store"} | ({"retry-after": "30"} if reason in ("rate", "busy") else {})
    return JSONResponse(content, status_code=_STATUS.get(reason, 403), headers=headers)

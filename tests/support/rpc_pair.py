"""Endpoints in this process, on real sockets, stopped at the end of the block."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tests.support.rpc_node import RUN_ID, fast_config, register_test_methods
from trainer.network.rpc import Endpoint, Identity


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
    """A caller and a callee."""
    async with running_endpoint(**options) as caller, running_endpoint(**options) as callee:
        yield caller, callee

"""Whether anybody listens where a worker was: the one sign that a process is gone that it cannot be too slow to give.

A process that is stopped, swapped out or busy keeps its port, and its kernel takes connections for it; a connection is
refused when no process holds the port any more. Silence proves nothing: the network may be down.
"""

from __future__ import annotations

import asyncio

from trainer.rpc.config import split_address

__all__ = ["is_gone"]


async def is_gone(address: str, timeout_s: float) -> bool:
    """Whether a connection to ``address`` (``host:port``) is refused; False where nothing is heard."""
    host, port = split_address(address)
    try:
        async with asyncio.timeout(timeout_s):
            _, writer = await asyncio.open_connection(host, port)
    except ConnectionRefusedError:
        return True
    except (OSError, TimeoutError):
        return False
    writer.transport.abort()  # The end of a connection that was never used is nobody's concern.
    return False

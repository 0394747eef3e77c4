"""A forwarder in front of a port, as a router or a container's proxy is: while it is shut, *it* refuses connections.

It listens at ``0.0.0.0``, which reaches this machine and is no loopback address: to a driver, a worker elsewhere.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

__all__ = ["Gate", "gate_before"]


class Gate:
    """Forwards to a port of this machine until it is shut.

    Args:
        port: where to.
    """

    def __init__(self, port: int) -> None:
        self.address = ""
        self._port = port
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()

    async def open(self) -> None:
        """Begins to listen, at the address it had before."""
        port = int(self.address.rpartition(":")[2] or 0)
        self._server = await asyncio.start_server(self._forward, "0.0.0.0", port)
        self.address = f"0.0.0.0:{self._server.sockets[0].getsockname()[1]}"

    def shut(self) -> None:
        """Refuses from now on, and cuts what there is."""
        if self._server is not None:
            self._server.close()
        for writer in self._writers:
            writer.transport.abort()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", self._port)
        except OSError:
            writer.transport.abort()
            return
        self._writers |= {writer, inner_writer}
        await asyncio.gather(_pass_on(reader, inner_writer), _pass_on(inner_reader, writer))


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    except OSError:
        pass
    finally:
        writer.transport.abort()


@asynccontextmanager
async def gate_before(port: int) -> AsyncIterator[Gate]:
    """An open one."""
    gate = Gate(port)
    await gate.open()
    try:
        yield gate
    finally:
        gate.shut()

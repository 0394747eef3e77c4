"""Checks a relay from outside, for the node that runs it: whether its port, and one that it lends, are reached.

Two short connections, each of one line; the relay's node signs both, so nobody else can answer for it.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from trainer.errors import PeerUnavailableError
from trainer.network.relay.carrying import Streams
from trainer.network.relay.protocol import PROBED_LINE, Probe, Probed, end, probe_text, read_line, write_line
from trainer.network.rpc.dialing import MIN_STRANGERS_PORT
from trainer.network.rpc.identity import verify_signature
from trainer.network.rpc.messages import PeerId

_CONNECT_S: Final = 4.0
_LINE_S: Final = 5.0


async def probe_relay(host: str, port: int, peer_id: PeerId, ticket: str) -> None:
    """Asks the relay of ``peer_id`` at an address; raises PeerUnavailableError where it, or its lent port, is silent.

    ``ticket`` is what that relay gave for it (`Relay.new_ticket`).
    The error's ``cause`` is ``refused`` or ``timeout`` where nothing answers, ``another`` where something else does.
    """
    probe = Probe(nonce=secrets.token_hex(16), ticket=ticket)
    async with _connected(host, port) as (reader, writer):  # The relay lends a port while this is open.
        await write_line(writer, probe, _LINE_S, host)
        first = await read_line(reader, PROBED_LINE, _LINE_S, f"{host}:{port}")
        _check(first, probe, peer_id, f"{host}:{port}")
        async with _connected(host, first.port) as (lent, _):
            again = await read_line(lent, PROBED_LINE, _LINE_S, f"{host}:{first.port}")
        if again != first:
            raise PeerUnavailableError(f"{host}:{first.port}: expected a port of the relay, found another's", "another")


def _check(found: Probed, probe: Probe, peer_id: PeerId, who: str) -> None:
    signed = probe_text(probe.nonce, found.port, peer_id)
    if found.port < MIN_STRANGERS_PORT or not verify_signature(peer_id, signed, bytes.fromhex(found.signature)):
        raise PeerUnavailableError(f"{who}: expected the relay of {peer_id[:16]}…, found another", "another")


@asynccontextmanager
async def _connected(host: str, port: int) -> AsyncIterator[Streams]:
    try:
        async with asyncio.timeout(_CONNECT_S):
            streams = await asyncio.open_connection(host, port)
    except (OSError, TimeoutError) as error:
        cause = "refused" if isinstance(error, ConnectionRefusedError) else "timeout"
        raise PeerUnavailableError(f"{host}:{port} cannot be connected to ({error or cause})", cause) from None
    try:
        yield streams
    finally:
        await end(streams[1])

"""How fast payloads travel to a peer and back: a bounded measurement of some seconds.

Calls of one frame each, larger and more at once as long as they take little time: so that a link of 1 Mbit/s is asked
for some 300 KB, and a fast one for at most 8 MiB each way. What is found is a lower bound of what many peers together
could move, and what one connection, which a round has to each member, does.
"""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import dataclass
from typing import Final

from trainer.errors import RefusedError
from trainer.network.reachability.messages import BANDWIDTH_METHOD, BandwidthReply, BandwidthRequest
from trainer.network.rpc.config import MAX_PAYLOAD_BYTES
from trainer.network.rpc.endpoint import Endpoint
from trainer.network.rpc.messages import Peer, Reason

_FIRST_BYTES: Final = 32 << 10
_MOST_BYTES: Final = 8 << 20
_MOST_AT_ONCE: Final = 4
_QUICK_S: Final = 0.25
"""A batch of calls that takes less than this says little: the next one is twice as large."""
_LONGEST_S: Final = 4.0
_TIMEOUT_S: Final = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Bandwidth:
    """What was measured."""

    up_bytes_per_s: float
    down_bytes_per_s: float
    round_trip_s: float
    """The least that an empty call took."""


async def measure_bandwidth(endpoint: Endpoint, peer: Peer) -> Bandwidth:
    """Measures the way to a peer and back. Raises RpcError: it is gone, or has refused the first calls."""
    round_trip_s = min([await _timed(endpoint, peer, 0, 0, 1) for _ in range(3)])
    return Bandwidth(
        up_bytes_per_s=await _rate(endpoint, peer, round_trip_s, is_up=True),
        down_bytes_per_s=await _rate(endpoint, peer, round_trip_s, is_up=False),
        round_trip_s=round_trip_s,
    )


async def _rate(endpoint: Endpoint, peer: Peer, round_trip_s: float, *, is_up: bool) -> float:
    """Returns bytes per second of the fastest batch; a batch takes one round trip in which nothing of it moves."""
    size_bytes, at_once, moved_bytes, fastest, began_s = _FIRST_BYTES, 1, 0, 0.0, time.monotonic()
    while moved_bytes + size_bytes * at_once <= _MOST_BYTES and time.monotonic() - began_s < _LONGEST_S:
        up, down = (size_bytes, 0) if is_up else (0, size_bytes)
        try:
            took_s = await _timed(endpoint, peer, up, down, at_once)
        except RefusedError as error:
            if error.reason != Reason.RATE or not fastest:
                raise
            break  # Others behind this address measure too: what was found has to do.
        moved_bytes += size_bytes * at_once
        fastest = max(fastest, size_bytes * at_once / max(took_s - round_trip_s, 0.2 * took_s))
        if took_s < _QUICK_S:
            at_once = min(_MOST_AT_ONCE, 2 * at_once) if size_bytes == MAX_PAYLOAD_BYTES else at_once
            size_bytes = min(MAX_PAYLOAD_BYTES, 2 * size_bytes)
    return fastest


async def _timed(endpoint: Endpoint, peer: Peer, up_bytes: int, down_bytes: int, at_once: int) -> float:
    """Returns the seconds that so many calls at once take."""
    payload, body = os.urandom(up_bytes), BandwidthRequest(answer_bytes=down_bytes)
    began_s = time.perf_counter()
    calls = (
        endpoint.call(peer, BANDWIDTH_METHOD, body, BandwidthReply, payload=payload, timeout_s=_TIMEOUT_S)
        for _ in range(at_once)
    )
    await asyncio.gather(*calls)
    return time.perf_counter() - began_s

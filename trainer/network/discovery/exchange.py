"""The messages of peer exchange: my record and what I know, for what I do not know yet.

The asker's payload is its own record followed by 40 bytes for each node it knows: the peer id and the time (float64,
big endian) of the record it has. The answer holds the records the asker lacks or has an older one of. So a node that
knows everybody sends 40 bytes a peer instead of 1.6 kB, and each new record crosses to each node about once.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Iterable, Mapping
from typing import Annotated

from pydantic import Field

from trainer.errors import RefusedError
from trainer.network.discovery.announcement import MAX_WIRE_BYTES
from trainer.network.discovery.peer_table import KnownPeer
from trainer.network.rpc.messages import Message

__all__ = [
    "EXCHANGE_METHOD",
    "PRESENT_METHOD",
    "ExchangeReply",
    "ExchangeRequest",
    "PresentReply",
    "pack_request",
    "records_for",
    "split_records",
    "unpack_request",
]

EXCHANGE_METHOD = "announce/exchange"
PRESENT_METHOD = "announce/present"
"""Asks nothing but a signed answer; the request is that of an exchange that knows nobody."""
_ENTRY = struct.Struct(">32sd")
_MAX_KNOWN = 16384
_MAX_RECORDS = 512
_MAX_PAYLOAD_BYTES = 1 << 20


class ExchangeRequest(Message):
    """Head of the asker's message."""

    own_bytes: Annotated[int, Field(ge=0, le=MAX_WIRE_BYTES)]
    """Length of its own record, the beginning of the payload; 0 if it has none yet."""


class ExchangeReply(Message):
    """Head of the answer."""

    sizes: Annotated[tuple[Annotated[int, Field(gt=0, le=MAX_WIRE_BYTES)], ...], Field(max_length=_MAX_RECORDS)]
    """Length of each record of the payload."""


class PresentReply(Message):
    """Says that this node is here."""


def pack_request(own: bytes, known: Iterable[KnownPeer]) -> tuple[ExchangeRequest, bytes]:
    """Head and payload of a request."""
    entries = [_ENTRY.pack(bytes.fromhex(peer.announcement.peer_id), peer.announcement.sent_at) for peer in known]
    return ExchangeRequest(own_bytes=len(own)), b"".join([own, *entries[:_MAX_KNOWN]])


def unpack_request(body: ExchangeRequest, payload: bytes) -> tuple[bytes, dict[str, float]]:
    """The asker's own record, and the time of the record it has by peer id.

    Raises:
        RefusedError: the payload does not fit its head.
    """
    rest = memoryview(payload)[body.own_bytes :]
    if body.own_bytes > len(payload) or len(rest) % _ENTRY.size or len(rest) > _MAX_KNOWN * _ENTRY.size:
        raise RefusedError(
            "payload",
            f"expected a record of {body.own_bytes} bytes and at most {_MAX_KNOWN} entries of {_ENTRY.size}, "
            f"found {len(payload)} bytes",
        )
    return payload[: body.own_bytes], {peer_id.hex(): sent_at for peer_id, sent_at in _ENTRY.iter_unpack(rest)}


def records_for(
    asker: str, has: Mapping[str, float], known: Iterable[KnownPeer], chance: random.Random
) -> tuple[ExchangeReply, bytes]:
    """The records the asker lacks; if they do not all fit, some of them by chance, so that in time all come through.

    Args:
        asker: its peer id; it is not told of itself.
        has: the time of the record it has, by peer id.
        known: all that could be told.
        chance: chooses.
    """
    # "not <=": a NaN in the asker's list is no reason to leave a record out.
    news = [
        peer.wire
        for peer in known
        if peer.announcement.peer_id != asker
        and not peer.announcement.sent_at <= has.get(peer.announcement.peer_id, -1)
    ]
    chance.shuffle(news)
    chosen: list[bytes] = []
    size_bytes = 0
    for wire in news[:_MAX_RECORDS]:
        size_bytes += len(wire)
        if size_bytes > _MAX_PAYLOAD_BYTES:
            break
        chosen.append(wire)
    return ExchangeReply(sizes=tuple(map(len, chosen))), b"".join(chosen)


def split_records(body: ExchangeReply, payload: bytes) -> list[bytes]:
    """The records of an answer.

    Raises:
        RefusedError: the payload does not fit its head.
    """
    if sum(body.sizes) != len(payload):
        raise RefusedError("payload", f"expected records of {sum(body.sizes)} bytes in all, found {len(payload)}")
    records: list[bytes] = []
    start = 0
    for size_bytes in body.sizes:
        records.append(payload[start : start + size_bytes])
        start += size_bytes
    return records

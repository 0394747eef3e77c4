"""What callers and handlers exchange: peers, requests, replies, frames of a stream, and an endpoint's counters.

A received payload is a read-only memoryview into the message as it came, because a copy of each MiB would be paid for:
it keeps the message, head and all, in memory for as long as it is held. Counters are changed on the event loop only.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Generic, TypeAlias, TypeVar

from pydantic import BaseModel, ConfigDict

__all__ = ["Counters", "Frame", "Message", "Payload", "Peer", "PeerId", "Reply", "Request", "peer_name"]

_MAX_REASONS = 256


@dataclass(slots=True)
class Counters:
    """Totals since the endpoint was made; bytes are those of whole frames, heads and heartbeats included."""

    sent_bytes: int = 0
    received_bytes: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    """How often each reason was given, or an answer was refused for it."""

    def count_refusal(self, reason: str) -> None:
        """Counts one; handlers pass on words of other peers, so what is kept of them is bounded."""
        known = reason in self.refused or len(self.refused) < _MAX_REASONS
        self.refused[str(reason) if known else "other"] += 1


PeerId: TypeAlias = str
"""An ed25519 public key as 64 lower-case hexadecimal digits."""

Payload: TypeAlias = bytes | memoryview
"""What goes beside a body: either, as far as the sender is concerned."""

BodyT_co = TypeVar("BodyT_co", bound=BaseModel, covariant=True)


class Message(BaseModel):
    """Base for bodies of requests and replies: strict types, no unknown fields, finite numbers, immutable."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)


@dataclass(frozen=True, slots=True)
class Peer:
    """Where to reach a node."""

    peer_id: PeerId | None
    """Who must answer; None: whoever does (only methods registered with ``any_recipient`` accept such calls)."""
    address: str
    """``host:port``; an IPv6 host in brackets."""
    certificate: bytes | None = None
    """PEM of its TLS certificate, from its signed announcement; None: fetched and confirmed by its signed reply."""


@dataclass(frozen=True, slots=True)
class Request(Generic[BodyT_co]):
    """A call that passed every check, as its handler sees it."""

    sender: PeerId
    body: BodyT_co
    payload: Payload = b""
    remote_address: str = ""
    """The host it came from, as `address_group` names it; identities are free, so limits count this too."""


@dataclass(frozen=True, slots=True)
class Reply(Generic[BodyT_co]):
    """An answer: what a handler returns, and what the caller gets."""

    body: BodyT_co
    payload: Payload = b""
    sender: PeerId = ""
    """Who signed it; set for the caller, ignored in what a handler returns."""


@dataclass(frozen=True, slots=True)
class Frame:
    """One message of a stream."""

    index: int
    """The sender's own number for it, in [0, 2**53)."""
    payload: memoryview


def peer_name(peer_id: PeerId | None, address: str) -> str:
    """How messages name a peer: twelve digits tell a run's nodes apart."""
    return f"peer {peer_id[:12]} at {address}" if peer_id else f"the peer at {address}"

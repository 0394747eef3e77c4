"""What callers and handlers exchange: peers, requests, replies, frames of a stream, and reasons of refusals.

A received payload is a read-only memoryview into the message as it came, which stays in memory for as long as it is
held. Counters are changed on the event loop only.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Generic, TypeAlias, TypeVar

from pydantic import BaseModel, ConfigDict

_MAX_REASONS = 256
_PEER_ID = re.compile(r"[0-9a-f]{64}")

PeerId: TypeAlias = str  # An ed25519 public key as 64 lower-case hexadecimal digits.

Payload: TypeAlias = bytes | memoryview  # The raw bytes beside a body.

BodyT_co = TypeVar("BodyT_co", bound=BaseModel, covariant=True)


class Reason(StrEnum):
    """Why this package refuses a message, one word each, in the order in which the checks are made."""

    BUSY = "busy"  # A limit of concurrent calls or streams is reached; the caller may try again later.
    STOPPING = "stopping"  # The node is shutting down.
    NO_REQUEST = "no_request"  # The call was opened, but no request arrived in time.
    SIZE = "size"  # Shorter than a frame can be, longer than it may be, or not as long as it says.
    MAGIC = "magic"  # Not a frame of this protocol.
    PROTOCOL = "protocol"  # A frame of another version of it.
    HEAD = "head"  # The header is not JSON as this protocol spells it, or has wrong fields.
    KIND = "kind"  # A kind of frame that has no place here, or of the wrong direction.
    RUN = "run"  # For another run.
    RECIPIENT = "recipient"  # For another node.
    SENDER = "sender"  # Not from the node this call is with, or from one that the allow-list does not name.
    CERTIFICATE = "certificate"  # For another TLS certificate: a man in the middle, or the node has restarted.
    METHOD = "method"  # No such method, or a call to a stream's method, or the reverse.
    PAYLOAD_SIZE = "payload_size"  # More payload than the method takes.
    CLOCK = "clock"  # Sent too far in the past or the future by this node's clock.
    SIGNATURE = "signature"  # Not signed by the sender it names.
    CREDENTIAL = "credential"  # The run names an authority, and the sender has shown no valid credential of it.
    REVOKED = "revoked"  # The run's authority has revoked the sender.
    ROLE = "role"  # Admitted in a role that may not call this method.
    REPLAYED = "replayed"  # The same request came before.
    RATE = "rate"  # More requests from this sender within the clock window than are remembered.
    SEQUENCE = "sequence"  # A frame of a stream out of order, missing, repeated, or of another stream.
    DIGEST = "digest"  # The payload is not the one that was signed.
    BODY = "body"  # The body is not what the method takes.
    STALLED = "stalled"  # The caller took no answer, or the node needed the place of a call that stood still.
    TIMEOUT = "timeout"  # The handler took longer than this node allows any handler.
    INTERNAL = "internal"  # The handler failed; the log of its node has the traceback.


@dataclass(slots=True)
class Counters:
    """Totals since the endpoint was made; bytes are those of whole frames, headers and heartbeats included."""

    sent_bytes: int = 0
    received_bytes: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    """How often each reason was given, or an answer was refused for it."""
    by_scope: dict[str, Counters] = field(default_factory=dict)
    """Bytes of the calls whose method begins with that name, which are among all: those of a `ScopedEndpoint`, and in
    them or without one those of a service that has asked for its own. Refusals are counted for all alone."""

    def of_scope(self, scope: str) -> Counters:
        """Returns the counters of one scope, which begin now if nobody has asked for them before."""
        return self.by_scope.setdefault(scope, Counters())

    def of_method(self, method: str) -> tuple[Counters, ...]:
        """Returns the counters of all scopes that a method is in, the widest first."""
        found: list[Counters] = []
        for scope in method.split("/")[:-1]:
            counters = (found[-1] if found else self).by_scope.get(scope)
            if counters is None:
                break
            found.append(counters)
        return tuple(found)

    def count_refusal(self, reason: str) -> None:
        """Counts one. Handlers may pass on words of other peers, so the number of distinct words is bounded."""
        known = reason in self.refused or len(self.refused) < _MAX_REASONS
        self.refused[str(reason) if known else "other"] += 1


class Message(BaseModel):
    """Base for bodies of requests and replies: strict types, no unknown fields, finite numbers, immutable."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)


@dataclass(frozen=True, slots=True)
class Peer:
    """Where to reach a node."""

    peer_id: PeerId | None
    """Who must answer; None: anyone (only methods registered with ``any_recipient`` accept such calls)."""
    address: str  # ``host:port``; an IPv6 host in brackets.
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
    sender: PeerId = ""  # Who signed it; set for the caller, ignored in what a handler returns.


@dataclass(frozen=True, slots=True)
class Frame:
    """One message of a stream."""

    index: int  # The sender's own number for it, in [0, 2**53).
    payload: memoryview


def is_peer_id(text: str) -> bool:
    """Returns whether ``text`` is spelled like a `PeerId`."""
    return _PEER_ID.fullmatch(text) is not None


def peer_name(peer_id: PeerId | None, address: str) -> str:
    """Returns a peer's name for messages: twelve digits tell a run's nodes apart."""
    return f"peer {peer_id[:12]} at {address}" if peer_id else f"the peer at {address}"

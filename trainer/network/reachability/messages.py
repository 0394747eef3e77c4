"""What nodes, and an authority, say to each other about whether and how fast a node is reached."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import Field

from trainer.network.discovery.announcement import Instant
from trainer.network.relay.protocol import Hex32
from trainer.network.rpc.config import MAX_PAYLOAD_BYTES
from trainer.network.rpc.messages import Message

PROBE_METHOD: Final = "admission/probe"
"""Asks a key to show that it is at an address; an authority asks it, and a node that dials back."""
HELLO_METHOD: Final = "reach/hello"
"""Asks for release, clock, and how the asker is seen; answered to anybody, also without a credential."""
DIAL_BACK_METHOD: Final = "reach/dial-back"
"""Asks to be connected to, at the address that the call comes from."""
RELAY_CHECK_METHOD: Final = "reach/relay"
"""Asks to be connected to at the asker's address as a node that wants to be relayed would, and at a port lent so."""
BANDWIDTH_METHOD: Final = "reach/bandwidth"
"""Takes a payload and answers with one, for the asker to time."""

Outcome = Literal["reached", "refused", "timeout", "no_route", "name", "tls", "another", "failed"]
"""What a dial-back has found: this key; nobody listening; no answer at all; no way there; no such host; something that
speaks no TLS; another node, or a node of another run; anything else."""

_Text = Annotated[str, Field(max_length=64, pattern=r"^[\x20-\x7e]*$")]
_Host = Annotated[str, Field(max_length=64, pattern=r"^[0-9A-Fa-f:.]*$")]


class Probe(Message):
    """Asks whether a key is at an address."""

    challenge: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]


class ProbeReply(Message):
    """The challenge again; the frame around it is signed by the key."""

    challenge: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]


class Hello(Message):
    """Says nothing."""


class HelloReply(Message):
    """What a node tells anybody."""

    version: _Text
    """Release of its package."""
    now: Instant
    """Seconds since 1970 by its clock."""
    seen_host: _Text
    """Where the call comes from: an IPv4 address, an IPv6 /64; empty: by way of a relay, so that is not known."""


class DialBackRequest(Message):
    """Asks whether the sender's key answers at a port of its own address."""

    port: Annotated[int, Field(ge=1, le=65535)]
    host: _Host = ""
    """The address itself, which has to be one of those the call may come from: of IPv6 a limit counts, and a handler is
    told, the /64 only. Empty: the IPv4 address of the call."""


class RelayCheckRequest(DialBackRequest):
    """Asks whether the sender's relay, at a port of its own address, is reached."""

    ticket: Hex32
    """To be shown to the relay, which lends a port for the check to nobody else."""


class DialBackReply(Message):
    """What was found at the asker's address."""

    outcome: Outcome
    address: Annotated[str, Field(max_length=72)]
    """``host:port`` that was dialled."""


class BandwidthRequest(Message):
    """Brings a payload, and asks for one."""

    answer_bytes: Annotated[int, Field(ge=0, le=MAX_PAYLOAD_BYTES)] = 0


class BandwidthReply(Message):
    """How many bytes of payload came; those that were asked for are beside it."""

    received_bytes: Annotated[int, Field(ge=0, le=MAX_PAYLOAD_BYTES)]

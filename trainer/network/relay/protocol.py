"""What a node and a relay say to each other: lines of JSON over TCP, each of 4 KiB at most, and joined connections.

    node                                        relay
    Register(peer_id, listen_port, certificate) ──▶
                                                ◀── Challenge(nonce, members_of)
    Proof(signature over nonce, relay and IP,
          credential where members_of a run)    ──▶
                                                ◀── Lent(port, seen_host, is_direct)
    Ping | Check | Show(a newer credential)     ──▶
                                                ◀── Pong | Checked(is_direct) | Incoming(token, host)
    on a connection of its own: Accept(token)   ──▶     from here on the bytes of the caller

    a node that the relay's has asked to check it:
    Probe(nonce, ticket)                        ──▶ Probed(port, signature), and the same again at that port

The lines are not encrypted. Somebody on the way could cut the connection, as they could any other; they can register
nobody, since a proof names the relay and its nonce, and read nothing, since what is carried is TLS between its ends. A
relay behind a router that was not told its `public_host` checks the port of its name only: then another relay of the
same port could register there those that register with it, which cuts them off there, and lets nobody pass for them.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
from collections.abc import Iterable
from typing import Annotated, Final, Literal, TypeVar

from pydantic import Field, TypeAdapter, ValidationError

from trainer.errors import PeerUnavailableError
from trainer.network.rpc.credential import MAX_CREDENTIAL_BYTES
from trainer.network.rpc.messages import Message

PROTOCOL_VERSION: Final = 1
MAX_LINE_BYTES: Final = 4096
MAX_REFUSAL_CHARS: Final = 300
SILENCE_S: Final = 45.0
"""A side that has heard nothing for so long gives the other up; a node pings three times in it."""
COPY_BYTES: Final = 1 << 16
_FLUSH_S: Final = 10.0
_DOMAIN: Final = b"genesis relay 1\n"
_PROBE_DOMAIN: Final = b"genesis relay probe 1\n"

T = TypeVar("T")

_PeerId = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Hex32 = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
_Host = Annotated[str, Field(max_length=64, pattern=r"^[0-9A-Za-z.:%_-]*$")]
_Port = Annotated[int, Field(ge=1, le=65_535)]
_Signature = Annotated[str, Field(pattern=r"^[0-9a-f]{128}$")]
_Credential = Annotated[str, Field(max_length=4 * -(-MAX_CREDENTIAL_BYTES // 3), pattern=r"^[0-9A-Za-z+/=]*$")]
"""In base64: a credential, or a pass by which a newcomer is reached while it joins."""


class Register(Message):
    """A node asks for a port. ``listen_port`` and ``certificate_sha256``: what would answer at its own address."""

    kind: Literal["register"] = "register"
    version: int = PROTOCOL_VERSION
    peer_id: _PeerId
    listen_port: _Port
    certificate_sha256: Annotated[str, Field(pattern=r"^(|[0-9a-f]{64})$")] = ""


class Challenge(Message):
    """What the node has to sign."""

    kind: Literal["challenge"] = "challenge"
    nonce: Hex32
    members_of: Annotated[str, Field(max_length=128)] = ""
    """The run whose members alone are relayed, by the credentials of its authority; empty: anybody is."""


class Proof(Message):
    """The node's signature of `proof_text`, and its credential where the challenge names a run."""

    kind: Literal["proof"] = "proof"
    relay: Annotated[str, Field(max_length=262)]
    """As the node calls it."""
    dialled_ip: Annotated[str, Field(max_length=64, pattern=r"^[0-9A-Fa-f:.]*$")] = ""
    """Where the node's connection goes to; empty: an earlier release, which does not say."""
    signature: _Signature
    credential: _Credential = ""


class Lent(Message):
    """The node's port at this relay, for as long as the connection lasts."""

    kind: Literal["lent"] = "lent"
    port: _Port
    public_host: _Host = ""
    seen_host: _Host
    """The address the node's connection comes from."""
    is_direct: bool
    """Whether the node answered at ``seen_host`` and its own port."""


class Refusal(Message):
    """Why the relay does not serve; the connection ends with it."""

    kind: Literal["refusal"] = "refusal"
    text: Annotated[str, Field(max_length=MAX_REFUSAL_CHARS)]


class Ping(Message):
    """The node is there; answered by `Pong`."""

    kind: Literal["ping"] = "ping"


class Pong(Message):
    """The relay is there."""

    kind: Literal["pong"] = "pong"


class Check(Message):
    """The node asks again whether it can be reached directly."""

    kind: Literal["check"] = "check"


class Show(Message):
    """A newer credential of the node, in place of the one that it has registered with; answered by `Pong`."""

    kind: Literal["show"] = "show"
    credential: _Credential


class Checked(Message):
    """The answer."""

    kind: Literal["checked"] = "checked"
    is_direct: bool


class Incoming(Message):
    """Somebody has connected to the node's port; the token counts once and for ten seconds."""

    kind: Literal["incoming"] = "incoming"
    token: Hex32
    host: _Host
    """Where from, as limits count hosts."""


class Accept(Message):
    """First line of the connection that the node opens for an `Incoming`."""

    kind: Literal["accept"] = "accept"
    token: Hex32


class Probe(Message):
    """Another node asks whether a relay is there, and whether the ports that it lends are reached."""

    kind: Literal["probe"] = "probe"
    nonce: Hex32
    ticket: Hex32
    """What the relay's node has given the asker: nobody else can have it lend a port."""


class Probed(Message):
    """The answer, at the relay's port and, to whoever connects, at ``port`` for ten seconds."""

    kind: Literal["probed"] = "probed"
    port: _Port
    signature: _Signature
    """Of the relay's node over `probe_text`."""


FirstLine = Annotated[Register | Accept | Probe, Field(discriminator="kind")]
NodeLine = Annotated[Ping | Check | Show, Field(discriminator="kind")]
RelayLine = Annotated[Lent | Challenge | Refusal | Pong | Checked | Incoming, Field(discriminator="kind")]

FIRST_LINE: Final[TypeAdapter[Register | Accept | Probe]] = TypeAdapter(FirstLine)
PROOF_LINE: Final[TypeAdapter[Proof]] = TypeAdapter(Proof)
NODE_LINE: Final[TypeAdapter[Ping | Check | Show]] = TypeAdapter(NodeLine)
PROBED_LINE: Final[TypeAdapter[Probed]] = TypeAdapter(Probed)
RELAY_LINE: Final[TypeAdapter[Lent | Challenge | Refusal | Pong | Checked | Incoming]] = TypeAdapter(RelayLine)


def proof_text(nonce: str, relay: str, peer_id: str, dialled_ip: str = "") -> bytes:
    """Returns what a node signs: the nonce, the relay's address as it calls it, its own key, and the IP it dialled."""
    dialled = f"\n{dialled_ip}" if dialled_ip else ""
    return _DOMAIN + f"{nonce}\n{relay}\n{peer_id}{dialled}".encode()


def probe_text(nonce: str, port: int, peer_id: str) -> bytes:
    """Returns what the node of a relay signs for who checks it: the nonce, the port lent for that, and its own key."""
    return _PROBE_DOMAIN + f"{nonce}\n{port}\n{peer_id}".encode()


def pack_credential(wire: bytes) -> str:
    """Returns a credential as lines have it."""
    return base64.b64encode(wire).decode()


def unpack_credential(text: str) -> bytes:
    """Returns the credential of a line; what is no base64 becomes one that nobody believes."""
    try:
        return base64.b64decode(text, validate=True)
    except ValueError:
        return text.encode()


async def read_line(reader: asyncio.StreamReader, form: TypeAdapter[T], timeout_s: float, who: str) -> T:
    """Returns the next line; raises PeerUnavailableError where none comes in time, or one that is none of ``form``.

    ``reader`` must have been opened with a limit of `COPY_BYTES`, so that what is carried behind a line is not slow.
    """
    try:
        async with asyncio.timeout(timeout_s):
            line = await reader.readuntil(b"\n")
    except TimeoutError:
        raise PeerUnavailableError(f"{who}: expected a line within {timeout_s:g} s, found none") from None
    except (asyncio.IncompleteReadError, OSError):
        raise PeerUnavailableError(f"{who} has closed the connection") from None
    except asyncio.LimitOverrunError:
        line = b""
    if not 0 < len(line) <= MAX_LINE_BYTES:
        raise PeerUnavailableError(f"{who}: expected a line of at most {MAX_LINE_BYTES} bytes, found more")
    try:
        return form.validate_json(line)
    except ValidationError:
        raise PeerUnavailableError(f"{who}: expected a line of the relay's protocol, found another") from None


async def write_line(writer: asyncio.StreamWriter, line: Message, timeout_s: float, who: str) -> None:
    """Sends a line; raises PeerUnavailableError where the other side does not take it in time."""
    try:
        async with asyncio.timeout(timeout_s):
            writer.write(line.model_dump_json().encode() + b"\n")
            await writer.drain()
    except (OSError, TimeoutError):
        raise PeerUnavailableError(f"{who} takes nothing any more") from None


async def end(writer: asyncio.StreamWriter, *, at_once: bool = True) -> None:
    """Ends a connection, and returns when that is done; else what is still to be sent goes out first, for 10 s."""
    try:
        if not at_once:
            writer.close()
            async with asyncio.timeout(_FLUSH_S):
                await writer.wait_closed()
    except (OSError, TimeoutError):
        pass
    finally:
        writer.transport.abort()
    with contextlib.suppress(OSError):
        await writer.wait_closed()


def cancel_once(tasks: Iterable[asyncio.Task[None]]) -> None:
    """Cancels each, but none a second time, which would break off what it does to close its connections."""
    for task in tasks:
        if not task.cancelling():
            task.cancel()

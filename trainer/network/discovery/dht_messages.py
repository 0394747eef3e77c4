"""What node and DHT process say to each other: one JSON object a line, through the process's standard streams.

The first line the process reads is a `DhtSettings`, each further one a request with an id; each line it writes is a
`DhtReply` with that id (0: the first, once it is ready). Lines are bounded, and both ends refuse what does not fit.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from trainer.network.rpc.messages import Message

__all__ = [
    "MAX_LINE_BYTES",
    "MAX_RECORDS",
    "MAX_VALUE_BYTES",
    "DhtReply",
    "DhtRequest",
    "DhtSettings",
    "GetRequest",
    "Record",
    "StatusRequest",
    "StoreRequest",
    "request_adapter",
]

MAX_VALUE_BYTES = 16 * 1024
"""Longest value stored or handed on."""
MAX_RECORDS = 4096
"""Most records of one answer."""
MAX_LINE_BYTES = 16 << 20
"""Longest line. hivemind's own messages hold 4 MiB, and JSON at most doubles an announcement's quotation marks."""

_Key = Annotated[str, Field(min_length=1, max_length=256)]
_Timeout = Annotated[float, Field(gt=0, le=3600)]


class DhtSettings(Message):
    """How the DHT node of the process is to be."""

    parent_pid: int
    """The process ends when this is no longer its parent."""
    initial_peers: tuple[str, ...] = ()
    listen: tuple[str, ...] = ("/ip4/0.0.0.0/tcp/0",)
    announce: tuple[str, ...] = ()
    """Addresses to give out instead of those listened on."""
    identity_path: str | None = None
    """File of the libp2p key, made if it is not there; None takes a new key each time."""
    socket_folder: str = ""
    """Folder for the daemon's sockets, which the process removes at its end; empty: hivemind's choice, /tmp."""
    client_mode: bool = False
    map_port: bool = True
    """Whether to ask the router (UPnP) for a way in."""
    rejoin_interval_s: _Timeout = 5.0
    """Seconds between two looks whether the initial peers are still connected."""
    refresh_interval_s: _Timeout = 30.0
    """Seconds without news of a part of the routing table after which nodes are looked for there."""


class StoreRequest(Message):
    """Files a value until it expires."""

    op: Literal["store"] = "store"
    id: int
    key: _Key
    subkey: _Key
    value: Annotated[str, Field(max_length=MAX_VALUE_BYTES)]
    expires_at: float
    timeout_s: _Timeout


class GetRequest(Message):
    """Looks a key up."""

    op: Literal["get"] = "get"
    id: int
    key: _Key
    timeout_s: _Timeout


class StatusRequest(Message):
    """Asks how the node stands."""

    op: Literal["status"] = "status"
    id: int
    timeout_s: _Timeout


DhtRequest = StoreRequest | GetRequest | StatusRequest
request_adapter: TypeAdapter[DhtRequest] = TypeAdapter(Annotated[DhtRequest, Field(discriminator="op")])


class Record(Message):
    """One value found."""

    subkey: str
    value: str


class DhtReply(Message):
    """The answer to the request of this id."""

    id: int
    error: str = ""
    """Why it did not work; empty if it did."""
    records: tuple[Record, ...] = ()
    skipped: int = 0
    """Records found that were too long, not text, or too many."""
    addresses: tuple[str, ...] = ()
    """Where the node is reached, each with its peer id: what others take as initial peers."""
    num_neighbours: int = 0
    """Nodes in the routing table; with every answer."""

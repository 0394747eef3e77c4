"""The messages between a node and its DHT process: one JSON object a line, through the process's standard streams.

The process first reads a `DhtSettings`, then `DhtRequest`s; each line it writes is a `DhtReply` with the id of a
request (0: the first, once it is ready). Lines are bounded, and both ends refuse what does not fit.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from trainer.network.rpc.messages import Message

__all__ = ["MAX_LINE_BYTES", "MAX_RECORDS", "MAX_VALUE_BYTES", "DhtReply", "DhtRequest", "DhtSettings", "Record"]

MAX_VALUE_BYTES = 16 * 1024
"""Longest value stored or returned."""
MAX_RECORDS = 4096
"""Most records of one reply."""
MAX_LINE_BYTES = 16 << 20
"""Longest line. hivemind's own messages hold 4 MiB, and JSON at most doubles an announcement's quotation marks."""

_Key = Annotated[str, Field(max_length=256)]
_Timeout = Annotated[float, Field(gt=0, le=3600)]


class DhtSettings(Message):
    """The configuration of the process's DHT node."""

    parent_pid: int
    """The process ends when this is no longer its parent."""
    initial_peers: tuple[str, ...] = ()
    listen: tuple[str, ...] = ("/ip4/0.0.0.0/tcp/0",)
    announce: tuple[str, ...] = ()
    """Addresses to publish instead of those listened on."""
    identity_path: str | None = None
    """File of the libp2p key, made if it is missing; None takes a new key each time."""
    socket_folder: str = ""
    """Folder for the daemon's sockets, which the process removes at its end; empty: hivemind's choice, /tmp."""
    client_mode: bool = False
    map_port: bool = True
    """Whether to ask the router to forward the port (UPnP)."""
    rejoin_interval_s: _Timeout = 5.0
    """Seconds between two checks whether the initial peers are still connected."""
    refresh_interval_s: _Timeout = 30.0
    """Seconds without contact with a part of the routing table after which nodes are looked for there."""


class DhtRequest(Message):
    """Stores a value until it expires, gets the records of a key, or asks for the node's status."""

    id: int
    op: Literal["store", "get", "status"]
    timeout_s: _Timeout
    key: _Key = ""
    subkey: _Key = ""
    value: Annotated[str, Field(max_length=MAX_VALUE_BYTES)] = ""
    expires_at: float = 0.0

    @model_validator(mode="after")
    def _has_keys(self) -> Self:
        if (self.op != "status" and not self.key) or (self.op == "store" and not self.subkey):
            raise ValueError(f"expected key and subkey to {self.op}, found none")
        return self


class Record(Message):
    """A stored value."""

    subkey: str
    value: str


class DhtReply(Message):
    """The reply to the request of this id."""

    id: int
    error: str = ""
    """Why the request failed; empty if it did not."""
    records: tuple[Record, ...] = ()
    skipped: int = 0
    """Number of records left out because they are too long, not text, or too many."""
    addresses: tuple[str, ...] = ()
    """The node's addresses, each with its peer id: initial peers for others."""
    num_neighbours: int = 0
    """Nodes in the routing table; set in every reply."""

"""Options of an endpoint; the defaults fit a node on the open internet with some tens of peers.

They bound what peers can make a node hold: ``max_calls`` requests of one frame each, three frames of each of
``max_streams`` streams (one that waits, one being verified, one being read) and ``max_queued_bytes`` beyond. The
``max_remembered`` nonces take some 100 bytes each (600 if each is of another sender).

Peers that have not proven useful (`trainer.network.rpc.limits`) share by IP address, and by /64 in IPv6: half of
``max_calls`` and ``max_streams``, a quarter of ``max_connections`` and ``max_remembered``, and as many queued bytes as
one peer. All of them together leave a quarter of everything to the proven ones.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from trainer.errors import TrainerUsageError
from trainer.network.rpc.messages import is_peer_id

MAX_PAYLOAD_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class RpcConfig:
    """How a node talks to its peers."""

    host: str = "0.0.0.0"
    """The interface to listen on; 127.0.0.1 for this machine only."""
    port: int = 0
    """The TCP port to listen on; 0: any free one."""
    public_address: str = ""
    """``host:port`` or ``host`` under which others reach this node; "": this machine's address on its default route."""
    tls: bool = True
    """Encrypt, with certificates pinned to node identities. False only inside a trusted cluster: frames stay signed,
    but are readable, and a request may be replayed to a node that restarted within `max_clock_skew_s`."""
    allowed_peers: tuple[str, ...] = ()
    """Identities (64 hexadecimal digits) that may call; empty: anyone."""
    heartbeat_s: float = 1.0
    """Seconds between heartbeats while there is nothing else to send."""
    stall_timeout_s: float = 10.0
    """Seconds of silence after which a peer is given up; more than a frame of 1 MiB takes on the slowest link, times
    the streams that share it, because no heartbeat overtakes a frame."""
    connect_timeout_s: float = 5.0
    """Seconds a connection may take."""
    request_timeout_s: float = 30.0
    """Seconds the first frame of a call may take to arrive."""
    max_clock_skew_s: float = 120.0
    """Seconds by which the clocks of two nodes may differ; requests are remembered this long against replay."""
    max_call_s: float = 3600.0
    """Seconds after which a handler, also of a stream, is cancelled, whatever deadline its caller gave."""
    stop_grace_s: float = 1.0
    """Seconds handlers may take to finish when the endpoint stops."""
    max_calls: int = 256
    """Calls served at once. One whose caller takes nothing for `stall_timeout_s` is ended with its connection."""
    max_calls_per_peer: int = 32
    """Among them, for one peer."""
    max_streams: int = 128
    """Streams served at once. One whose caller takes nothing is ended when its place is needed."""
    max_streams_per_peer: int = 16
    """Among them, for one peer."""
    max_connections: int = 1024
    """Connections from others; on Linux the longest idle ones are closed beyond three quarters of them, and beyond a
    quarter (at least 16) of one address. Elsewhere idle ones are closed after a minute."""
    max_waiting_per_host: int = 128
    """Calls of one IP address whose sender is not verified yet; the oldest gives way to a further one."""
    max_queued_frames: int = 4
    """Frames of a stream received ahead of its reader."""
    max_queued_bytes: int = 256 << 20
    """Bytes of all streams received ahead of their readers; each stream may always have one frame."""
    max_queued_bytes_per_peer: int = 64 << 20
    """Among them, from one peer."""
    max_remembered: int = 524_288
    """Requests remembered against replay, of all peers; more are refused until older ones expire."""
    max_remembered_per_peer: int = 65_536
    """Among them, for one peer: with 120 s of skew, a steady 546 requests a second."""

    def __post_init__(self) -> None:
        if has_port(self.public_address):
            try:
                split_address(self.public_address)
            except TrainerUsageError as error:
                raise TrainerUsageError(f"rpc.public_address: {error}") from None
        for name in (field.name for field in fields(self)):
            value = getattr(self, name)
            if name == "port":
                is_good, expected = 0 <= value <= 65535, "0 to 65535"
            elif name == "stop_grace_s":
                is_good, expected = math.isfinite(value) and value >= 0, "seconds, 0 or more"
            elif name.endswith("_s"):
                is_good, expected = math.isfinite(value) and value > 0, "a positive number of seconds"
            else:
                is_good, expected = not name.startswith("max_") or value >= 1, "1 or more"
            if not is_good:
                raise TrainerUsageError(f"rpc.{name}: expected {expected}, found {value}")
        least_s = 2 * self.heartbeat_s
        if self.stall_timeout_s < least_s:
            raise TrainerUsageError(
                f"rpc.stall_timeout_s: expected at least two heartbeats ({least_s} s), found {self.stall_timeout_s}"
            )
        for peer_id in self.allowed_peers:
            if not is_peer_id(peer_id):
                raise TrainerUsageError(f"rpc.allowed_peers: expected 64 hexadecimal digits, found {peer_id!r}")


def has_port(address: str) -> bool:
    """Returns whether a port follows the host, which may be an IPv6 one in brackets."""
    return ":" in address.rpartition("]")[2]


def split_address(address: str) -> tuple[str, int]:
    """Splits ``"host:port"`` or ``"[v6]:port"`` into host without brackets and port; TrainerUsageError: neither."""
    host, colon, port = address.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        host = ""
    if not (colon and host and port.isascii() and port.isdecimal() and len(port) <= 5 and 0 < int(port) <= 65535):
        raise TrainerUsageError(f"expected an address such as 203.0.113.7:4100, found {address[:80]!r}")
    return host, int(port)

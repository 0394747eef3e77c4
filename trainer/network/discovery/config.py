"""The options of discovery, and the checks of the addresses given as initial peers.

An address is checked before anything is opened: a misspelt one would look like a node that is not there yet, and be
waited for. The usual mistake in a seed's is an id that was cut short in copying; its multihash states its length.
"""

from __future__ import annotations

import ipaddress
import math
import re
from dataclasses import dataclass

from trainer.errors import TrainerUsageError
from trainer.network.rpc.config import split_address

_HOST_NAME = re.compile(r"[A-Za-z0-9._-]{1,253}")
_SEED = re.compile(
    r"/(?P<kind>ip4|ip6|dns|dns4|dns6)/(?P<host>[^/\s]+)/(?:tcp|udp)/(?P<port>[0-9]{1,5})"
    r"(?:/(?:quic|quic-v1|tls|ws|wss))*/p2p/(?P<id>[^/\s]+)"
)
_BASE58 = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"
_MIN_ID_CHARS, _MAX_ID_CHARS = 40, 64


@dataclass(frozen=True, kw_only=True, slots=True)
class DiscoveryConfig:
    """How nodes of a run find each other; by default an announcement is repeated six times before it expires."""

    initial_peers: tuple[str, ...] = ()
    """``host:port`` of nodes (peer exchange) or ``/ip4/…/p2p/…`` of seeds (DHT); not both kinds."""
    announce_interval_s: float = 10.0
    """Seconds between two announcements of this node."""
    announcement_lifetime_s: float = 60.0
    """Seconds until an unrepeated announcement expires, this node's and, at this node, any other's; 1 to 3,600."""
    poll_interval_s: float = 2.0
    """Seconds between two look-ups (DHT) or two rounds of peer exchange."""
    request_timeout_s: float = 10.0
    """Seconds for one look-up, one announcement or one exchange."""
    max_retry_interval_s: float = 30.0
    """Longest pause, in seconds, before an address that does not answer is retried."""
    report_interval_s: float = 60.0
    """Seconds between two reports on this node's work, which `python -m trainer monitor` reads; 0: none."""
    max_peers: int = 1024
    """Most peers remembered. Beyond it, hosts with many peers that were never of use lose some."""
    allow_private: bool = False
    """Connect to loopback, private and link-local addresses that others announce, and identify nodes by name: for a
    cluster or a test that no stranger can reach. Without it, this node connects only to addresses of the kinds of its
    initial peers and its own address."""
    max_clock_skew_s: float = 120.0
    """How far, in seconds, the clock of a peer may be ahead of ours."""
    dht_host: str = "0.0.0.0"
    """Address the DHT node listens on."""
    dht_port: int = 0
    """Port the DHT node listens on; 0 takes a free one."""
    dht_client_mode: bool = False
    """Only query the DHT, serve nothing: for nodes that cannot be reached."""
    partition_by_stage: bool = False
    """Store announcements of pipeline workers in the DHT by stage, so that a look-up need not return all. All nodes of
    a run must use the same setting, or they do not find each other."""
    num_partitions: int = 0
    """Number of keys that the stages are then dealt over, neighbours together; 0: each stage has its own."""

    def __post_init__(self) -> None:
        intervals = ("announce_interval_s", "poll_interval_s", "request_timeout_s", "max_retry_interval_s")
        ranges = {
            **dict.fromkeys(intervals, (0.05, 3600.0)),
            "announcement_lifetime_s": (1.0, 3600.0),
            "report_interval_s": (0.0, 1200.0),
            "max_clock_skew_s": (0.0, 3600.0),
            "max_peers": (1, 100_000),
            "dht_port": (0, 65535),
            "num_partitions": (0, 10_000),
        }
        for name, (low, high) in ranges.items():
            value = getattr(self, name)
            if not (math.isfinite(value) and low <= value <= high):
                raise TrainerUsageError(f"{name}: expected {low:g} to {high:g}, found {value!r}")
        if self.num_partitions and not self.partition_by_stage:
            raise TrainerUsageError(
                f"num_partitions: expected 0 without partition_by_stage, found {self.num_partitions}; set that too"
            )
        if self.announcement_lifetime_s <= self.announce_interval_s:
            raise TrainerUsageError(
                f"announcement_lifetime_s: expected more than announce_interval_s ({self.announce_interval_s:g}), "
                f"found {self.announcement_lifetime_s:g}; three times as much survives two losses"
            )
        if len({address.startswith("/") for address in self.initial_peers}) > 1:
            raise TrainerUsageError(
                f"initial_peers: expected either host:port of nodes or /ip4/… of DHT seeds, found both in "
                f"{', '.join(self.initial_peers)}"
            )
        for address in self.initial_peers:
            (check_seed_address if self.uses_dht else _check_node_address)(address)

    @property
    def uses_dht(self) -> bool:
        """Whether the initial peers are seeds of a DHT."""
        return bool(self.initial_peers) and self.initial_peers[0].startswith("/")


def check_seed_address(address: str) -> None:
    """Raises `TrainerUsageError` unless this is a seed's address, ``/ip4/…/tcp/…/p2p/…``."""
    if "/p2p/" not in address:
        found = f"{address[:200]!r}, without a peer id (/p2p/…)" if address else "nothing"
        raise TrainerUsageError(
            f"initial_peers: expected an address of a seed, whole as it prints it (/ip4/…/tcp/…/p2p/…), found {found}"
        )
    parts = _SEED.fullmatch(address)
    if parts is None or not 0 < int(parts["port"]) <= 65535 or not _is_host(parts["kind"], parts["host"]):
        raise TrainerUsageError(
            f"initial_peers: expected an address of a seed, such as /ip4/203.0.113.7/tcp/4001/p2p/…, found "
            f"{address[:200]!r}"
        )
    if not _is_peer_id(parts["id"]):
        raise TrainerUsageError(
            f"initial_peers: expected a whole id behind /p2p/, as the seed prints it, found {parts['id'][:80]!r}"
        )


def _check_node_address(address: str) -> None:
    try:
        host, _ = split_address(address)
    except TrainerUsageError:
        host = ""
    if not (_HOST_NAME.fullmatch(host) or _is_ip(host, 6)):
        raise TrainerUsageError(
            "initial_peers: expected host:port of a node, such as 203.0.113.7:4100, or /ip4/…/tcp/…/p2p/… as a seed "
            f"prints it, found {address[:80]!r}"
        )


def _is_host(kind: str, host: str) -> bool:
    return _is_ip(host, int(kind[2:])) if kind.startswith("ip") else _HOST_NAME.fullmatch(host) is not None


def _is_ip(host: str, version: int) -> bool:
    try:
        return ipaddress.ip_address(host).version == version
    except ValueError:
        return False


def _is_peer_id(text: str) -> bool:
    """Returns whether a text is a multihash in base58: a code, the length of the rest, the rest."""
    if not _MIN_ID_CHARS <= len(text) <= _MAX_ID_CHARS or not set(text) <= set(_BASE58):
        return False
    number = 0
    for char in text:
        number = number * 58 + _BASE58.index(char)
    leading = len(text) - len(text.lstrip("1"))
    raw = bytes(leading) + number.to_bytes((number.bit_length() + 7) // 8)
    return len(raw) > 2 and raw[1] == len(raw) - 2

"""The options of discovery: where to begin, how often to announce and look, how long an announcement lives."""

from __future__ import annotations

import math
from dataclasses import dataclass

from trainer.errors import TrainerUsageError
from trainer.network.discovery.addresses import check_node_address, check_seed_address

__all__ = ["DiscoveryConfig"]


@dataclass(frozen=True, kw_only=True, slots=True)
class DiscoveryConfig:
    """How nodes of a run find each other.

    An announcement is repeated six times before it expires, so that losing a few does not lose the node.
    """

    initial_peers: tuple[str, ...] = ()
    """Where to begin: ``host:port`` of nodes (peer exchange) or ``/ip4/…/p2p/…`` of seeds (DHT); not both kinds."""
    announce_interval_s: float = 10.0
    """Seconds between two announcements of this node."""
    announcement_lifetime_s: float = 60.0
    """Seconds until an announcement that is not repeated expires, of this node and here of any other; 1 to 3,600."""
    poll_interval_s: float = 2.0
    """Seconds between two look-ups (DHT) or two rounds of exchange (static)."""
    request_timeout_s: float = 10.0
    """Seconds for one look-up, one announcement or one exchange."""
    max_retry_interval_s: float = 30.0
    """Longest pause, in seconds, before an address that does not answer is tried again."""
    max_peers: int = 1024
    """Most peers remembered. When there are more, hosts with many of them that are of no use lose some."""
    allow_private: bool = False
    """Connect to loopback, private and link-local addresses that others announce, and let names stand for keys: for a
    cluster or a test where no stranger can come. Without it, this node connects only to addresses of a kind that an
    initial peer or its own address is of."""
    max_clock_skew_s: float = 120.0
    """How far, in seconds, the clock of a peer may be ahead of ours."""
    dht_host: str = "0.0.0.0"
    """Address the DHT node listens on."""
    dht_port: int = 0
    """Port the DHT node listens on; 0 takes a free one."""
    dht_client_mode: bool = False
    """Only ask the DHT, serve nothing: for nodes nobody can reach."""

    partition_by_stage: bool = False
    """Workers of a pipeline are filed in the DHT by stage, so that looking for some does not bring all. The same at all
    nodes of a run: who looks in one place does not find who files in another."""
    num_partitions: int = 0
    """Over how many keys the stages are dealt then, neighbours together; 0: each stage has its own."""

    def __post_init__(self) -> None:
        for name in ("announce_interval_s", "poll_interval_s", "request_timeout_s", "max_retry_interval_s"):
            _check_range(name, getattr(self, name), 0.05, 3600.0)
        _check_range("announcement_lifetime_s", self.announcement_lifetime_s, 1.0, 3600.0)
        _check_range("max_clock_skew_s", self.max_clock_skew_s, 0.0, 3600.0)
        _check_range("max_peers", self.max_peers, 1, 100_000)
        _check_range("dht_port", self.dht_port, 0, 65535)
        _check_range("num_partitions", self.num_partitions, 0, 10_000)
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
            (check_seed_address if self.uses_dht else check_node_address)(address)

    @property
    def uses_dht(self) -> bool:
        """Whether the initial peers are seeds of a DHT."""
        return bool(self.initial_peers) and self.initial_peers[0].startswith("/")


def _check_range(name: str, value: float, low: float, high: float) -> None:
    if not (math.isfinite(value) and low <= value <= high):
        raise TrainerUsageError(f"{name}: expected {low:g} to {high:g}, found {value!r}")

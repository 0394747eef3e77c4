"""Options of relays: those by which a node is reached, and what a machine gives that relays for others itself."""

from __future__ import annotations

from dataclasses import dataclass

from trainer.errors import TrainerUsageError
from trainer.network.rpc.config import split_address

MAX_RELAYS = 2
DEFAULT_PORT = 4002
"""Where nodes register at a relay that was given no port, and where nodes look for one at hosts named to them."""
SERVED_BYTES_PER_S = 2.5e6


@dataclass(frozen=True, kw_only=True, slots=True)
class RelayConfig:
    """Both sides; by default there is neither."""

    through: tuple[str, ...] = ()
    """``host:port`` of one or two relays, for a node that others cannot connect to."""
    auto: bool = True
    """Look for relays where nobody connects to this node and `through` names none: nodes that `serve`, and port 4002 of
    the hosts of the initial peers. Two at most are used, and none while the node is reached directly."""
    wait_s: float = 30.0
    """Seconds to wait for a relay at the start, before the node goes on without one and keeps trying."""
    serve: bool = False
    """Relay for other nodes of the run, and announce that to them, as long as others find `port` reachable."""
    port: int = 0
    """TCP port at which others may register to be relayed by this node; 0: relays for nobody, or with `serve` 4002."""
    host: str = "0.0.0.0"
    """The interface to listen on, for nodes and for those that call them."""
    public_host: str = ""
    """Host under which others reach the lent ports; empty: the one under which each node has reached this relay."""
    first_port: int = 0
    """Lowest port to lend, of `max_nodes` in a row; 0: any free ones."""
    bytes_per_s: float = 0.0
    """Bytes a second in all, both directions counted, shared evenly by the nodes that use it; 0: no bound, but
    2,500,000 with `serve`, so that a node's own training has the rest of its link."""
    max_nodes: int = 64
    """Nodes that may be registered at once."""
    max_nodes_per_host: int = 8
    """Among them, of one IPv4 address or IPv6 /64."""
    max_connections: int = 1024
    """Connections carried at once in all, each of two open files and at most half a MiB of memory; fewer where the
    process may open less than eight files for each."""
    max_connections_per_node: int = 128
    """Connections carried at once for one node."""
    max_connections_per_host: int = 32
    """Among them, from one IPv4 address or IPv6 /64."""

    @property
    def is_used(self) -> bool:
        """Whether the operator has asked for either side."""
        return bool(self.through or self.port or self.serve)

    @property
    def listen_port(self) -> int:
        """Where others register; 0: nowhere."""
        return self.port or (DEFAULT_PORT if self.serve else 0)

    @property
    def limit_bytes_per_s(self) -> float:
        """Bytes a second that are carried; 0: no bound."""
        return self.bytes_per_s or (SERVED_BYTES_PER_S if self.serve else 0.0)

    def __post_init__(self) -> None:
        if self.serve and self.through:
            raise TrainerUsageError(
                "relay.serve: expected a node that others reach, found relay.through, by which others reach one that "
                "they do not reach otherwise; leave one of the two out"
            )
        if len(self.through) > MAX_RELAYS:
            raise TrainerUsageError(f"relay.through: expected {MAX_RELAYS} relays at most, found {len(self.through)}")
        for address in self.through:
            try:
                split_address(address)
            except TrainerUsageError as error:
                raise TrainerUsageError(f"relay.through: {error}") from None
        if not 0 < self.wait_s < float("inf"):
            raise TrainerUsageError(f"relay.wait_s: expected a positive number of seconds, found {self.wait_s}")
        for name in ("port", "first_port"):
            if not 0 <= getattr(self, name) <= 65_535:
                raise TrainerUsageError(f"relay.{name}: expected 0 to 65535, found {getattr(self, name)}")
        if self.first_port and not 1024 <= self.first_port <= 65_536 - self.max_nodes:
            highest = 65_536 - self.max_nodes
            raise TrainerUsageError(
                f"relay.first_port: expected 1024 to {highest}, so that there are {self.max_nodes} ports from it on, "
                f"found {self.first_port}"
            )
        if not 0 <= self.bytes_per_s < float("inf"):
            raise TrainerUsageError(f"relay.bytes_per_s: expected 0 or more, found {self.bytes_per_s}")
        for name in (
            "max_nodes",
            "max_nodes_per_host",
            "max_connections",
            "max_connections_per_node",
            "max_connections_per_host",
        ):
            if getattr(self, name) < 1:
                raise TrainerUsageError(f"relay.{name}: expected 1 or more, found {getattr(self, name)}")

"""Whether others reach this node: the address it announces, and what a peer finds that calls it back.

announced address ≠ where calls come from        wrong address: --public-address
calls come from an address that is not of here    a router translates: forward the port
no answer at an address of this machine           a firewall drops it
refused at an address of this machine             it listens at another interface, or a firewall rejects it
another identity answers                          the port is someone else's, or forwarded to another machine
"""

from __future__ import annotations

import errno
import socket
from dataclasses import dataclass
from typing import Final

from genesis.doctor import Finding
from genesis.doctor.findings import problem_of
from trainer.errors import RefusedError, RpcError, TrainerUsageError
from trainer.network.reachability import DIAL_BACK_METHOD, DialBackReply, DialBackRequest
from trainer.network.rpc import Endpoint, Peer
from trainer.network.rpc.config import RpcConfig, split_address
from trainer.network.rpc.dialing import HostKind, address_group, host_kind, parse_ip
from trainer.network.rpc.messages import Reason
from trainer.run.doctor.peers import Greeting

_TIMEOUT_S: Final = 25.0
_FOUND: Final = {
    "refused": "the connection was refused",
    "timeout": "nothing answered",
    "no_route": "there is no way to it",
    "tls": "something that is no node of this run answered",
    "another": "another identity answered",
    "failed": "this node's key did not answer",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a node is: what it announces, how a peer sees it, and what is of this machine."""

    announced: str  # ``host:port``.
    announced_ip: str  # The host looked up; empty: it has no address.
    listens_at: str  # Interface.
    local_host: str  # Of this machine, on its default route.
    local_port: int  # On which it listens.
    seen_host: str = ""  # Where a peer sees calls come from; an IPv6 /64 as such.
    is_seen_here: bool = False  # Whether that is an address of this machine.
    peer_kind: HostKind | None = None  # What kind of address the peers have.

    @property
    def port(self) -> int:
        """The announced port."""
        return split_address(self.announced)[1]

    @property
    def is_where_seen(self) -> bool:
        """Whether the announced address is where a peer sees this node, or both are of this machine."""
        if not self.seen_host or address_group(self.announced_ip) == self.seen_host:
            return True
        return self.is_seen_here and is_of_this_machine(self.announced_ip)

    @property
    def seen_address(self) -> str:
        """``host:port`` of the announced port where a peer sees this node."""
        return f"{self.seen_host}:{self.port}"


def is_of_this_machine(host: str) -> bool:
    """Whether an address is one of this machine's interfaces: a socket can be bound to it."""
    ip = parse_ip(host)
    if ip is None:
        return False
    family = socket.AF_INET if ip.version == 4 else socket.AF_INET6
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((str(ip), 0))
        except OSError as error:
            return error.errno not in (errno.EADDRNOTAVAIL, errno.EINVAL)
    return True


def looked_up(host: str) -> str:
    """Returns the first address of a host; empty: it has none."""
    if host_kind(host) is not None:
        return host
    try:
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except (OSError, UnicodeError):
        return ""


def place_of(
    endpoint_address: str,
    config: RpcConfig,
    local_host: str,
    local_port: int,
    greeting: Greeting | None,
    peer_host: str,
) -> Place:
    """Returns where a node is, as its endpoint and one peer see it.

    ``local_port`` is the one it listens on; ``peer_host`` that of any peer, empty without one.
    """
    announced_host, _ = split_address(endpoint_address)
    seen = greeting.seen_host if greeting is not None else ""
    of_peer = looked_up(peer_host) if peer_host else ""
    return Place(
        announced=endpoint_address,
        announced_ip=looked_up(announced_host),
        listens_at=config.host,
        local_host=local_host,
        local_port=local_port,
        seen_host=seen,
        is_seen_here=is_of_this_machine(seen.partition("/")[0]) if "/" not in seen and seen else False,
        peer_kind=host_kind(of_peer) if of_peer else None,
    )


def address_finding(place: Place) -> Finding:
    """Whether the announced address can be an address for the others at all."""
    kind = host_kind(place.announced_ip) if place.announced_ip else None
    seen = place.seen_address if place.seen_host and "/" not in place.seen_host else f"HOST:{place.port}"
    cure = f"give --public-address {seen}, the address at which the others reach this machine"
    if kind is None:
        text = f"expected an address that can be looked up, found {place.announced}"
        return Finding.failed("network", "address", text, cure)
    if kind == "unusable":
        text = f"expected an address of this machine, found {place.announced}, which nobody can connect to"
        return Finding.failed("network", "address", text, cure)
    if place.peer_kind is None:
        if kind != "public":
            text = f"{place.announced} is {kind}: only nodes of the same network reach it"
            return Finding.warning(
                "network", "address", text, "give --public-address HOST:PORT if others are elsewhere"
            )
        return Finding.ok("network", "address", f"announces {place.announced}")
    is_too_near = kind == "loopback" and place.peer_kind != "loopback"
    if is_too_near or (kind != "public" and place.peer_kind == "public"):
        text = f"expected an address that {place.peer_kind} peers reach, found {place.announced} ({kind})"
        forwarding = "" if place.is_seen_here else f", and forward that port of the router to {place.local_host}"
        return Finding.failed("network", "address", text, f"{cure}{forwarding}")
    return Finding.ok("network", "address", f"announces {place.announced} ({kind})")


async def dial_back(endpoint: Endpoint, peer: Peer, place: Place) -> DialBackReply:
    """Has a peer connect to the announced port of where it sees this node; raises RpcError: it does not."""
    host = ""
    if "/" in place.seen_host:  # IPv6: the peer is told which address of the /64.
        host = place.announced_ip if place.is_where_seen else _local_host_towards(peer.address)
    body = DialBackRequest(port=place.port, host=host)
    return (await endpoint.call(peer, DIAL_BACK_METHOD, body, DialBackReply, timeout_s=_TIMEOUT_S)).body


def _local_host_towards(address: str) -> str:
    host, port = split_address(address)
    with socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host.strip("[]"), port))
        except OSError:
            return ""
        return str(probe.getsockname()[0])


def reached_finding(place: Place, reply: DialBackReply, who: str, *, taken: str = "") -> Finding:
    """What a peer has found that called this node back; ``taken``: why this process could not listen there itself."""
    where = reply.address
    if reply.outcome == "reached":
        if not place.is_where_seen:
            text = f"{who} reaches this node at {where}, but it announces {place.announced}"
            return Finding.failed(
                "network", "reachable", text, f"give --public-address {where}: wrong address, the port is open"
            )
        running = " (a node with this key runs there already)" if taken else ""
        return Finding.ok("network", "reachable", f"reachable as {where}, says {who}{running}")
    text = f"expected {who} to reach this node at {where}, found: {_FOUND.get(reply.outcome, reply.outcome)}"
    return Finding.failed("network", "reachable", text, _cure(place, reply, taken))


def _cure(place: Place, reply: DialBackReply, taken: str) -> str:
    port = place.port
    if taken:
        return f"end what listens there (ss -ltnp 'sport = :{port}' names it), or choose another --port"
    if port != place.local_port and place.is_seen_here:
        return (
            f"give --public-address {place.seen_host}:{place.local_port}, or --port {port}: it listens on port "
            f"{place.local_port} and announces another"
        )
    if reply.outcome in ("another", "tls"):
        return (
            f"choose another --port, or forward port {port} to this machine ({place.local_host}): it leads to another "
            "machine or process now"
        )
    if not place.is_seen_here and "/" not in place.seen_host:
        wrong = "" if place.is_where_seen else f"; check the address too: it announces {place.announced}"
        return (
            f"the router: forward TCP port {port} of {place.seen_host} to {place.local_host}:{place.local_port}, and "
            f"open it in this machine's firewall{wrong}"
        )
    if reply.outcome == "refused":
        if host_kind(place.listens_at) == "loopback":
            return f"it listens at {place.listens_at} only: give --set rpc.host=0.0.0.0"
        return f"the firewall rejects it: allow TCP port {port} (ufw allow {port}/tcp), or end a proxy on that port"
    return (
        f"the firewall drops it: allow TCP port {port} here (ufw allow {port}/tcp, firewall-cmd --add-port={port}/tcp) "
        "and in the provider's security group"
    )


def is_too_soon(error: RpcError | TrainerUsageError) -> bool:
    """Whether a peer refuses to call back now, and will later."""
    return isinstance(error, RefusedError) and error.reason in (Reason.RATE, Reason.BUSY)


def not_dialled_finding(error: RpcError | TrainerUsageError) -> Finding:
    """Why no peer has called back."""
    if is_too_soon(error):
        return Finding.skipped("network", "reachable", f"{problem_of(error)}; run it again in a minute")
    if isinstance(error, RefusedError) and error.reason == Reason.METHOD:
        return Finding.skipped("network", "reachable", "the peers are of a release that calls nobody back")
    return Finding.skipped("network", "reachable", problem_of(error))


def taken_finding(port: int, error: TrainerUsageError) -> Finding:
    """That this process cannot listen, and nobody is there to say who does."""
    return Finding.failed(
        "network",
        "port",
        problem_of(error),
        f"end what listens there (ss -ltnp 'sport = :{port}' names it), or choose another --port",
    )

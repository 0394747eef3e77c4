"""IP addresses of peers: how many count as one host, and which may not be dialled because a stranger says so.

Identities cost nothing, addresses cost something. So every limit that is shared among peers is shared by address too:
an IPv4 address is one host, and so is an IPv6 /64, the least that a provider hands to one customer.
"""

from __future__ import annotations

import ipaddress
from typing import Literal, TypeAlias

__all__ = [
    "HostKind",
    "address_group",
    "group_of_grpc_peer",
    "grpc_peer_of_socket",
    "host_kind",
    "is_private_host",
]

HostKind: TypeAlias = Literal["public", "private", "loopback", "link-local", "unusable"]
"""``unusable`` is no host's own address: multicast, unspecified, reserved."""

_IPV6_PREFIX_BITS = 64
_LOCAL_NAMES = ("localhost", "localhost.localdomain", "ip6-localhost", "ip6-loopback")


def address_group(host: str) -> str:
    """The key under which limits count a host: an IPv4 address, an IPv6 /64, or the name in lower case.

    An IPv4 address mapped into IPv6 counts as the IPv4 address. A zone (``%eth0``) and brackets are left out.
    """
    name = host.strip("[]").partition("%")[0].lower()
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return name
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((address, _IPV6_PREFIX_BITS), strict=False))


def group_of_grpc_peer(grpc_peer: str) -> str:
    """The same for gRPC's name of a peer: ``ipv4:127.0.0.1:5000``, ``ipv6:%5B::1%5D:5000``, ``unix:…``."""
    scheme, _, rest = grpc_peer.partition(":")
    if scheme not in ("ipv4", "ipv6"):
        return grpc_peer
    return address_group(rest.replace("%5B", "[").replace("%5D", "]").rpartition(":")[0])


def grpc_peer_of_socket(peer_name: object) -> str | None:
    """GRPC's name of a peer for what ``socket.getpeername`` returned; None if that is no IP address and port."""
    if not (isinstance(peer_name, tuple) and len(peer_name) >= 2):
        return None
    try:
        address = ipaddress.ip_address(str(peer_name[0]).partition("%")[0])
    except ValueError:
        return None
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is None:
            return f"ipv6:%5B{peer_name[0]}%5D:{peer_name[1]}"
        address = address.ipv4_mapped
    return f"ipv4:{address}:{peer_name[1]}"


def is_private_host(host: str) -> bool:
    """Checks whether a host is no public unicast address: loopback, private, link-local, multicast, unspecified …

    A name is judged by itself (``localhost`` is private); whoever resolves it judges what it resolves to.
    """
    name = host.strip("[]").partition("%")[0].lower()
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return name.rstrip(".") in _LOCAL_NAMES or name.rstrip(".").endswith((".localhost", ".local", ".internal"))
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    judged = mapped or address
    return not judged.is_global or judged.is_multicast


def host_kind(host: str) -> HostKind | None:
    """What kind of address this is; None: a name, whose kind is that of the address it resolves to."""
    try:
        address = ipaddress.ip_address(host.strip("[]").partition("%")[0])
    except ValueError:
        return None
    if isinstance(address, ipaddress.IPv6Address):
        address = address.ipv4_mapped or address
    if address.is_loopback:
        return "loopback"
    if address.is_link_local:
        return "link-local"
    if address.is_multicast or address.is_unspecified or address.is_reserved:
        return "unusable"
    return "public" if address.is_global else "private"

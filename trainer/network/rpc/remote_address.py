"""IP addresses of peers: how many count as one host, and which may not be dialled because a stranger says so.

Identities cost nothing, addresses cost something. So every limit that is shared among peers is shared by address too:
an IPv4 address is one host, and so is an IPv6 /64, the least that a provider hands to one customer.
"""

from __future__ import annotations

import ipaddress
from typing import Literal, TypeAlias

HostKind: TypeAlias = Literal["public", "private", "loopback", "link-local", "unusable"]
"""``unusable`` is no host's own address: multicast, unspecified, reserved."""

_IPV6_PREFIX_BITS = 64
_LOCAL_NAMES = ("localhost", "localhost.localdomain", "ip6-localhost", "ip6-loopback")


def parse_ip(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Returns the address that ``host`` spells, without brackets and zone (``%eth0``); None: it is a name.

    An IPv4 address mapped into IPv6 becomes the IPv4 address.
    """
    try:
        address = ipaddress.ip_address(host.strip("[]").partition("%")[0])
    except ValueError:
        return None
    return (address.ipv4_mapped or address) if isinstance(address, ipaddress.IPv6Address) else address


def address_group(host: str) -> str:
    """Returns the key under which limits count a host: an IPv4 address, an IPv6 /64, or the name in lower case."""
    address = parse_ip(host)
    if address is None:
        return host.strip("[]").partition("%")[0].lower()
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    return str(ipaddress.ip_network((address, _IPV6_PREFIX_BITS), strict=False))


def is_private_host(host: str) -> bool:
    """Returns whether a host is no public unicast address: loopback, private, link-local, multicast, unspecified …

    A name is judged by itself (``localhost`` is private), and not by what it resolves to.
    """
    address = parse_ip(host)
    if address is None:
        name = host.strip("[]").partition("%")[0].lower().rstrip(".")
        return name in _LOCAL_NAMES or name.endswith((".localhost", ".local", ".internal"))
    return not address.is_global or address.is_multicast


def host_kind(host: str) -> HostKind | None:
    """Returns what kind of address this is; None: a name, whose kind is that of the address it resolves to."""
    address = parse_ip(host)
    if address is None:
        return None
    if address.is_loopback:
        return "loopback"
    if address.is_link_local:
        return "link-local"
    if address.is_multicast or address.is_unspecified or address.is_reserved:
        return "unusable"
    return "public" if address.is_global else "private"

"""Whose process is at the other end of a TCP connection on this machine: Linux shows the user of every socket."""

from __future__ import annotations

import ipaddress
import socket
import sys
from pathlib import Path
from typing import Final

__all__ = ["user_of_peer"]

_TABLES: Final = (Path("/proc/self/net/tcp"), Path("/proc/self/net/tcp6"))


def user_of_peer(client: tuple[str, int], server: tuple[str, int]) -> int | None:
    """The user id of the process that holds the client's end.

    Args:
        client: address and port that the connection comes from.
        server: address and port that it goes to.

    Returns:
        None where that cannot be told: the client has closed its socket, it is on another machine or in another network
        namespace, or the platform does not say.
    """
    for table in _TABLES:
        try:
            lines = table.read_text(encoding="ascii").splitlines()[1:]
        except OSError:
            continue
        family = socket.AF_INET6 if table.name == "tcp6" else socket.AF_INET
        wanted = (_hex_of(client, family), _hex_of(server, family))
        for line in lines:
            fields = line.split()
            # A socket that no process holds any more has no inode, and is shown as root's.
            if (fields[1], fields[2]) == wanted and fields[9] != "0":
                return int(fields[7])
    return None


def _hex_of(end: tuple[str, int], family: socket.AddressFamily) -> str:
    """As the kernel writes it: the address in words of 32 bits in this machine's byte order, and the port."""
    address = ipaddress.ip_address(end[0].partition("%")[0])
    if family == socket.AF_INET6 and isinstance(address, ipaddress.IPv4Address):
        address = ipaddress.IPv6Address(f"::ffff:{address}")
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    if family == socket.AF_INET and mapped is not None:
        address = mapped
    packed = address.packed
    words = [int.from_bytes(packed[at : at + 4], sys.byteorder) for at in range(0, len(packed), 4)]
    return "".join(f"{word:08X}" for word in words) + f":{end[1]:04X}"

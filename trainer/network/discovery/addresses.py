"""Where a node may be told to begin, checked before anything is opened: ``host:port``, or a seed's multiaddress.

A slip of the pen would otherwise look like a node that is not there yet, and be waited for. What passes can be dialled;
whether somebody answers is another matter. The id of a seed is decoded, since one that was cut short in copying is the
slip that happens: its multihash says how long it is.
"""

from __future__ import annotations

import ipaddress
import re

from trainer.errors import TrainerUsageError
from trainer.network.rpc.config import split_address

__all__ = ["check_node_address", "check_seed_address", "seed_host"]

_HOST_NAME = re.compile(r"[A-Za-z0-9._-]{1,253}")
_SEED = re.compile(
    r"/(?P<kind>ip4|ip6|dns|dns4|dns6)/(?P<host>[^/\s]+)/(?:tcp|udp)/(?P<port>[0-9]{1,5})"
    r"(?:/(?:quic|quic-v1|tls|ws|wss))*/p2p/(?P<id>[^/\s]+)"
)
_BASE58 = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"
_MIN_ID_CHARS, _MAX_ID_CHARS = 40, 64


def check_node_address(address: str) -> None:
    """Checks ``host:port``.

    Raises:
        TrainerUsageError: it is something else.
    """
    try:
        host, _ = split_address(address)
    except TrainerUsageError:
        host = ""
    if not (_HOST_NAME.fullmatch(host) or _is_ip(host, 6)):
        raise TrainerUsageError(
            "initial_peers: expected host:port of a node, such as 203.0.113.7:4100, or /ip4/…/tcp/…/p2p/… as a seed "
            f"prints it, found {address[:80]!r}"
        )


def check_seed_address(address: str) -> None:
    """Checks ``/ip4/…/tcp/…/p2p/…``.

    Raises:
        TrainerUsageError: it is something else.
    """
    if "/p2p/" not in address:
        found = f"{address[:200]!r}, which does not say whose it is (/p2p/…)" if address else "nothing"
        raise TrainerUsageError(
            f"initial_peers: expected an address of a seed, whole as it prints it (/ip4/…/tcp/…/p2p/…), found {found}"
        )
    parts = _SEED.fullmatch(address)
    if parts is None or not (_is_host(parts["kind"], parts["host"]) and 0 < int(parts["port"]) <= 65535):
        raise TrainerUsageError(
            f"initial_peers: expected an address of a seed, such as /ip4/203.0.113.7/tcp/4001/p2p/…, found "
            f"{address[:200]!r}"
        )
    if not _is_peer_id(parts["id"]):
        raise TrainerUsageError(
            f"initial_peers: expected a whole id behind /p2p/, as the seed prints it, found {parts['id'][:80]!r}"
        )


def seed_host(address: str) -> str:
    """The host of a seed's address that has been checked."""
    return address.split("/")[2]


def _is_host(kind: str, host: str) -> bool:
    return _is_ip(host, int(kind[2:])) if kind.startswith("ip") else _HOST_NAME.fullmatch(host) is not None


def _is_ip(host: str, version: int) -> bool:
    try:
        return ipaddress.ip_address(host).version == version
    except ValueError:
        return False


def _is_peer_id(text: str) -> bool:
    """Whether it is a multihash in base58: a code, the length of the rest, the rest."""
    if not _MIN_ID_CHARS <= len(text) <= _MAX_ID_CHARS or not set(text) <= set(_BASE58):
        return False
    number = 0
    for char in text:
        number = number * 58 + _BASE58.index(char)
    leading = len(text) - len(text.lstrip("1"))
    raw = bytes(leading) + number.to_bytes((number.bit_length() + 7) // 8)
    return len(raw) > 2 and raw[1] == len(raw) - 2

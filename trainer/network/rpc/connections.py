"""The connections that others have opened to this node: what is known of each, and which are closed under pressure.

gRPC accepts connections from anyone up to a number, and has no hook that could prefer one to another. So a guard looks
once a second at the sockets themselves (1,000 idle connections cost 2 ms). It ends the connections that an address has
beyond its share, and the worst of all close to gRPC's limit: those on which no signed message came before those that
have, idle ones before those with calls, the longest idle first. Connections of proven peers stay. It also ends single
ones: gRPC's server cannot break off a call whose caller takes nothing, only wait until the connection ends.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import os
import socket
import stat
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from trainer.network.rpc.dialing import address_group, parse_ip
from trainer.network.rpc.limits import MIN_GOOD_CALLS, MIN_TENURE_S, Share, Standing
from trainer.network.rpc.messages import PeerId

logger = logging.getLogger(__name__)

_SWEEP_INTERVAL_S = 1.0
_MIN_SHARE = 16
_MAX_OF_PROVEN_PEER = 8  # Connections of one proven peer that count as its own; a node needs one to each of its peers.
_DESCRIPTORS: Final = "/proc/self/fd"


@dataclass(slots=True, eq=False)
class Connection:
    """One that was accepted; times are those of a clock that never goes back."""

    grpc_peer: str  # Its other end, as gRPC names it.
    address: str  # The host, as limits count it.
    used_at_s: float  # When it was first seen, or a call on it last began or ended.
    num_calls: int = 0  # In progress.
    peer_id: PeerId = ""  # Whose call was last verified on it; empty: none was yet.
    known_since_s: float = 0.0  # Since when all its calls have been this peer's.
    num_good: int = 0  # Calls of this peer since then that ended in good order.
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held by the one call that is served at a time, where `Connections.takes_turns` says so."""


def worst_connections(
    connections: Sequence[Connection], is_proven: Callable[[Connection], bool], max_total: int
) -> list[Connection]:
    """Returns the connections to close, where the server accepts ``max_total``.

    Peers of an address that are not proven may have a quarter of them, at least 16; a quarter is kept for newcomers.
    """
    max_per_address = max(_MIN_SHARE, max_total // 4)
    by_address: dict[str, list[Connection]] = {}
    num_of_proven: Counter[PeerId] = Counter()
    for connection in sorted(connections, key=lambda it: it.used_at_s, reverse=True):
        num_of_proven[connection.peer_id] += 1
        if not (is_proven(connection) and num_of_proven[connection.peer_id] <= _MAX_OF_PROVEN_PEER):
            by_address.setdefault(connection.address, []).append(connection)
    closed = []
    for unproven in by_address.values():
        unproven.sort(key=lambda it: (bool(it.peer_id), it.num_calls > 0, it.used_at_s), reverse=True)
        while len(unproven) > max_per_address:
            closed.append(unproven.pop())
    num_beyond = len(connections) - len(closed) - max(1, max_total - max_total // 4)
    remaining = Counter({address: len(unproven) for address, unproven in by_address.items()})
    for _ in range(min(num_beyond, remaining.total())):
        [(most, _)] = remaining.most_common(1)
        closed.append(by_address[most].pop())
        remaining[most] -= 1
    return closed


class Connections:
    """The accepted connections of one endpoint; calls in good order on them add to ``standing``."""

    def __init__(self, max_connections: int, standing: Standing, now: Callable[[], float] = time.monotonic) -> None:
        self._max_connections = max_connections
        self._standing = standing
        self._now = now
        self._known: dict[str, Connection] = {}
        self._sockets: AcceptedSockets | None = None

    @contextmanager
    def in_use(self, grpc_peer: str) -> Iterator[Connection]:
        """Gives the connection of a call, for as long as the call takes."""
        connection = self._known.get(grpc_peer) or self._add(grpc_peer)
        connection.num_calls += 1
        connection.used_at_s = self._now()
        try:
            yield connection
        finally:
            connection.num_calls -= 1
            connection.used_at_s = self._now()

    def takes_turns(self, connection: Connection) -> bool:
        """Returns whether one call at a time is served on it, because strangers at its address let answers stall."""
        return self._standing.is_greylisted(connection.address) and not self._is_proven(connection)

    def share(self, connection: Connection) -> Share:
        """Returns what a call on it counts for whose caller is not known yet."""
        return self._standing.share(connection.peer_id, connection.address)

    def identified(self, connection: Connection, peer_id: PeerId) -> None:
        """Records that a call by ``peer_id`` was verified on it."""
        if connection.peer_id != peer_id:
            connection.peer_id, connection.known_since_s, connection.num_good = peer_id, self._now(), 0

    def ended_well(self, connection: Connection, peer_id: PeerId) -> None:
        """Records that such a call ended in good order; enough of them prove the peer."""
        if connection.peer_id != peer_id:
            return
        connection.num_good += 1
        is_due = connection.num_good >= MIN_GOOD_CALLS and self._now() - connection.known_since_s >= MIN_TENURE_S
        if is_due or self._standing.is_proven(peer_id):
            self._standing.prove(peer_id, connection.address)

    def cut_stalled(self, connection: Connection) -> None:
        """Ends one whose caller takes nothing, at once, and with it all calls on it, where that is possible."""
        if self._sockets is not None and self._sockets.shut(connection.grpc_peer):
            if not self._is_proven(connection):
                self._standing.let_stall(connection.address)
            logger.info("closed the connection from %s: it takes nothing", connection.grpc_peer)

    async def guard(self, port: int, sweep_calls: Callable[[], None]) -> None:
        """Closes what is too much and calls ``sweep_calls``, once a second while the server listens at ``port``."""
        if AcceptedSockets.are_visible():
            self._sockets = AcceptedSockets(port)
        while True:
            await asyncio.sleep(_SWEEP_INTERVAL_S)
            sweep_calls()
            if self._sockets is not None:
                try:
                    self._sweep(self._sockets)
                except OSError as error:
                    logger.warning("cannot look at this process's connections now: %s", error)

    def _sweep(self, sockets: AcceptedSockets) -> None:
        there = sockets.scan()
        for gone in self._known.keys() - there:
            if not self._known[gone].num_calls:
                del self._known[gone]
        for new in there - self._known.keys():
            self._add(new)
        worst = worst_connections([self._known[peer] for peer in there], self._is_proven, self._max_connections)
        num_closed = sum(sockets.shut(connection.grpc_peer) for connection in worst)
        if num_closed:
            counted = Counter(connection.address for connection in worst).most_common(3)
            logger.info("closed %d of %d connections, most from %s", num_closed, len(there), counted)

    def _add(self, grpc_peer: str) -> Connection:
        connection = Connection(grpc_peer, group_of_grpc_peer(grpc_peer), self._now())
        self._known[grpc_peer] = connection
        # Where no sweep forgets the closed ones, the oldest without calls goes.
        while len(self._known) > 2 * self._max_connections:
            oldest = next((peer for peer, known in self._known.items() if not known.num_calls), None)
            if oldest is None:
                break
            del self._known[oldest]
        return connection

    def _is_proven(self, connection: Connection) -> bool:
        return bool(connection.peer_id) and self._standing.is_proven(connection.peer_id)


class AcceptedSockets:
    """The connections that a listening port of this process has accepted, found among the process's own descriptors.

    A socket is looked at through a duplicate, which pins it: gRPC, which owns it, may close its own descriptor at any
    time, and the number may be another file's by then. A look costs 2 µs for each descriptor seen before.
    """

    def __init__(self, port: int) -> None:
        self._port = port
        self._peer_of: dict[int, str | None] = {}  # By inode.
        self._descriptor_of: dict[str, int] = {}

    @staticmethod
    def are_visible() -> bool:
        """Returns whether this platform shows a process its descriptors as `scan` needs it."""
        return Path(_DESCRIPTORS).is_dir()

    def scan(self) -> frozenset[str]:
        """Returns the other ends of all connections, by the names that gRPC gives to peers."""
        seen: dict[int, str | None] = {}
        self._descriptor_of = {}
        known = self._peer_of
        for name in os.listdir(_DESCRIPTORS):  # noqa: PTH208 Path objects would take five times as long.
            descriptor = int(name)
            try:
                status = os.fstat(descriptor)
                if not stat.S_ISSOCK(status.st_mode):
                    continue
                inode = status.st_ino
                peer = seen[inode] = known[inode] if inode in known else self._peer_at(descriptor)
            except OSError:
                continue  # Not connected, closed meanwhile, or no descriptor is left to look with.
            if peer is not None:
                self._descriptor_of[peer] = descriptor
        # An inode's number comes again once its socket is closed; what is not there now is forgotten.
        self._peer_of = seen
        return frozenset(self._descriptor_of)

    def shut(self, peer: str) -> bool:
        """Ends the connection with ``peer``, both ways at once, and so its calls; returns whether there is one."""
        for rescan in (False, True):
            if rescan:
                self.scan()
            descriptor = self._descriptor_of.get(peer)
            if descriptor is None:
                continue
            with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as pinned:  # It may be closed meanwhile.
                if self._peer_on(pinned) == peer:
                    pinned.shutdown(socket.SHUT_RDWR)
                    return True
        return False

    def _peer_at(self, descriptor: int) -> str | None:
        with socket.socket(fileno=os.dup(descriptor)) as pinned:
            return self._peer_on(pinned)

    def _peer_on(self, pinned: socket.socket) -> str | None:
        """Returns gRPC's name of the other end; None if that is no IP socket of this port."""
        own: object = pinned.getsockname()
        if not (isinstance(own, tuple) and len(own) >= 2 and own[1] == self._port):
            return None
        host, port = pinned.getpeername()[:2]
        address = parse_ip(host)
        if isinstance(address, ipaddress.IPv6Address):
            return f"ipv6:%5B{host}%5D:{port}"
        return f"ipv4:{address}:{port}"


def group_of_grpc_peer(grpc_peer: str) -> str:
    """Returns `address_group` for gRPC's name of a peer: ``ipv4:127.0.0.1:5000``, ``ipv6:%5B::1%5D:5000`` …"""
    scheme, _, rest = grpc_peer.partition(":")
    if scheme not in ("ipv4", "ipv6"):
        return grpc_peer
    return address_group(rest.replace("%5B", "[").replace("%5D", "]").rpartition(":")[0])

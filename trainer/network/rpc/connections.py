"""The connections that others have opened to this node: what is known of each, and which are closed under pressure.

gRPC accepts connections up to a number, from whomever, and has no hook that could prefer one to another. So a guard
looks once a second at the sockets themselves (`trainer.network.rpc.accepted_sockets`) and ends those that an address
has beyond its share, and the worst of all where they are close to gRPC's limit: the ones on which nobody has said
anything that was signed before those that have, idle ones before those with calls, the longest idle first. Connections
of proven peers count against no share and stay. 1,000 idle connections cost 2 ms of the event loop a second.

The guard also ends single connections: gRPC's server cannot break off a call whose caller takes nothing, it can only
wait until the connection ends.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from trainer.network.rpc.accepted_sockets import AcceptedSockets
from trainer.network.rpc.messages import PeerId
from trainer.network.rpc.remote_address import group_of_grpc_peer
from trainer.network.rpc.standing import MIN_GOOD_CALLS, MIN_TENURE_S, Share, Standing

__all__ = ["Connection", "Connections", "worst_connections"]

logger = logging.getLogger(__name__)

SWEEP_EVERY_S = 1.0
_MIN_SHARE = 16
_MAX_OF_PROVEN_PEER = 8
"""Connections of one proven peer that count as its own; a node needs one to each of its peers."""


@dataclass(slots=True, eq=False)
class Connection:
    """One that was accepted; times are those of a clock that never goes back."""

    grpc_peer: str
    """Its other end, as gRPC names it."""
    address: str
    """The host, as limits count it."""
    used_at_s: float
    """When it was first seen, or a call on it last began or ended."""
    num_calls: int = 0
    """In progress."""
    peer_id: PeerId = ""
    """Whose call was last verified on it; empty: nobody's yet."""
    known_since_s: float = 0.0
    """Since when all its calls have been this peer's."""
    num_good: int = 0
    """Calls of this peer since then that ended in good order."""
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held by the one call that is served at a time, where `Connections.takes_turns` says so."""


def worst_connections(
    connections: Sequence[Connection], is_proven: Callable[[Connection], bool], max_total: int
) -> list[Connection]:
    """Those that are to be closed.

    Args:
        connections: all there are.
        is_proven: whether the peer behind one is proven; these are left alone.
        max_total: how many the server accepts. An address may have a quarter of them, at least 16, for peers that are
            not proven; and a quarter is kept free for whoever comes.
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
    """The accepted connections of one endpoint.

    Args:
        max_connections: as many as the server accepts.
        standing: which peers are proven; calls in good order add to it.
        now: seconds of a clock that never goes back.
    """

    def __init__(self, max_connections: int, standing: Standing, now: Callable[[], float] = time.monotonic) -> None:
        self._max_connections = max_connections
        self._standing = standing
        self._now = now
        self._known: dict[str, Connection] = {}
        self._sockets: AcceptedSockets | None = None

    @contextmanager
    def in_use(self, grpc_peer: str) -> Iterator[Connection]:
        """The connection of a call, for as long as it takes."""
        connection = self._known.get(grpc_peer) or self._add(grpc_peer)
        connection.num_calls += 1
        connection.used_at_s = self._now()
        try:
            yield connection
        finally:
            connection.num_calls -= 1
            connection.used_at_s = self._now()

    def takes_turns(self, connection: Connection) -> bool:
        """Whether one call at a time is served on it: where strangers at its address have let answers stall."""
        return self._standing.is_greylisted(connection.address) and not self._is_proven(connection)

    def share(self, connection: Connection) -> Share:
        """What counts for a call on it whose caller is not known yet."""
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

    def cut_stalled(self, connection: Connection) -> bool:
        """Ends one whose caller takes nothing, at once, and with it all calls on it; whether that was possible."""
        was_there = self._sockets is not None and self._sockets.shut(connection.grpc_peer)
        if was_there:
            if not self._is_proven(connection):
                self._standing.let_stall(connection.address)
            logger.info("closed the connection from %s: it takes nothing", connection.grpc_peer)
        return was_there

    async def guard(self, port: int, sweep_calls: Callable[[], None]) -> None:
        """Closes what is too much, for as long as the server listens at ``port``.

        Args:
            port: the TCP port.
            sweep_calls: called once a second as well.
        """
        if AcceptedSockets.are_visible():
            self._sockets = AcceptedSockets(port)
        while True:
            await asyncio.sleep(SWEEP_EVERY_S)
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

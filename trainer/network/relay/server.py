"""The relay: lends ports to nodes that pass its `Gate`, and joins what connects there to what the node opens for it.

Whatever anybody can send is bounded first: connections that have proven nothing yet (256, 16 of one host, ten seconds a
line; hosts with a registered node are not kept out by others'), registrations (`RelayConfig`, and per host 8 and then
one in ten seconds), probes (each by a ticket of this node's), a node's lines (16 and then one a second), connections
carried in all, for a node and from a host, and how fast a host calls a node (64 and then 4 a second), the time until a
node accepts one. Carried connections take at most a quarter of the files that the process may open. A relay connects to
nobody but, once a registration or check, to the address that a node's own connection comes from, at the port it says it
listens on: no third party can be named.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final, TypeAlias

from genesis.open_files import raise_open_files
from trainer.errors import PeerUnavailableError, RefusedError, TrainerUsageError
from trainer.network.relay.carrying import FairShares, Streams, carry
from trainer.network.relay.config import RelayConfig
from trainer.network.relay.gate import LINE_S, Gate, Place
from trainer.network.relay.protocol import (
    COPY_BYTES,
    FIRST_LINE,
    MAX_REFUSAL_CHARS,
    NODE_LINE,
    SILENCE_S,
    Accept,
    Check,
    Checked,
    Incoming,
    Lent,
    Pong,
    Probe,
    Probed,
    Refusal,
    Register,
    Show,
    cancel_once,
    end,
    probe_text,
    read_line,
    unpack_credential,
    write_line,
)
from trainer.network.rpc.admission import Admission
from trainer.network.rpc.channels import fetch_certificate
from trainer.network.rpc.credential import is_relay_pass
from trainer.network.rpc.dialing import MIN_STRANGERS_PORT, address_group
from trainer.network.rpc.identity import Identity, certificate_digest
from trainer.network.rpc.messages import Reason
from trainer.network.rpc.token_buckets import TokenBuckets, count_down, remember

logger = logging.getLogger(__name__)

_Called: TypeAlias = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

_ACCEPT_S: Final = 10.0
_DIAL_BACK_S: Final = 5.0
_MAX_UNPROVEN: Final = 256
_MAX_UNPROVEN_PER_HOST: Final = 16
_LINES, _LINES_PER_S = 16.0, 1.0
_CALLS, _CALLS_PER_S = 64.0, 4.0
_FILES_PER_CONNECTION: Final = 8
"""Two are its sockets: so the rest of the process keeps three quarters of what it may open."""
_PROBE_S: Final = 10.0
_TICKET_S: Final = 30.0
_MAX_TICKETS: Final = 16
_SWEEP_S: Final = 1.0
_LAST_LINE_S: Final = 2.0


@dataclass(slots=True, eq=False)
class _LentPort:
    """A node that is registered, and what is carried for it."""

    peer_id: str
    control: asyncio.StreamWriter
    place: Place
    server: asyncio.Server | None = None
    connections: Counter[str] = field(default_factory=Counter)  # By the host they come from.
    tasks: set[asyncio.Task[None]] = field(default_factory=set)

    @property
    def host(self) -> str:
        return self.place.host

    @property
    def port(self) -> int:
        if self.server is None or not self.server.sockets:
            return 0
        port: int = self.server.sockets[0].getsockname()[1]
        return port


class Relay:
    """Relays for others between `start` and `stop`; everything happens on the event loop of `start`.

    With ``admission`` it does so for members of that run alone. ``identity`` is that of its node, which answers probes
    by those that it has given a ticket (`new_ticket`); a relay without one, such as a seed's, answers none.
    """

    def __init__(
        self, config: RelayConfig, admission: Admission | None = None, identity: Identity | None = None
    ) -> None:
        self._config = config
        self._gate = Gate(config, admission)
        self._identity = identity
        self._sweeping: asyncio.Task[None] | None = None
        self.paused = ""
        """Why nobody new gets a port; empty: whoever passes the gate does."""
        self._server: asyncio.Server | None = None
        self._nodes: dict[str, _LentPort] = {}
        self._tickets: OrderedDict[str, float] = OrderedDict()
        """Of probes that this node has asked others for: until when each is answered, once."""
        self._waiting: dict[str, asyncio.Future[Streams]] = {}
        """By token: callers whose node has not come for them yet."""
        self._unproven: Counter[str] = Counter()
        self._lines = TokenBuckets(_LINES, _LINES_PER_S)
        self._calls = TokenBuckets(_CALLS, _CALLS_PER_S)
        self._max_connections = config.max_connections
        self._shares = FairShares(config.limit_bytes_per_s)
        self._tasks: set[asyncio.Task[None]] = set()
        self.carried_bytes = 0

    @property
    def num_nodes(self) -> int:
        """Nodes that have a port now."""
        return len(self._nodes)

    def new_ticket(self) -> str:
        """Returns what another node shows that is to check this relay; it counts once, and for half a minute."""
        ticket = secrets.token_hex(16)
        remember(self._tickets, ticket, time.monotonic() + _TICKET_S, _MAX_TICKETS)
        return ticket

    @property
    def num_connections(self) -> int:
        """Callers whose connections are carried now, or wait for the node."""
        return sum(node.connections.total() for node in self._nodes.values())

    @property
    def port(self) -> int:
        """Where nodes register; known after `start`."""
        if self._server is None:
            return self._config.listen_port
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def start(self) -> None:
        """Begins to listen; raises TrainerUsageError where the port cannot be had."""
        try:
            self._server = await asyncio.start_server(
                self._accepted, self._config.host, self._config.listen_port, limit=COPY_BYTES
            )
        except OSError as error:
            raise TrainerUsageError(
                f"relay.port: expected a free port of {self._config.host}, found {self._config.listen_port} ({error}); "
                "choose another"
            ) from None
        self._sweeping = asyncio.create_task(self._sweep_forever(), name="genesis-relay-sweep")
        granted = raise_open_files(_FILES_PER_CONNECTION * self._config.max_connections)
        self._max_connections = max(1, min(self._config.max_connections, granted // _FILES_PER_CONNECTION))
        if self._max_connections < self._config.max_connections:
            logger.warning(
                "relay.max_connections: expected %d, found that %d open files suffice for %d; raise 'ulimit -n'",
                *(self._config.max_connections, granted, self._max_connections),
            )
        logger.info("relays for nodes that cannot be reached, at port %d", self.port)

    async def stop(self) -> None:
        """Ends everything that is carried."""
        sweeping, self._sweeping = self._sweeping, None
        if sweeping is not None:
            sweeping.cancel()
            await asyncio.gather(sweeping, return_exceptions=True)
        server, self._server = self._server, None
        if server is not None:
            server.close()
        for node in list(self._nodes.values()):
            self._forget(node)
        cancel_once(self._tasks)
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # -- connections at the relay's own port ---------------------------------------------------------------------------

    async def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with self._tracked():
            is_handed_over = False
            try:
                host = _host_of(writer)
                place: Place | None = None
                with self._counted_unproven(host):
                    first = await read_line(reader, FIRST_LINE, LINE_S, host)
                    if isinstance(first, Register):
                        place = await self._admitted(first, host, (reader, writer))
                    elif isinstance(first, Probe):
                        await self._answer_probe(first, host, (reader, writer))
                if isinstance(first, Register) and place is not None:
                    await self._keep_node(first, place, (reader, writer))
                elif isinstance(first, Accept):
                    is_handed_over = self._hand_over(first.token, (reader, writer))
            except PeerUnavailableError as error:
                logger.info("a relayed node or its connection has gone: %s", error)
            except RefusedError as error:
                logger.info("no port for a node of %s (%s): %s", _host_of(writer), error.reason, error)
                await _refuse(writer, error)
            finally:
                if not is_handed_over:
                    await end(writer)

    def _hand_over(self, token: str, streams: Streams) -> bool:
        """Gives a node's connection to the caller that it is for; returns whether there is one."""
        waiting = self._waiting.pop(token, None)
        if waiting is None or waiting.done():
            return False
        waiting.set_result(streams)
        return True

    @contextlib.contextmanager
    def _counted_unproven(self, host: str) -> Iterator[None]:
        """Counts a connection that has proven nothing yet; raises PeerUnavailableError where there are too many.

        However many others have, a host with a registered node can take up what is carried for it.
        """
        is_known = any(node.host == host for node in self._nodes.values())
        is_full = self._unproven.total() >= _MAX_UNPROVEN and not is_known
        if is_full or self._unproven[host] >= _MAX_UNPROVEN_PER_HOST:
            raise PeerUnavailableError(f"{host}: expected fewer connections that prove nothing, found too many")
        self._unproven[host] += 1
        try:
            yield
        finally:
            count_down(self._unproven, host)

    async def _admitted(self, asked: Register, host: str, streams: Streams) -> Place:
        """Returns what a node has that may have a port; raises RefusedError where it may have none."""
        if self.paused:
            raise RefusedError(Reason.STOPPING, self.paused)

        def others() -> list[Place]:
            return [it.place for it in self._nodes.values() if it.peer_id != asked.peer_id]

        return await self._gate.pass_through(asked, host, self.port, others, streams)

    async def _keep_node(self, asked: Register, place: Place, streams: Streams) -> None:
        """Lends the node a port and answers it until it goes away, which raises PeerUnavailableError.

        Raises RefusedError where it shows a credential that does not count.
        """
        reader, writer = streams
        host, node = place.host, _LentPort(asked.peer_id, writer, place)
        before = self._nodes.get(asked.peer_id)
        if before is not None:  # It has proven its key: its old connection is dead, or it has restarted.
            self._forget(before)
        self._nodes[asked.peer_id] = node
        try:
            node.server = await self._listen(partial(self._called, node))
            is_direct = await _answers_directly(asked, _ip_of(writer))
            lent = Lent(
                port=node.port, public_host=self._config.public_host, seen_host=_ip_of(writer), is_direct=is_direct
            )
            await write_line(writer, lent, LINE_S, host)
            logger.info("relays for node %s… of %s at port %d", asked.peer_id[:12], host, node.port)
            while True:
                line = await read_line(reader, NODE_LINE, SILENCE_S, host)
                if not self._lines.take(asked.peer_id):
                    raise PeerUnavailableError(
                        f"{host}: expected three lines in {SILENCE_S:g} s, found more than one a second"
                    )
                if isinstance(line, Show):
                    shown = unpack_credential(line.credential)
                    until = self._gate.until(asked.peer_id, line.credential)
                    node.place = replace(place, until=until, is_by_pass=place.is_by_pass and is_relay_pass(shown))
                if not isinstance(line, Check):
                    await write_line(writer, Pong(), LINE_S, host)
                    continue
                is_direct = self._gate.take(host) and await _answers_directly(asked, _ip_of(writer))
                await write_line(writer, Checked(is_direct=is_direct), LINE_S, host)
        finally:
            self._forget(node)

    async def _sweep_forever(self) -> None:
        """Takes their ports from nodes that are revoked, or whose credentials have expired."""
        while True:
            await asyncio.sleep(_SWEEP_S)
            await asyncio.gather(*(self._sweep(node) for node in list(self._nodes.values())))

    async def _sweep(self, node: _LentPort) -> None:
        try:
            self._gate.check_still(node.peer_id, node.place.until)
        except RefusedError as error:
            logger.info("node %s… loses its port (%s): %s", node.peer_id[:12], error.reason, error)
            if node.server is not None:
                node.server.close()
            cancel_once(node.tasks)  # Before it is told, which it may take its time to hear.
            await _refuse(node.control, error)
            self._forget(node)

    async def _answer_probe(self, probe: Probe, host: str, streams: Streams) -> None:
        """Shows another node that this relay, and a port that it lends, are reached; raises RefusedError."""
        identity, until_s = self._identity, self._tickets.pop(probe.ticket, 0.0)
        if identity is None or time.monotonic() > until_s:
            raise RefusedError(Reason.RECIPIENT, "expected a probe that this relay's node has asked for, found another")

        async def called(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            async with self._tracked():
                try:
                    await write_line(writer, answer, LINE_S, host)
                except PeerUnavailableError:
                    pass  # Who has asked finds out.
                finally:
                    await end(writer, at_once=False)

        server = await self._listen(called)
        try:
            port: int = server.sockets[0].getsockname()[1]
            signature = identity.sign(probe_text(probe.nonce, port, identity.peer_id)).hex()
            answer = Probed(port=port, signature=signature)
            await write_line(streams[1], answer, LINE_S, host)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_PROBE_S):
                    await streams[0].read(1)  # Until whoever has asked closes.
        finally:
            server.close()

    async def _listen(self, called: _Called) -> asyncio.Server:
        """Listens at a port to lend."""
        first = self._config.first_port
        for port in range(first, first + self._config.max_nodes) if first else (0,):
            with contextlib.suppress(OSError):
                return await asyncio.start_server(called, self._config.host, port, limit=COPY_BYTES)
        raise PeerUnavailableError("this relay has no free port left")

    # -- connections at lent ports -------------------------------------------------------------------------------------

    async def _called(self, node: _LentPort, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with self._tracked(node.tasks):
            await self._carry(node, (reader, writer))

    async def _carry(self, node: _LentPort, caller: Streams) -> None:
        host = _host_of(caller[1])
        is_full = (
            self.num_connections >= self._max_connections
            or node.connections.total() >= self._config.max_connections_per_node
            or node.connections[host] >= self._config.max_connections_per_host
        )
        if is_full or not self._calls.take(f"{node.peer_id} {host}"):
            await end(caller[1])
            return
        node.connections[host] += 1
        try:
            own = await self._answer_of(node, host)
            if own is None:
                await end(caller[1])
                return

            async def pay(size_bytes: int, _is_of_caller: bool) -> None:
                self.carried_bytes += size_bytes
                owed_s = self._shares.owed_s(node.peer_id, size_bytes)
                if owed_s > 0:
                    await asyncio.sleep(owed_s)

            await carry(caller, own, pay)
        finally:
            await end(caller[1])
            count_down(node.connections, host)

    async def _answer_of(self, node: _LentPort, host: str) -> Streams | None:
        """Tells the node of a caller; returns the connection it opens for that, None if it opens none in time."""
        token = secrets.token_hex(16)
        waiting: asyncio.Future[Streams] = asyncio.get_running_loop().create_future()
        self._waiting[token] = waiting
        try:
            await write_line(node.control, Incoming(token=token, host=host), LINE_S, node.host)
            async with asyncio.timeout(_ACCEPT_S):
                return await waiting
        except (PeerUnavailableError, TimeoutError, asyncio.CancelledError) as error:
            if waiting.done() and not waiting.cancelled():  # It came at this very moment.
                waiting.result()[1].transport.abort()
            if isinstance(error, asyncio.CancelledError):
                raise
            return None
        finally:
            self._waiting.pop(token, None)

    def _forget(self, node: _LentPort) -> None:
        if node.server is not None:
            node.server.close()
        cancel_once(node.tasks)
        node.control.transport.abort()
        if self._nodes.get(node.peer_id) is node:
            del self._nodes[node.peer_id]

    @contextlib.asynccontextmanager
    async def _tracked(self, also: set[asyncio.Task[None]] | None = None) -> AsyncIterator[None]:
        """Lets `stop` end what runs inside; what it fails with is logged and ends nothing else."""
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("expected to run in a task, found none")
        sets = [self._tasks] if also is None else [self._tasks, also]
        for each in sets:
            each.add(task)
        try:
            yield
        except asyncio.CancelledError:
            pass  # The connection's own task: nobody awaits it but `stop`.
        except Exception:
            logger.exception("a relayed connection failed")
        finally:
            for each in sets:
                each.discard(task)


async def _answers_directly(asked: Register, ip: str) -> bool:
    """Returns whether the node itself shows its certificate at the address its connection comes from."""
    if asked.listen_port < MIN_STRANGERS_PORT:
        return False
    try:
        found = await fetch_certificate(ip, asked.listen_port, _DIAL_BACK_S)
    except PeerUnavailableError:
        return False
    return bool(asked.certificate_sha256) and certificate_digest(found) == asked.certificate_sha256


async def _refuse(writer: asyncio.StreamWriter, error: RefusedError) -> None:
    """Tells a node why it has no port (any more); whether it hears it does not matter."""
    with contextlib.suppress(PeerUnavailableError):
        await write_line(writer, Refusal(text=str(error)[:MAX_REFUSAL_CHARS]), _LAST_LINE_S, _host_of(writer))


def _ip_of(writer: asyncio.StreamWriter) -> str:
    name = writer.get_extra_info("peername")
    return str(name[0]) if name else ""


def _host_of(writer: asyncio.StreamWriter) -> str:
    return address_group(_ip_of(writer))

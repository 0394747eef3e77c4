"""A node's side: it stays registered with one or two relays, and takes up the connections they tell it of.

Each connection that a relay announces is joined to this node's own listening port by way of the loopback interface,
from an address in 127.0.0.0/8 that stands for the caller's host: so limits that this node shares by address still tell
its callers apart, as far as the relay says who they are.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
from collections.abc import Callable, Sequence
from typing import Final

from trainer.errors import PeerUnavailableError
from trainer.network.relay.carrying import Streams, carry
from trainer.network.relay.protocol import (
    COPY_BYTES,
    RELAY_LINE,
    SILENCE_S,
    Accept,
    Challenge,
    Check,
    Checked,
    Incoming,
    Lent,
    Ping,
    Proof,
    Refusal,
    Register,
    cancel_once,
    end,
    proof_text,
    read_line,
    write_line,
)
from trainer.network.rpc.config import split_address
from trainer.network.rpc.dialing import address_group, parse_ip
from trainer.network.rpc.identity import Identity

logger = logging.getLogger(__name__)

_LINE_S: Final = 10.0
_LENDING_S: Final = 20.0  # The relay dials back meanwhile.
_PING_S: Final = SILENCE_S / 3
_CHECK_S: Final = 600.0
_PAUSES_S: Final = (1.0, 60.0)
_MAX_CONNECTIONS: Final = 256
_NAME: Final = re.compile(r"[0-9A-Za-z.-]{1,253}")
"""Of a host, as announcements have it."""


class RelayLinks:
    """The relays of one node; `address` is where they let it be reached. For the event loop of `start`."""

    def __init__(
        self,
        relays: Sequence[str],
        identity: Identity,
        local: tuple[str, int],
        certificate_sha256: str,
        *,
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        """``local`` is where this node listens, and ``changed`` is called when `address` has changed."""
        self._links = [_Link(each, identity, local, certificate_sha256, self._changed) for each in relays]
        self._notify = changed
        self._local_host = _own_host(local[0])
        self._has_stand_ins = self._local_host.startswith("127.")
        self._has_address = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def address(self) -> str:
        """``host:port`` where this node is reached: its own if a relay says that works, else a relay's; or empty."""
        direct = (link.direct_address for link in self._links)
        relayed = (link.lent_address for link in self._links)
        return next(filter(None, (*direct, *relayed)), "")

    def may_be_caller(self, remote_host: str) -> bool:
        """Returns whether whoever comes from this address may have come by way of a relay, from anywhere."""
        return is_stand_in(remote_host) or (not self._has_stand_ins and remote_host == address_group(self._local_host))

    @property
    def carried_bytes(self) -> tuple[int, int]:
        """Bytes sent and received by way of relays since the start."""
        return sum(it.sent_bytes for it in self._links), sum(it.received_bytes for it in self._links)

    async def start(self, timeout_s: float) -> bool:
        """Begins to register, and again whenever a relay is lost; returns whether there is an address by then."""
        self._tasks = [asyncio.create_task(link.keep(), name="genesis-relay") for link in self._links]
        try:
            async with asyncio.timeout(timeout_s):
                await self._has_address.wait()
        except TimeoutError:
            return False
        return True

    async def stop(self) -> None:
        """Gives the ports back, which ends what came over them."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _changed(self) -> None:
        if self.address:
            self._has_address.set()
        self._notify()


class _Link:
    """The connection to one relay."""

    def __init__(
        self,
        relay: str,
        identity: Identity,
        local: tuple[str, int],
        certificate_sha256: str,
        changed: Callable[[], None],
    ) -> None:
        self._relay = relay
        self._identity = identity
        self._local = local
        self._certificate_sha256 = certificate_sha256
        self._changed = changed
        self._carrying: set[asyncio.Task[None]] = set()
        self.lent_address = ""
        self.direct_address = ""
        self.sent_bytes = 0
        self.received_bytes = 0

    async def keep(self) -> None:
        """Stays registered; a relay that is lost, or refuses, is asked again after pauses that grow."""
        pause_s, last = _PAUSES_S[0], ""
        try:
            while True:
                try:
                    await self._register_once()
                except PeerUnavailableError as error:
                    if self.lent_address:
                        pause_s, last = _PAUSES_S[0], ""
                    if str(error) != last:  # The same again is not worth a line.
                        logger.warning("relay %s: %s; trying again", self._relay, error)
                        last = str(error)
                self._lose()
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _PAUSES_S[1])
        finally:
            self._lose()
            await asyncio.gather(*self._carrying, return_exceptions=True)

    async def _register_once(self) -> None:
        host, port = split_address(self._relay)
        reader, writer = await self._connect(host, port)
        tasks = []
        try:
            lent = await self._lent(reader, writer)
            shown = lent.public_host or host
            self.lent_address = _announceable(shown, lent.port)
            self._take_direct(lent.seen_host, lent.is_direct)
            how = f"directly, at {self.direct_address}" if self.direct_address else f"at {self.lent_address}"
            logger.info("relay %s: others reach this node %s", self._relay, how)
            tasks = [asyncio.create_task(self._ping(writer)), asyncio.create_task(self._check(writer))]
            while True:
                line = await read_line(reader, RELAY_LINE, SILENCE_S, self._relay)
                if isinstance(line, Incoming) and len(self._carrying) < _MAX_CONNECTIONS:
                    task = asyncio.create_task(self._take_up(line, host, port))
                    self._carrying.add(task)
                    task.add_done_callback(self._carrying.discard)
                elif isinstance(line, Checked):
                    self._take_direct(lent.seen_host, line.is_direct)
        finally:
            for task in tasks:
                task.cancel()
            await end(writer)
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _lent(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Lent:
        own = self._identity.peer_id
        ask = Register(peer_id=own, listen_port=self._local[1], certificate_sha256=self._certificate_sha256)
        await write_line(writer, ask, _LINE_S, self._relay)
        line = await read_line(reader, RELAY_LINE, _LINE_S, self._relay)
        if isinstance(line, Challenge):
            signature = self._identity.sign(proof_text(line.nonce, self._relay, own)).hex()
            await write_line(writer, Proof(relay=self._relay, signature=signature), _LINE_S, self._relay)
            line = await read_line(reader, RELAY_LINE, _LENDING_S, self._relay)
        if isinstance(line, Lent):
            return line
        reason = line.text if isinstance(line, Refusal) else f"expected a port, found {line.kind}"
        raise PeerUnavailableError(f"it refuses this node ({_printable(reason)})")

    async def _ping(self, writer: asyncio.StreamWriter) -> None:
        while True:
            await asyncio.sleep(_PING_S)
            await write_line(writer, Ping(), _LINE_S, self._relay)

    async def _check(self, writer: asyncio.StreamWriter) -> None:
        while True:
            await asyncio.sleep(_CHECK_S)
            await write_line(writer, Check(), _LINE_S, self._relay)

    async def _take_up(self, incoming: Incoming, host: str, port: int) -> None:
        """Joins a caller's connection to this node's own port."""
        relayed = own = None
        try:
            relayed = await self._connect(host, port)
            await write_line(relayed[1], Accept(token=incoming.token), _LINE_S, self._relay)
            own = await self._open_own(incoming.host)
            await carry(relayed, own, self._count)
        except (PeerUnavailableError, OSError, TimeoutError) as error:
            logger.debug("a caller of relay %s is not taken up: %s", self._relay, error)
        finally:
            opened = [streams[1] for streams in (relayed, own) if streams is not None]
            for writer in opened:
                writer.transport.abort()
            for writer in opened:
                await end(writer)

    async def _open_own(self, caller_host: str) -> Streams:
        host = _own_host(self._local[0])
        source = (_loopback_of(caller_host), 0) if host.startswith("127.") else None
        async with asyncio.timeout(_LINE_S):
            return await asyncio.open_connection(host, self._local[1], limit=COPY_BYTES, local_addr=source)

    async def _connect(self, host: str, port: int) -> Streams:
        try:
            async with asyncio.timeout(_LINE_S):
                return await asyncio.open_connection(host, port, limit=COPY_BYTES)
        except (OSError, TimeoutError) as error:
            raise PeerUnavailableError(f"cannot be reached ({error or f'no answer in {_LINE_S:g} s'})") from None

    async def _count(self, size_bytes: int, is_received: bool) -> None:
        if is_received:
            self.received_bytes += size_bytes
        else:
            self.sent_bytes += size_bytes

    def _take_direct(self, host: str, is_direct: bool) -> None:
        found = _announceable(host, self._local[1]) if is_direct else ""
        if found != self.direct_address or not found:
            self.direct_address = found
            self._changed()

    def _lose(self) -> None:
        if self.lent_address or self.direct_address:
            self.lent_address = self.direct_address = ""
            self._changed()
        cancel_once(self._carrying)


def _announceable(host: str, port: int) -> str:
    """Returns the address; raises PeerUnavailableError where the relay names a host that no node can announce."""
    ip = parse_ip(host) if "%" not in host else None
    if ip is not None:
        return f"[{ip}]:{port}" if ip.version == 6 else f"{ip}:{port}"
    if not _NAME.fullmatch(host):
        raise PeerUnavailableError(f"expected a host that others can call, found {host!r}")
    return f"{host}:{port}"


def _own_host(listen_host: str) -> str:
    """Returns where a node is reached from its own machine."""
    return listen_host if listen_host not in ("0.0.0.0", "::", "") else "127.0.0.1"


def is_stand_in(host: str) -> bool:
    """Returns whether an address is one of those that stand for callers' hosts: 127.0.0.0/8 beside 127.0.x.x."""
    return host.startswith("127.") and not host.startswith("127.0.")


def _loopback_of(host: str) -> str:
    """Returns the stand-in (`is_stand_in`) for a host."""
    one, two, three = hashlib.sha256(host.encode()).digest()[:3]
    return f"127.{one or 1}.{two}.{three or 1}"


def _printable(text: str) -> str:
    return "".join(char if char.isprintable() else " " for char in text)

"""A node's side: it stays registered with one or two relays, and takes up the connections they tell it of.

A relay that only carries for members of the run is shown the node's credential, and the newer one when it is renewed;
before a newcomer has one, the pass that the authority gives it to join by. A relay that the operator has not named is
judged before it is dialled, as all addresses of strangers are (`Dialing`), and counts once this node has reached itself
at the port that it was lent, and while it does so again every ten minutes: one that lends ports which a firewall
closes, or of another host, is none. Any relay is left that says more than its part: 512 lines at once and then 64 a
second, or a check that was not asked for, by which it could have this node announce another address each second.

Each connection that a relay announces is joined to this node's own listening port by way of the loopback interface,
from an address in 127.0.0.0/8 that stands for the caller's host: so limits that this node shares by address still tell
its callers apart, as far as the relay says who they are.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from genesis.open_files import raise_open_files
from trainer.errors import PeerUnavailableError, RefusedError, TrainerUsageError
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
    Show,
    cancel_once,
    end,
    pack_credential,
    proof_text,
    read_line,
    write_line,
)
from trainer.network.rpc.admission import Admission
from trainer.network.rpc.channels import fetch_certificate
from trainer.network.rpc.config import split_address
from trainer.network.rpc.dialing import Dialing, Socket, address_group, parse_ip
from trainer.network.rpc.identity import Identity, certificate_digest
from trainer.network.rpc.messages import Peer
from trainer.network.rpc.token_buckets import TokenBuckets

logger = logging.getLogger(__name__)

_LINE_S: Final = 10.0
_LENDING_S: Final = 20.0  # The relay dials back meanwhile.
_PING_S: Final = SILENCE_S / 3
_CHECK_S: Final = 600.0
_PAUSES_S: Final = (1.0, 60.0)
_MAX_CONNECTIONS: Final = 256
_FILES_PER_CONNECTION: Final = 16
"""Two are its sockets here, one is the endpoint's, by each of two relays: the process keeps most of its files."""
_PASS_S: Final = 8.0  # Less than a relay waits for a proof.
_OWN_PORT_S: Final = 10.0  # For this node to reach itself by way of a relay.
_LINES, _LINES_PER_S = 512.0, 64.0
"""Of a relay, which tells of at most 128 callers that are there at once."""
_NAME: Final = re.compile(r"[0-9A-Za-z.-]{1,253}")
"""Of a host, as announcements have it."""


@dataclass(frozen=True, slots=True)
class ShownCredential:
    """What this node shows relays: its credential, or while it has none what ``ask_pass`` returns of its authority."""

    admission: Admission | None = None
    ask_pass: Callable[[], Awaitable[bytes]] | None = None

    @property
    def current(self) -> bytes:
        """The credential that it has now; empty: none."""
        return b"" if self.admission is None else self.admission.own_wire

    async def first(self, run_name: str) -> bytes:
        """Returns what to show a relay of the members of a run; raises PeerUnavailableError: there is nothing."""
        if self.admission is None or self.admission.run_name != run_name:
            raise PeerUnavailableError(
                f"it carries for members of run {run_name[:80]!r} only, and this node has joined no such run by its "
                "authority (--run FILE, or --authority URL and --token)"
            )
        if not self.current and self.ask_pass is not None:
            try:
                async with asyncio.timeout(_PASS_S):
                    return await self.ask_pass()
            except (RefusedError, TrainerUsageError) as error:
                raise PeerUnavailableError(f"the run's authority gives no pass for it: {error}") from None
            except TimeoutError:
                raise PeerUnavailableError(f"the run's authority gives no pass for it in {_PASS_S:g} s") from None
        return self.current


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnPlace:
    """The node that relays are to reach."""

    identity: Identity
    listens_at: tuple[str, int]
    """Host and port."""
    certificate_sha256: str
    """Empty in plain mode: then no relay can tell whether it is this node that answers directly."""
    credential: ShownCredential = ShownCredential()


class RelayLinks:
    """The relays of one node; `address` is where they let it be reached. For the event loop of `add`."""

    def __init__(self, place: OwnPlace) -> None:
        self._place = place
        self._links: dict[str, _Link] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._local_host = _own_host(place.listens_at[0])
        self._has_stand_ins = self._local_host.startswith("127.")
        self._has_address = asyncio.Event()
        granted = raise_open_files(_FILES_PER_CONNECTION * _MAX_CONNECTIONS)
        self._max_connections = max(1, min(_MAX_CONNECTIONS, granted // _FILES_PER_CONNECTION))  # By one relay.
        self._dropped_bytes = (0, 0)

    @property
    def address(self) -> str:
        """``host:port`` where this node is reached: its own if a relay says that works, else a relay's; or empty."""
        direct = (link.direct_address for link in self._links.values())
        relayed = (link.lent_address for link in self._links.values())
        return next(filter(None, (*direct, *relayed)), "")

    def may_be_caller(self, remote_host: str) -> bool:
        """Returns whether whoever comes from this address may have come by way of a relay, from anywhere."""
        return is_stand_in(remote_host) or (not self._has_stand_ins and remote_host == address_group(self._local_host))

    @property
    def carried_bytes(self) -> tuple[int, int]:
        """Bytes sent and received by way of relays since the start."""
        sent, received = self._dropped_bytes
        links = self._links.values()
        return sent + sum(it.sent_bytes for it in links), received + sum(it.received_bytes for it in links)

    def states(self) -> tuple[LinkState, ...]:
        """Returns how it stands with each relay."""
        return tuple(link.state() for link in self._links.values())

    def add(self, relay: str, judge: Dialing | None = None) -> None:
        """Begins to register with a relay, and again whenever it is lost; with ``judge`` no operator has named it."""
        if relay not in self._links:
            link = self._links[relay] = _Link(relay, self._place, judge, self._changed, self._max_connections)
            self._tasks[relay] = asyncio.create_task(link.keep(), name="genesis-relay")

    async def drop(self, relay: str) -> None:
        """Gives the port of a relay back, which ends what came over it."""
        link, task = self._links.pop(relay, None), self._tasks.pop(relay, None)
        if link is None or task is None:
            return
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        sent, received = self._dropped_bytes
        self._dropped_bytes = (sent + link.sent_bytes, received + link.received_bytes)

    async def has_address(self, timeout_s: float) -> bool:
        """Waits until there is an address; returns whether there is one by then."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._has_address.wait()
        except TimeoutError:
            return False
        return True

    async def stop(self) -> None:
        """Gives all ports back."""
        await asyncio.gather(*(self.drop(relay) for relay in list(self._links)))

    def _changed(self) -> None:
        if self.address:
            self._has_address.set()
        else:
            self._has_address.clear()


@dataclass(frozen=True, slots=True)
class LinkState:
    """How it stands with a relay."""

    relay: str
    lent_address: str  # Where others reach this node by way of it; empty: nowhere (yet).
    direct_address: str  # Where it reaches this node itself; empty: nowhere.
    failure: str  # Why it was left last, or does not serve; empty: it never was.
    changed_s: float  # When the addresses have changed last, monotonic.


class _Link:
    """The connection to one relay."""

    def __init__(
        self,
        relay: str,
        place: OwnPlace,
        judge: Dialing | None,
        changed: Callable[[], None],
        max_connections: int,
    ) -> None:
        self._relay = relay
        self._place = place
        self._judge = judge
        self._changed = changed
        self._max_connections = max_connections
        self._carrying: set[asyncio.Task[None]] = set()
        self._shown = b""
        self._lines = TokenBuckets(_LINES, _LINES_PER_S)
        self._num_checks_asked = 0
        self._failure = ""
        self._own_port_failure = ""
        self._changed_s = time.monotonic()
        self.lent_address = ""
        self.direct_address = ""
        self.sent_bytes = 0
        self.received_bytes = 0

    def state(self) -> LinkState:
        """Returns how it stands."""
        return LinkState(self._relay, self.lent_address, self.direct_address, self._failure, self._changed_s)

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
                    self._failure = self._own_port_failure or str(error)
                    if self._failure != last:  # The same again is not worth a line.
                        level = logging.WARNING if self._judge is None else logging.INFO
                        logger.log(level, "relay %s: %s; trying again", self._relay, self._failure)
                        last = self._failure
                except Exception as error:
                    # Whatever a relay says, it is asked again: a node that no longer tries is reached by nobody.
                    self._failure = f"it cannot be used ({type(error).__name__})"
                    if self._failure != last:
                        logger.exception("relay %s", self._relay)
                        last = self._failure
                self._lose()
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _PAUSES_S[1])
        finally:
            self._lose()
            await asyncio.gather(*self._carrying, return_exceptions=True)

    async def _register_once(self) -> None:
        host, port = await self._where(self._relay)
        reader, writer = await self._connect(host, port)
        self._own_port_failure, self._num_checks_asked = "", 0
        tasks = []
        try:
            lent = await self._lent(reader, writer)
            shown = _announceable(lent.public_host or split_address(self._relay)[0], lent.port)
            self._take_direct(lent.seen_host, lent.is_direct)
            if self._judge is None or not self._place.certificate_sha256:
                self._take_lent(shown)
            else:
                tasks.append(asyncio.create_task(self._reach_own(shown, (host, port), writer)))
            tasks += [asyncio.create_task(self._ping(writer)), asyncio.create_task(self._check(writer))]
            while True:
                line = await read_line(reader, RELAY_LINE, SILENCE_S, self._relay)
                if not self._lines.take(""):
                    raise PeerUnavailableError(f"expected {_LINES_PER_S:g} lines a second at most, found more")
                if isinstance(line, Incoming) and len(self._carrying) < self._max_connections:
                    task = asyncio.create_task(self._take_up(line, host, port))
                    self._carrying.add(task)
                    task.add_done_callback(self._carrying.discard)
                elif isinstance(line, Checked):
                    self._take_checked(lent.seen_host, line)
                elif isinstance(line, Refusal):
                    raise _refusal(line)
        finally:
            for task in tasks:
                task.cancel()
            await end(writer)
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _where(self, address: str) -> tuple[str, int]:
        """Returns where to connect; raises PeerUnavailableError: it is no address, or none that is dialled now."""
        if self._judge is None:
            return split_address(address)
        try:
            return (await self._judge.admit(Peer(None, address)))[0]
        except TrainerUsageError as error:
            raise PeerUnavailableError(str(error)) from None

    async def _lent(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Lent:
        place, own = self._place, self._place.identity.peer_id
        ask = Register(peer_id=own, listen_port=place.listens_at[1], certificate_sha256=place.certificate_sha256)
        await write_line(writer, ask, _LINE_S, self._relay)
        line = await read_line(reader, RELAY_LINE, _LINE_S, self._relay)
        if isinstance(line, Challenge):
            self._shown = await place.credential.first(line.members_of) if line.members_of else b""
            ip = _dialled_ip(writer)
            signature = place.identity.sign(proof_text(line.nonce, self._relay, own, ip)).hex()
            shown = pack_credential(self._shown)
            proof = Proof(relay=self._relay, dialled_ip=ip, signature=signature, credential=shown)
            await write_line(writer, proof, _LINE_S, self._relay)
            line = await read_line(reader, RELAY_LINE, _LENDING_S, self._relay)
        if isinstance(line, Lent):
            return line
        if isinstance(line, Refusal):
            raise _refusal(line)
        raise PeerUnavailableError(f"expected a port, found {line.kind}")

    async def _reach_own(self, shown: str, dialled: Socket, writer: asyncio.StreamWriter) -> None:
        """Takes the lent address while this node reaches itself there; once it does not, ends the registration."""
        while True:
            try:
                where = await self._where(shown)
                found = await fetch_certificate(*where, _OWN_PORT_S)
                if certificate_digest(found) != self._place.certificate_sha256:
                    raise PeerUnavailableError("another answers there")
            except (PeerUnavailableError, OSError) as error:
                self._own_port_failure = f"it lends {shown}, where this node does not reach itself ({error})"
                writer.transport.abort()
                return
            if self._judge is not None:  # Both may be dialled again, without the pauses of addresses that are silent.
                self._judge.answered(dialled)
                self._judge.answered(where)
            if not self.lent_address:
                self._take_lent(shown)
            await asyncio.sleep(_CHECK_S)

    async def _ping(self, writer: asyncio.StreamWriter) -> None:
        while True:
            await asyncio.sleep(_PING_S)
            current = self._place.credential.current
            if not self._shown or current in (b"", self._shown):
                await write_line(writer, Ping(), _LINE_S, self._relay)
            else:  # It was renewed.
                await write_line(writer, Show(credential=pack_credential(current)), _LINE_S, self._relay)
                self._shown = current

    async def _check(self, writer: asyncio.StreamWriter) -> None:
        while True:
            await asyncio.sleep(_CHECK_S)
            self._num_checks_asked += 1
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
        listens_at, port = self._place.listens_at
        host = _own_host(listens_at)
        source = (_loopback_of(caller_host), 0) if host.startswith("127.") else None
        async with asyncio.timeout(_LINE_S):
            return await asyncio.open_connection(host, port, limit=COPY_BYTES, local_addr=source)

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

    def _take_lent(self, address: str) -> None:
        self.lent_address = address
        self._note_change()

    def _take_direct(self, host: str, is_direct: bool) -> None:
        found = _announceable(host, self._place.listens_at[1]) if is_direct else ""
        if found != self.direct_address:
            self.direct_address = found
            self._note_change()

    def _take_checked(self, host: str, said: Checked) -> None:
        if self._num_checks_asked < 1:
            raise PeerUnavailableError("expected an answer to a check, found one that nobody has asked for")
        self._num_checks_asked -= 1
        self._take_direct(host, said.is_direct)

    def _note_change(self) -> None:
        self._changed_s = time.monotonic()
        self._changed()
        if found := self.direct_address or self.lent_address:
            how = "directly, at" if self.direct_address else "at"
            logger.info("relay %s: others reach this node %s %s", self._relay, how, found)

    def _lose(self) -> None:
        if self.lent_address or self.direct_address:
            self.lent_address = self.direct_address = ""
            self._note_change()
        cancel_once(self._carrying)


def _dialled_ip(writer: asyncio.StreamWriter) -> str:
    name = writer.get_extra_info("peername")
    ip = parse_ip(str(name[0])) if name else None
    return "" if ip is None else str(ip)


def _refusal(line: Refusal) -> PeerUnavailableError:
    return PeerUnavailableError(f"it refuses this node ({_printable(line.text)})")


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

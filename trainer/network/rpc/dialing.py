"""Which addresses this node connects to, and how often: strangers name addresses, and may name any machine's.

Identities cost nothing, addresses cost something. So every limit that is shared among peers is shared by address too:
an IPv4 address is one host, and so is an IPv6 /64, the least that a provider hands to one customer. And every
connection that an endpoint opens is judged here, by the address it goes to and not by the identity claimed for it; else
a stranger could have all nodes of a run connect to services of their own machines, or at once to a victim:

- Loopback, private and link-local addresses are dialled where the operator named one of that kind, or said that the run
  is private. A host name is resolved; what it resolves to is judged, and that is dialled. Where loopback was named, the
  address of this machine's default route is dialled too: a second node here that is given no address announces that.
- This node's own listening address is never dialled for another node, nor are ports below 1024.
- An address at which no node has answered is tried once, then after pauses that grow. A host has a budget for all
  such ports together: 8 and then one in 10 s, or 64 and then one a second where it has been in contact with this node.

Addresses that the operator named (`guard`) are exempt; an endpoint without `guard` dials what its program names. The
trade-off: a node that was silent when it was first tried waits for the end of the pause, 10 or 20 s.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Final, Literal, TypeAlias

from trainer.errors import PeerUnavailableError, TrainerUsageError
from trainer.network.rpc.config import RpcConfig, has_port, split_address
from trainer.network.rpc.messages import Peer, PeerId
from trainer.network.rpc.token_buckets import TokenBuckets, remember

Socket = tuple[str, int]  # An IP address and a port.
HostKind: TypeAlias = Literal["public", "private", "loopback", "link-local", "unusable"]
"""``unusable`` is no host's own address: multicast, unspecified, reserved."""

MIN_STRANGERS_PORT: Final = 1024
"""Lowest port that is dialled because a stranger has named it: below it are services that nobody here has started."""
_IPV6_PREFIX_BITS = 64
_LOCAL_NAMES = ("localhost", "localhost.localdomain", "ip6-localhost", "ip6-loopback")
_PAUSE_GROWTH = 3.0
_PAUSES_S = (20.0, 3600.0)  # The first and the longest.
_PAUSES_IN_CONTACT_S = (10.0, 60.0)
"""At a host that talks to this node: the host can spare itself the calls it brings about."""
_CONTACT_S = 600.0
_HOST_BURST = 8.0
_HOST_DIALS_PER_S = 0.1
_BURST_IN_CONTACT = 64.0
_DIALS_IN_CONTACT_PER_S = 1.0  # A try that a node answers is not counted.
_MAX_FAILURES = 30  # Failures in a row after which an address where a node once answered counts as a stranger's.
_MAX_REMEMBERED = 4096
_RESOLVED_FOR_S = 60.0
_MAX_RESOLVED_ADDRESSES = 4
_MAX_RESOLVING = 8


class DialRefusedError(PeerUnavailableError):
    """An address is not dialled: ``private``, ``own``, ``port``, ``name``, ``pause`` or ``budget`` is the reason."""

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason


class Dialing:
    """Judges and counts the connections of one endpoint, that of ``peer_id``, which may call itself."""

    def __init__(self, config: RpcConfig, peer_id: PeerId, clock: Callable[[], float] = time.monotonic) -> None:
        self._config = config
        self.peer_id = peer_id
        self._clock = clock
        self._is_guarded = False
        self._allows_private = False
        self._kinds: set[HostKind] = {"public"}  # Kinds of address that the operator has named.
        self._is_public_named = False  # Whether an initial peer has a public address.
        self._derived_kind: HostKind | None = None
        self._named: set[str] = set()
        self._named_sockets: set[Socket] = set()
        self._own: set[Socket] = set()
        self._machine = ""  # The address of this machine's default route.
        self._own_loopback_port = 0
        self._answered: OrderedDict[Socket, int] = OrderedDict()
        """Where a node has answered, and how often in a row connecting has failed since."""
        self._tried: OrderedDict[Socket, tuple[float, float]] = OrderedDict()
        """Strangers' addresses that were tried: until when each is paused, and for how many seconds."""
        self._contacts: OrderedDict[str, float] = OrderedDict()
        self._budgets = {
            False: TokenBuckets(_HOST_BURST, _HOST_DIALS_PER_S, clock),
            True: TokenBuckets(_BURST_IN_CONTACT, _DIALS_IN_CONTACT_PER_S, clock),
        }
        """By whether the host has been in contact; for addresses where no node has answered."""
        self._resolved: OrderedDict[str, tuple[float, tuple[str, ...]]] = OrderedDict()
        self._resolving = asyncio.Semaphore(_MAX_RESOLVING)
        public = config.public_address
        for host in (config.host, split_address(public)[0] if has_port(public) else public):
            self._learn_kind(host)

    def guard(self, named: Iterable[str], *, allow_private: bool) -> None:
        """From now on judges addresses, because they may come from strangers.

        ``named`` are ``host:port`` (or a host alone) of the initial peers, which the operator named. ``allow_private``:
        loopback, private and link-local addresses are dialled, whoever names them.
        """
        self._is_guarded = True
        self._allows_private = allow_private
        for address in named:
            self._named.add(address)
            host = split_address(address)[0] if has_port(address) else address
            self._learn_kind(host, of_initial_peer=True)

    def listening_at(self, address: str, port: int, machine: str = "") -> None:
        """Learns that this node is reached at ``address`` (``host:port``), and listens on ``port`` of its own host.

        ``machine`` is the address of this machine's default route.
        """
        host, public_port = split_address(address)
        self._own = {(host, public_port), (host, port), (self._config.host, port)}
        self._machine = machine
        if self._config.host in ("0.0.0.0", "::", ""):
            self._own_loopback_port = port
            self._own |= {(machine, port)} if machine else set()
            if not self._config.public_address:
                self._derived_kind = host_kind(host)

    def objection(self, address: str) -> str:
        """Returns why a stranger's address would not be dialled, as `DialRefusedError.reason`; empty: it may be.

        A name is objected to only once it is resolved, when it is dialled.
        """
        if not self._is_guarded or address in self._named:
            return ""
        try:
            return self._objection(*split_address(address))
        except TrainerUsageError:
            return "name"

    async def admit(self, peer: Peer) -> tuple[Socket, ...]:
        """Returns where to connect for this peer, in order; counts a try of an address where no node has answered.

        Raises DialRefusedError for nowhere, or not now; TrainerUsageError for a malformed address.
        """
        host, port = split_address(peer.address)
        if not self._is_guarded or peer.peer_id == self.peer_id:
            return ((host, port),)
        hosts = await self._resolve(host)
        if peer.address in self._named:
            for ip in hosts:
                self._learn_kind(ip, of_initial_peer=True)
                self._named_sockets.add((ip, port))
            return tuple((ip, port) for ip in hosts)
        reason = "name"
        for ip in hosts:
            reason = self._objection(ip, port)
            if not reason:
                self._count_try(peer.address, (ip, port))
                return ((ip, port),)  # The others would be further tries.
        raise DialRefusedError(reason, f"{peer.address} is not dialled because a stranger names it ({reason})")

    def num_dials(self, host: str) -> float:
        """Returns how many addresses of this host (`address_group`) where no node has answered may be tried now."""
        return self._budgets[self._is_in_contact(host)].left(host) if self._is_guarded else float("inf")

    def counts(self, address: str) -> bool:
        """Returns whether a try of this address counts against `num_dials`; a name is judged when it is dialled."""
        where = split_address(address)
        is_known = where in self._answered or where in self._named_sockets or address in self._named
        return self._is_guarded and not is_known and host_kind(where[0]) is not None

    def answered(self, where: Socket) -> None:
        """Records that a node has answered there, with a signed message."""
        group = address_group(where[0])
        if self._tried.pop(where, None) is not None:
            self._budgets[True].give_back(group)
        remember(self._answered, where, 0, _MAX_REMEMBERED)
        self.in_contact(group)

    def failed(self, where: Socket) -> None:
        """Records that connecting did not work."""
        if where in self._answered:
            self._answered[where] += 1
            if self._answered[where] >= _MAX_FAILURES:
                del self._answered[where]

    def in_contact(self, host: str) -> None:
        """Records that a node at this host (`address_group`) talks to this one, so that it is no bystander."""
        remember(self._contacts, host, self._clock(), _MAX_REMEMBERED)

    def _is_in_contact(self, host: str) -> bool:
        return self._clock() - self._contacts.get(host, -_CONTACT_S) < _CONTACT_S

    def _objection(self, ip: str, port: int) -> str:
        if (ip, port) in self._named_sockets:
            return ""
        kind = host_kind(ip)
        # A machine in a private network: where no public node was named, the run is there.
        is_derived = kind == self._derived_kind and not self._is_public_named
        is_here = ip == self._machine and "loopback" in self._kinds
        is_allowed = kind is None or kind in self._kinds or self._allows_private or is_derived or is_here
        if kind == "unusable" or not is_allowed:
            return "private"
        if self.is_own(ip, port):
            return "own"
        return "port" if port < MIN_STRANGERS_PORT else ""

    def is_own(self, ip: str, port: int) -> bool:
        """Returns whether this node listens there."""
        return (ip, port) in self._own or (host_kind(ip) == "loopback" and port == self._own_loopback_port)

    def _count_try(self, address: str, where: Socket) -> None:
        """Counts a try; raises DialRefusedError (``pause`` or ``budget``)."""
        if where in self._answered or where in self._named_sockets:
            return
        group = address_group(where[0])
        is_in_contact = self._is_in_contact(group)
        until_s, last_pause_s = self._tried.get(where, (0.0, 0.0))
        now_s = self._clock()
        if last_pause_s and until_s > now_s:
            text = f"{address} is not dialled for another {until_s - now_s:.0f} s: no node answered there"
            raise DialRefusedError("pause", text)
        if not self._budgets[is_in_contact].take(group):
            raise DialRefusedError("budget", f"{address} is not dialled now: too many ports of its host were")
        first_s, longest_s = _PAUSES_IN_CONTACT_S if is_in_contact else _PAUSES_S
        pause_s = min(_PAUSE_GROWTH * last_pause_s, longest_s) if last_pause_s else first_s
        remember(self._tried, where, (now_s + pause_s, pause_s), _MAX_REMEMBERED)

    async def _resolve(self, host: str) -> tuple[str, ...]:
        """Returns the addresses of a host; raises DialRefusedError (``name``) if it cannot be looked up."""
        if host_kind(host) is not None:
            return (host,)
        known = self._resolved.get(host)
        if known is not None and known[0] > self._clock():
            return known[1]
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._config.connect_timeout_s), self._resolving:
                found = await loop.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError, TimeoutError) as error:
            is_later = isinstance(error, TimeoutError) or getattr(error, "errno", None) == socket.EAI_AGAIN
            text = "its name cannot be looked up now" if is_later else "no such host"
            raise DialRefusedError("name", f"{host} cannot be reached: {text}") from None
        hosts = tuple(dict.fromkeys(str(entry[4][0]) for entry in found))[:_MAX_RESOLVED_ADDRESSES]
        remember(self._resolved, host, (self._clock() + _RESOLVED_FOR_S, hosts), _MAX_REMEMBERED)
        return hosts

    def _learn_kind(self, host: str, *, of_initial_peer: bool = False) -> None:
        kind: HostKind | None = "loopback" if host == "localhost" else host_kind(host)
        if kind is not None and kind != "unusable":
            self._kinds.add(kind)
            self._is_public_named |= of_initial_peer and kind == "public"


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

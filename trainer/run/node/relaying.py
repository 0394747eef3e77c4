"""Relays that nobody has named: a node that nobody connects to looks for some, one that serves announces itself.

    20 s, others are there, nobody has connected     → registers with two relays at most: at hosts named to this node
                                                       (port 4002), and of nodes that announce one and were reached
    a relay without an address for 25 s, or for 10 s
    after it has refused or was lost                 → is left for ten minutes; another is tried
    a relay that says "reached directly", and nobody connects for three minutes → the same
    two relays, and nobody comes by them for 15 min  → the announced one is left, so that the other is announced
    relay.serve: a peer finds this relay reachable,
    or only nodes that nobody reaches connect to it  → announced; asked again every ten minutes
    peers find it unreachable, and no node uses it   → not announced, and nobody new gets a port

A relay that registers a node tries to reach it directly and goes on trying, so registering is also how a node finds out
whether it needs one. The trade-off: a node behind a router that others of its own network connect to is taken for
reachable, unless nodes with public addresses are there, whose calls alone count then.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Sequence
from typing import Final

from trainer.errors import RpcError, TrainerUsageError
from trainer.network.discovery import Announcement, Discovery
from trainer.network.discovery.config import DiscoveryConfig
from trainer.network.reachability import RELAY_CHECK_METHOD, DialBackReply, RelayCheckRequest
from trainer.network.relay import Relay, RelayConfig, RelayedReach
from trainer.network.relay.client import LinkState
from trainer.network.relay.config import DEFAULT_PORT, MAX_RELAYS
from trainer.network.rpc import Endpoint
from trainer.network.rpc.config import split_address
from trainer.network.rpc.dialing import address_group, host_kind
from trainer.network.rpc.messages import PeerId

logger = logging.getLogger(__name__)

_GRACE_S: Final = 20.0
"""Nodes that are reached are called by each other well within it."""
_LOOK_S: Final = 1.0
_CALLED_S: Final = 900.0
_TRIAL_S: Final = 25.0
_FAILED_S: Final = 10.0
"""Time for a relay that has refused, or was lost, to take the node again."""
_UNCALLED_S: Final = 180.0
_SILENT_S: Final = 900.0
"""A relay may let a node reach itself, and nobody else reach it; where it is the only one, it is kept all the same."""
_PAUSE_S: Final = 600.0
_CHECK_TIMEOUT_S: Final = 25.0
_CHECKED_EVERY_S: Final = 600.0
_CHECK_AGAIN_S: Final = 60.0
_FIRST_CHECK_S: Final = 5.0
_MOST_ASKED: Final = 3


def named_relays(config: DiscoveryConfig) -> tuple[str, ...]:
    """Returns where a relay may be at the hosts that were named to this node: those of seeds or nodes, port 4002."""
    hosts = []
    for address in config.initial_peers:
        host = address.split("/")[2] if address.startswith("/") else split_address(address)[0]
        hosts.append(f"[{host}]" if ":" in host and not host.startswith("[") else host)
    return tuple(f"{host}:{DEFAULT_PORT}" for host in dict.fromkeys(hosts))


def announced_relays(peers: Sequence[Announcement]) -> tuple[str, ...]:
    """Returns the relays of nodes that announce one."""
    found = [(said.address.rpartition(":")[0], said.relay_port) for said in peers if said.relay_port]
    return tuple(dict.fromkeys(f"{host}:{port}" for host, port in found))


async def address_by_relay(config: RelayConfig, discovery: DiscoveryConfig, reach: RelayedReach) -> str:
    """Returns where this node is reached by way of a relay at a named host; empty: there is none.

    For a newcomer that its run's authority does not reach, and that nobody else answers before it has.
    """
    if config.through or config.serve or not config.auto:
        return ""
    relays = named_relays(discovery)[:MAX_RELAYS]
    for relay in relays:
        reach.use(relay)
    ends_s = time.monotonic() + _TRIAL_S
    while not reach.address and time.monotonic() < ends_s:
        if all(state.failure for state in reach.states()):
            break
        await reach.has_address(_LOOK_S)
    if reach.address:
        logger.info("the run's authority does not reach this node; it joins by way of a relay, at %s", reach.address)
        return reach.address
    for relay in relays:
        await reach.leave(relay)
    return ""


class RelayFinder:
    """Finds relays for one node while nobody connects to it; for the event loop of its endpoint."""

    def __init__(
        self,
        config: RelayConfig,
        initial: DiscoveryConfig,
        endpoint: Endpoint,
        reach: RelayedReach,
        discovery: Discovery,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._through = frozenset(config.through)
        self._is_wanted = config.auto and not config.through and not config.serve
        self._named = named_relays(initial)
        self._endpoint = endpoint
        self._reach = reach
        self._discovery = discovery
        self._clock = clock
        self._rng = random.Random(endpoint.peer_id)
        self._began_s = clock()
        self._called_s: dict[str, float] = {}
        """When somebody has connected to this node last, by kind of address."""
        self._came_by_relay_s = self._began_s
        self._paused_until_s: dict[str, float] = {}
        self._tells_at_s = 0.0
        endpoint.contacts.when_served.append(self._served)

    async def run(self) -> None:
        """Looks every second, until it is cancelled; returns at once where relays are named, or not wanted."""
        while self._is_wanted:
            await asyncio.sleep(_LOOK_S)
            try:
                await self.look()
            except Exception:
                # The node trains without a relay, as before; looking for one must not end for good.
                logger.exception("looking for relays")

    async def look(self) -> None:
        """Leaves relays that do not serve, and takes others where this node needs them."""
        peers = await self._discovery.peers()
        called_s = self._last_call_s(peers)
        silent = self._silent(peers, called_s)
        for state in self._in_use():
            if why := self._fault(state, called_s) or ("nobody comes by it" if state == silent else ""):
                logger.info("relay %s: %s; left for %.0f s", state.relay, why, _PAUSE_S)
                self._paused_until_s[state.relay] = self._clock() + _PAUSE_S
                await self._reach.leave(state.relay)
        is_called = self._clock() - called_s < _CALLED_S
        is_early = self._clock() - self._began_s < _GRACE_S
        if is_early or is_called or not (peers or self._discovery.heard()):
            return
        used = self._in_use()
        hosts = {_host_of(state.relay) for state in used}
        for relay in self._candidates(peers):
            if len(hosts) >= MAX_RELAYS:
                break
            if _host_of(relay) not in hosts:
                hosts.add(_host_of(relay))
                self._reach.use(relay)
        if not hosts:
            self._tell_alone()

    def _in_use(self) -> list[LinkState]:
        return [state for state in self._reach.states() if state.relay not in self._through]

    def _candidates(self, peers: Sequence[Announcement]) -> list[str]:
        announced = list(announced_relays(peers))
        self._rng.shuffle(announced)  # So that nodes do not all take the same.
        hosts = {_host_of(relay) for relay in announced}
        named = [relay for relay in self._named if _host_of(relay) not in hosts]
        now_s = self._clock()
        self._paused_until_s = {relay: until_s for relay, until_s in self._paused_until_s.items() if until_s > now_s}
        return [relay for relay in (*named, *announced) if relay not in self._paused_until_s]

    def _fault(self, state: LinkState, called_s: float) -> str:
        """Returns why a relay does not serve; empty: it does, or is still being tried."""
        since_s = self._clock() - state.changed_s
        limit_s = _FAILED_S if state.failure else _TRIAL_S
        if not state.lent_address and not state.direct_address and since_s > limit_s:
            return state.failure or "it does not answer"
        if state.direct_address and since_s > _UNCALLED_S and called_s < state.changed_s:
            return f"it says that this node is reached at {state.direct_address}, and nobody connects there"
        return ""

    def _silent(self, peers: Sequence[Announcement], called_s: float) -> LinkState | None:
        """Returns the relay that is announced, where another could be, and nobody has come by it for long."""
        lent = [state for state in self._in_use() if state.lent_address]
        since_s = max(self._came_by_relay_s, called_s, *(state.changed_s for state in lent), float("-inf"))
        if len(lent) < 2 or not peers or self._clock() - since_s < _SILENT_S:
            return None
        self._came_by_relay_s = self._clock()  # The other one has as long.
        return next((state for state in lent if state.lent_address == self._reach.address), None)

    def _served(self, _peer_id: PeerId, host: str, _method: str) -> None:
        if self._endpoint.may_be_relayed(host):
            self._came_by_relay_s = self._clock()
        if not self._endpoint.may_be_relayed(host):
            self._called_s[host_kind(host.partition("/")[0]) or ""] = self._clock()

    def _last_call_s(self, peers: Sequence[Announcement]) -> float:
        """Returns when somebody has connected last who shows that this node is reached by the others."""
        has_public = any(host_kind(said.address.rpartition(":")[0]) == "public" for said in peers)
        times = [at_s for kind, at_s in self._called_s.items() if not has_public or kind == "public"]
        return max(times, default=float("-inf"))

    def _tell_alone(self) -> None:
        if self._clock() >= self._tells_at_s:
            self._tells_at_s = self._clock() + _PAUSE_S
            logger.warning(
                "nobody has connected to this node, and no relay of this run is found; open its port, or give --relay "
                "HOST:PORT (python -m trainer doctor, with the same options, says what stands in the way)"
            )


class ServedRelay:
    """Finds out whether the relay of a node with `relay.serve` is reached, and is announced; for one event loop."""

    def __init__(self, relay: Relay, endpoint: Endpoint, discovery: Discovery) -> None:
        self._relay = relay
        self._endpoint = endpoint
        self._discovery = discovery
        self._rng = random.Random(endpoint.peer_id)
        self.announced_port = 0
        """What to announce; 0: not found reachable."""
        self._is_reached: bool | None = None  # Nobody has said yet.
        self._is_called = False
        endpoint.contacts.when_served.append(self._served)

    async def run(self, changed: Callable[[], None]) -> None:
        """Asks peers again and again, until it is cancelled; ``changed``: `announced_port` has."""
        pause_s = _FIRST_CHECK_S
        while True:
            await asyncio.sleep(pause_s)
            try:
                is_reached = await self.check()
            except Exception:
                # What peers say must not end the checks for good: a relay would stay announced, or be so no more.
                logger.exception("checking this node's relay")
                is_reached = None
            if is_reached is not None and is_reached != self._is_reached:
                self._is_reached = is_reached
                self._take(is_reached=is_reached)
                changed()
            unknown_s = _FIRST_CHECK_S if not self.announced_port else _CHECK_AGAIN_S
            pause_s = unknown_s if is_reached is None else _CHECKED_EVERY_S if is_reached else _CHECK_AGAIN_S

    async def check(self) -> bool | None:
        """Returns whether others reach this relay; None: nobody says.

        Where no node that could say is there, as beside nodes behind routers alone, it counts that nodes have connected
        to this one: those that want to be relayed find out about the relay's own ports themselves.
        """
        if self._relay.num_nodes:  # They could not have registered.
            return True
        peers = list(await self._discovery.peers())
        asked = self._rng.sample(peers, min(_MOST_ASKED, len(peers)))
        answers = await asyncio.gather(*(self._ask(each) for each in asked))
        found = [answer for answer in answers if answer is not None]
        if any(found):
            return True
        if found and len(found) >= min(2, len(peers)):
            return False
        return True if self._is_called and not peers else None

    async def _ask(self, said: Announcement) -> bool | None:
        body = RelayCheckRequest(port=self._relay.port, ticket=self._relay.new_ticket())
        try:
            reply = await self._endpoint.call(
                said.peer(), RELAY_CHECK_METHOD, body, DialBackReply, timeout_s=_CHECK_TIMEOUT_S
            )
        except (RpcError, TrainerUsageError) as error:
            logger.debug("%s does not say whether this relay is reached: %s", said.address, error)
            return None
        return reply.body.outcome == "reached"

    def _served(self, _peer_id: PeerId, host: str, _method: str) -> None:
        self._is_called = True

    def _take(self, *, is_reached: bool) -> None:
        if is_reached:
            self.announced_port, self._relay.paused = self._relay.port, ""
            logger.info("others reach this node's relay at port %d; it is announced to the run", self._relay.port)
            return
        self.announced_port = 0
        self._relay.paused = "expected a relay that others reach, found that they do not reach this one"
        logger.warning(
            "others do not reach this node's relay at port %d, or the ports that it lends (relay.first_port): it is "
            "not announced (any more), and takes nobody",
            self._relay.port,
        )


def _host_of(address: str) -> str:
    return address_group(split_address(address)[0])

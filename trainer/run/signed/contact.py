"""A run as its owner meets it from outside: found, asked how far it is and which changes it knows, told of another.

Whoever calls trains nothing and announces nothing. Nodes are found as nodes find each other, from the addresses in the
run file or those given, by peer exchange or in the DHT; in the DHT a change is kept as well. In a run that admits its
members only, peer exchange is closed to whoever calls here: the addresses themselves are asked, and what the DHT has.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from typing import Final

from trainer.errors import DiscoveryError, RpcError, TrainerUsageError
from trainer.model.config import stage_names
from trainer.network.discovery import Discovery, open_discovery
from trainer.network.discovery.announcement import Announcement
from trainer.network.discovery.exchange import RUN_METHOD
from trainer.network.discovery.record_exchange import RecordExchange
from trainer.network.discovery.records import record_key, sign_record
from trainer.network.discovery.run_change import RUN_CHANGE, RunChange, SettingValue
from trainer.network.rpc import Endpoint, Identity, Peer, RpcConfig
from trainer.network.rpc.config import has_port
from trainer.run.config import RunConfig
from trainer.run.signed.chain import ChangeChain
from trainer.run.signed.files import RunFile
from trainer.run.signed.run import RunAnswer, RunQuestion

_FIND_S: Final = 20.0  # For a DHT to start on a busy machine, and to answer.
_SETTLE_S: Final = 2.0  # After the first node was found, for the rest to be.
_LOOK_S: Final = 0.2
_ASK_S: Final = 5.0
_MAX_HEARD: Final = 64  # Nodes of a DHT that are asked, where none says by itself that it is there.
ROUNDS_AHEAD: Final = 2
"""By default a change is in force from so many rounds behind the furthest node's: one is under way, and in the next
everybody hears of it."""


@dataclass(frozen=True, slots=True)
class NodeFound:
    """A node of the run that has answered."""

    node_id: str
    peer: Peer
    round_index: int  # -1: it has no rounds, as drivers, or none yet.
    newest_change: int
    newest_digest: str  # Of that change; empty: it knows none.


@dataclass(frozen=True, slots=True)
class Told:
    """What nodes said to a change."""

    accepted: tuple[str, ...]
    refused: tuple[tuple[str, str], ...]  # Node and why.
    silent: tuple[str, ...]

    @property
    def is_refused(self) -> bool:
        """Whether all who said anything refused it."""
        return bool(self.refused) and not self.accepted


class RunContact:
    """A run that can be reached; made by `reached`."""

    def __init__(self, endpoint: Endpoint, discovery: Discovery, chain: ChangeChain, named: Sequence[str] = ()) -> None:
        self.nodes: tuple[NodeFound, ...] = ()
        """The nodes that have answered, by `find`."""
        self._endpoint = endpoint
        self._discovery = discovery
        self._chain = chain
        self._has_authority = bool(chain.authorities_at(0))
        dialled = named if self._has_authority else ()
        self._named = tuple(address for address in dialled if has_port(address) and not address.startswith("/"))
        self._exchange = RecordExchange(endpoint, chain, lambda: ())

    async def find(self, wait_s: float = _FIND_S) -> None:
        """Finds the nodes of the run, asks each how far it is, and takes up the changes they know."""
        named = [node for node in await asyncio.gather(*map(self._ask_address, self._named)) if node is not None]
        ends_s, is_settling = time.monotonic() + wait_s, False
        while time.monotonic() < ends_s:
            if not is_settling and (named or await self._said()):
                ends_s, is_settling = min(ends_s, time.monotonic() + _SETTLE_S), True
            await asyncio.sleep(_LOOK_S)
        found = await asyncio.gather(*(self._ask(it.node_id, it.peer()) for it in await self._said()))
        by_key = {node.peer.peer_id: node for node in (*named, *found) if node is not None}
        self.nodes = tuple(by_key.values())
        for node in sorted(self.nodes, key=lambda node: -node.newest_change)[:3]:
            await self._exchange.pull(node.peer)

    @property
    def furthest_round(self) -> int | None:
        """The latest round that a node trains towards; None: no node has rounds."""
        return max((node.round_index for node in self.nodes if node.round_index >= 0), default=None)

    async def tell(self) -> Told:
        """Tells all nodes that were found the changes that are known here; in the DHT keeps what they do not refuse."""
        wires = self._chain.newer_than({})
        answers = await asyncio.gather(*(self._tell(node, wires[node.newest_change :]) for node in self.nodes))
        told = Told(
            accepted=tuple(node.node_id for node, why in zip(self.nodes, answers, strict=True) if why == ""),
            refused=tuple((node.node_id, why) for node, why in zip(self.nodes, answers, strict=True) if why),
            silent=tuple(node.node_id for node, why in zip(self.nodes, answers, strict=True) if why is None),
        )
        if wires and not told.is_refused:
            key, expires_at = record_key(self._endpoint.run_id, RUN_CHANGE), time.time() + RUN_CHANGE.max_stored_s
            with suppress(DiscoveryError):  # The nodes that were told keep it there.
                await self._discovery.store_record(key, self._chain.subkey_of(wires[-1]), wires[-1], expires_at)
        return told

    async def _said(self) -> Sequence[Announcement]:
        """Returns what the nodes announce that are to be asked."""
        found = await self._discovery.peers()
        return found or (self._discovery.heard()[:_MAX_HEARD] if self._has_authority else ())

    async def _ask_address(self, address: str) -> NodeFound | None:
        return await self._ask(address, Peer(None, address))

    async def _ask(self, node_id: str, peer: Peer) -> NodeFound | None:
        try:
            reply = await self._endpoint.call(peer, RUN_METHOD, RunQuestion(), RunAnswer, timeout_s=_ASK_S)
        except (RpcError, TrainerUsageError):  # The latter: an announced address that cannot be dialled.
            return None
        said, known = reply.body, Peer(reply.sender, peer.address, peer.certificate)
        return NodeFound(node_id, known, said.round_index, said.newest_change, said.newest_digest)

    async def _tell(self, node: NodeFound, wires: Sequence[bytes]) -> str | None:
        """Returns why a node refused what it was told; empty: it did not; None: no answer."""
        try:
            return await self._exchange.exchange(node.peer, wires)
        except RpcError:
            return None


@asynccontextmanager
async def reached(
    config: RunConfig, chain: ChangeChain, identity: Identity, initial_peers: tuple[str, ...] = ()
) -> AsyncIterator[RunContact]:
    """Opens a way to the nodes of a run, of which ``config`` has the options; for use with ``async with``."""
    options = replace(
        config.discovery, initial_peers=initial_peers or config.discovery.initial_peers, poll_interval_s=0.5
    )
    rpc = RpcConfig(host=config.rpc.host, public_address=config.rpc.public_address, tls=config.rpc.tls)
    endpoint = Endpoint(identity, config.run_id, rpc)
    discovery = open_discovery(endpoint, options, stage_names(config.swarm.num_stages))
    await endpoint.start()
    try:
        await discovery.start()
        yield RunContact(endpoint, discovery, chain, options.initial_peers)
    finally:
        await discovery.close()
        await endpoint.stop()


def signed_change(
    file: RunFile,
    chain: ChangeChain,
    owner: Identity,
    settings: dict[str, SettingValue],
    at_round: int,
    comment: str = "",
) -> bytes:
    """Returns the next change of a run, signed and checked as every node checks it, and adds it to the chain.

    Raises:
        RecordRefusedError: it would be refused everywhere.
        DiscoveryError: the key is not the owner's, or there is too much in one change.
    """
    change = RunChange(
        run_id=file.name,
        signer=file.owner,
        number=chain.newest + 1,
        issued_at=time.time(),
        previous=chain.previous_digest(),
        at_round=at_round,
        settings=settings,
        comment=comment,
    )
    wire = sign_record(change, owner)
    chain.offer(wire)
    return wire

"""Looks at a run from outside: who announces itself, who answers, what each reports, what the keeper's account says.

A look asks every node that can be reached for its report and those it was told, 16 at a time, and reads the reports in
the DHT; every report is verified here, whoever handed it over. What comes back is bounded: 4 KiB a report, 16,384
nodes.
The watcher announces nothing and answers nobody. It costs a node one request a look.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from trainer.errors import DiscoveryError, RefusedError, RpcError, TrainerUsageError
from trainer.monitor.status import SwarmAccount
from trainer.network.discovery import Announcement, open_discovery
from trainer.network.discovery.node_report import NodeReport, ReportRefusedError, report_key, verify_report
from trainer.network.discovery.report_exchange import (
    REPORTS_METHOD,
    ReportsAsk,
    ReportsReply,
    split_reports,
)
from trainer.network.rpc import Endpoint, Identity, Peer
from trainer.network.rpc.messages import Reason
from trainer.pipeline.ledger.messages import (
    LEDGER_ACCOUNT,
    LEDGER_WORKERS,
    Account,
    AccountAsk,
    WorkerCounts,
)
from trainer.run.config import RunConfig
from trainer.run.node.admission import admission_client

logger = logging.getLogger(__name__)

_AT_ONCE: Final = 16
_TIMEOUT_S: Final = 10.0
_MAX_NODES: Final = 16_384
_MAX_UNCERTAIN_S: Final = 5.0
"""An answer that took longer than twice that says nothing of its clock."""


@dataclass(slots=True)
class WatchedNode:
    """What is known of a node; times in seconds since 1970 by the monitor's clock."""

    peer_id: str
    heard_at: float
    said: Announcement | None = None
    report: NodeReport | None = None
    before: NodeReport | None = None  # The report before the newest, of the same incarnation.
    is_reached: bool = False
    clock_offset_s: float | None = None

    def take(self, report: NodeReport) -> None:
        """Takes a report, if it is newer than the known one."""
        known = self.report
        if known is not None and known.sent_at >= report.sent_at:
            return
        self.before = known if known is not None and known.incarnation == report.incarnation else None
        self.report = report


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """The run as it was seen at a moment."""

    at: float
    nodes: Mapping[str, WatchedNode]  # By key.
    account: SwarmAccount | None = None
    keeper: str = ""  # Key of the driver that told it.
    counts: Mapping[str, int] = field(default_factory=dict)
    """Micro-batches that drivers settled with each worker process, by incarnation."""
    num_future: int = 0  # Records refused since the last look since they are from the future.


class RunWatcher:
    """A monitor's ears; for one event loop. ``stages`` are the run's, where a run file tells them."""

    def __init__(self, config: RunConfig, identity: Identity, stages: tuple[str, ...] = ()) -> None:
        self._config = config
        self._admission = admission_client(config, identity, "monitor")
        admission = None if self._admission is None else self._admission.admission
        self._endpoint = Endpoint(identity, config.run_id, config.rpc, admission)
        self._discovery = open_discovery(self._endpoint, config.discovery, stages)
        self._nodes: dict[str, WatchedNode] = {}
        self._keeper = config.swarm.ledger.keeper if config.swarm.ledger.keeper_is_key else ""
        self._num_future = 0

    async def start(self) -> None:
        """Begins to listen, admitted where the run has an authority; raises what discovery and admission do."""
        if self._admission is not None:
            self._admission.register(self._endpoint)
        await self._endpoint.start()
        if self._admission is not None:
            await self._admission.join(self._endpoint.address)
            self._admission.start(lambda: self._endpoint.address, self._discovery, self._endpoint)
        await self._discovery.start()

    async def stop(self) -> None:
        """Ends all of it."""
        if self._admission is not None:
            await self._admission.stop()
        await self._discovery.close()
        await self._endpoint.stop()

    async def wait_for_nodes(self, timeout_s: float, settle_s: float = 3.0) -> bool:
        """Waits until nodes are there and no further ones have come for a while; False: nobody has."""
        deadline_s, since_s, num_known = time.monotonic() + timeout_s, time.monotonic(), 0
        while time.monotonic() < deadline_s:
            num_heard = len(await self._discovery.peers())
            if num_heard != num_known:
                num_known, since_s = num_heard, time.monotonic()
            if num_known and time.monotonic() - since_s >= settle_s:
                return True
            await asyncio.sleep(0.1)
        return bool(self._discovery.heard())

    def silence(self) -> str:
        """Returns why nobody may have been heard of."""
        return self._discovery.no_peers_reason() or "the nodes there know nobody else"

    async def look(self) -> Look:
        """Looks once, in some seconds."""
        now = time.time()
        for said in self._discovery.heard():
            node = self._nodes.setdefault(said.peer_id, WatchedNode(said.peer_id, now))
            node.said, node.heard_at, node.is_reached = said, now, False
        await self._ask_all(await self._discovery.peers())
        await self._read_stored()
        self._forget(now)
        account, counts = await self._ask_keeper()
        num_future = self._discovery.refused["future"]
        new_future, self._num_future = num_future - self._num_future, num_future
        return Look(
            at=now,
            nodes=dict(self._nodes),
            account=account,
            keeper=self._keeper,
            counts=counts,
            num_future=new_future,
        )

    # -- reports -------------------------------------------------------------------------------------------------------

    async def _ask_all(self, nodes: Iterable[Announcement]) -> None:
        slots = asyncio.Semaphore(_AT_ONCE)

        async def ask(said: Announcement) -> None:
            async with slots:
                await self._ask(said)

        await asyncio.gather(*map(ask, nodes))

    async def _ask(self, said: Announcement) -> None:
        node = self._nodes.setdefault(said.peer_id, WatchedNode(said.peer_id, time.time(), said))
        asked_at = time.time()
        try:
            reply = await self._endpoint.call(
                said.peer(), REPORTS_METHOD, ReportsAsk(), ReportsReply, timeout_s=_TIMEOUT_S
            )
            wires = split_reports(reply.body, bytes(reply.payload))
        except RefusedError as error:
            # It answered; an earlier release knows no reports, and a clock that is far off refuses everything.
            node.is_reached = True
            if error.reason == Reason.CLOCK:
                node.clock_offset_s = said.sent_at - asked_at
            logger.debug("%s: no report: %s", said.node_id, error)
            return
        except (RpcError, TrainerUsageError) as error:
            logger.debug("%s is not reached: %s", said.node_id, error)
            return
        node.is_reached = True
        uncertain_s = (time.time() - asked_at) / 2
        node.clock_offset_s = reply.body.now - (asked_at + uncertain_s) if uncertain_s < _MAX_UNCERTAIN_S else None
        for wire in wires:
            self._take(wire)

    async def _read_stored(self) -> None:
        try:
            stored = await self._discovery.stored_records(report_key(self._config.run_id))
        except DiscoveryError as error:
            logger.warning("the reports in the DHT: %s", error)
            return
        for peer_id, wire in stored:
            self._take(wire, peer_id)

    def _take(self, wire: bytes, subkey: str | None = None) -> None:
        try:
            report = verify_report(
                wire,
                now=time.time(),
                max_clock_skew_s=self._config.discovery.max_clock_skew_s,
                run_id=self._config.run_id,
                subkey=subkey,
            )
        except ReportRefusedError as error:
            logger.debug("a report is refused: %s", error)
            return
        if report.peer_id in self._nodes or len(self._nodes) < _MAX_NODES:
            self._nodes.setdefault(report.peer_id, WatchedNode(report.peer_id, time.time())).take(report)

    def _forget(self, now: float) -> None:
        """Forgets nodes that neither announce themselves nor report any more."""
        heard = {said.peer_id for said in self._discovery.heard()}
        for node in self._nodes.values():
            if node.peer_id not in heard:
                node.said = None
            if node.report is not None and node.report.expires_at <= now:
                node.report = node.before = None
        gone = [key for key, node in self._nodes.items() if node.said is None and node.report is None]
        for key in gone:
            del self._nodes[key]

    # -- the account ---------------------------------------------------------------------------------------------------

    async def _ask_keeper(self) -> tuple[SwarmAccount | None, dict[str, int]]:
        """Asks the keeper that the run file names by its key; else who kept the account before, else any driver."""
        drivers = [
            node.said
            for node in self._nodes.values()
            if node.said is not None
            and node.said.stage is None
            and (node.report is None or node.report.role == "driver")
        ]
        if self._config.swarm.ledger.keeper_is_key:
            drivers = [said for said in drivers if said.peer_id == self._keeper]
        for said in sorted(drivers, key=lambda it: (it.peer_id != self._keeper, it.node_id)):
            try:
                peer = said.peer()
                reply = await self._endpoint.call(peer, LEDGER_ACCOUNT, AccountAsk(), Account, timeout_s=_TIMEOUT_S)
                self._keeper = said.peer_id
                own = {"node_id": said.node_id, "keeper": said.peer_id, "age_s": 0.0}
                account = SwarmAccount.model_validate(reply.body.model_dump(mode="json") | own)
                return account, await self._worker_counts(peer)
            except (RpcError, TrainerUsageError) as error:
                logger.debug("%s tells no account: %s", said.node_id, error)
        return None, {}

    async def _worker_counts(self, peer: Peer) -> dict[str, int]:
        try:
            reply = await self._endpoint.call(peer, LEDGER_WORKERS, AccountAsk(), WorkerCounts, timeout_s=_TIMEOUT_S)
        except RpcError as error:  # An earlier release counts none.
            logger.debug("%s counts no workers: %s", peer.address, error)
            return {}
        return {it.incarnation: it.micro_batches for it in reply.body.workers}

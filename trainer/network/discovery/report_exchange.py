"""How reports reach whoever looks: stored in the DHT, or told to three peers; and handed out to who asks a node.

Once a minute a node signs a report. With a DHT it stores it there under the run's reports; without one it tells three
random peers, which keep it for as long as it counts. Anybody of the run may ask a node for its own newest report and
for those it was told, so a node that cannot be dialled is seen through others. No node passes a told report on: what
reporting costs a node does not grow with the run: three messages out a minute and, on average, three in, which with a
monitor took 11 ms of processor time and 350 bytes a second (`bench_swarm.py monitor`).
The trade-off: whoever wants all reports has to ask all nodes, or enough of them.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Annotated, Final

from pydantic import Field

from trainer.errors import DiscoveryError, RefusedError, RpcError, TrainerUsageError
from trainer.network.discovery.announcement import Instant
from trainer.network.discovery.base import Discovery
from trainer.network.discovery.node_report import (
    MAX_REPORT_BYTES,
    NodeReport,
    ReportRefusedError,
    SignedReport,
    report_key,
    sign_report,
    verify_report,
)
from trainer.network.rpc.endpoint import Endpoint
from trainer.network.rpc.messages import Message, Peer, Reason, Reply, Request
from trainer.network.rpc.token_buckets import TokenBuckets

logger = logging.getLogger(__name__)

REPORTS_METHOD: Final = "report/exchange"
REPORT_INTERVAL_S: Final = 60.0
LIFETIMES: Final = 3.0
"""A report counts for so many intervals: two may be lost."""

_FIRST_REPORT_S = 3.0
_FANOUT = 3
_FRESH_S = 10.0
"""Who asks gets a report at most so old: none is signed more often than that, however often it is asked for."""
_MAX_TOLD = 256
_MAX_ANSWERED = 63
_ASKED_BURST, _ASKED_PER_S = 64.0, 4.0
"""Requests of one address: at once, and per second."""
_TIMEOUT_S = 10.0


class ReportsAsk(Message):
    """Asks for reports; the payload is the asker's own, if it has one."""


class ReportsReply(Message):
    """Head of a reply: the length of each report of the payload, this node's own first, and the time by its clock."""

    sizes: Annotated[tuple[Annotated[int, Field(gt=0, le=MAX_REPORT_BYTES)], ...], Field(max_length=_MAX_ANSWERED + 1)]
    now: Instant


class ReportExchange:
    """Reports on one node, and keeps what others tell it; for the event loop of its endpoint.

    ``build`` returns the node's report, not stamped yet; it is called in the loop and must not wait.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        discovery: Discovery,
        build: Callable[[], NodeReport],
        *,
        interval_s: float = REPORT_INTERVAL_S,
        max_clock_skew_s: float = 120.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._endpoint = endpoint
        self._discovery = discovery
        self._build = build
        self._interval_s = interval_s
        self._max_clock_skew_s = max_clock_skew_s
        self._clock = clock
        self._rng = random.Random(endpoint.peer_id)
        self._asked = TokenBuckets(_ASKED_BURST, _ASKED_PER_S)
        self._current: SignedReport | None = None
        self._told: OrderedDict[str, tuple[str, SignedReport]] = OrderedDict()
        """By peer id, the newest last: the address it was told from, and the report."""
        self.refused: Counter[str] = Counter()  # Reports that were told and not believed, by reason.

    def register(self) -> None:
        """Makes the node answer; before its endpoint starts."""
        self._endpoint.register(REPORTS_METHOD, ReportsAsk, self._answer, max_payload_bytes=MAX_REPORT_BYTES)

    async def run(self) -> None:
        """Reports every interval, for the first time after some seconds, until it is cancelled."""
        await asyncio.sleep(min(_FIRST_REPORT_S, self._interval_s))
        while True:
            try:
                await self._report()
            except (DiscoveryError, RpcError) as error:
                logger.debug("the report is not spread: %s", error)
            except Exception:
                # A figure that cannot be read must not end the reports, nor the node.
                logger.exception("reporting on this node")
            await asyncio.sleep(self._interval_s * self._rng.uniform(0.9, 1.1))

    def told(self) -> tuple[SignedReport, ...]:
        """Returns the reports of others that still count, the newest last."""
        now = self._clock()
        for peer_id in [key for key, (_, it) in self._told.items() if it.report.expires_at <= now]:
            del self._told[peer_id]
        return tuple(report for _, report in self._told.values())

    def signed(self) -> SignedReport:
        """Returns this node's report, signed anew if the last one is some seconds old; raises `DiscoveryError`."""
        now = self._clock()
        current = self._current
        if current is None or not 0 <= now - current.report.sent_at < min(_FRESH_S, self._interval_s):
            lifetime_s = LIFETIMES * self._interval_s
            current = self._current = sign_report(self._build().stamped(now, lifetime_s), self._endpoint.identity)
        return current

    async def _report(self) -> None:
        current = self.signed()
        if self._discovery.stores_reports:
            said = current.report
            await self._discovery.store_record(report_key(said.run_id), said.peer_id, current.wire, said.expires_at)
            return
        peers = await self._discovery.peers()
        chosen = self._rng.sample(peers, min(_FANOUT, len(peers)))
        await asyncio.gather(*(self._tell(said.peer(), current.wire) for said in chosen))

    async def _tell(self, peer: Peer, wire: bytes) -> None:
        """Tells a peer; of its answer nothing is needed, so the node asks for none of its reports."""
        try:
            await self._endpoint.call(
                peer, REPORTS_METHOD, ReportsAsk(), ReportsReply, payload=wire, timeout_s=_TIMEOUT_S
            )
        except (RpcError, TrainerUsageError) as error:
            logger.debug("%s is not told the report: %s", peer.address, error)

    async def _answer(self, request: Request[ReportsAsk]) -> Reply[ReportsReply]:
        if not self._asked.take(request.remote_address):
            raise RefusedError(Reason.BUSY, "expected fewer requests for reports of this address; ask again later")
        if request.payload:
            self._hear(bytes(request.payload), request.sender, request.remote_address)
            return Reply(ReportsReply(sizes=(), now=self._clock()))
        told = [it.wire for it in self.told()[-_MAX_ANSWERED:]]
        wires = [self.signed().wire, *told]
        return Reply(ReportsReply(sizes=tuple(map(len, wires)), now=self._clock()), b"".join(wires))

    def _hear(self, wire: bytes, sender: str, address: str) -> None:
        known = self._told.get(sender)
        if known is not None and known[1].wire == wire:
            return
        try:
            report = verify_report(
                wire,
                now=self._clock(),
                max_clock_skew_s=self._max_clock_skew_s,
                run_id=self._endpoint.run_id,
                subkey=sender,
            )
        except ReportRefusedError as error:
            self.refused[error.reason] += 1
            raise RefusedError("report", str(error)) from None
        if known is not None and known[1].report.sent_at >= report.sent_at:
            return
        self._told.pop(sender, None)
        if len(self._told) >= _MAX_TOLD:
            sizes = Counter(where for where, _ in self._told.values())
            fullest = max(sizes.values())  # So an address full of made-up nodes evicts its own.
            del self._told[next(key for key, (where, _) in self._told.items() if sizes[where] == fullest)]
        self._told[sender] = (address, SignedReport(report, wire))


def split_reports(body: ReportsReply, payload: bytes) -> list[bytes]:
    """Returns the reports of a reply; raises `RefusedError` where the payload does not fit its head."""
    if sum(body.sizes) != len(payload):
        raise RefusedError("payload", f"expected reports of {sum(body.sizes)} bytes in all, found {len(payload)}")
    ends = itertools.accumulate(body.sizes)
    return [payload[end - size_bytes : end] for end, size_bytes in zip(ends, body.sizes, strict=True)]

"""A driver's side: gives micro-batches to work on, and reports what became of them, whether the keeper answers or not.

`next` and `settle` never wait for the network: one task reads rows ahead, one talks to the keeper. It repeats every
report until it is acknowledged, which is safe because a repetition changes nothing. A lease's end is counted from
before it was asked for, on a clock that goes on while this process is stopped, so it is never later than the keeper's.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor

from loader.errors import LoaderError
from trainer.errors import LedgerError, MalformedAnswerError, PeerUnavailableError, RefusedError, RpcError
from trainer.network.rpc import Endpoint, Message, Peer
from trainer.network.rpc.wire import end_task
from trainer.outer.engine.daemon_call import in_daemon_thread
from trainer.pipeline.ledger import messages
from trainer.pipeline.ledger.config import MAX_LEASE_UNITS, LedgerConfig
from trainer.pipeline.ledger.lease_cache import LeaseCache
from trainer.pipeline.ledger.messages import SettleAnswer, SettleAsk
from trainer.pipeline.ledger.rows import MicroBatches
from trainer.pipeline.ledger.units import LedgerSpec, Run
from trainer.pipeline.protocol.work import MicroBatch, MicroBatchId, Settlement, boottime_s

logger = logging.getLogger(__name__)

_GATHER_S = 0.05  # Settlements that come within this time are reported together.
_RETRY_S = 1.0
"""Between two attempts to reach a keeper that is away, and two requests for rows where there are none now."""
_RENEWALS = 6
_UNREADABLE_S = 5.0
_LOG_AWAY_S = 60.0
AnswerT = TypeVar("AnswerT", bound=Message)


@dataclass(eq=False, repr=False)
class LedgerClient:
    """A driver's `Work`; ``keeper`` returns the current keeper, which has the same ``spec`` and ``config``."""

    endpoint: Endpoint
    keeper: Callable[[], Peer | None]
    rows: MicroBatches
    spec: LedgerSpec
    config: LedgerConfig
    preferred: Sequence[int] = ()

    def __post_init__(self) -> None:
        self.cache = LeaseCache()
        self._token = secrets.token_hex(16)
        self._renewed_s = self._lease_from_s = 0.0
        self._single = False
        self._finished = self._closing = False
        self._away_since_s = self._logged_away_s = math.inf
        self._failure: BaseException | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._leasing: asyncio.Task[bool] | None = None
        self._to_report, self._to_read, self._to_give = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.stale = self.refused = 0
        """Settlements that came too late, their micro-batches having been given to others; that made no sense."""

    @property
    def keeper_away_s(self) -> float:
        """Seconds for which the keeper has not answered; 0: it does."""
        return max(0.0, boottime_s() - self._away_since_s)

    async def start(self) -> None:
        """Begins to lease and to read."""
        for name, run in (("ledger-client", self._talk), ("ledger-rows", self._read)):
            task = asyncio.create_task(run(), name=name)
            task.add_done_callback(lambda task: None if task.cancelled() else self._fail(task.exception()))
            self._tasks.append(task)

    async def next(self) -> MicroBatch | None:
        """Waits for the next micro-batch; None: the data are through, or this was closed.

        Raises LedgerError if the keeper's account is of other data than this driver's, or this has failed.
        """
        while not self._closing:
            if self._failure is not None:
                raise LedgerError(f"no more micro-batches: {self._failure}") from self._failure
            micro_batch = self.cache.begin(boottime_s())
            if micro_batch is not None:
                self._to_read.set()
                self._to_report.set()
                return micro_batch
            if self._finished:
                return None
            self._to_give.clear()
            await self._to_give.wait()
        return None

    def settle(self, settlement: Settlement) -> None:
        """Reports what became of one; the settlement is kept until the keeper has acknowledged it."""
        if not self.cache.settle(settlement, boottime_s()):
            self.stale += 1
            logger.info("%s is not held any more; what became of it is not reported", settlement.micro_batch)
        self._to_report.set()

    def hand_back(self, micro_batch: MicroBatch) -> None:
        """Gives back one that no stage was asked to apply."""
        self.cache.hand_back(micro_batch.key)
        self._to_report.set()

    async def close(self) -> None:
        """Hands back what was not begun and reports all settlements, for `close_s` at most. May be called again.

        Of what was begun and not settled the keeper is told that nothing more is sent, and it asks the workers.
        """
        self._closing = True
        self._to_give.set()
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        try:
            async with asyncio.timeout(self.config.close_s):
                if self._leasing is not None:
                    await asyncio.wait({self._leasing}, timeout=self.config.close_s / 2)
                for token in self.cache.leases:
                    self.cache.hand_back_unbegun(token)
                while self.cache.num_unreported:
                    bundle = self.cache.bundle(boottime_s(), single=self._single)
                    if bundle is None or not await self._report(bundle):
                        await asyncio.sleep(_RETRY_S / 4)
                self.cache.lapse(math.inf)
                for token in self.cache.forget_lapsed():
                    await self._ask(messages.LEDGER_SETTLE, SettleAsk(token=token, release=True), SettleAnswer)
        except TimeoutError:
            logger.warning(
                "%d settlements could not be reported; the keeper asks the workers when their leases run out",
                self.cache.num_unreported,
            )
        finally:
            await end_task(self._leasing)

    # -- talking to the keeper -----------------------------------------------------------------------------------------

    async def _talk(self) -> None:
        """Renews leases, reports and asks for rows, one after the other, as long as there is something to do."""
        while True:
            wait_s = await self._renew_if_due()
            while (bundle := self.cache.bundle(boottime_s(), single=self._single)) is not None:
                if not await self._report(bundle):
                    break
            else:
                self._single = False
            if self.cache.num_unreported:
                wait_s = min(wait_s, _RETRY_S)
            if self._units_wanted():
                wait_s = min(wait_s, await self._lease_if_due())
            if self._away_since_s != math.inf:
                await asyncio.sleep(_RETRY_S)
                continue
            with suppress(TimeoutError):
                async with asyncio.timeout(max(wait_s, _GATHER_S)):
                    await self._to_report.wait()
                    await asyncio.sleep(_GATHER_S)
            self._to_report.clear()

    def _units_wanted(self) -> int:
        """Returns how many units to ask for, so that what is held lasts for `LedgerConfig.hold_s` at this speed."""
        per_unit, ahead = self.spec.layout.micro_batches_per_unit, self.cache.num_ahead
        least = per_unit * self.config.lease_units
        wanted = math.ceil(self.cache.ended_per_s(boottime_s()) * self.config.hold_s)
        wanted = max(least, min(wanted, self.config.max_open - self.cache.num_begun))
        if ahead > wanted - (least + 1) // 2:
            return 0
        return min(MAX_LEASE_UNITS, max(self.config.lease_units, -(-(wanted - ahead) // per_unit)))

    async def _lease_if_due(self) -> float:
        """Asks for rows, unless there were none a moment ago; returns the seconds until the next time."""
        now_s = boottime_s()
        if now_s >= self._lease_from_s:
            # Shielded: what the keeper grants a client that has begun to close is handed back by `close`.
            self._leasing = asyncio.create_task(self._lease(self._units_wanted()), name="genesis-lease")
            self._lease_from_s = now_s if await asyncio.shield(self._leasing) else now_s + _RETRY_S
        return max(0.0, self._lease_from_s - now_s)

    async def _lease(self, num_units: int) -> bool:
        """Asks for rows; returns whether there were any."""
        asked_s = boottime_s()
        ask = messages.LeaseAsk(
            token=self._token,
            data_digest=self.spec.digest(),
            preferred=tuple(dict.fromkeys((*self.cache.shards(), *self.preferred)))[: messages.MAX_PREFERRED],
            num_units=num_units,
        )
        answer = await self._ask(messages.LEDGER_LEASE, ask, messages.LeaseAnswer)
        if answer is None:
            return False
        try:
            leased = self._checked(answer.runs)
        except MalformedAnswerError as error:
            self._note_away(error)
            return False
        self._finished = answer.finished
        if leased:
            self.cache.add(self._token, leased, asked_s + answer.lease_s)
            self._token = secrets.token_hex(16)
        self._to_read.set()
        self._to_give.set()
        return bool(leased)

    def _checked(self, runs: Sequence[Run]) -> list[MicroBatchId]:
        """Returns the micro-batches of a lease; raises MalformedAnswerError if no lease of this run can have them."""
        layout = self.spec.layout
        if any(run.row % layout.micro_batch_rows or run.row + run.num_rows > layout.num_windows for run in runs):
            raise MalformedAnswerError(
                "expected a lease of rows of this run's shards, found others; check which node is the keeper"
            )
        num_rows = sum(run.num_rows for run in runs)
        most = max(self.config.max_open * layout.micro_batch_rows, self.config.lease_units * layout.unit_rows)
        if num_rows > most:
            raise MalformedAnswerError(
                f"expected a lease of at most {most} rows, found {num_rows}; check which node is the keeper"
            )
        return list(layout.micro_batches(*runs))

    async def _renew_if_due(self) -> float:
        """Renews all leases in time; returns the seconds until the next time."""
        every_s, asked_s = self.config.lease_s / _RENEWALS, boottime_s()
        for token in self.cache.lapse(asked_s):
            logger.warning("lease %s ran out before it could be renewed; what was not begun is handed back", token[:8])
        self.cache.forget_lapsed(asked_s - 2 * self.config.lease_s)
        tokens = tuple(self.cache.leases)
        if not tokens:
            return every_s
        if asked_s < self._renewed_s + every_s:
            return self._renewed_s + every_s - asked_s
        live: set[str] = set()
        for first in range(0, len(tokens), messages.MAX_SAID):
            ask = messages.RenewAsk(tokens=tokens[first : first + messages.MAX_SAID])
            answer = await self._ask(messages.LEDGER_RENEW, ask, messages.RenewAnswer)
            if answer is None:
                return _RETRY_S
            for token in answer.live:
                term = self.cache.leases.get(token)
                if term is not None and boottime_s() < term.send_before_s:
                    term.send_before_s = asked_s + answer.lease_s
            live.update(answer.live)
        self._renewed_s = asked_s
        for token in set(tokens) - live:
            unsettled = self.cache.drop(token)
            logger.warning("lease %s is over; %d begun of it were not settled", token[:8], unsettled)
        self._to_give.set()
        return every_s

    async def _report(self, bundle: SettleAsk) -> bool:
        """Reports to the keeper; returns whether it answered."""
        unheard: tuple[str, ...] = ()
        try:
            answer = await self._call(messages.LEDGER_SETTLE, bundle, SettleAnswer)
        except RpcError as error:
            if not isinstance(error, RefusedError) or error.reason not in ("malformed", "not-yours", "body"):
                self._note_away(error)
                return False
            if len(bundle.settlements) + len(bundle.handed_back) > 1:
                self._single = True
                return True
            logger.error("%s: the keeper refuses the settlement: %s", bundle.token[:8], error)
            self.refused += 1
        else:
            self.stale += len(answer.stale)
            unheard = answer.unheard
        # The keeper may hear of a worker a little later than this driver did.
        self.cache.reported(bundle, unheard, boottime_s() + _RETRY_S)
        return True

    async def _ask(self, method: str, ask: Message, answer: type[AnswerT]) -> AnswerT | None:
        """Returns the keeper's answer; None: there is none now."""
        try:
            return await self._call(method, ask, answer)
        except RpcError as error:
            match error.reason if isinstance(error, RefusedError) else "":
                case "lease-over":
                    self._token = secrets.token_hex(16)
                case "enough":
                    logger.debug("%s", error)
                case "data":
                    self._fail(error)
                case _:
                    self._note_away(error)
            return None

    async def _call(self, method: str, ask: Message, answer: type[AnswerT]) -> AnswerT:
        keeper = self.keeper()
        if keeper is None:
            raise PeerUnavailableError(
                f"expected the keeper of the account, {self.config.keeper_text}, found none announced"
            )
        reply = await self.endpoint.call(keeper, method, ask, answer, timeout_s=self.config.call_timeout_s)
        self._away_since_s = math.inf
        return reply.body

    def _fail(self, failure: BaseException | None) -> None:
        self._failure = self._failure or failure
        self._to_give.set()

    def _note_away(self, error: RpcError) -> None:
        now_s = boottime_s()
        if self._away_since_s == math.inf:
            self._away_since_s = self._logged_away_s = now_s
            logger.warning("the account's keeper does not answer; going on with what is held: %s", error)
        elif now_s - self._logged_away_s >= _LOG_AWAY_S:
            self._logged_away_s = now_s
            logger.warning(
                "waiting for the account's keeper, %s, for %.0f s; %d micro-batches are held and not begun: %s",
                *(self.config.keeper_text, self.keeper_away_s, self.cache.num_ahead, error),
            )

    # -- reading rows --------------------------------------------------------------------------------------------------

    async def _read(self) -> None:
        while True:
            while self.cache.unread and len(self.cache.ready) < self.config.ahead:
                await self._read_one(*self.cache.unread[0])
            self._to_read.clear()
            await self._to_read.wait()

    async def _read_one(self, token: str, wanted: MicroBatchId) -> None:
        term = self.cache.leases[token]
        coming = dict.fromkeys(each.shard for _, each in self.cache.unread)

        def read() -> tuple[Tensor, Tensor]:
            self.rows.want(coming)  # Waits for its turn, as reading does: neither is for the event loop.
            return self.rows.read(wanted)

        try:
            inputs, labels = await in_daemon_thread(read, "ledger-rows")
        except LoaderError as error:
            logger.warning("%s cannot be read here, and is handed back: %s", wanted, error)
            self.cache.have_read(token, wanted, None)
            self._to_report.set()
            await asyncio.sleep(_UNREADABLE_S)
            return
        self.cache.have_read(token, wanted, MicroBatch(wanted, inputs, labels, term))
        self._to_give.set()

"""A driver's side: micro-batches to work on, and a place to say what became of them, keeper or no keeper.

`next` and `settle` never wait for the network: one task reads rows ahead, one talks to the keeper. It says everything
until it is acknowledged, which is safe because saying it twice is as once. A lease's end is counted from before it was
asked for, on a clock that goes on while this process is stopped, so it is never later than the keeper's.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
from collections.abc import Callable, Sequence
from typing import TypeVar

from torch import Tensor

from loader.errors import LoaderError
from trainer.errors import LedgerError, MalformedAnswerError, PeerUnavailableError, RefusedError, RpcError
from trainer.network.rpc import Endpoint, Message, Peer
from trainer.network.rpc.wire import end_task
from trainer.outer.engine.daemon_call import in_daemon_thread
from trainer.pipeline.ledger.config import MAX_LEASE_UNITS, LedgerConfig
from trainer.pipeline.ledger.lease_cache import Bundle, HeldLease, LeaseCache, Pace
from trainer.pipeline.ledger.messages import (
    LEDGER_LEASE,
    LEDGER_RENEW,
    LEDGER_SETTLE,
    MAX_PREFERRED,
    MAX_SAID,
    LeaseAnswer,
    LeaseAsk,
    RenewAnswer,
    RenewAsk,
    SettleAnswer,
    SettleAsk,
)
from trainer.pipeline.ledger.rows import MicroBatches
from trainer.pipeline.ledger.units import LedgerSpec, Run
from trainer.pipeline.protocol.micro_batch import MicroBatchId
from trainer.pipeline.protocol.work import MicroBatch, Settlement, boottime_s

__all__ = ["LedgerClient"]

logger = logging.getLogger(__name__)

_GATHER_S = 0.05
"""Settlements that come within this are said together."""
_RETRY_S = 1.0
"""Between two attempts to reach a keeper that is away, and two questions for rows where there are none now."""
_UNREADABLE_S = 5.0
_SAY_AWAY_S = 60.0
AnswerT = TypeVar("AnswerT", bound=Message)


class LedgerClient:
    """A driver's `Work`.

    Args:
        endpoint: one's own.
        keeper: who keeps the account now; None: not known.
        rows: reads micro-batches.
        spec: what the account is of.
        config: as the keeper's.
        preferred: shards this driver is assigned.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        keeper: Callable[[], Peer | None],
        rows: MicroBatches,
        spec: LedgerSpec,
        config: LedgerConfig,
        preferred: Sequence[int] = (),
    ) -> None:
        self._endpoint = endpoint
        self._keeper = keeper
        self._rows = rows
        self._spec = spec
        self._config = config
        self._preferred = tuple(preferred)
        self._holdings = LeaseCache()
        self._token = secrets.token_hex(16)
        self._renewed_s = self._lease_from_s = 0.0
        self._single = False
        self._pace = Pace()
        self._finished = self._closing = False
        self._away_since_s = self._said_away_s = math.inf
        self._failure: BaseException | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._lease_under_way: asyncio.Task[bool] | None = None
        self._to_say, self._to_read, self._to_give = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.stale = 0
        """Settlements that came too late: what they were of had been given to others."""
        self.refused = 0
        """Settlements that the keeper did not understand."""

    @property
    def holdings(self) -> LeaseCache:
        """What this driver holds, to look at."""
        return self._holdings

    @property
    def keeper_away_s(self) -> float:
        """Seconds for which the keeper has not answered; 0: it does."""
        return max(0.0, boottime_s() - self._away_since_s)

    async def start(self) -> None:
        """Begins to lease and to read."""
        self._tasks = [
            asyncio.create_task(self._talk(), name="ledger-client"),
            asyncio.create_task(self._read(), name="ledger-rows"),
        ]
        for task in self._tasks:
            task.add_done_callback(self._ended)

    async def next(self) -> MicroBatch | None:
        """The next micro-batch; waits while there is none. None: the data are through, or this was closed.

        Raises:
            LedgerError: the keeper's account is of other data than this driver's, or this has failed.
        """
        while not self._closing:
            if self._failure is not None:
                raise LedgerError(f"no more micro-batches: {self._failure}") from self._failure
            micro_batch = self._holdings.begin(boottime_s())
            if micro_batch is not None:
                self._pace.begun(boottime_s())
                self._to_read.set()
                self._to_say.set()
                return micro_batch
            if self._finished:
                return None
            self._to_give.clear()
            await self._to_give.wait()
        return None

    def settle(self, settlement: Settlement) -> None:
        """Says what became of one; it is kept until the keeper has acknowledged it."""
        self._pace.ended(boottime_s())
        if not self._holdings.settle(settlement):
            self.stale += 1
            logger.info("%s is not held any more; what became of it is not said", settlement.micro_batch)
        self._to_say.set()

    def hand_back(self, micro_batch: MicroBatch) -> None:
        """Gives back one that no stage was asked to apply."""
        self._holdings.hand_back(micro_batch.key)
        self._to_say.set()

    async def close(self) -> None:
        """Hands back what was not begun, says what is to be said, for `close_s` at most. May be called again.

        What was begun and not settled stays leased; the keeper is told that nothing more of it is sent, and asks the
        workers.
        """
        self._closing = True
        self._to_give.set()
        await self._cancel()
        try:
            async with asyncio.timeout(self._config.close_s):
                if self._lease_under_way is not None:
                    await asyncio.wait({self._lease_under_way}, timeout=self._config.close_s / 2)
                self._holdings.hand_back_all()
                await self._say_last()
        except TimeoutError:
            logger.warning(
                "%d settlements could not be said; their leases will run out and be asked after",
                self._holdings.num_unreported,
            )
        finally:
            await end_task(self._lease_under_way)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            self._fail(task.exception())

    def _fail(self, failure: BaseException | None) -> None:
        """Lets `next` say so."""
        self._failure = self._failure or failure
        self._to_give.set()

    async def _cancel(self) -> None:
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _say_last(self) -> None:
        while self._holdings.num_unreported:
            bundle = self._holdings.bundle(boottime_s(), single=self._single)
            if bundle is None or not await self._say(bundle):
                await asyncio.sleep(_RETRY_S / 4)
        self._holdings.lapse(math.inf)
        for token in self._holdings.forget_lapsed():
            await self._ask(LEDGER_SETTLE, SettleAsk(token=token, release=True), SettleAnswer)

    async def _talk(self) -> None:
        """Says, renews and asks, one after the other, as long as there is something to."""
        while True:
            waits_s = await self._renew_if_due()
            await self._say_all()
            if self._holdings.num_unreported:
                waits_s = min(waits_s, _RETRY_S)
            if self._units_wanted():
                waits_s = min(waits_s, await self._lease_if_due())
            if self._away_since_s == math.inf:
                await self._woken(waits_s)
            else:
                await asyncio.sleep(_RETRY_S)

    async def _woken(self, within_s: float) -> None:
        """Until something is to be said, or time is up."""
        try:
            async with asyncio.timeout(max(within_s, _GATHER_S)):
                await self._to_say.wait()
                await asyncio.sleep(_GATHER_S)
        except TimeoutError:
            pass
        self._to_say.clear()

    def _units_wanted(self) -> int:
        """How many to ask for, so that what is held lasts for `LedgerConfig.hold_s` at this driver's speed."""
        per_unit, ahead = self._spec.layout.micro_batches_per_unit, self._holdings.num_ahead
        least = per_unit * self._config.lease_units
        wanted = math.ceil(self._pace.per_s(boottime_s()) * self._config.hold_s)
        wanted = max(least, min(wanted, self._config.max_open - self._holdings.num_begun))
        if ahead > wanted - (least + 1) // 2:
            return 0
        return min(MAX_LEASE_UNITS, max(self._config.lease_units, -(-(wanted - ahead) // per_unit)))

    async def _lease_if_due(self) -> float:
        """Asks for rows, unless there were none a moment ago; seconds until the next time."""
        now_s = boottime_s()
        if now_s >= self._lease_from_s:
            # Shielded: what the keeper grants to one that has begun to stop is handed back by `close`.
            self._lease_under_way = asyncio.create_task(self._lease(self._units_wanted()), name="genesis-lease")
            granted = await asyncio.shield(self._lease_under_way)
            self._lease_from_s = now_s if granted else now_s + _RETRY_S
        return max(0.0, self._lease_from_s - now_s)

    async def _lease(self, num_units: int) -> bool:
        """Asks for rows; whether there were any."""
        asked_s = boottime_s()
        preferred = tuple(dict.fromkeys((*self._holdings.shards(), *self._preferred)))[:MAX_PREFERRED]
        ask = LeaseAsk(
            token=self._token,
            data_digest=self._spec.digest(),
            preferred=preferred,
            num_units=num_units,
        )
        answer = await self._ask(LEDGER_LEASE, ask, LeaseAnswer)
        if answer is None:
            return False
        try:
            named = self._named_in(answer.runs)
        except MalformedAnswerError as error:
            self._away(error)
            return False
        self._finished = answer.finished
        if named:
            self._holdings.add(self._token, named, asked_s + answer.lease_s)
            self._token = secrets.token_hex(16)
        self._to_read.set()
        self._to_give.set()
        return bool(named)

    def _give_up_lapsed(self) -> None:
        now_s = boottime_s()
        for token in self._holdings.lapse(now_s):
            logger.warning("lease %s ran out before it could be renewed; what was not begun is handed back", token[:8])
        self._holdings.forget_lapsed(now_s - 2 * self._config.lease_s)

    def _named_in(self, runs: Sequence[Run]) -> list[MicroBatchId]:
        """The micro-batches of a lease.

        Raises:
            MalformedAnswerError: they are not what a lease of this run can have.
        """
        layout = self._spec.layout
        if any(run.row % layout.micro_batch_rows or run.row + run.num_rows > layout.num_windows for run in runs):
            raise MalformedAnswerError(
                "expected a lease of rows of this run's shards, found others; mind who keeps the account"
            )
        num_rows = sum(run.num_rows for run in runs)
        most = max(self._config.max_open * layout.micro_batch_rows, self._config.lease_units * layout.unit_rows)
        if num_rows > most:
            raise MalformedAnswerError(
                f"expected a lease of at most {most} rows, found {num_rows}; mind who keeps the account"
            )
        return [each for run in runs for each in layout.micro_batches(run)]

    async def _renew_if_due(self) -> float:
        """Renews all leases in time; seconds until the next time."""
        every_s = self._config.renew_s
        self._give_up_lapsed()
        tokens = tuple(self._holdings.leases)
        asked_s = boottime_s()
        if not tokens:
            return every_s
        if asked_s < self._renewed_s + every_s:
            return self._renewed_s + every_s - asked_s
        live: set[str] = set()
        for first in range(0, len(tokens), MAX_SAID):
            part = tokens[first : first + MAX_SAID]
            answer = await self._ask(LEDGER_RENEW, RenewAsk(tokens=part), RenewAnswer)
            if answer is None:
                return _RETRY_S
            for token in answer.live:
                lease = self._holdings.leases.get(token)
                if lease is not None and boottime_s() < lease.term.send_before_s:
                    lease.term.send_before_s = asked_s + answer.lease_s
            live.update(answer.live)
        self._renewed_s = asked_s
        for token in set(tokens) - live:
            unsettled = self._holdings.drop(token)
            logger.warning("lease %s is over; %d begun of it were not settled", token[:8], unsettled)
        self._to_give.set()
        return every_s

    async def _say_all(self) -> None:
        """Says what there is to say, until the keeper does not answer."""
        while (bundle := self._holdings.bundle(boottime_s(), single=self._single)) is not None:
            if not await self._say(bundle):
                return
        self._single = False

    async def _say(self, bundle: Bundle) -> bool:
        """Whether there is an answer to it."""
        ask = SettleAsk(token=bundle.token, settlements=bundle.settlements, handed_back=bundle.handed_back)
        try:
            answer = await self._called(LEDGER_SETTLE, ask, SettleAnswer)
        except RefusedError as error:
            if error.reason not in ("malformed", "not-yours", "body"):
                self._away(error)
                return False
            if len(bundle.settlements) + len(bundle.handed_back) > 1:
                self._single = True
                return True
            logger.error("%s: the keeper refuses what became of it: %s", bundle.token[:8], error)
            self.refused += 1
        except RpcError as error:
            self._away(error)
            return False
        else:
            self._away_since_s = math.inf
            self.stale += len(answer.stale)
            # The keeper may hear of a worker a little later than this driver did.
            bundle = self._holdings.not_taken_up(bundle, answer.unheard, boottime_s() + _RETRY_S)
        self._holdings.said(bundle)
        return True

    async def _ask(self, method: str, ask: Message, answer: type[AnswerT]) -> AnswerT | None:
        """The answer; None: there is none now."""
        try:
            found = await self._called(method, ask, answer)
        except RefusedError as error:
            match error.reason:
                case "lease-over":
                    self._token = secrets.token_hex(16)
                case "enough":
                    logger.debug("%s", error)
                case "data":
                    self._fail(error)
                case _:
                    self._away(error)
            return None
        except RpcError as error:
            self._away(error)
            return None
        self._away_since_s = math.inf
        return found

    async def _called(self, method: str, ask: Message, answer: type[AnswerT]) -> AnswerT:
        """Raises RpcError if there is no answer."""
        keeper = self._keeper()
        if keeper is None:
            raise PeerUnavailableError(
                f"expected the keeper of the account, {self._config.keeper}, found none announced"
            )
        reply = await self._endpoint.call(keeper, method, ask, answer, timeout_s=self._config.call_timeout_s)
        return reply.body

    def _away(self, error: RpcError) -> None:
        """Says that the keeper is away, and again every minute."""
        now_s = boottime_s()
        if self._away_since_s == math.inf:
            self._away_since_s = self._said_away_s = now_s
            logger.warning("the account's keeper does not answer; going on with what is held: %s", error)
        elif now_s - self._said_away_s >= _SAY_AWAY_S:
            self._said_away_s = now_s
            logger.warning(
                "waiting for the account's keeper, %s, for %.0f s; %d micro-batches are held and not begun: %s",
                self._config.keeper,
                now_s - self._away_since_s,
                self._holdings.num_ahead,
                error,
            )

    async def _read(self) -> None:
        """Keeps some micro-batches read."""
        while True:
            while self._holdings.unread and len(self._holdings.ready) < self._config.ahead:
                await self._read_one(*self._holdings.unread[0])
            self._to_read.clear()
            await self._to_read.wait()

    async def _read_one(self, lease: HeldLease, wanted: MicroBatchId) -> None:
        coming = dict.fromkeys(each.shard for _, each in self._holdings.unread)

        def read() -> tuple[Tensor, Tensor]:
            self._rows.want(coming)  # Waits for its turn, as reading does: neither is for the event loop.
            return self._rows.read(wanted)

        try:
            inputs, labels = await in_daemon_thread(read, "ledger-rows")
        except LoaderError as error:
            logger.warning("%s cannot be read here, and is handed back: %s", wanted, error)
            self._holdings.hand_back_unread(lease, wanted)
            self._to_say.set()
            await asyncio.sleep(_UNREADABLE_S)
            return
        self._holdings.have_read(lease, MicroBatch(wanted, inputs, labels, lease.term))
        self._to_give.set()

"""The keeper's side: the ledger and its journal behind an endpoint, and the watch over leases that run out.

All that touches the ledger runs in one thread of its own, since each change may wait for the disk; the event loop goes
on meanwhile, and a caller that gives up leaves nothing half done. A journal outside this machine is written in groups:
who asked waits for the group, and the ledger goes on with the next request. About a lease that ran out all workers are
asked which of its micro-batches they have counted, and told to count no more of it.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeAlias, TypeVar

from trainer.errors import LedgerError, RefusedError, RpcError, TrainerError
from trainer.network.rpc import Endpoint, Message, Peer, PeerId, Reply, Request
from trainer.network.rpc.token_buckets import TokenBuckets
from trainer.pipeline.ledger import messages
from trainer.pipeline.ledger.config import LedgerConfig
from trainer.pipeline.ledger.group_commit import AccountJournal
from trainer.pipeline.ledger.journal import Journal
from trainer.pipeline.ledger.ledger import AppliedReport, Ledger
from trainer.pipeline.ledger.ledger_state import LedgerState
from trainer.pipeline.ledger.messages import Account
from trainer.pipeline.ledger.records import Opened, Record, WorkerSeen
from trainer.pipeline.ledger.units import LedgerSpec, Run
from trainer.pipeline.protocol.messages import APPLIED, AppliedAnswer, AppliedAsk
from trainer.pipeline.protocol.work import MicroBatchId, MicroBatchKey, boottime_s

logger = logging.getLogger(__name__)

_AT_ONCE = 512  # Micro-batches asked for in one call: 30 bytes each, within the 64 KiB a message may have.
_LOG_INTERVAL_S = 60.0
_ASK_AGAIN_S = 2.0
T = TypeVar("T")

LEDGER_METHODS: Final[dict[str, type[Message]]] = {
    messages.LEDGER_LEASE: messages.LeaseAsk,
    messages.LEDGER_RENEW: messages.RenewAsk,
    messages.LEDGER_SETTLE: messages.SettleAsk,
    messages.LEDGER_ACCOUNT: messages.AccountAsk,
    messages.LEDGER_WORKERS: messages.AccountAsk,
}
"""What a keeper answers, and the bodies of the requests."""

AppliedInquiry: TypeAlias = Callable[[Sequence[MicroBatchKey]], Awaitable[AppliedReport]]
"""Asks every worker of every stage; from then on they refuse what they had not counted of it."""


def open_ledger(
    path: Path, spec: LedgerSpec, shards: Sequence[Sequence[int]], config: LedgerConfig, *, max_tokens: int = 0
) -> tuple[Ledger, Journal]:
    """Opens the account in a journal, as it was left; a new one if there is none.

    ``shards`` are those of each lane, ascending, all there are now; ``max_tokens`` to be trained on in all, over all
    lives of the account, 0: no bound. Raises LedgerError if another process keeps it, it is damaged, or of another run.
    """
    journal, records = Journal.open(path)
    try:
        return ledger_in(journal, records, spec, shards, config, max_tokens=max_tokens), journal
    except BaseException:
        journal.close()
        raise


def ledger_in(
    journal: AccountJournal,
    records: list[Record],
    spec: LedgerSpec,
    shards: Sequence[Sequence[int]],
    config: LedgerConfig,
    *,
    max_tokens: int = 0,
) -> Ledger:
    """Returns the account in an open journal, whose ``records`` were read from it; otherwise as `open_ledger`."""
    if not records:
        records = [Opened(spec=spec, shards=tuple(map(len, shards)))]
        journal.append(records[0])
    ledger: Ledger
    compact_at = config.compact_bytes

    def write(record: Record) -> None:
        nonlocal compact_at
        if journal.size_bytes > compact_at:
            journal.replace(ledger.state.snapshot())
            compact_at = max(config.compact_bytes, 2 * journal.size_bytes)
        journal.append(record)

    ledger = Ledger(LedgerState.of(records, spec, shards), config, write, boottime_s(), max_tokens=max_tokens)
    ledger.grow(shards)
    return ledger


@dataclass(eq=False, repr=False)
class WorkerInquiry:
    """An `AppliedInquiry` over the network; ``workers`` returns the stage and address of each as known now."""

    endpoint: Endpoint
    workers: Callable[[], Iterable[tuple[str, Peer]]]
    timeout_s: float = 10.0

    def __post_init__(self) -> None:
        self._log_limit = TokenBuckets(1.0, 1.0 / _LOG_INTERVAL_S)

    async def __call__(self, micro_batches: Sequence[MicroBatchKey]) -> AppliedReport:
        """Asks all workers at once."""
        workers = list(self.workers())
        answers = await asyncio.gather(*(self._ask(peer, micro_batches) for _, peer in workers))
        applied: dict[str, frozenset[str]] = {}
        answered = set()
        for (stage, _), answer in zip(workers, answers, strict=True):
            if answer is not None:
                answered.add(answer[0])
                applied[stage] = applied.get(stage, frozenset()) | answer[1]
        return AppliedReport(applied, frozenset(answered), answers.count(None))

    async def _ask(self, peer: Peer, micro_batches: Sequence[str]) -> tuple[str, frozenset[str]] | None:
        """Returns a worker's incarnation, and what it has counted; None: no answer, or it restarted in between."""
        incarnations: set[str] = set()
        applied: set[str] = set()
        for first in range(0, len(micro_batches), _AT_ONCE):
            part = tuple(micro_batches[first : first + _AT_ONCE])
            ask = AppliedAsk(micro_batches=part, refuse_from_now=True)
            try:
                reply = await self.endpoint.call(peer, APPLIED, ask, AppliedAnswer, timeout_s=self.timeout_s)
            except RpcError as error:
                if self._log_limit.take(peer.address):  # Each lease that runs out asks all workers.
                    logger.info("%s does not say what it has counted: %s", peer.address, error)
                return None
            incarnations.add(reply.body.incarnation)
            applied.update(set(reply.body.micro_batches) & set(part))
        return (incarnations.pop(), frozenset(applied)) if len(incarnations) == 1 else None


@dataclass(eq=False, repr=False)
class LedgerService:
    """Answers drivers, at an endpoint that is not started yet; `stop` closes the journal.

    Args:
        drivers: returns the run's other drivers as known now, which are given rows as this node is. What a driver says
            of its rows is believed, as long as it names workers that have announced themselves (`note_workers`). None:
            any caller is given rows and believed, which is for trusted networks only.
    """

    endpoint: Endpoint
    ledger: Ledger
    journal: AccountJournal
    config: LedgerConfig
    inquiry: AppliedInquiry
    drivers: Callable[[], Collection[PeerId]] | None = None

    def __post_init__(self) -> None:
        self._digest = self.ledger.state.spec.digest()
        self._thread = ThreadPoolExecutor(1, "genesis-ledger")
        self._watch: asyncio.Task[None] | None = None
        self._stopped = False
        self._inquiries: dict[str, asyncio.Task[None]] = {}
        self._told_finished: set[PeerId] = set()
        self._asked_s: dict[PeerId, float] = {}
        self._has_failed = asyncio.Event()

    def has_told(self, driver: str) -> bool:
        """Whether a driver knows that nothing is left, and so needs the keeper no more."""
        return driver in self._told_finished

    def quiet_s(self, driver: str) -> float:
        """Returns the seconds since a driver asked for rows, or to keep those it has; infinity: it never has.

        A driver at work asks every sixth of `lease_s`; one that never asks need not be waited for.
        """
        return boottime_s() - self._asked_s.get(driver, -math.inf)

    def register(self) -> None:
        """Registers its methods at the endpoint."""
        for method, body_model in LEDGER_METHODS.items():
            self.endpoint.register(method, body_model, partial(self.handle, method))

    async def handle(self, method: str, request: Request[Any]) -> Reply[Any]:
        """Answers a request of one of `LEDGER_METHODS`; raises RefusedError."""
        handlers: dict[str, Callable[[Request[Any]], Awaitable[Reply[Any]]]] = {
            messages.LEDGER_LEASE: self._lease,
            messages.LEDGER_RENEW: self._renew,
            messages.LEDGER_SETTLE: self._settle,
            messages.LEDGER_ACCOUNT: self._account,
            messages.LEDGER_WORKERS: self._workers,
        }
        return await handlers[method](request)

    async def start(self) -> None:
        """Begins to watch over leases."""
        self._watch = asyncio.create_task(self._watch_leases(), name="ledger-watch")

    async def stop(self) -> None:
        """Stops watching and closes the journal; drivers are refused from then on. May be called again."""
        self._stopped = True
        tasks = [*self._inquiries.values(), *([self._watch] if self._watch else [])]
        self._watch = None
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.get_running_loop().run_in_executor(None, self._thread.shutdown)
        self.journal.close()

    async def account(self) -> Account:
        """Returns the account; raises LedgerError if this was stopped."""
        return await self._run(self.ledger.account)

    async def failed(self) -> None:
        """Waits until the account cannot be written any more; raises LedgerError with the reason."""
        await self._has_failed.wait()
        raise LedgerError(f"the account cannot be kept: {self.ledger.failure}") from self.ledger.failure

    async def note_workers(self, workers: Iterable[WorkerSeen], version: int | None = None) -> None:
        """Notes all workers that are announced now, see `Ledger.note_workers`; to be called every few seconds."""
        seen = tuple(workers)
        await self._run(lambda: self.ledger.note_workers(seen, boottime_s(), version))

    async def grow(self, shards: Sequence[Sequence[int]]) -> None:
        """Notes a store that has more shards, see `Ledger.grow`."""
        await self._run(lambda: self.ledger.grow(shards))

    async def _run(self, work: Callable[[], T]) -> T:
        """Runs something in the ledger's thread, to its end even if the caller is cancelled.

        Returns when all is durable that the result may follow from.
        """
        if self._stopped:
            raise LedgerError("expected an account that is kept here, found that it was closed")

        def act() -> tuple[T, int]:
            self.journal.check_current()
            return work(), self.journal.position

        try:
            result, position = await asyncio.get_running_loop().run_in_executor(self._thread, act)
            await self.journal.committed(position)
            return result
        finally:
            if self.ledger.failure is not None:
                self._has_failed.set()

    # -- drivers' requests ---------------------------------------------------------------------------------------------

    async def _lease(self, request: Request[messages.LeaseAsk]) -> Reply[messages.LeaseAnswer]:
        ask, sender = request.body, request.sender
        if ask.data_digest != self._digest:
            raise RefusedError(
                "data",
                "expected a driver with this run's seed, seq_len, micro-batch, stages, sources, holdout and store, "
                f"found one with others (digest {ask.data_digest}, here {self._digest})",
            )
        if self.drivers is not None and sender not in (self.endpoint.peer_id, *self.drivers()):
            raise RefusedError("not-a-driver", f"expected a driver that is announced, found {sender[:12]}; try again")
        self._asked_s[sender] = boottime_s()
        answer = await self._answered(
            lambda: self.ledger.lease(sender, ask.token, ask.preferred, ask.num_units, boottime_s())
        )
        if answer.finished:
            self._told_finished.add(sender)
        return Reply(answer)

    async def _renew(self, request: Request[messages.RenewAsk]) -> Reply[messages.RenewAnswer]:
        tokens = request.body.tokens
        live = await self._answered(lambda: self.ledger.renew(request.sender, tokens, boottime_s()))
        if live:
            self._asked_s[request.sender] = boottime_s()
        return Reply(messages.RenewAnswer(live=live, lease_s=self.config.lease_s))

    async def _settle(self, request: Request[messages.SettleAsk]) -> Reply[messages.SettleAnswer]:
        sender, ask = request.sender, request.body
        back = [MicroBatchId.parse(key) for key in ask.handed_back]

        def settle() -> messages.SettleAnswer:
            checked_s = None if self.drivers is None else boottime_s()
            answer = self.ledger.settle(sender, ask.token, ask.settlements, back, checked_s=checked_s)
            if ask.release:
                self.ledger.release(sender, ask.token, boottime_s())
            return answer

        return Reply(await self._answered(settle))

    async def _account(self, _request: Request[messages.AccountAsk]) -> Reply[Account]:
        return Reply(await self._answered(self.ledger.account))

    async def _workers(self, _request: Request[messages.AccountAsk]) -> Reply[messages.WorkerCounts]:
        counts = await self._answered(lambda: self.ledger.state.worker_counts())
        return Reply(messages.WorkerCounts(workers=counts))

    async def _answered(self, work: Callable[[], T]) -> T:
        try:
            return await self._run(work)
        except LedgerError as error:
            logger.error("a driver is refused: %s", error)
            raise RefusedError("account", str(error)) from error

    # -- leases that run out -------------------------------------------------------------------------------------------

    async def _watch_leases(self) -> None:
        while True:
            try:
                due = await self._run(lambda: self.ledger.due(boottime_s()))
                unheard = await self._run(lambda: self.ledger.unheard(boottime_s()))
                for token, some in {**unheard, **dict.fromkeys(due)}.items():
                    if token not in self._inquiries:
                        task = asyncio.create_task(self._resolve(token, some), name=f"ledger-inquiry-{token[:8]}")
                        self._inquiries[token] = task
                        task.add_done_callback(partial(self._end_inquiry, token))
            except LedgerError as error:
                logger.error("leases are not watched over: %s", error)
            await asyncio.sleep(min(1.0, self.config.lease_s / 10))

    def _end_inquiry(self, token: str, _task: asyncio.Task[None]) -> None:
        del self._inquiries[token]

    async def _resolve(self, token: str, unheard: Collection[MicroBatchId] | None) -> None:
        """Ends a lease that ran out, by what the workers say; where that fails, it stays due."""
        why = "ran out" if unheard is None else "is said to be done by workers that nobody has heard of"
        try:
            report = await self._report_on(token, unheard)
            decided = await self._run(lambda: self.ledger.resolve(token, report, boottime_s(), unheard))
        except LedgerError as error:
            logger.error("lease %s %s, and stays open: %s", token[:8], why, error)
            return
        if decided is not None:
            lost = sum(_num_rows(each.runs) for each in decided.lost)
            logger.warning(
                "lease %s %s: rows %d done, %d lost, %d given again",
                *(token[:8], why, _num_rows(decided.done), lost, _num_rows(decided.returned)),
            )

    async def _report_on(self, token: str, some: Collection[MicroBatchId] | None) -> AppliedReport:
        """Asks the workers about a lease, or some of it, until all have answered or time is up."""
        deadline_s = boottime_s() + self.config.inquiry_s
        while True:
            asked = await self._run(lambda: self.ledger.open_in(token, some))
            try:
                report = await self.inquiry(tuple(map(str, asked)))
            except (TrainerError, OSError, TimeoutError) as error:
                logger.warning("the workers cannot be asked: %s", error)
                report = AppliedReport({}, frozenset(), silent=1)
            may_learn_more = await self._run(partial(self.ledger.may_learn_more, token, report))
            left_s = deadline_s - boottime_s()
            if not may_learn_more or left_s <= 0:
                return report
            await asyncio.sleep(min(_ASK_AGAIN_S, left_s))


def _num_rows(runs: Sequence[Run]) -> int:
    return sum(run.num_rows for run in runs)

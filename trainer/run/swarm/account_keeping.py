"""A driver's part in keeping the account of what is trained on: opens it, tells it what it hears, stays until the end.

    journal under ``state_dir``, if this driver is the keeper that the run file names; else a seat among those that may
    be it (`keeper_seat`) → workers fit the account (`keeper.AccountOpening`) → leases; workers and new shards are noted
    → done: until the other drivers have been told

A driver keeps one account at most, and may begin to, and end it, at any moment while it has a seat: so whoever asks for
`AccountKeeping.service` asks anew each time. Workers are noted every 2 s and shards every 60 s; the account is as late
to know of either. A keeper that is done waits for a driver that asks for nothing, as those do that only claim to be
one, no longer than two lifetimes of an announcement.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, Final

from loader.errors import LoaderError
from loader.session import Session
from trainer.errors import LedgerError, TrainerError, TrainerUsageError
from trainer.network.rpc import Endpoint, Peer
from trainer.outer.engine.daemon_call import in_daemon_thread
from trainer.pipeline.ledger import (
    KeeperSeat,
    LedgerClient,
    LedgerLane,
    LedgerService,
    LedgerSpec,
    WorkerInquiry,
    lanes_of,
    ledger_in,
    open_ledger,
    spec_of,
)
from trainer.pipeline.ledger.group_commit import AccountJournal
from trainer.pipeline.ledger.ledger import Ledger
from trainer.pipeline.ledger.records import Record
from trainer.pipeline.protocol.work import boottime_s
from trainer.run.config import RunConfig
from trainer.run.config.run import keeper_option
from trainer.run.swarm.keeper import AccountOpening, keeps_account, ledger_folder, workers_seen
from trainer.run.swarm.keeper_seat import num_shards_in, open_seat
from trainer.run.swarm.peer_view import DriverPeerView
from trainer.run.swarm.shape import SwarmShape, as_usage_errors, stage_of, target_tokens_of

logger = logging.getLogger(__name__)

STORE_THREAD: Final = "driver-store"
"""The name of threads that ask a driver's store, which may hang."""
_LOOK_S: Final = 0.2
_NOTE_SHARDS_S: Final = 60.0


def lanes_and_spec(config: RunConfig, shape: SwarmShape, session: Session) -> tuple[tuple[LedgerLane, ...], LedgerSpec]:
    """Returns what there is to lease by the store's catalog, and what an account of it is about; asks the store."""
    lanes = lanes_of(session.catalog, config.data.sources, config.data.holdout)
    spec = spec_of(
        session.catalog,
        lanes,
        stages=shape.plan.names,
        seed=config.seed,
        seq_len=config.inner.seq_len,
        micro_batch_rows=config.inner.micro_batch_size,
        config=config.swarm.ledger,
    )
    return lanes, spec


class AccountKeeping:
    """What one driver does for the account; for its event loop.

    Args:
        config: the run's options.
        shape: the stages whose workers are noted.
        session: the open store.
        endpoint: where other drivers ask; not started yet.
        peers: the workers and drivers that are there.
    """

    def __init__(
        self, config: RunConfig, shape: SwarmShape, session: Session, endpoint: Endpoint, peers: DriverPeerView
    ) -> None:
        self.client: LedgerClient | None = None
        """By which this driver leases, once it does; it tells how long the keeper has not answered."""
        self._config = config
        self._shape = shape
        self._session = session
        self._endpoint = endpoint
        self._peers = peers
        self._local: LedgerService | None = None  # Of an account that is local; see `service`.
        self._seat: KeeperSeat | None = None
        self._opening: AccountOpening | None = None
        self._served: frozenset[str] = frozenset()  # Incarnations of workers that have served, and are announced.

    @property
    def service(self) -> LedgerService | None:
        """The account, while this driver keeps it."""
        return self._local if self._seat is None else self._seat.service

    def open(self, lanes: tuple[LedgerLane, ...], spec: LedgerSpec) -> None:
        """Opens the account or takes a seat, if either is this driver's; before the endpoint starts.

        Raises:
            TrainerUsageError: the journal cannot be opened, or checkpoints are of more than it tells of.
        """
        if self._config.swarm.ledger.is_shared:
            self._take_seat(lanes, spec)
        elif keeps_account(self._config, self._endpoint.peer_id):
            self._open_local(lanes, spec)

    async def start(self) -> None:
        """Begins to answer for the account, or to look who does; leases wait until workers are there."""
        if self._local is not None:
            await self._local.start()
        if self._seat is not None:
            with as_usage_errors():
                await self._seat.start()

    async def stop(self) -> None:
        """Ends it; after `start`."""
        if self._seat is not None:
            await self._seat.stop()
        if self._local is not None:
            await self._local.stop()

    def tasks(self, note_workers: Callable[[], Awaitable[None]]) -> list[Coroutine[Any, Any, None]]:
        """Returns what is to run beside the driving; none returns, and each raises what the driver cannot go on after.

        ``note_workers`` is `note_workers`, and whatever the driver does with it.
        """
        running = [self._open_leasing(note_workers)]
        if self._local is not None:
            running += [self._local.failed(), repeated(_NOTE_SHARDS_S, self._note_shards)]
        if self._seat is not None:
            running += [self._seat_ended(self._seat), repeated(_NOTE_SHARDS_S, self._note_shards)]
        return running

    async def note_workers(self) -> None:
        """Tells the account, if it is kept here, of the workers that are announced; raises `TrainerError`."""
        keeper = self.service
        if keeper is None:
            return
        reports = self._peers.reports()
        seen = workers_seen(reports, self._served)
        self._served = frozenset(worker.incarnation for worker in seen)
        version = self._opening.version(reports) if self._opening is not None else None
        await keeper.note_workers(seen, version)

    async def stay(self, stop: Callable[[], bool]) -> None:
        """Keeps the account, if it is kept here, until all other drivers have been told that nothing is left.

        It waits no longer for one that asks for nothing, as those do that only claim to be drivers, than it takes to
        hear of one that begins just now.
        """
        logged, done_s = False, time.monotonic()
        patience_s = 2 * self._config.discovery.announcement_lifetime_s
        while (keeper := self.service) is not None and not stop():
            waited_s = time.monotonic() - done_s
            untold = [key for key in self._peers.drivers() if not keeper.has_told(key)]
            awaited = [key for key in untold if min(waited_s, keeper.quiet_s(key)) < patience_s]
            if not awaited and not await self._num_leases(keeper):
                return
            if not logged:
                logger.info("done here; keeping the account until the other drivers are done too")
                logged = True
            await asyncio.sleep(_LOOK_S)

    async def _open_leasing(self, note_workers: Callable[[], Awaitable[None]]) -> None:
        """Looks at each account that this driver begins to keep, until it may lease."""
        opened: AccountOpening | None = None
        while True:
            opening = self._opening
            if opening is not None and opening is not opened and opening.is_over(self._peers.reports()):
                opened = opening
                await note_workers()
            await asyncio.sleep(_LOOK_S)

    async def _seat_ended(self, seat: KeeperSeat) -> None:
        """Waits until it turns out that no driver can keep the account; raises TrainerUsageError then."""
        with as_usage_errors():
            await seat.ended()

    async def _num_leases(self, keeper: LedgerService) -> int:
        """The leases that are live; 1 if the account has just been taken over by another driver."""
        try:
            return (await keeper.account()).leases
        except LedgerError as error:
            if self._seat is None:
                raise
            logger.info("%s", error)
            return 1

    async def _note_shards(self) -> None:
        """Adds shards that the store has got since; they are read from the next epoch on."""
        keeper = self.service
        if keeper is None:
            return

        def shards() -> list[Sequence[int]]:
            return [lane.shards for lane in self._newest_lanes()]

        try:
            found = await in_daemon_thread(shards, STORE_THREAD)
            await keeper.grow(found)
        except (TrainerError, LoaderError) as error:
            logger.warning("the store's newest shards: %s", error)

    def _newest_lanes(self) -> tuple[LedgerLane, ...]:
        data = self._config.data
        return lanes_of(self._session.newest_catalog(), data.sources, data.holdout)

    def _open_local(self, lanes: tuple[LedgerLane, ...], spec: LedgerSpec) -> None:
        config = self._config
        path = ledger_folder(config) / "journal.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        logger.info("the account is kept here; in the run file of all: %s", keeper_option(self._endpoint.peer_id))
        with as_usage_errors():
            ledger, journal = open_ledger(
                path,
                spec,
                [lane.shards for lane in lanes],
                config.swarm.ledger,
                max_tokens=config.max_steps * target_tokens_of(config),
            )
        try:
            self._local = self._keeper_of(ledger, journal, str(path))
        except TrainerUsageError:
            journal.close()
            raise
        self._local.register()

    def _take_seat(self, lanes: tuple[LedgerLane, ...], spec: LedgerSpec) -> None:
        """Takes a place among the drivers that may keep the account."""
        config = self._config

        def shards_for(records: list[Record]) -> list[Sequence[int]]:
            shards = [lane.shards for lane in lanes]
            if any(map(int.__lt__, map(len, shards), num_shards_in(records))):  # More have come since this began.
                try:
                    newest = self._newest_lanes()
                except LoaderError as error:
                    raise LedgerError(f"expected the shards that the account names, found: {error}") from error
                shards = [lane.shards for lane in newest]
            return shards

        def make(journal: AccountJournal, records: list[Record]) -> LedgerService:
            tokens = config.max_steps * target_tokens_of(config)
            ledger = ledger_in(journal, records, spec, shards_for(records), config.swarm.ledger, max_tokens=tokens)
            return self._keeper_of(ledger, journal, config.swarm.ledger.journal)

        def is_away() -> bool:
            return self.client is None or self.client.keeper_away_s > 0

        self._seat = open_seat(config, self._endpoint, self._peers, is_away, make)
        self._seat.register()
        self._peers.found_keeper = lambda: None if self._seat is None else self._seat.keeper

    def _keeper_of(self, ledger: Ledger, journal: AccountJournal, where: str) -> LedgerService:
        """What answers for an account; raises TrainerUsageError beside checkpoints of what it does not tell of."""
        config = self._config
        if self.client is None:  # This process has only begun: what its node held is held by nobody.
            ledger.release_all(self._endpoint.peer_id, boottime_s())
        opening = AccountOpening(config, where, ledger, self._shape.plan.names)
        opening.check_checkpoints()
        self._opening = opening

        def workers() -> list[tuple[str, Peer]]:
            heard = self._peers.workers_heard()
            return [(stage_of(said.stage), said.peer()) for said in heard if said.stage is not None]

        return LedgerService(
            self._endpoint,
            ledger,
            journal,
            config.swarm.ledger,
            WorkerInquiry(self._endpoint, workers),
            drivers=self._peers.drivers,
        )


async def repeated(every_s: float, act: Callable[[], Awaitable[None]]) -> None:
    """Acts every ``every_s`` seconds, for the first time after that."""
    while True:
        await asyncio.sleep(every_s)
        await act()

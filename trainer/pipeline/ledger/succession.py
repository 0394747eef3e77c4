"""Who keeps the account: a driver follows its keeper, takes over when that one is gone, and ends when it is replaced.

    local       one driver, named in the run file, with its own disk: nobody takes over
    a store     whoever swaps the journal's head in a folder or bucket (`store_journal`)
    replicated  whoever most of the named drivers have promised to follow (`election`)

Time alone decides when a driver tries: after `takeover_s` without a sign of the keeper. What a former keeper can still
do is decided by the fencing token that it writes under, whatever its clock says: another driver has got a higher one,
and each of its writes fails. The trade-off: a machine that stands still for `takeover_s` loses the account needlessly,
which costs a replay of the journal, some 20 µs a record.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from trainer.errors import JournalLostError, LedgerError, RefusedError
from trainer.network.rpc import Endpoint, Message, PeerId, Reply, Request
from trainer.network.rpc.wire import end_task
from trainer.outer.engine.daemon_call import in_daemon_thread
from trainer.pipeline.ledger.group_commit import AccountJournal, GroupCommitJournal, JournalTarget
from trainer.pipeline.ledger.records import Record
from trainer.pipeline.ledger.service import LEDGER_METHODS, LedgerService

logger = logging.getLogger(__name__)

_END_S = 15.0
"""For what was answered to be written by a keeper that stops; what was not answered is asked of the next one again."""


@dataclass(frozen=True, slots=True)
class TakenJournal:
    """A journal that this driver keeps from here on, and what is in it."""

    target: JournalTarget
    records: tuple[Record, ...]
    digest: str  # Of its last line.
    size_bytes: int
    token: int  # Higher than all keepers' before.
    confirmed_s: float  # When the write began by which it was taken (`boottime_s`).


class JournalSite(Protocol):
    """A place of a journal that several drivers can keep, one after the other."""

    @property
    def keeper(self) -> PeerId | None:
        """The key of the driver that keeps the account, as known now."""

    def register(self) -> None:
        """Registers what others may ask of this driver; before its endpoint starts."""

    async def check(self) -> None:
        """Raises LedgerError if no journal can be kept here."""

    async def follow(self) -> TakenJournal:
        """Keeps `keeper` up to date, until this driver has taken the journal over; for ever if it may not.

        Raises LedgerError if the journal is damaged, or of another release.
        """

    async def close(self) -> None:
        """Ends what `follow` has begun."""


class KeeperSeat:
    """A driver's place in the succession of keepers, at an endpoint that is not started yet.

    Args:
        endpoint: where drivers ask the keeper, and are refused (``not-keeper``) while this driver is none.
        site: the journal.
        takeover_s: see `LedgerConfig`.
        make: opens the account in a journal that was taken, with its records; called in a thread of its own.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        site: JournalSite,
        takeover_s: float,
        make: Callable[[AccountJournal, list[Record]], LedgerService],
    ) -> None:
        self._endpoint = endpoint
        self._site = site
        self._takeover_s = takeover_s
        self._make = make
        self._task: asyncio.Task[None] | None = None
        self.service: LedgerService | None = None
        """The account, while this driver keeps it."""

    @property
    def keeper(self) -> PeerId | None:
        """The key of the driver that keeps the account, as known now."""
        return self._endpoint.peer_id if self.service is not None else self._site.keeper

    def register(self) -> None:
        """Registers the keeper's methods, and the journal's."""
        self._site.register()
        for method, body_model in LEDGER_METHODS.items():
            self._endpoint.register(method, body_model, self._handler(method))

    async def start(self) -> None:
        """Begins to follow; raises LedgerError if no journal can be kept where the run file says."""
        await self._site.check()
        self._task = asyncio.create_task(self._follow(), name="genesis-keeper-seat")

    async def ended(self) -> None:
        """Waits for ever, unless the account cannot be kept by any driver: raises what `make` or the journal raises."""
        if self._task is None:
            raise RuntimeError("expected a seat that was started")
        await asyncio.shield(self._task)

    async def stop(self) -> None:
        """Gives the journal back, if this driver has it. May be called again."""
        task, self._task = self._task, None
        await end_task(task)
        await self._site.close()

    def _handler(self, method: str) -> Callable[[Request[Message]], Awaitable[Reply[Message]]]:
        async def handle(request: Request[Message]) -> Reply[Message]:
            service = self.service
            if service is None:
                keeper = self._site.keeper
                found = "none known here" if keeper is None else f"driver {keeper[:12]}"
                raise RefusedError("not-keeper", f"expected the keeper of the account, which is {found}; ask there")
            return await service.handle(method, request)

        return handle

    async def _follow(self) -> None:
        while True:
            taken = await self._site.follow()
            journal = GroupCommitJournal(
                taken.target, taken.digest, taken.size_bytes, self._takeover_s, taken.confirmed_s
            )
            writing = asyncio.create_task(journal.run(), name="genesis-journal")
            try:
                await self._keep(taken, journal, writing)
            except LedgerError as error:
                if not journal.is_lost:
                    raise
                logger.warning("this driver keeps the account no more: %s", error)
            finally:
                service, self.service = self.service, None
                journal.close()
                if service is not None:
                    await service.stop()
                await self._written(writing)

    async def _keep(self, taken: TakenJournal, journal: GroupCommitJournal, writing: asyncio.Task[None]) -> None:
        """Keeps the account until the journal is lost."""
        records = list(taken.records)
        service = await in_daemon_thread(lambda: self._make(journal, records), "ledger-replay")
        if not writing.done():
            await service.start()
            self.service = service
            logger.info("this driver keeps the account from here on, with token %d", taken.token)
        else:
            await service.stop()
        await asyncio.shield(writing)

    async def _written(self, writing: asyncio.Task[None]) -> None:
        """Waits until what was appended is written and the journal is given back, or lost."""
        try:
            with suppress(JournalLostError):
                async with asyncio.timeout(_END_S):
                    await asyncio.shield(writing)
        except TimeoutError:
            logger.warning("the journal cannot be reached; what was not answered is left to the next keeper")
        finally:
            await end_task(writing)

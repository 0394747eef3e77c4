"""The account's journal in an object store: one object names all of it, and is replaced by compare-and-swap alone.

As the populator's checkpoints.json, the head is both lease and commit (`genesis.populate.commit_log`): whoever takes
over replaces it with a higher token, and from then on the former keeper's swap fails, however long it slept. So a group
of records costs one put; when the lines in the head exceed 256 KiB they become a part, which costs another. A snapshot
replaces all parts. Killed between two writes, a keeper leaves at most a part that no head names; the next one deletes
it. A reader takes the parts that the head names and the lines in it, each line vouched for by those before.

The head is taken from a keeper that has not written it for `takeover_s` by the reader's own clock, at once from a
process of this machine that has ended, and at once where it was given back. The trade-off: a head is 128 KiB on average
in a busy run, some 2.5 MB/s at 20 groups a second; smaller parts would be more objects to read at a takeover.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from typing import Final, TypeVar

from genesis.errors import GenesisError, ObjectNotFoundError, PreconditionFailedError, StoreError
from genesis.populate.crashpoint import crash_point
from genesis.populate.lease import ProcessId, describe_writer, lease_end, this_process
from manifests import ContractError, Writer
from trainer.errors import JournalLostError, LedgerError
from trainer.network.rpc import PeerId
from trainer.network.rpc.token_buckets import TokenBuckets
from trainer.outer.engine.daemon_call import in_daemon_thread
from trainer.pipeline.ledger.journal_lines import decode_lines
from trainer.pipeline.ledger.store_place import Head, JournalHead, JournalPart, StorePlace
from trainer.pipeline.ledger.succession import TakenJournal
from trainer.pipeline.protocol.work import boottime_s

logger = logging.getLogger(__name__)

PART_BYTES: Final = 256 << 10
JOURNAL_CRASH_POINTS: Final = ("journal-taken", "journal-part-stored", "journal-head-stored", "journal-replaced")
"""Where a test can have a keeper killed (`genesis.populate.crashpoint`): behind each kind of write."""
_LOOKS: Final = 5
"""In `takeover_s`, for what the keeper last wrote."""
_RETRY_S: Final = 0.5
_LOG_EVERY_S: Final = 60.0
T = TypeVar("T")


class StoreTarget:
    """A `JournalTarget`: the head and the parts, under the token that this keeper swapped in."""

    def __init__(self, place: StorePlace, head: Head, takeover_s: float) -> None:
        self._place = place
        self._head = head
        self._takeover_s = takeover_s
        self._num_parts = 0
        self._deleting: set[asyncio.Task[None]] = set()
        self._log_limit = TokenBuckets(1.0, 1.0 / _LOG_EVERY_S)

    async def append(self, lines: bytes, digest: str, num_records: int) -> None:
        """See `JournalTarget`."""
        parts, tail = self._head.about.parts, self._head.tail + lines
        if len(tail) > PART_BYTES:
            parts, tail = (*parts, await self._stored(tail)), b""
        await self._swap(parts, tail, digest)
        crash_point("journal-head-stored")

    async def replace(self, lines: bytes, digest: str, num_records: int) -> None:
        """See `JournalTarget`."""
        before = [part.key for part in self._head.about.parts]
        await self._swap((await self._stored(lines),), b"", digest)
        crash_point("journal-replaced")
        self._delete(lambda: before)

    async def confirm(self) -> None:
        """See `JournalTarget`."""
        await self._swap(self._head.about.parts, self._head.tail, self._head.about.digest)

    async def close(self) -> None:
        """See `JournalTarget`."""
        await self._swap(self._head.about.parts, self._head.tail, self._head.about.digest, is_held=False)
        await asyncio.gather(*self._deleting, return_exceptions=True)

    def abandon(self) -> None:
        """See `JournalTarget`; a deletion that runs ends by itself."""

    def sweep(self) -> None:
        """Begins to delete what former keepers left behind."""
        head = self._head
        self._delete(lambda: self._place.left_behind(head))

    def _delete(self, keys: Callable[[], Iterable[str]]) -> None:
        """Begins to delete parts; one that cannot be deleted stays until the next keeper."""

        def delete() -> None:
            for key in keys():
                self._place.store.delete(key)

        async def deleting() -> None:
            try:
                await in_daemon_thread(delete, "ledger-sweep")
            except (GenesisError, OSError) as error:
                logger.info("old parts of the journal stay: %s", error)

        task = asyncio.create_task(deleting(), name="ledger-sweep")
        self._deleting.add(task)
        task.add_done_callback(self._deleting.discard)

    async def _stored(self, lines: bytes) -> JournalPart:
        token, number = self._head.about.writer.token, self._num_parts
        part = await self._until_known(lambda: self._place.put_part(token, number, lines))
        self._num_parts += 1
        crash_point("journal-part-stored")
        return part

    async def _swap(self, parts: tuple[JournalPart, ...], tail: bytes, digest: str, *, is_held: bool = True) -> None:
        about = self._head.about
        writer = about.writer.model_copy(update={"expires_at": _end(self._takeover_s) if is_held else None})
        changes = {"writer": writer, "writes": about.writes + 1, "parts": parts, "digest": digest}
        wanted = Head(about.model_copy(update=changes), tail, self._head.etag)
        self._head = await self._until_known(lambda: self._place.swap(wanted))

    async def _until_known(self, write: Callable[[], T]) -> T:
        """Repeats a write, of the same bytes, until it is known to have been made or refused."""
        while True:
            try:
                return await in_daemon_thread(write, "ledger-store")
            except PreconditionFailedError:
                raise await self._lost() from None
            except (StoreError, OSError) as error:
                if self._log_limit.take("store"):
                    logger.warning("the journal cannot be written, which is tried again: %s", error)
                await asyncio.sleep(_RETRY_S)

    async def _lost(self) -> JournalLostError:
        try:
            found = await in_daemon_thread(self._place.read, "ledger-store")
        except (GenesisError, LedgerError, OSError):
            found = None
        own = self._head.about.writer.token
        if found is None:
            text = "the journal is gone"
        else:
            about = found.about
            text = (
                f"{describe_writer(about.writer)} (driver {about.keeper[:12]}) has it, with token {about.writer.token}"
            )
        return JournalLostError(
            f"{self._place.name}: expected it as this driver wrote it last, with token {own}, found that {text}"
        )


class StoreSite:
    """A `JournalSite` in a store.

    Args:
        place: where in it.
        own: this driver's key.
        takeover_s: see `LedgerConfig`.
        may_keep: whether this driver takes over; else it follows only.
        is_away: whether the keeper that is known does not answer.
    """

    def __init__(
        self, place: StorePlace, own: PeerId, takeover_s: float, *, may_keep: bool, is_away: Callable[[], bool]
    ) -> None:
        self._place = place
        self._own = own
        self._takeover_s = takeover_s
        self._may_keep = may_keep
        self._is_away = is_away
        self._keeper: PeerId | None = None
        self._log_limit = TokenBuckets(1.0, 1.0 / _LOG_EVERY_S)

    @property
    def keeper(self) -> PeerId | None:
        """See `JournalSite`."""
        return self._keeper

    def register(self) -> None:
        """Nothing is asked of a driver: the store has all."""

    async def check(self) -> None:
        """See `JournalSite`."""
        await in_daemon_thread(self._place.check, "ledger-store")

    async def follow(self) -> TakenJournal:
        """See `JournalSite`."""
        head: Head | None = None
        watched: str | None = None
        seen_s = boottime_s()
        while True:
            try:
                etag = await in_daemon_thread(self._place.etag, "ledger-store")
                if etag is None or head is None or self._is_away():
                    head = await in_daemon_thread(self._place.read, "ledger-store")
                    self._keeper = None if head is None else head.about.keeper
                    etag = None if head is None else head.etag
                if etag != watched:
                    watched, seen_s = etag, boottime_s()
                is_left = head is None or (head.etag == etag and _was_left(head.about.writer))
                if self._may_keep and (is_left or boottime_s() >= seen_s + self._takeover_s):
                    taken = await self._take(etag)
                    if taken is not None:
                        return taken
            except (StoreError, OSError) as error:
                if self._log_limit.take("store"):
                    logger.warning("the account's journal cannot be looked at, which is tried again: %s", error)
            await asyncio.sleep(self._takeover_s / _LOOKS)

    async def close(self) -> None:
        """See `JournalSite`."""
        self._place.store.close()

    async def _take(self, etag: str | None) -> TakenJournal | None:
        """Takes the journal over, if its head still has this ETag; None: another driver was faster."""
        began_s = boottime_s()

        def take() -> tuple[Head, bytes]:
            before = self._place.read()
            if (None if before is None else before.etag) != etag:
                raise PreconditionFailedError("the head was written meanwhile")
            token = 1 if before is None else before.about.writer.token + 1
            about = JournalHead(
                keeper=self._own,
                writer=Writer(id=str(this_process()), token=token, expires_at=_end(self._takeover_s)),
                writes=0,
                parts=() if before is None else before.about.parts,
                digest="" if before is None else before.about.digest,
            )
            wanted = Head(about, b"" if before is None else before.tail, "" if before is None else before.etag)
            head = self._place.swap(wanted)
            crash_point("journal-taken")
            return head, self._place.lines(head)

        began = time.perf_counter()
        try:
            head, lines = await in_daemon_thread(take, "ledger-store")
        except PreconditionFailedError:
            return None
        except ObjectNotFoundError as error:
            raise LedgerError(
                f"expected the parts that {self._place.name} names, found one missing: {error}; put back a copy"
            ) from None
        except ContractError as error:
            raise LedgerError(f"swarm.ledger.journal: {error}") from None
        records, digest, size_bytes = await in_daemon_thread(
            lambda: decode_lines(lines, self._place.name), "ledger-replay"
        )
        if head.about.digest and digest != head.about.digest:
            raise LedgerError(f"expected all lines that {self._place.name} names, found some missing; put back a copy")
        logger.info(
            "took the journal over: %d records, %d bytes, in %.2f s",
            *(len(records), size_bytes, time.perf_counter() - began),
        )
        self._keeper = self._own
        target = StoreTarget(self._place, head, self._takeover_s)
        target.sweep()
        return TakenJournal(target, tuple(records), digest, size_bytes, head.about.writer.token, began_s)


def _was_left(writer: Writer) -> bool:
    """Whether a keeper has given the journal back, or was a process of this machine that has ended."""
    process = ProcessId.parse(writer.id)
    return writer.expires_at is None or (process is not None and process.is_gone())


def _end(takeover_s: float) -> str:
    return lease_end(datetime.now(UTC), takeover_s)

r"""The account's journal in an object store: one object names all of it, and is replaced by compare-and-swap alone.

    ledger/RUN/head                     keeper, fencing token, parts, and the newest lines: each write of it is a commit
    ledger/RUN/parts/TOKEN-NUMBER       older lines (`journal_lines`), put if absent; the first may be a snapshot

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
import hashlib
import logging
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Annotated, Final, Literal, TypeVar

from pydantic import Field, ValidationError

from genesis.errors import GenesisError, ObjectNotFoundError, PreconditionFailedError, StoreError
from genesis.populate.crashpoint import crash_point
from genesis.populate.lease import ProcessId, describe_writer, lease_end, this_process
from genesis.store.base import CachePolicy, Store
from genesis.store.limits import RetryPolicy
from genesis.store.opening import open_store
from manifests import ContractError, Writer
from trainer.errors import JournalLostError, LedgerError
from trainer.network.discovery.stage_report import Counted
from trainer.network.rpc import Message, PeerId
from trainer.network.rpc.token_buckets import TokenBuckets
from trainer.outer.engine.daemon_call import in_daemon_thread
from trainer.pipeline.ledger.journal_lines import decode_lines
from trainer.pipeline.ledger.succession import TakenJournal
from trainer.pipeline.protocol.work import boottime_s

logger = logging.getLogger(__name__)

PART_BYTES: Final = 256 << 10
JOURNAL_CRASH_POINTS: Final = ("journal-taken", "journal-part-stored", "journal-head-stored", "journal-replaced")
"""Where a test can have a keeper killed (`genesis.populate.crashpoint`): behind each kind of write."""
_MAX_HEAD_BYTES: Final = 64 << 20
_LOOKS: Final = 5
"""In `takeover_s`, for what the keeper last wrote."""
_RETRY_S: Final = 0.5
_STORE_CALL_S: Final = 10.0
_READS: Final = 5
_LOG_EVERY_S: Final = 60.0
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]")
T = TypeVar("T")


class JournalPart(Message):
    """An object with lines of the journal."""

    key: str
    size_bytes: Counted
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class JournalHead(Message):
    """The first line of the head; the newest lines of the journal follow it."""

    version: Literal[1] = 1
    keeper: str  # Key of the driver.
    writer: Writer  # Its process and its fencing token; without an end, the journal was given back.
    writes: Counted  # By this keeper, so that each write changes the object.
    parts: tuple[JournalPart, ...] = ()
    digest: str  # Of the last line; empty: there is none yet.


@dataclass(frozen=True, slots=True)
class Head:
    """The head as it was read or written."""

    about: JournalHead
    tail: bytes  # The newest lines.
    etag: str

    def to_bytes(self) -> bytes:
        """Returns the object's bytes."""
        return self.about.model_dump_json(exclude_none=True).encode() + b"\n" + self.tail

    @classmethod
    def from_bytes(cls, body: bytes, etag: str, name: str) -> Head:
        """Inverts `to_bytes`; raises LedgerError if it is damaged."""
        first, newline, tail = body.partition(b"\n")
        try:
            about = JournalHead.model_validate_json(first)
        except ValidationError as error:
            why = str(error).splitlines()[0]
            raise LedgerError(f"expected the head of a journal at {name}, found something else ({why})") from None
        if not newline:
            raise LedgerError(f"expected the head of a journal at {name}, found it cut; put back a copy")
        return cls(about, tail, etag)


@dataclass(frozen=True, slots=True)
class StorePlace:
    """Where in a store a run's journal is; its methods block."""

    store: Store
    prefix: str

    @classmethod
    def of(cls, url: str, run_id: str) -> StorePlace:
        """The place of a run's journal in the store at an address; nothing is contacted.

        Raises LedgerError if no store that can be written has that address.
        """
        name = run_id
        if _UNSAFE.search(run_id):  # Names of runs may have characters that keys of objects may not.
            name = f"{_UNSAFE.sub('_', run_id)}-{hashlib.sha256(run_id.encode()).hexdigest()[:8]}"
        try:
            store = open_store(url, policy=RetryPolicy().lasting(_STORE_CALL_S))
        except GenesisError as error:
            raise LedgerError(f"swarm.ledger.journal: {error}") from None
        return cls(store, f"ledger/{name}/")

    @property
    def head_key(self) -> str:
        """Of the object that names all others."""
        return self.prefix + "head"

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.store.url}/{self.head_key}"

    def check(self) -> None:
        """Raises LedgerError if the store cannot be written, or does not honour conditions."""
        try:
            honours = self.store.conditional_writes
        except (GenesisError, OSError) as error:
            raise LedgerError(f"swarm.ledger.journal: expected a store that can be written, found: {error}") from error
        if not honours:
            raise LedgerError(
                f"swarm.ledger.journal: expected a store that honours If-Match and If-None-Match, found that "
                f"{self.store.url} ignores them, so two drivers could both keep the account; take another store, a "
                "folder that all drivers share, or swarm.ledger.journal=replicated"
            )

    def read(self) -> Head | None:
        """Returns the head; None: there is none yet. Raises LedgerError if it is damaged."""
        try:
            found = self.store.get(self.head_key, max_bytes=_MAX_HEAD_BYTES)
        except ObjectNotFoundError:
            return None
        return Head.from_bytes(found.body, found.etag, self.name)

    def etag(self) -> str | None:
        """Returns what changes with each write of the head; None: there is none."""
        found = self.store.head(self.head_key)
        return None if found is None else found.etag

    def swap(self, head: Head) -> Head:
        """Writes the head in place of the one with its ETag (empty: of none); returns it with its new one.

        Raises PreconditionFailedError if that one is not there any more.
        """
        body = head.to_bytes()
        etag = self.store.put(
            self.head_key, body, cache=CachePolicy.NONE, if_absent=not head.etag, if_match=head.etag or None
        )
        return replace(head, etag=etag)

    def lines(self, head: Head) -> bytes:
        """Returns all lines of the journal that a head names.

        Raises ObjectNotFoundError if a part is gone, as when the head was replaced meanwhile, LedgerError if one is
        damaged.
        """
        bodies = []
        for part in head.about.parts:
            body = self.store.get(part.key, max_bytes=part.size_bytes).body
            if hashlib.sha256(body).hexdigest() != part.sha256:
                raise LedgerError(
                    f"expected {part.key} in {self.store.url} to have sha256 {part.sha256}, found it damaged; put back "
                    "a copy"
                )
            bodies.append(body)
        return b"".join((*bodies, head.tail))

    def put_part(self, token: int, number: int, lines: bytes) -> JournalPart:
        """Stores lines under a name that only the keeper with this token uses."""
        key = f"{self.prefix}parts/{token:08d}-{number:08d}"
        self.store.put(key, lines, cache=CachePolicy.IMMUTABLE, if_absent=True)
        return JournalPart(key=key, size_bytes=len(lines), sha256=hashlib.sha256(lines).hexdigest())

    def left_behind(self, head: Head) -> list[str]:
        """Returns the keys of parts that nobody needs: former keepers' that are not named by the keeper's head."""
        named = {part.key for part in head.about.parts}
        own = f"{self.prefix}parts/{head.about.writer.token:08d}-"
        found = [each.key for each in self.store.list(self.prefix + "parts/")]
        return [key for key in found if key not in named and not key.startswith(own)]


def read_journal(place: StorePlace) -> tuple[bytes, Head | None]:
    """Returns all lines of a journal, and its head, from a store in which a keeper may go on meanwhile.

    Raises LedgerError if it is damaged.
    """
    for _ in range(_READS):
        head = place.read()
        if head is None:
            return b"", None
        try:
            return place.lines(head), head
        except ObjectNotFoundError as error:
            missing = str(error)
    raise LedgerError(f"expected the parts that {place.name} names, found one missing: {missing}; put back a copy")


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

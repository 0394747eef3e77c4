"""Group commit: what many requests add to the account goes to a distant journal together, and each waits for its part.

The ledger's thread appends and goes on; one task writes whatever has gathered since its last write. So a journal that
takes 50 ms a write carries as many requests as come in 50 ms, and each waits for 50 to 100 ms. Nobody is told anything
before what it follows from is durable: the ledger may be ahead of its journal, its answers never are. A keeper that has
not been confirmed for `takeover_s` answers nothing, since another may keep the account by then: what it would say of
leases without writing, such as that they are live, would bind nobody.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from dataclasses import dataclass, field
from typing import Final, Protocol

from trainer.errors import JournalLostError, LedgerError
from trainer.pipeline.ledger.journal_lines import SEED, encode_line
from trainer.pipeline.ledger.records import Record
from trainer.pipeline.protocol.work import boottime_s

GROUP_BYTES: Final = 512 << 10
"""Of lines in one write, at most; a single line may be longer."""
_CONFIRMATIONS: Final = 3
"""In `takeover_s`, of a keeper that has nothing to write."""


class AccountJournal(Protocol):
    """Where a keeper writes the account: its own disk, or a place that outlives it."""

    @property
    def size_bytes(self) -> int:
        """Of all lines, those included that are not durable yet."""

    @property
    def position(self) -> int:
        """Of what was appended last; for `committed`."""

    def append(self, record: Record) -> None:
        """Adds a record. Raises LedgerError if it cannot be written; the journal takes no more then."""

    def replace(self, record: Record) -> None:
        """Puts a record in place of all there are."""

    def check_current(self) -> None:
        """Raises LedgerError if another may keep the account by now."""

    async def committed(self, position: int) -> None:
        """Waits until all up to there is durable; raises LedgerError if it never will be."""

    def close(self) -> None:
        """Takes nothing more; may be called again."""


class JournalTarget(Protocol):
    """A journal outside this process, held by this keeper under a fencing token; for one task at a time.

    Each method returns when what it does is durable, and goes on trying where it is not known whether it is. It raises
    JournalLostError once another keeper has the journal: then nothing of this one is added any more.
    """

    async def append(self, lines: bytes, digest: str, num_records: int) -> None:
        """Adds whole lines, the last with this digest."""

    async def replace(self, lines: bytes, digest: str, num_records: int) -> None:
        """Puts lines in place of all there are."""

    async def confirm(self) -> None:
        """Says that this keeper goes on, and finds out whether it may."""

    async def close(self) -> None:
        """Gives the journal back, so that another keeper need not wait."""

    def abandon(self) -> None:
        """Ends what runs for it, without giving it back; may be called again."""


@dataclass(slots=True)
class _Group:
    """Lines that are written together."""

    is_whole: bool  # In place of all lines there are.
    lines: bytearray = field(default_factory=bytearray)
    digest: str = SEED
    num_records: int = 0


class GroupCommitJournal:
    """An `AccountJournal` on a `JournalTarget`: `append` and `replace` are for one thread, the rest for an event loop.

    Args:
        target: where the lines go; `run` alone uses it.
        digest: of the journal's last line.
        size_bytes: of its lines.
        takeover_s: without confirmation, after which another may take over.
        confirmed_s: when (`boottime_s`) the write began by which this keeper got the journal.
    """

    def __init__(
        self, target: JournalTarget, digest: str, size_bytes: int, takeover_s: float, confirmed_s: float
    ) -> None:
        self._target = target
        self._digest = digest
        self._takeover_s = takeover_s
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._groups: deque[_Group] = deque()
        self._wake = asyncio.Event()
        self._advanced = asyncio.Event()
        self._confirmed_s = confirmed_s
        self._broken = ""
        self.is_lost = False
        """Whether another keeper has it."""
        self._closing = False
        self._position = self._committed = 0
        self._size_bytes = size_bytes

    @property
    def size_bytes(self) -> int:
        """See `AccountJournal`."""
        return self._size_bytes

    @property
    def position(self) -> int:
        """See `AccountJournal`."""
        return self._position

    def append(self, record: Record) -> None:
        """See `AccountJournal`; returns before the record is durable."""
        self._add(record, is_whole=False)

    def replace(self, record: Record) -> None:
        """See `AccountJournal`; returns before the record is durable."""
        self._add(record, is_whole=True)

    def check_current(self) -> None:
        """See `AccountJournal`."""
        silent_s = boottime_s() - self._confirmed_s
        if silent_s >= self._takeover_s:
            raise LedgerError(
                f"expected a keeper whose journal was written within {self._takeover_s:g} s, found the last time "
                f"{silent_s:.1f} s ago; another may keep the account by now, ask again"
            )

    async def committed(self, position: int) -> None:
        """See `AccountJournal`."""
        while self._committed < position:
            if self._broken:
                raise LedgerError(self._broken)
            await self._advanced.wait()

    async def run(self) -> None:
        """Writes and confirms until `close`, and then gives the journal back; raises JournalLostError if it is lost."""
        try:
            while True:
                group = self._next()
                began_s = boottime_s()
                if group is not None:
                    write = self._target.replace if group.is_whole else self._target.append
                    await write(bytes(group.lines), group.digest, group.num_records)
                    self._committed += group.num_records
                elif self._closing:
                    await self._target.close()
                    return
                elif not await self._idle():
                    await self._target.confirm()
                else:
                    continue
                self._confirmed_s = began_s
                self._advance()
        except JournalLostError as error:
            self.is_lost = True
            self._fail(str(error))
            raise
        finally:
            self._target.abandon()
            self._fail("expected an account that is kept here, found that it was given back")

    def close(self) -> None:
        """See `AccountJournal`; `run` ends when all that was appended is durable."""
        self._closing = True
        self._wake.set()

    def _add(self, record: Record, *, is_whole: bool) -> None:
        if self._broken or self._closing:
            raise LedgerError(self._broken or "expected an open journal, found it closed")
        line, digest = encode_line(record, SEED if is_whole else self._digest)
        with self._lock:
            last = self._groups[-1] if self._groups else None
            if last is None or is_whole or len(last.lines) + len(line) > GROUP_BYTES:
                last = _Group(is_whole)
                self._groups.append(last)
            last.lines += line
            last.digest, last.num_records = digest, last.num_records + 1
            self._digest = digest
            self._position += 1
            self._size_bytes = len(line) + (0 if is_whole else self._size_bytes)
        self._loop.call_soon_threadsafe(self._wake.set)

    def _next(self) -> _Group | None:
        with self._lock:
            return self._groups.popleft() if self._groups else None

    async def _idle(self) -> bool:
        """Waits for something to do; returns False when the keeper is to be confirmed instead."""
        left_s = self._confirmed_s + self._takeover_s / _CONFIRMATIONS - boottime_s()
        try:
            async with asyncio.timeout(max(0.0, left_s)):
                await self._wake.wait()
        except TimeoutError:
            return False
        self._wake.clear()
        return True

    def _advance(self) -> None:
        advanced, self._advanced = self._advanced, asyncio.Event()
        advanced.set()

    def _fail(self, reason: str) -> None:
        self._broken = self._broken or reason
        self._advance()

r"""A member's copy of a replicated journal, on its own disk, and what the other members may ask of it.

    DIRECTORY/journal    `{header}\n`, then lines (`journal_lines`); replaced whole, or added to at its end
    DIRECTORY/promised   the highest ballot that this member has promised to follow

A ballot is the fencing token of a keeper: unique to it, and higher than all before. A copy takes lines only under the
highest ballot it has promised, and only behind the lines they were made to follow, which the digests tell. All that it
acknowledges is synced before. A copy without a vote, as after its disk was lost, may miss lines and promises that it
acknowledged once: it counts for nothing until a keeper has brought it up to date and most of the others have confirmed
that keeper again (`replicated_journal`).
"""

from __future__ import annotations

import json
import logging
import os
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import Field, ValidationError

from genesis.file_lock import try_lock
from genesis.store.durable import TemporaryFile, make_folders, remove_leftovers, sync_folder
from trainer.errors import LedgerError
from trainer.network.discovery.stage_report import Counted
from trainer.network.rpc import Message
from trainer.pipeline.ledger.journal_lines import SEED, check_lines

logger = logging.getLogger(__name__)

MAX_JOURNAL_BYTES: Final = 256 << 20
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]


class ReplicaState(Message):
    """How far a copy is."""

    promised: Counted  # The highest ballot that it follows.
    accepted: Counted  # The ballot under which its lines were written or confirmed last.
    index: Counted  # Records since the account began, those included that a snapshot stands for.
    digest: Digest  # Of its last line.
    is_voter: bool  # Whether what it acknowledges counts.

    @property
    def rank(self) -> tuple[int, int]:
        """Of two copies the one with the higher rank has all that was acknowledged by most."""
        return self.accepted, self.index


class ReplicaHeader(Message):
    """The first line of the copy's file."""

    version: Literal[1] = 1
    accepted: Counted
    index_before: Counted  # The first line is of the record after that.
    is_voter: bool


class Replica:
    """A copy that this process alone has open; its methods block, and are for one thread. Use `open`."""

    def __init__(self, folder: Path, lock: int) -> None:
        self._folder = folder
        self._lock = lock
        self._descriptor = -1
        self._header = ReplicaHeader(accepted=0, index_before=0, is_voter=False)
        self._header_bytes = 0
        self._size_bytes = 0  # Of the lines.
        self._is_torn = False  # A line could not be written to its end: the file is written anew.
        self._num_lines = 0
        self._digest = SEED
        self._promised = 0

    @classmethod
    def open(cls, folder: Path) -> Replica:
        """Opens or creates the copy in a folder.

        Raises LedgerError if another process has it, it is damaged, or it cannot be written.
        """
        with ExitStack() as opened:
            try:
                make_folders(folder)
                remove_leftovers(folder)
                lock_path = folder / "lock"
                lock = os.open(lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
                opened.callback(os.close, lock)
                if not try_lock(lock):
                    raise LedgerError(f"expected to keep this copy alone, found another process that has {lock_path}")
                replica = cls(folder, lock)
                replica._read()
            except OSError as error:
                raise LedgerError(f"expected a copy that can be written in {folder}, found {error}") from error
            opened.pop_all()
        return replica

    def state(self) -> ReplicaState:
        """Returns how far it is."""
        return ReplicaState(
            promised=self._promised,
            accepted=self._header.accepted,
            index=self._header.index_before + self._num_lines,
            digest=self._digest,
            is_voter=self._header.is_voter,
        )

    def lines(self) -> tuple[bytes, ReplicaState]:
        """Returns all of its lines, and what they add up to."""
        if self._descriptor < 0:
            return b"", self.state()
        return os.pread(self._descriptor, self._size_bytes, self._header_bytes), self.state()

    def promise(self, ballot: int) -> bool:
        """Promises to take lines of no lower ballot any more; returns False if it follows that one or a higher one."""
        if ballot <= self._promised:
            return False
        self._store("promised", json.dumps({"promised": ballot}).encode())
        self._promised = ballot
        return True

    def append(
        self, ballot: int, index: int, digest: str, lines: bytes | memoryview, num_records: int, *, as_voter: bool
    ) -> bool:
        """Adds lines that follow the record with this index and digest, and counts from then on if ``as_voter``.

        Without lines it confirms those it has. Returns False, and changes nothing, if it follows a higher ballot or
        ends elsewhere.
        """
        state = self.state()
        if not self._follows(ballot) or (state.index, state.digest) != (index, digest):
            return False
        after, num_lines, size_bytes = check_lines(bytes(lines), digest)
        if (num_lines, size_bytes) != (num_records, len(lines)):
            return False
        is_voter = state.is_voter or as_voter
        is_same = (ballot, is_voter) == (self._header.accepted, self._header.is_voter)
        if not is_same or self._descriptor < 0 or self._is_torn:
            header = self._header.model_copy(update={"accepted": ballot, "is_voter": is_voter})
            self._rewrite(header, self.lines()[0] + bytes(lines))
        elif size_bytes:
            self._is_torn = True
            _write(self._descriptor, lines)
            os.fdatasync(self._descriptor)
            self._is_torn = False
        self._size_bytes += size_bytes
        self._num_lines += num_lines
        self._digest = after
        return True

    def install(self, ballot: int, index: int, lines: bytes, *, as_voter: bool) -> bool:
        """Puts lines in place of all it has, the last of the record with this index; otherwise as `append`."""
        if not self._follows(ballot):
            return False
        digest, num_lines, size_bytes = check_lines(lines, SEED)
        if size_bytes != len(lines) or num_lines > index:
            return False
        is_voter = self._header.is_voter or as_voter
        self._rewrite(ReplicaHeader(accepted=ballot, index_before=index - num_lines, is_voter=is_voter), lines)
        self._size_bytes, self._num_lines, self._digest = size_bytes, num_lines, digest
        return True

    def close(self) -> None:
        """Lets go of the file; may be called again."""
        for name in ("_descriptor", "_lock"):
            descriptor = getattr(self, name)
            if descriptor >= 0:
                setattr(self, name, -1)
                os.close(descriptor)

    def _follows(self, ballot: int) -> bool:
        """Whether it takes lines of this ballot; a higher one than it has promised is promised by that."""
        return ballot == self._promised or self.promise(ballot)

    def _rewrite(self, header: ReplicaHeader, lines: bytes) -> None:
        first = header.model_dump_json().encode() + b"\n"
        self._store("journal", first + lines)
        descriptor = os.open(self._folder / "journal", os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor, self._header, self._header_bytes = descriptor, header, len(first)
        self._is_torn = False

    def _store(self, name: str, body: bytes) -> None:
        with TemporaryFile(self._folder) as file:
            file.write(memoryview(body))
            file.replace(self._folder / name)
        sync_folder(self._folder)

    def _read(self) -> None:
        try:
            self._promised = json.loads((self._folder / "promised").read_bytes())["promised"]
        except FileNotFoundError:
            pass
        except (ValueError, KeyError, TypeError):
            raise self._damage("promised") from None
        path = self._folder / "journal"
        if not path.exists():
            return
        first, newline, lines = path.read_bytes().partition(b"\n")
        try:
            self._header = ReplicaHeader.model_validate_json(first)
        except ValidationError:
            raise self._damage("journal") from None
        self._digest, self._num_lines, self._size_bytes = check_lines(lines, SEED)
        if not newline or b"\n" in lines[self._size_bytes : -1]:
            raise self._damage("journal")
        self._descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)
        self._header_bytes = len(first) + 1
        if self._size_bytes < len(lines):
            logger.warning("%s: the last line was not written to its end, and not acknowledged", path)
            os.ftruncate(self._descriptor, self._header_bytes + self._size_bytes)
            os.fdatasync(self._descriptor)
        self._promised = max(self._promised, self._header.accepted)

    def _damage(self, name: str) -> LedgerError:
        return LedgerError(
            f"expected this member's copy of the journal in {self._folder / name}, found it damaged; remove the folder "
            "while the other members run, and it is fetched from them again"
        )


def _write(descriptor: int, data: bytes | memoryview) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]

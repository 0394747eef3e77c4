r"""The account's file: one record a line, each line vouched for by a digest over it and all lines before it.

`<32 hexadecimal digits> <JSON>\n`. `append` returns when the line is on disk (fdatasync), so what a driver was told
after it survives kill -9 and a power cut. A line that is not whole can only be the last, which nobody was told of: it
is dropped. Anything else that does not fit its digest is damage, and is refused rather than guessed at: a damaged line
costs the account. When the file has grown, a snapshot replaces it: written beside it, synced, renamed over it, the
folder synced. One process keeps a journal (flock on a file beside it, since the journal itself is replaced).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from genesis.file_lock import try_lock
from genesis.store.durable import sync_folder
from trainer.errors import LedgerError
from trainer.pipeline.ledger.journal_lines import SEED, decode_lines, encode_line
from trainer.pipeline.ledger.records import Record


class Journal:
    """An open journal of whole lines, the last with this digest; nobody else can open it. Use `open`."""

    def __init__(self, path: Path, lock: int, descriptor: int, digest: str, size_bytes: int) -> None:
        self._path = path
        self._lock = lock
        self._descriptor = descriptor
        self._digest = digest
        self._broken = ""
        self.size_bytes = size_bytes
        self.position = 0
        """See `AccountJournal`: what is appended here is durable at once, and nobody else can take over."""

    @classmethod
    def open(cls, path: Path) -> tuple[Journal, list[Record]]:
        """Opens or creates a journal, and its folder; returns it with all records in it.

        Raises LedgerError if another process keeps it, it is damaged, or it cannot be written.
        """
        with ExitStack() as opened:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                lock_path = path.with_name(path.name + ".lock")
                lock = _opened(lock_path)
                opened.callback(os.close, lock)
                if not try_lock(lock):
                    raise LedgerError(f"expected to keep the account alone, found another process that has {lock_path}")
                is_new = not path.exists()
                descriptor = _opened(path, os.O_APPEND)
                opened.callback(os.close, descriptor)
                if is_new:
                    sync_folder(path.parent)
                records, digest, size_bytes = decode_lines(path.read_bytes(), str(path), may_be_cut=True)
                if os.fstat(descriptor).st_size != size_bytes:  # What follows the last whole line goes.
                    os.ftruncate(descriptor, size_bytes)
                    os.fdatasync(descriptor)
            except OSError as error:
                raise LedgerError(f"expected a journal that can be written at {path}, found {error}") from error
            opened.pop_all()
            return cls(path, lock, descriptor, digest, size_bytes), records

    def append(self, record: Record) -> None:
        """Adds a record; it is on disk when this returns. After a LedgerError the journal takes no more."""
        line, digest = encode_line(record, self._digest)
        with self._writing("write"):
            _write(self._descriptor, line)
            os.fdatasync(self._descriptor)
        self._digest = digest
        self.size_bytes += len(line)

    def replace(self, record: Record) -> None:
        """Puts a record in place of all there are; whenever this process dies, either is there whole."""
        line, digest = encode_line(record, SEED)
        fresh = self._path.with_name(self._path.name + ".new")
        with self._writing("replace"):
            descriptor = _opened(fresh, os.O_APPEND | os.O_TRUNC)
            try:
                _write(descriptor, line)
                os.fsync(descriptor)
                fresh.replace(self._path)
            except BaseException:
                os.close(descriptor)
                raise
            os.close(self._descriptor)
            self._descriptor = descriptor
            sync_folder(self._path.parent)
        self._digest, self.size_bytes = digest, len(line)

    def check_current(self) -> None:
        """Does nothing: nobody else can open the journal."""

    async def committed(self, position: int) -> None:
        """Returns at once: what was appended is on disk."""

    def close(self) -> None:
        """Lets go of the file; may be called again."""
        self._broken = self._broken or f"expected an open journal, found {self._path} closed"
        for name in ("_descriptor", "_lock"):
            descriptor = getattr(self, name)
            if descriptor >= 0:
                setattr(self, name, -1)
                os.close(descriptor)

    @contextmanager
    def _writing(self, what: str) -> Iterator[None]:
        if self._broken:
            raise LedgerError(self._broken)
        try:
            yield
        except OSError as error:
            self._broken = f"expected to {what} the journal {self._path}, found {error}; free the disk, start again"
            raise LedgerError(self._broken) from error


def _opened(path: Path, flags: int = 0) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | flags, 0o600)


def _write(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]

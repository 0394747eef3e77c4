r"""The account's file: one record a line, each line vouched for by a digest over it and all lines before it.

`<32 hexadecimal digits> <JSON>\n`. `append` returns when the line is on disk (fdatasync), so what a driver was told
after it survives kill -9 and a power cut. A line that is not whole can only be the last, which nobody was told of: it
is dropped. Anything else that does not fit its digest is damage, and is refused rather than guessed at. When the file
has grown, a snapshot replaces it: written beside it, synced, renamed over it, the folder synced.

One process keeps a journal (flock on a file beside it, since the journal itself is replaced). The trade-off: a damaged
line costs the account, where a format without chained digests would go on with a wrong one.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from pydantic import ValidationError

from genesis.file_lock import try_lock
from trainer.errors import LedgerError
from trainer.pipeline.ledger.records import RECORD, Record

__all__ = ["Journal"]

logger = logging.getLogger(__name__)

_SEED: Final = hashlib.sha256(b"genesis ledger 1").hexdigest()[:32]
_DIGEST_CHARS: Final = 32


class Journal:
    """An open journal; nobody else can open it. Use `open`.

    Args:
        path: its file.
        lock: descriptor of the file that is locked.
        descriptor: of the journal, for appending.
        digest: of its last line.
        size_bytes: of its whole lines.
    """

    def __init__(self, path: Path, lock: int, descriptor: int, digest: str, size_bytes: int) -> None:
        self._path = path
        self._lock = lock
        self._descriptor = descriptor
        self._digest = digest
        self._broken = ""
        self.size_bytes = size_bytes

    @classmethod
    def open(cls, path: Path) -> tuple[Journal, list[Record]]:
        """Opens or creates a journal.

        Args:
            path: its file; the folder is made.

        Returns:
            The journal, and all records in it.

        Raises:
            LedgerError: another process keeps it, it is damaged, or it cannot be written.
        """
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            lock = _locked(path.with_name(path.name + ".lock"))
        except OSError as error:
            raise LedgerError(f"expected a journal that can be written at {path}, found {error}") from error
        try:
            is_new = not path.exists()
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            try:
                if is_new:
                    _sync_folder(path.parent)
                records, digest, size_bytes = _read(path)
                _cut(descriptor, size_bytes)
            except BaseException:
                os.close(descriptor)
                raise
        except OSError as error:
            os.close(lock)
            raise LedgerError(f"expected a journal that can be written at {path}, found {error}") from error
        except LedgerError:
            os.close(lock)
            raise
        return cls(path, lock, descriptor, digest, size_bytes), records

    def append(self, record: Record) -> None:
        """Adds a record; it is on disk when this returns.

        Raises:
            LedgerError: it cannot be written; the journal takes no more, since what it holds is not what was meant.
        """
        if self._broken:
            raise LedgerError(self._broken)
        line, digest = _line(record, self._digest)
        try:
            _write(self._descriptor, line)
            os.fdatasync(self._descriptor)
        except OSError as error:
            self._broken = f"expected to write the journal {self._path}, found {error}; free the disk, start again"
            raise LedgerError(self._broken) from error
        self._digest = digest
        self.size_bytes += len(line)

    def replace(self, record: Record) -> None:
        """Puts a record in place of all there are; whenever this process dies, either is there whole.

        Raises:
            LedgerError: it cannot be written; the journal is as it was, and takes no more.
        """
        if self._broken:
            raise LedgerError(self._broken)
        line, digest = _line(record, _SEED)
        fresh = self._path.with_name(self._path.name + ".new")
        try:
            descriptor = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o600)
            try:
                _write(descriptor, line)
                os.fsync(descriptor)
                fresh.replace(self._path)
            except BaseException:
                os.close(descriptor)
                raise
            os.close(self._descriptor)
            self._descriptor = descriptor
            _sync_folder(self._path.parent)
        except OSError as error:
            self._broken = f"expected to replace the journal {self._path}, found {error}; free the disk, start again"
            raise LedgerError(self._broken) from error
        self._digest, self.size_bytes = digest, len(line)

    def close(self) -> None:
        """Lets go of the file; may be called again."""
        self._broken = self._broken or f"expected an open journal, found {self._path} closed"
        for name in ("_descriptor", "_lock"):
            descriptor = getattr(self, name)
            if descriptor >= 0:
                setattr(self, name, -1)
                os.close(descriptor)


def _line(record: Record, before: str) -> tuple[bytes, str]:
    """A record's line, and its digest."""
    body = record.model_dump_json(exclude_defaults=False).encode()
    digest = _digest(before, body)
    return b"%s %s\n" % (digest.encode(), body), digest


def _digest(before: str, body: bytes) -> str:
    return hashlib.sha256(before.encode() + body).hexdigest()[:_DIGEST_CHARS]


def _read(path: Path) -> tuple[list[Record], str, int]:
    """The records, the digest of the last, and how many bytes they take.

    Raises:
        LedgerError: a line other than the last is not whole.
    """
    records: list[Record] = []
    digest, size_bytes = _SEED, 0
    for number, line, is_last in _lines(path):
        found, _, body = line.rstrip(b"\n").partition(b" ")
        expected = _digest(digest, body)
        if not line.endswith(b"\n") or found != expected.encode():
            if is_last:
                logger.warning("%s: line %d was not written to its end; nobody was told of it", path, number)
                break
            raise LedgerError(
                f"expected line {number} of {path} to fit the digests before it, found it damaged or changed; put back "
                "a copy, or begin a new account in another state folder"
            )
        records.append(_record(body, path, number))
        digest, size_bytes = expected, size_bytes + len(line)
    return records, digest, size_bytes


def _record(body: bytes, path: Path, number: int) -> Record:
    try:
        return RECORD.validate_json(body)
    except ValidationError as error:
        reason = str(error).splitlines()[0]
        raise LedgerError(f"expected line {number} of {path} to be this release's, found another ({reason})") from None


def _lines(path: Path) -> Iterator[tuple[int, bytes, bool]]:
    """Number, bytes, and whether it is the last."""
    with path.open("rb") as file:
        number, line = 1, file.readline()
        while line:
            following = file.readline()
            yield number, line, not following
            number, line = number + 1, following


def _locked(path: Path) -> int:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        if not try_lock(descriptor):
            raise LedgerError(f"expected to keep the account alone, found another process that has {path}")
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _write(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def _cut(descriptor: int, size_bytes: int) -> None:
    """Takes off what follows the last whole line, before anything is added behind it."""
    if os.fstat(descriptor).st_size != size_bytes:
        os.ftruncate(descriptor, size_bytes)
        os.fdatasync(descriptor)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

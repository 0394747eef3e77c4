"""A snapshot while it is being fetched: it keeps every verified chunk, and believes nothing that is not verified.

    {directory}/.fetch-{digest}/   descriptor.json, pages, data (full length from the start), lock

Besides the current fetch, the newest interrupted one is kept: states change with each outer step, and parts of older
ones (12 bytes a parameter each, reserved whole) would fill the disk, one for each attempt.

There is no list of received chunks: after a restart they are hashed again (1 GB/s), which no crash can corrupt. Space
is reserved when the file is made, so a full disk is reported at once and not after hours.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import shutil
import threading
from pathlib import Path

from genesis.file_lock import FileLock, FileLockedError
from manifests.serialisation import sha256_hex
from trainer.errors import StateTransferError
from trainer.network.transfer.descriptor import (
    CHUNK_BYTES,
    DATA_NAME,
    DESCRIPTOR_NAME,
    DIGEST_BYTES,
    PAGE_CHUNKS,
    PAGES_NAME,
    Descriptor,
    parse_descriptor,
    publish,
)
from trainer.network.transfer.snapshot import Snapshot, load_folder, write_file

__all__ = ["PartFile"]

logger = logging.getLogger(__name__)

_PREFIX, _LOCK_SUFFIX = ".fetch-", ".lock"
_KEPT_OTHERS = 1
"""Interrupted fetches of other states that are kept for resumption."""


class PartFile:
    """One snapshot being fetched into ``directory``; `open` and `close` it. Any thread may call its methods.

    Raises:
        StateTransferError: by each method, if the disk is full or fails.
    """

    def __init__(self, directory: Path, digest: str) -> None:
        self._target = directory / digest
        self._folder = directory / f"{_PREFIX}{digest}"
        self._digest = digest
        self._lock = FileLock(_lock_path(self._folder))
        self._guard = threading.Lock()
        """Held while the file is used, so that no thread writes to a closed descriptor that another file has reused."""
        self._digests = b""
        self._file = -1

    def open(self) -> None:
        """Makes or resumes the folder, and removes other interrupted fetches, except the newest.

        Raises:
            StateTransferError: another process fetches the same state, or the folder cannot be made.
        """
        try:
            self._target.parent.mkdir(parents=True, exist_ok=True)
            self._lock.acquire()
            self._folder.mkdir(exist_ok=True)
        except FileLockedError:
            raise StateTransferError(
                f"another process fetches the state {self._digest[:16]}… into {self._target.parent}; wait for it"
            ) from None
        except OSError as error:
            self._lock.release()
            raise StateTransferError(f"the state cannot be fetched into {self._target.parent}: {error}") from error
        _remove_abandoned(self._folder)

    def close(self) -> None:
        """Closes the file and keeps what was fetched for the next attempt. Later writes fail."""
        with self._guard:
            if self._file >= 0:
                os.close(self._file)
            self._file = -1
        self._lock.release()

    def discard(self) -> None:
        """Removes what was fetched."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def saved_descriptor(self) -> Descriptor | None:
        """Returns the descriptor of an earlier attempt, verified."""
        try:
            return parse_descriptor((self._folder / DESCRIPTOR_NAME).read_bytes(), self._digest)
        except (OSError, StateTransferError):
            return None

    def saved_pages(self, descriptor: Descriptor) -> list[bytes | None]:
        """Returns the pages of an earlier attempt, verified; None for each that is missing."""
        try:
            data = (self._folder / PAGES_NAME).read_bytes()
        except OSError:
            data = b""
        step = PAGE_CHUNKS * DIGEST_BYTES
        pages = [data[number * step : (number + 1) * step] for number in range(len(descriptor.pages))]
        return [
            page if sha256_hex(page) == digest else None for page, digest in zip(pages, descriptor.pages, strict=True)
        ]

    def begin(self, descriptor: Descriptor, pages: list[bytes]) -> list[int]:
        """Writes descriptor and pages, reserves the space, and returns the indices of the chunks that are missing.

        Chunks of an earlier attempt are verified.
        """
        try:
            self._write(DESCRIPTOR_NAME, descriptor.to_bytes())
            self._write(PAGES_NAME, b"".join(pages))
            self._digests = b"".join(pages)
            path = self._folder / DATA_NAME
            is_new = self._open_data(path, descriptor.size_bytes)
            return [index for index in range(descriptor.num_chunks) if is_new or not self._is_there(index)]
        except OSError as error:
            raise self._disk_error(error) from error

    def is_valid(self, index: int, chunk: memoryview) -> bool:
        """Returns whether these are the bytes of a chunk."""
        expected = self._digests[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES]
        return hashlib.sha256(chunk).digest() == expected

    def write(self, index: int, chunk: memoryview) -> None:
        """Writes a verified chunk."""
        position = index * CHUNK_BYTES
        try:
            with self._guard:
                while chunk:
                    written = os.pwrite(self._file, chunk, position)
                    chunk, position = chunk[written:], position + written
        except OSError as error:
            raise self._disk_error(error) from error

    def load(self) -> Snapshot:
        """Reads what was fetched back from the disk and verifies all of it."""
        return load_folder(self._folder, self._digest)

    def publish(self) -> None:
        """Makes it a snapshot; all chunks must be there."""
        try:
            with self._guard:
                os.fsync(self._file)
            publish(self._folder, self._target)
            _lock_path(self._folder).unlink(missing_ok=True)
        except OSError as error:
            raise self._disk_error(error) from error

    def _is_there(self, index: int) -> bool:
        with self._guard:
            chunk = os.pread(self._file, CHUNK_BYTES, index * CHUNK_BYTES)
        return self.is_valid(index, memoryview(chunk))

    def _open_data(self, path: Path, size_bytes: int) -> bool:
        """Opens the data file at its full length; returns whether it is new, with no chunk in it."""
        is_new = not path.exists() or path.stat().st_size != size_bytes
        if is_new:
            path.unlink(missing_ok=True)
        with self._guard:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            if is_new and size_bytes:
                try:
                    if hasattr(os, "posix_fallocate"):
                        os.posix_fallocate(self._file, 0, size_bytes)
                    else:
                        os.ftruncate(self._file, size_bytes)
                except OSError:
                    path.unlink(missing_ok=True)  # Else its length would pass for an earlier attempt's.
                    raise
        return is_new

    def _write(self, name: str, data: bytes) -> None:
        draft = self._folder / f"{name}.draft"
        write_file(draft, data)
        draft.rename(self._folder / name)

    def _disk_error(self, error: OSError) -> StateTransferError:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            return StateTransferError(
                f"the state {self._digest[:16]}… does not fit into {self._target.parent}: {error.strerror}; make room"
            )
        return StateTransferError(f"the state {self._digest[:16]}… cannot be written to {self._target.parent}: {error}")


def _lock_path(folder: Path) -> Path:
    return folder.with_name(folder.name + _LOCK_SUFFIX)


def _remove_abandoned(current: Path) -> None:
    """Removes fetches beside ``current`` that no process works on, except the newest."""
    abandoned = [path for path in current.parent.glob(f"{_PREFIX}*") if path.is_dir() and path != current]
    for folder in sorted(abandoned, key=_begun_ns, reverse=True)[_KEPT_OTHERS:]:
        try:
            with FileLock(_lock_path(folder)):
                shutil.rmtree(folder, ignore_errors=True)
                _lock_path(folder).unlink(missing_ok=True)
        except FileLockedError:
            continue
        except OSError as error:
            logger.warning("the interrupted fetch %s cannot be removed: %s", folder, error)


def _begun_ns(folder: Path) -> int:
    """Returns when a fetch was last begun or resumed; 0 if it is gone."""
    try:
        return folder.stat().st_mtime_ns
    except FileNotFoundError:
        return 0

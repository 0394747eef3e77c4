"""A snapshot while it is being fetched: nothing in it is believed that was not verified, and nothing verified is lost.

    {directory}/.fetch-{digest}/   descriptor.json, pages, data (full length from the start), lock

Besides the one being fetched, one more that was broken off is kept, the newest: states change with each outer step, and
parts of older ones (12 bytes a parameter each, reserved whole) would fill the disk, one for each attempt.

There is no list of what has come: after a restart the chunks are hashed again (1 GB/s), which no crash can make wrong.
Space is reserved when the file is made, so a full disk is told at once and not after hours.
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
from manifests.spelling import sha256_hex
from trainer.errors import StateTransferError
from trainer.network.transfer.descriptor import CHUNK_BYTES, DIGEST_BYTES, PAGE_CHUNKS, Descriptor, parse_descriptor
from trainer.network.transfer.layout import DATA_NAME, DESCRIPTOR_NAME, PAGES_NAME, publish
from trainer.network.transfer.snapshot import Snapshot, load_folder

__all__ = ["PartFile"]

logger = logging.getLogger(__name__)

_PREFIX, _LOCK_SUFFIX = ".fetch-", ".lock"
_KEPT_OTHERS = 1
"""Broken off fetches of other states that may still be taken up again."""


class PartFile:
    """One snapshot being fetched; `open` it, and `close` it. Its methods may be called from any thread.

    Args:
        directory: where the whole snapshot will lie.
        digest: of the snapshot.
    """

    def __init__(self, directory: Path, digest: str) -> None:
        self._target = directory / digest
        self._folder = directory / f"{_PREFIX}{digest}"
        self._digest = digest
        self._lock = FileLock(_lock_path(self._folder))
        self._guard = threading.Lock()
        """Held while the file is used, so that it is never closed under a thread, and its number taken by another."""
        self._digests = b""
        self._file = -1

    def open(self) -> None:
        """Makes or takes up the folder, and makes room: removes what was fetched of states nobody fetches any more.

        Raises:
            StateTransferError: another process fetches the same, or the folder cannot be made.
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
        """Lets go of the files; what was fetched stays for the next time. Writes that come later fail."""
        with self._guard:
            if self._file >= 0:
                os.close(self._file)
            self._file = -1
        self._lock.release()

    def discard(self) -> None:
        """Removes what was fetched."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def saved_descriptor(self) -> Descriptor | None:
        """The descriptor kept from an earlier attempt."""
        try:
            return parse_descriptor((self._folder / DESCRIPTOR_NAME).read_bytes(), self._digest)
        except (OSError, StateTransferError):
            return None

    def saved_pages(self, descriptor: Descriptor) -> list[bytes | None]:
        """The pages kept from an earlier attempt, verified; None where one is missing."""
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
        """Writes descriptor and pages, reserves the space, and looks what is there already.

        Returns:
            The chunks that are missing.

        Raises:
            StateTransferError: there is no room, or it cannot be written.
        """
        try:
            self._write(DESCRIPTOR_NAME, descriptor.to_bytes())
            self._write(PAGES_NAME, b"".join(pages))
            self._digests = b"".join(pages)
            path = self._folder / DATA_NAME
            if self._open_data(path, descriptor.size_bytes):
                return list(range(descriptor.num_chunks))
            return [index for index in range(descriptor.num_chunks) if not self._is_there(index)]
        except OSError as error:
            raise self._disk_error(error) from error

    def is_valid(self, index: int, chunk: memoryview) -> bool:
        """Whether these are the bytes of a chunk."""
        expected = self._digests[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES]
        return hashlib.sha256(chunk).digest() == expected

    def write(self, index: int, chunk: memoryview) -> None:
        """Writes a verified chunk.

        Raises:
            StateTransferError: the disk does not take it.
        """
        position = index * CHUNK_BYTES
        try:
            with self._guard:
                while chunk:
                    written = os.pwrite(self._file, chunk, position)
                    chunk, position = chunk[written:], position + written
        except OSError as error:
            raise self._disk_error(error) from error

    def load(self) -> Snapshot:
        """Reads what was fetched and verifies it once more as a whole, from the disk.

        Raises:
            StateTransferError: the disk gives back something else than was written.
        """
        return load_folder(self._folder, self._digest)

    def publish(self) -> None:
        """Makes it a snapshot: all chunks are there.

        Raises:
            StateTransferError: the disk does not take it.
        """
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
        """Opens the data file, full length; whether it is a new one, with nothing in it yet."""
        is_new = not path.exists() or path.stat().st_size != size_bytes
        if is_new:
            path.unlink(missing_ok=True)
        with self._guard:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            if is_new and size_bytes:
                self._reserve(path, size_bytes)
        return is_new

    def _reserve(self, path: Path, size_bytes: int) -> None:
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(self._file, 0, size_bytes)
            else:
                os.ftruncate(self._file, size_bytes)
        except OSError:
            path.unlink(missing_ok=True)  # Else its length would pass for a file begun.
            raise

    def _write(self, name: str, data: bytes) -> None:
        draft = self._folder / f"{name}.draft"
        with draft.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
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
    """Removes fetches beside ``current`` that no process is at, but for the newest; what cannot be removed stays."""
    abandoned = [path for path in current.parent.glob(f"{_PREFIX}*") if path.is_dir() and path != current]
    for folder in sorted(abandoned, key=_begun_ns, reverse=True)[_KEPT_OTHERS:]:
        try:
            with FileLock(_lock_path(folder)):
                shutil.rmtree(folder, ignore_errors=True)
                _lock_path(folder).unlink(missing_ok=True)
        except FileLockedError:
            continue
        except OSError as error:
            logger.warning("%s, broken off, cannot be removed: %s", folder, error)


def _begun_ns(folder: Path) -> int:
    """When a fetch was last begun or taken up; 0 if it has gone meanwhile."""
    try:
        return folder.stat().st_mtime_ns
    except FileNotFoundError:
        return 0

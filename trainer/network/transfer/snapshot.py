"""Snapshots on disk: complete folders named by their digests, and those in the middle of being fetched.

    {directory}/{digest}/descriptor.json   the descriptor
    {directory}/{digest}/pages             SHA-256 of each chunk, 32 bytes each
    {directory}/{digest}/data              the tensors' bytes
    {directory}/.fetch-{digest}/           the same, data of full length from the start; beside it a lock

A snapshot is written beside, synced and renamed: one pass of SHA-256 (1.7 GB/s on one core) and the disk's time, so
`write_snapshot` is meant for a background thread.

A `PartFile` has no list of received chunks: after a restart they are hashed again (1 GB/s), which no crash can corrupt.
Space is reserved when the file is made, so a full disk is reported at once and not after hours. Of interrupted fetches
the newest is kept: states change with each outer step, and older parts would fill the disk.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

import numpy as np
import torch

from genesis.file_lock import FileLock, FileLockedError
from genesis.store.durable import sync_folder
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
    Meta,
    chunks_of,
    make_descriptor,
    parse_descriptor,
    specs_of,
    tensors_in,
)

logger = logging.getLogger(__name__)

_DRAFT_PREFIX, _FETCH_PREFIX, _LOCK_SUFFIX = ".draft-", ".fetch-", ".lock"
_READ_BYTES = 1 << 30  # Linux reads at most 2 GiB at a time.
_KEPT_FETCHES = 1  # Interrupted fetches of other states that are kept for resumption.


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A verified snapshot in memory."""

    descriptor: Descriptor
    tensors: dict[str, torch.Tensor]  # By name, on the CPU; the caller may change them.

    @property
    def meta(self) -> Meta:
        """The metadata written with the tensors."""
        return self.descriptor.meta


def describe(meta: Meta, tensors: Mapping[str, torch.Tensor]) -> Descriptor:
    """Returns the descriptor, and so the digest, that `write_snapshot` would return, without writing."""
    return describe_chunks(meta, tensors)[0]


def describe_chunks(meta: Meta, tensors: Mapping[str, torch.Tensor]) -> tuple[Descriptor, bytes]:
    """Returns what `describe` does, and the SHA-256 digests of all chunks, one after the other: the pages."""
    digests = b"".join(hashlib.sha256(chunk).digest() for chunk in chunks_of(tensors))
    return make_descriptor(meta, specs_of(tensors), _page_digests(digests)), digests


def write_snapshot(
    directory: str | os.PathLike[str], meta: Meta, tensors: Mapping[str, torch.Tensor], *, keep: int = 2
) -> Descriptor:
    """Writes a snapshot, then removes all but the last ``keep``, this one included; others fetch it by its digest.

    ``meta`` is JSON, equal on all nodes that hold equal state; the tensors must not change until this returns.

    Raises TrainerUsageError where ``meta`` is no JSON or a tensor's dtype is not supported, StateTransferError where it
    cannot be written.
    """
    folder = Path(directory)
    specs = specs_of(tensors)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _remove_abandoned_drafts(folder)
        draft = Path(tempfile.mkdtemp(prefix=f"{_DRAFT_PREFIX}{os.getpid()}-", dir=folder))
        try:
            hashed = bytearray()
            with (draft / DATA_NAME).open("xb", buffering=0) as file:
                for chunk in chunks_of(tensors):
                    hashed += hashlib.sha256(chunk).digest()
                    while chunk:
                        chunk = chunk[file.write(chunk) :]
                os.fsync(file.fileno())
            digests = bytes(hashed)
            descriptor = make_descriptor(meta, specs, _page_digests(digests))
            _write_file(draft / PAGES_NAME, digests)
            _write_file(draft / DESCRIPTOR_NAME, descriptor.to_bytes())
            publish(draft, folder / descriptor.digest)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
        others = [digest for digest in snapshots_in(folder) if digest != descriptor.digest]
        for digest in others[keep - 1 :]:
            # Renamed first, so that nobody who lists the folder sees half of it.
            doomed = folder / f"{_DRAFT_PREFIX}{os.getpid()}-old-{digest[:16]}"
            (folder / digest).rename(doomed)
            shutil.rmtree(doomed, ignore_errors=True)
            logger.debug("removed the snapshot %s…", digest[:16])
    except OSError as error:
        raise StateTransferError(f"the snapshot cannot be written to {folder}: {error}") from error
    return descriptor


def snapshots_in(directory: str | os.PathLike[str]) -> list[str]:
    """Returns the digests of the complete snapshots in ``directory``, newest first."""
    folder = Path(directory)
    if not folder.is_dir():
        return []
    found = [path for path in folder.iterdir() if len(path.name) == 64 and (path / DESCRIPTOR_NAME).is_file()]
    return [path.name for path in sorted(found, key=lambda path: path.stat().st_mtime_ns, reverse=True)]


def load_snapshot(directory: str | os.PathLike[str], digest: str) -> Snapshot:
    """Reads a snapshot and verifies every byte; raises StateTransferError where it is missing or damaged."""
    return _load_folder(Path(directory) / digest, digest)


def publish(draft: Path, target: Path) -> None:
    """Renames a draft, whose files are synced, to its final name; a snapshot already there becomes the newest."""
    os.utime(draft)
    try:
        draft.rename(target)
    except OSError:
        if not (target / DESCRIPTOR_NAME).is_file():
            raise
        os.utime(target)
    sync_folder(target.parent)


def _load_folder(folder: Path, digest: str) -> Snapshot:
    try:
        descriptor = parse_descriptor((folder / DESCRIPTOR_NAME).read_bytes(), digest)
        digests = (folder / PAGES_NAME).read_bytes()
        data = np.empty(descriptor.size_bytes, dtype=np.uint8)
        with (folder / DATA_NAME).open("rb", buffering=0) as file:
            complete = _read_fully(file, data.data)
    except OSError as error:
        raise StateTransferError(f"the state {digest[:16]}… cannot be read: {error}") from error
    damaged = f"the state {digest[:16]}… in {folder} is damaged"
    if _page_digests(digests) != descriptor.pages or len(digests) != descriptor.num_chunks * DIGEST_BYTES:
        raise StateTransferError(f"{damaged}: its pages are not its own")
    if not complete:
        raise StateTransferError(f"{damaged}: its data are of another length")
    for index in range(descriptor.num_chunks):
        if not _is_chunk(digests, index, data[index * CHUNK_BYTES : (index + 1) * CHUNK_BYTES].data):
            raise StateTransferError(f"{damaged} in chunk {index}")
    return Snapshot(descriptor, tensors_in(data, descriptor.tensors))


def _is_chunk(digests: bytes, index: int, chunk: memoryview) -> bool:
    return hashlib.sha256(chunk).digest() == digests[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES]


def _write_file(path: Path, data: bytes) -> None:
    """Writes a file and waits until it is on the disk."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _read_fully(file: FileIO, target: memoryview) -> bool:
    """Returns whether the file is exactly as long as the target."""
    while target:
        count = file.readinto(target[:_READ_BYTES])
        if not count:
            return False
        target = target[count:]
    return not file.read(1)


def _page_digests(digests: bytes) -> tuple[str, ...]:
    step = PAGE_CHUNKS * DIGEST_BYTES
    return tuple(sha256_hex(digests[start : start + step]) for start in range(0, len(digests), step))


def _remove_abandoned_drafts(folder: Path) -> None:
    for path in folder.glob(f"{_DRAFT_PREFIX}*"):
        pid = path.name.removeprefix(_DRAFT_PREFIX).partition("-")[0]
        if pid.isdigit() and int(pid) != os.getpid() and not Path(f"/proc/{pid}").exists():
            shutil.rmtree(path, ignore_errors=True)


class PartFile:
    """One snapshot being fetched into ``directory``; `open` and `close` it. Any thread may call its methods.

    Each of them raises StateTransferError if the disk is full or fails.
    """

    def __init__(self, directory: Path, digest: str) -> None:
        self._target = directory / digest
        self._folder = directory / f"{_FETCH_PREFIX}{digest}"
        self._digest = digest
        self._lock = FileLock(_lock_path(self._folder))
        self._guard = threading.Lock()
        """Held while the file is used, so that no thread writes to a closed descriptor that another file has reused."""
        self._digests = b""
        self._file = -1

    def open(self) -> None:
        """Makes or resumes the folder, unless another process does; removes all other interrupted fetches but one."""
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
        _remove_abandoned_fetches(self._folder)

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
        expected = zip(pages, descriptor.pages, strict=True)
        return [page if sha256_hex(page) == digest else None for page, digest in expected]

    def begin(self, descriptor: Descriptor, pages: list[bytes]) -> list[int]:
        """Writes descriptor and pages, reserves the space, and returns the indices of the chunks that are missing.

        Chunks of an earlier attempt are verified.
        """
        self._digests = b"".join(pages)
        with self._disk_errors():
            for name, content in ((DESCRIPTOR_NAME, descriptor.to_bytes()), (PAGES_NAME, self._digests)):
                draft = self._folder / f"{name}.draft"
                _write_file(draft, content)
                draft.rename(self._folder / name)
            is_new = self._open_data(self._folder / DATA_NAME, descriptor.size_bytes)
            return [index for index in range(descriptor.num_chunks) if is_new or not self._is_there(index)]

    def is_valid(self, index: int, chunk: memoryview) -> bool:
        """Returns whether these are the bytes of a chunk."""
        return _is_chunk(self._digests, index, chunk)

    def write(self, index: int, chunk: memoryview) -> None:
        """Writes a verified chunk."""
        position = index * CHUNK_BYTES
        with self._disk_errors(), self._guard:
            while chunk:
                written = os.pwrite(self._file, chunk, position)
                chunk, position = chunk[written:], position + written

    def load(self) -> Snapshot:
        """Reads what was fetched back from the disk and verifies all of it."""
        return _load_folder(self._folder, self._digest)

    def publish(self) -> None:
        """Makes it a snapshot; all chunks must be there."""
        with self._disk_errors():
            with self._guard:
                os.fsync(self._file)
            publish(self._folder, self._target)
            _lock_path(self._folder).unlink(missing_ok=True)

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

    @contextmanager
    def _disk_errors(self) -> Iterator[None]:
        what = f"the state {self._digest[:16]}…"
        try:
            yield
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                text = f"{what} does not fit into {self._target.parent}: {error.strerror}; make room"
                raise StateTransferError(text) from error
            raise StateTransferError(f"{what} cannot be written to {self._target.parent}: {error}") from error


def _lock_path(folder: Path) -> Path:
    return folder.with_name(folder.name + _LOCK_SUFFIX)


def _remove_abandoned_fetches(current: Path) -> None:
    """Removes fetches beside ``current`` that no process works on, except the newest."""
    abandoned = [path for path in current.parent.glob(f"{_FETCH_PREFIX}*") if path.is_dir() and path != current]
    for folder in sorted(abandoned, key=_begun_ns, reverse=True)[_KEPT_FETCHES:]:
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

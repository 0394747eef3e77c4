"""Serves the node's snapshots to newcomers, within limits, from the disk; with options and messages of both sides.

Threads read chunks with pread, so neither training nor the event loop waits for the disk, and a throttle leaves the
uplink to the rounds. The donor does not verify what it sends: the fetcher checks each chunk. A snapshot requested
within the last minute stays readable after newer ones have replaced it, because its files are held open.
"""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field

from genesis.store.limits import Throttle
from trainer.errors import RefusedError, StateTransferError
from trainer.network.rpc.messages import Message, Reply, Request
from trainer.network.rpc.scoped import CallEndpoint
from trainer.network.rpc.stream import ServerStream
from trainer.network.transfer.config import StateConfig
from trainer.network.transfer.descriptor import (
    CHUNK_BYTES,
    DATA_NAME,
    DESCRIPTOR_NAME,
    DIGEST_BYTES,
    PAGE_CHUNKS,
    PAGES_NAME,
    Descriptor,
    DigestField,
    parse_descriptor,
)

DESCRIPTOR_METHOD = "state/descriptor"
PAGE_METHOD = "state/page"
CHUNKS_METHOD = "state/chunks"
_MAX_CHUNKS_PER_REQUEST = 256
_HOLD_S = 60.0
_MAX_HELD = 4


class DescriptorRequest(Message):
    """Asks for the descriptor of a snapshot, as payload."""

    digest: DigestField


class PageRequest(Message):
    """Asks for one page of its chunk digests, as payload."""

    digest: DigestField
    page: Annotated[int, Field(ge=0, lt=2**32)]


class ChunksRequest(Message):
    """Asks for some of its chunks, as frames of a stream, each numbered by its index, in this order."""

    digest: DigestField
    indices: Annotated[
        tuple[Annotated[int, Field(ge=0, lt=2**40)], ...], Field(min_length=1, max_length=_MAX_CHUNKS_PER_REQUEST)
    ]


class Empty(Message):
    """A head without fields."""


@dataclass(slots=True)
class _OpenSnapshot:
    descriptor: Descriptor
    descriptor_bytes: bytes
    pages: bytes
    data_file: int
    last_used_s: float = 0.0


class StateDonor:
    """Serves the snapshots that `write_snapshot` puts into ``directory``, within the limits of ``config``."""

    def __init__(self, endpoint: CallEndpoint, directory: str | os.PathLike[str], config: StateConfig) -> None:
        self.uploaded_bytes = 0
        self._endpoint = endpoint
        self._directory = Path(directory)
        self._max_uploads = config.max_uploads
        rate = config.max_upload_bytes_per_s
        # It only computes the waits: threads that slept would leave none for reading.
        self._throttle = Throttle(rate, burst_bytes=CHUNK_BYTES, sleep=lambda _: None) if rate else None
        self._num_uploads = 0
        self._open: dict[str, _OpenSnapshot] = {}

    def start(self) -> None:
        """Registers the methods on the endpoint."""
        self._endpoint.register(DESCRIPTOR_METHOD, DescriptorRequest, self._send_descriptor)
        self._endpoint.register(PAGE_METHOD, PageRequest, self._send_page)
        self._endpoint.register_stream(CHUNKS_METHOD, ChunksRequest, self._send_chunks)

    def close(self) -> None:
        """Closes the files; later requests open them anew."""
        for digest in list(self._open):
            os.close(self._open.pop(digest).data_file)

    async def _send_descriptor(self, request: Request[DescriptorRequest]) -> Reply[Empty]:
        return Reply(Empty(), self._opened(request.body.digest).descriptor_bytes)

    async def _send_page(self, request: Request[PageRequest]) -> Reply[Empty]:
        snapshot = self._opened(request.body.digest)
        page = request.body.page
        if page >= len(snapshot.descriptor.pages):
            raise RefusedError("page", f"expected a page below {len(snapshot.descriptor.pages)}, found {page}")
        step = PAGE_CHUNKS * DIGEST_BYTES
        return Reply(Empty(), snapshot.pages[page * step : (page + 1) * step])

    async def _send_chunks(self, request: Request[ChunksRequest], stream: ServerStream) -> None:
        snapshot = self._opened(request.body.digest)
        num_chunks = snapshot.descriptor.num_chunks
        if max(request.body.indices) >= num_chunks:
            raise RefusedError("chunk", f"expected chunks below {num_chunks}, found {max(request.body.indices)}")
        if self._num_uploads >= self._max_uploads:
            raise RefusedError("busy", f"{self._num_uploads} transfers are under way; come again later")
        self._num_uploads += 1
        file = os.dup(snapshot.data_file)  # `_opened` may close the original meanwhile.
        try:
            for index in request.body.indices:
                size_bytes = snapshot.descriptor.chunk_bytes(index)
                if self._throttle is not None:
                    await asyncio.sleep(self._throttle.pay(size_bytes))
                chunk = await asyncio.to_thread(os.pread, file, size_bytes, index * CHUNK_BYTES)
                await stream.send(index, chunk)
                self.uploaded_bytes += len(chunk)
                snapshot.last_used_s = time.monotonic()
        finally:
            os.close(file)
            self._num_uploads -= 1

    def _opened(self, digest: str) -> _OpenSnapshot:
        """Returns the snapshot with its files open; closes those unused for a minute, and the oldest beyond a few."""
        now_s = time.monotonic()
        by_use = sorted(self._open, key=lambda each: self._open[each].last_used_s, reverse=True)
        for position, each in enumerate(by_use):
            if position >= _MAX_HELD - 1 or now_s - self._open[each].last_used_s > _HOLD_S:
                os.close(self._open.pop(each).data_file)
        if digest not in self._open:
            self._open[digest] = _open_snapshot(self._directory / digest, digest)
        self._open[digest].last_used_s = now_s
        return self._open[digest]


def _open_snapshot(folder: Path, digest: str) -> _OpenSnapshot:
    try:
        descriptor_bytes, pages = (folder / DESCRIPTOR_NAME).read_bytes(), (folder / PAGES_NAME).read_bytes()
        descriptor = parse_descriptor(descriptor_bytes, digest)
        data_file = os.open(folder / DATA_NAME, os.O_RDONLY | os.O_CLOEXEC)
    except (OSError, StateTransferError):
        raise RefusedError("unknown_state", f"the state {digest[:16]}… is not here (any more)") from None
    return _OpenSnapshot(descriptor, descriptor_bytes, pages, data_file)

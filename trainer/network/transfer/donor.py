"""Hands out the node's snapshots to newcomers, within limits, from the disk and not from memory.

Chunks are read with pread in threads, so neither training nor the event loop waits for the disk, and a rate limiter
spreads their bytes over time, so that a newcomer leaves the uplink to the rounds. What is handed out is not verified
here: the fetcher checks each chunk, and a damaged disk costs it one donor. A snapshot that was asked for within the
last minute stays readable after newer ones have replaced it, because its files are held open: a fetcher that began in
time is not cut off by the next outer step.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from trainer.errors import RefusedError, StateTransferError
from trainer.network.rpc.endpoint import Endpoint
from trainer.network.rpc.messages import Reply, Request
from trainer.network.rpc.stream import ServerStream
from trainer.network.transfer.config import StateConfig
from trainer.network.transfer.descriptor import CHUNK_BYTES, DIGEST_BYTES, PAGE_CHUNKS, Descriptor, parse_descriptor
from trainer.network.transfer.donor_messages import (
    CHUNKS_METHOD,
    DESCRIPTOR_METHOD,
    PAGE_METHOD,
    ChunksRequest,
    DescriptorRequest,
    Empty,
    PageRequest,
)
from trainer.network.transfer.layout import DATA_NAME, DESCRIPTOR_NAME, PAGES_NAME

__all__ = ["RateLimiter", "StateDonor"]


class RateLimiter:
    """Lets bytes through at a rate; who asks waits his turn.

    Args:
        bytes_per_s: the rate; 0 lets everything through.
        clock: seconds, monotonic.
    """

    def __init__(self, bytes_per_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._bytes_per_s = bytes_per_s
        self._clock = clock
        self._free_at = 0.0

    def reserve(self, size_bytes: int) -> float:
        """Takes the next place for so many bytes; seconds until it comes."""
        if self._bytes_per_s <= 0:
            return 0.0
        now = self._clock()
        start = max(now, self._free_at)
        self._free_at = start + size_bytes / self._bytes_per_s
        return start - now

    async def wait(self, size_bytes: int) -> None:
        """Until so many bytes may go."""
        pause_s = self.reserve(size_bytes)
        if pause_s > 0:
            await asyncio.sleep(pause_s)


_HOLD_S = 60.0
_MAX_HELD = 4


@dataclass(slots=True)
class _Held:
    """A snapshot with its files open."""

    descriptor: Descriptor
    spelling: bytes
    pages: int
    data: int
    last_used_s: float


class StateDonor:
    """Serves the snapshots of a folder.

    Args:
        endpoint: this node's; the methods are registered on it by `start`.
        directory: where `write_snapshot` puts them.
        config: limits.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        directory: str | os.PathLike[str],
        config: StateConfig,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.uploaded_bytes = 0
        self._endpoint = endpoint
        self._directory = Path(directory)
        self._config = config
        self._clock = clock
        self._limiter = RateLimiter(config.max_upload_bytes_per_s)
        self._num_uploads = 0
        self._held: dict[str, _Held] = {}

    def start(self) -> None:
        """Registers the methods on the endpoint."""
        self._endpoint.register(DESCRIPTOR_METHOD, DescriptorRequest, self._give_descriptor)
        self._endpoint.register(PAGE_METHOD, PageRequest, self._give_page)
        self._endpoint.register_stream(CHUNKS_METHOD, ChunksRequest, self._give_chunks)

    def close(self) -> None:
        """Closes the files; requests from now on open them anew."""
        for held in self._held.values():
            os.close(held.pages)
            os.close(held.data)
        self._held.clear()

    async def _give_descriptor(self, request: Request[DescriptorRequest]) -> Reply[Empty]:
        return Reply(Empty(), self._hold(request.body.digest).spelling)

    async def _give_page(self, request: Request[PageRequest]) -> Reply[Empty]:
        held = self._hold(request.body.digest)
        page = request.body.page
        if page >= len(held.descriptor.pages):
            raise RefusedError("page", f"expected a page below {len(held.descriptor.pages)}, found {page}")
        size_bytes = held.descriptor.page_chunks(page) * DIGEST_BYTES
        return Reply(Empty(), os.pread(held.pages, size_bytes, page * PAGE_CHUNKS * DIGEST_BYTES))

    async def _give_chunks(self, request: Request[ChunksRequest], stream: ServerStream) -> None:
        held = self._hold(request.body.digest)
        num_chunks = held.descriptor.num_chunks
        if max(request.body.indices) >= num_chunks:
            raise RefusedError("chunk", f"expected chunks below {num_chunks}, found {max(request.body.indices)}")
        if self._num_uploads >= self._config.max_uploads:
            raise RefusedError("busy", f"{self._num_uploads} transfers are under way; come again later")
        self._num_uploads += 1
        file = os.dup(held.data)  # The held one may be closed meanwhile.
        try:
            for index in request.body.indices:
                size_bytes = held.descriptor.chunk_bytes(index)
                await self._limiter.wait(size_bytes)
                chunk = await asyncio.to_thread(os.pread, file, size_bytes, index * CHUNK_BYTES)
                await stream.send(index, chunk)
                self.uploaded_bytes += len(chunk)
                held.last_used_s = self._clock()
        finally:
            os.close(file)
            self._num_uploads -= 1

    def _hold(self, digest: str) -> _Held:
        """The snapshot with its files open.

        Raises:
            RefusedError: this node does not have it (any more).
        """
        now = self._clock()
        self._let_go(now)
        held = self._held.get(digest)
        if held is None:
            held = self._held[digest] = self._open(digest, now)
        held.last_used_s = now
        return held

    def _open(self, digest: str, now: float) -> _Held:
        folder = self._directory / digest
        try:
            spelling = (folder / DESCRIPTOR_NAME).read_bytes()
            descriptor = parse_descriptor(spelling, digest)
            pages = os.open(folder / PAGES_NAME, os.O_RDONLY | os.O_CLOEXEC)
        except (OSError, StateTransferError):
            raise RefusedError("unknown_state", f"the state {digest[:16]}… is not here (any more)") from None
        try:
            data = os.open(folder / DATA_NAME, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            os.close(pages)
            raise RefusedError("unknown_state", f"the state {digest[:16]}… is not here any more") from None
        return _Held(descriptor, spelling, pages, data, now)

    def _let_go(self, now: float) -> None:
        """Closes what was not used for a minute, and the least recently used beyond a few."""
        by_use = sorted(self._held, key=lambda digest: self._held[digest].last_used_s, reverse=True)
        for position, digest in enumerate(by_use):
            if position >= _MAX_HELD - 1 or now - self._held[digest].last_used_s > _HOLD_S:
                held = self._held.pop(digest)
                os.close(held.pages)
                os.close(held.data)

"""Downloads the chunks of one state from all donors at once, drops donors that fail, and retries with the others.

While chunks are left, each request to a donor asks for the next run of them, at most `max_run` and at most half of an
even share of what is left, so that all finish at about the same time. When none is left, an idle donor is asked for a
chunk that another still owes; the first to send it wins. So one slow donor delays the end by one chunk at most.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from trainer.errors import PeerUnavailableError, RefusedError, RpcError, StateTransferError, TrainerUsageError
from trainer.network.rpc.endpoint import Endpoint
from trainer.network.rpc.messages import Peer
from trainer.network.rpc.stream import Stream
from trainer.network.transfer.config import StateConfig
from trainer.network.transfer.descriptor import Descriptor
from trainer.network.transfer.donor import CHUNKS_METHOD, ChunksRequest
from trainer.network.transfer.part_file import PartFile

__all__ = ["ChunkDownload", "ChunkPool", "donor_name"]

logger = logging.getLogger(__name__)

_MAX_HOLDERS = 2
"""Donors that may be asked for one chunk at a time: more would only compete."""
_MAX_PAUSE_S = 30.0


class ChunkPool:
    """The indices of the missing chunks, and the donors asked for each; at most ``max_run`` in one request."""

    def __init__(self, missing: Iterable[int], max_run: int) -> None:
        self._waiting = deque(missing)
        self._max_run = max_run
        self._holders: dict[int, list[str]] = {}

    @property
    def num_missing(self) -> int:
        """Number of chunks not received yet."""
        return len(self._waiting) + len(self._holders)

    def take(self, donor: str, num_workers: int) -> list[int]:
        """Assigns the next chunks to a donor, where ``num_workers`` requests to all donors may be under way.

        Returns:
            Their indices; none if there is nothing it could help with now.
        """
        if self._waiting:
            run = max(1, min(self._max_run, len(self._waiting) // (2 * max(1, num_workers))))
            taken = [self._waiting.popleft() for _ in range(run)]
        else:
            held = self._holders.items()
            taken = [index for index, donors in held if donor not in donors and len(donors) < _MAX_HOLDERS][:1]
        for index in taken:
            self._holders.setdefault(index, []).append(donor)
        return taken

    def is_missing(self, index: int) -> bool:
        """Returns whether a chunk that was assigned has not been received yet."""
        return index in self._holders

    def done(self, index: int) -> bool:
        """Notes that a chunk was received; returns False if another donor was faster."""
        return self._holders.pop(index, None) is not None

    def give_back(self, donor: str, indices: Iterable[int]) -> None:
        """Takes chunks back from a donor; those that no other donor has are assigned next."""
        for index in sorted(indices, reverse=True):
            holders = self._holders.get(index)
            if holders is not None and donor in holders:
                holders.remove(donor)
                if not holders:
                    del self._holders[index]
                    self._waiting.appendleft(index)


@dataclass(slots=True)
class _Donor:
    name: str
    peer: Peer
    num_failures: int = 0
    """Consecutive, without a chunk between them."""
    dropped: str = ""
    """Why it was dropped; empty: it was not."""


class _LyingDonorError(Exception):
    """A donor sent something else than the digest names."""


class ChunkDownload:
    """Downloads the missing chunks of a state into a part file; `run` it once."""

    def __init__(
        self,
        endpoint: Endpoint,
        donors: Sequence[Peer],
        descriptor: Descriptor,
        part: PartFile,
        missing: Sequence[int],
        config: StateConfig,
    ) -> None:
        self._endpoint = endpoint
        self._digest = descriptor.digest
        self._descriptor = descriptor
        self._part = part
        self._config = config
        self._donors = [_Donor(name, peer) for name, peer in {donor_name(peer): peer for peer in donors}.items()]
        self._pool = ChunkPool(missing, config.chunks_per_request)
        self._changed = asyncio.Event()
        """Replaced each time it is set."""
        self._complete = asyncio.Event()

    async def run(self) -> None:
        """Returns when all chunks are there.

        Raises:
            StateTransferError: no donor is left, or a chunk cannot be written.
        """
        if self._pool.num_missing == 0:
            return
        workers = [
            asyncio.create_task(self._work(donor))
            for donor in self._donors
            for _ in range(self._config.parallel_per_donor)
        ]
        working = asyncio.gather(*workers)
        complete = asyncio.create_task(self._complete.wait())
        either: set[asyncio.Future[Any]] = {working, complete}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                working.result()
        finally:
            for task in (*workers, complete):
                task.cancel()
            await asyncio.gather(working, *workers, complete, return_exceptions=True)
        if self._pool.num_missing:
            reasons = "; ".join(f"{donor.name}: {donor.dropped}" for donor in self._donors)
            raise StateTransferError(
                f"{self._pool.num_missing} of {self._descriptor.num_chunks} chunks of the state {self._digest[:16]}… "
                f"could not be fetched: {reasons or 'there are no donors'}; what was received is kept"
            )

    async def _work(self, donor: _Donor) -> None:
        """Requests one run of chunks after another from one donor, until all are there or it is dropped."""
        while not donor.dropped and self._pool.num_missing:
            taken = self._pool.take(donor.name, self._num_workers())
            if not taken:
                await self._changed.wait()
                continue
            pause_s = 0.0
            try:
                await self._request(donor, taken)
            except _LyingDonorError as error:
                donor.dropped = str(error)
                logger.warning("%s is asked no more: it %s", donor.name, error)
            except RpcError as error:
                pause_s = self._note_failure(donor, error)
            except TrainerUsageError as error:  # Its address cannot be dialled.
                donor.dropped = str(error)
            finally:
                self._pool.give_back(donor.name, taken)
                self._changed.set()  # Wakes workers that had nothing to do.
                self._changed = asyncio.Event()
            if pause_s and not donor.dropped:
                await asyncio.sleep(pause_s)

    async def _request(self, donor: _Donor, indices: list[int]) -> None:
        """Receives, verifies and writes one run of chunks."""
        body = ChunksRequest(digest=self._digest, indices=tuple(indices))
        async with self._endpoint.open_stream(
            donor.peer,
            CHUNKS_METHOD,
            body,
            timeout_s=self._config.chunk_timeout_s * len(indices),
            stall_timeout_s=self._config.stall_timeout_s,
        ) as stream:
            for index in indices:
                payload = await self._receive(donor, stream, index)
                if self._pool.is_missing(index):
                    await self._verify_and_write(index, payload)
                donor.num_failures = 0
                if not any(map(self._pool.is_missing, indices)):
                    return  # Other donors sent the rest.

    async def _receive(self, donor: _Donor, stream: Stream, index: int) -> memoryview:
        timeout_s = self._config.chunk_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                frame = await stream.receive()
        except TimeoutError:
            raise PeerUnavailableError(f"{donor.name} did not send a chunk within {timeout_s:g} s") from None
        if frame is None:
            raise PeerUnavailableError(f"{donor.name} ended before it sent all chunks")
        if frame.index != index:
            raise _LyingDonorError(f"sent chunk {frame.index} for chunk {index}")
        if len(frame.payload) != self._descriptor.chunk_bytes(index):
            raise _LyingDonorError(f"sent {len(frame.payload)} bytes as chunk {index}")
        return frame.payload

    async def _verify_and_write(self, index: int, payload: memoryview) -> None:
        if not await asyncio.to_thread(self._part.is_valid, index, payload):
            raise _LyingDonorError(f"sent a chunk {index} that does not match its digest")
        await asyncio.to_thread(self._part.write, index, payload)
        self._pool.done(index)
        if self._pool.num_missing == 0:
            self._complete.set()

    def _note_failure(self, donor: _Donor, error: RpcError) -> float:
        """Counts a failure and drops the donor after too many; returns the pause before the next request."""
        is_busy = isinstance(error, RefusedError) and error.reason == "busy"
        donor.num_failures += 1
        if not is_busy and donor.num_failures >= self._config.max_failures:
            donor.dropped = str(error)
            logger.warning("%s is asked no more: %s", donor.name, error)
        else:
            logger.debug("%s failed (%d in a row): %s", donor.name, donor.num_failures, error)
        return min(self._config.retry_pause_s * 2.0 ** min(donor.num_failures - 1, 10), _MAX_PAUSE_S)

    def _num_workers(self) -> int:
        return self._config.parallel_per_donor * sum(not donor.dropped for donor in self._donors)


def donor_name(peer: Peer) -> str:
    """Returns the name of a donor in messages."""
    return f"donor {(peer.peer_id or 'unknown')[:16]}… at {peer.address}"

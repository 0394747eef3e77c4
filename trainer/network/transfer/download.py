"""Downloads the chunks of one state from all donors at once, drops donors that fail, and asks others again.

While chunks are left, a donor takes the next run of them, at most `max_run` and at most half of an even share of what
is left, so that all finish at about the same time. When none is left, an idle donor takes over a chunk that another
still owes; the first to bring it wins. So one slow donor delays the end by one chunk at most.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from trainer.errors import PeerUnavailableError, RefusedError, RpcError, StateTransferError, TrainerUsageError
from trainer.network.rpc.endpoint import Endpoint
from trainer.network.rpc.messages import Peer
from trainer.network.rpc.stream import Stream
from trainer.network.transfer.config import StateConfig
from trainer.network.transfer.descriptor import Descriptor
from trainer.network.transfer.donor_messages import CHUNKS_METHOD, ChunksRequest
from trainer.network.transfer.part_file import PartFile

__all__ = ["ChunkDownload", "ChunkPool", "donor_name"]

logger = logging.getLogger(__name__)

_MAX_HOLDERS = 2
"""How many may fetch one chunk at a time: more would only crowd each other."""


class ChunkPool:
    """The chunks still missing and who fetches them.

    Args:
        missing: their indices.
        max_run: most chunks of one request.
    """

    def __init__(self, missing: Iterable[int], max_run: int) -> None:
        self._waiting = deque(missing)
        self._max_run = max_run
        self._holders: dict[int, list[str]] = {}

    @property
    def num_missing(self) -> int:
        """Chunks not yet there."""
        return len(self._waiting) + len(self._holders)

    def take(self, donor: str, num_workers: int) -> list[int]:
        """The next chunks for a donor to bring; none if there is nothing it could help with now.

        Args:
            donor: its name; may have several requests under way.
            num_workers: requests that can be under way in all.
        """
        if self._waiting:
            run = max(1, min(self._max_run, len(self._waiting) // (2 * max(1, num_workers))))
            taken = [self._waiting.popleft() for _ in range(run)]
        else:
            owed = [
                index
                for index, holders in self._holders.items()
                if donor not in holders and len(holders) < _MAX_HOLDERS
            ]
            taken = owed[:1]
        for index in taken:
            self._holders.setdefault(index, []).append(donor)
        return taken

    def is_missing(self, index: int) -> bool:
        """Whether a chunk that was taken has not come from anybody yet."""
        return index in self._holders

    def done(self, index: int) -> bool:
        """Notes that a chunk is there; False if somebody was faster."""
        return self._holders.pop(index, None) is not None

    def give_back(self, donor: str, indices: Iterable[int]) -> None:
        """Notes that a donor will not bring these; whoever asks next gets those nobody else is bringing."""
        for index in sorted(indices, reverse=True):
            holders = self._holders.get(index)
            if holders is None or donor not in holders:
                continue
            holders.remove(donor)
            if not holders:
                del self._holders[index]
                self._waiting.appendleft(index)


_MAX_PAUSE_S = 30.0


@dataclass(slots=True)
class _Donor:
    name: str
    peer: Peer
    num_failures: int = 0
    """In a row, without a chunk between them."""
    dropped: str = ""
    """Why it is asked no more."""


class _LyingDonorError(Exception):
    """A donor sent what its digest does not vouch for."""


class ChunkDownload:
    """Brings the missing chunks into a part file; `run` it once.

    Args:
        endpoint: this node's.
        donors: whom to ask.
        descriptor: of the state.
        part: where the chunks go.
        missing: indices of the chunks to bring.
        config: how many to ask for at once, when to give a donor up.
    """

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
        """Until all chunks are there.

        Raises:
            StateTransferError: no donor is left, or the disk does not take a chunk.
        """
        if self._pool.num_missing == 0:
            return
        workers = [
            asyncio.create_task(self._work(donor))
            for donor in self._donors
            for _ in range(self._config.parallel_per_donor)
        ]
        complete = asyncio.create_task(self._complete.wait())
        try:
            pending = set(workers)
            while pending and not self._complete.is_set():
                await asyncio.wait({*pending, complete}, return_when=asyncio.FIRST_COMPLETED)
                ended = {worker for worker in pending if worker.done()}
                for worker in ended:
                    worker.result()
                pending -= ended
        finally:
            for task in (*workers, complete):
                task.cancel()
            await asyncio.gather(*workers, complete, return_exceptions=True)
        if self._pool.num_missing:
            reasons = "; ".join(f"{donor.name}: {donor.dropped}" for donor in self._donors)
            raise StateTransferError(
                f"{self._pool.num_missing} of {self._descriptor.num_chunks} chunks of the state {self._digest[:16]}… "
                f"could not be had: {reasons or 'there are no donors'}; what has come is kept"
            )

    async def _work(self, donor: _Donor) -> None:
        """Asks one donor for one run of chunks after another, until all are there or it is dropped."""
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
                self._tell_change()
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
                    await self._keep(index, payload)
                donor.num_failures = 0
                if not any(map(self._pool.is_missing, indices)):
                    return  # Others were faster with the rest.

    async def _receive(self, donor: _Donor, stream: Stream, index: int) -> memoryview:
        timeout_s = self._config.chunk_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                frame = await stream.receive()
        except TimeoutError:
            raise PeerUnavailableError(f"{donor.name} did not send a chunk within {timeout_s:g} s") from None
        if frame is None:
            raise PeerUnavailableError(f"{donor.name} ended before it sent all it was asked for")
        if frame.index != index:
            raise _LyingDonorError(f"sent chunk {frame.index} for chunk {index}")
        if len(frame.payload) != self._descriptor.chunk_bytes(index):
            raise _LyingDonorError(f"sent {len(frame.payload)} bytes as chunk {index}")
        return frame.payload

    async def _keep(self, index: int, payload: memoryview) -> None:
        if not await asyncio.to_thread(self._part.is_valid, index, payload):
            raise _LyingDonorError(f"sent a chunk {index} that its digest does not vouch for")
        await asyncio.to_thread(self._part.write, index, payload)
        self._pool.done(index)
        if self._pool.num_missing == 0:
            self._complete.set()

    def _note_failure(self, donor: _Donor, error: RpcError) -> float:
        """Counts it and drops the donor if it is one too many; else the pause before it is asked again."""
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

    def _tell_change(self) -> None:
        """Wakes workers that found nothing to do."""
        self._changed.set()
        self._changed = asyncio.Event()


def donor_name(peer: Peer) -> str:
    """How messages call a donor."""
    return f"donor {(peer.peer_id or 'unknown')[:16]}… at {peer.address}"

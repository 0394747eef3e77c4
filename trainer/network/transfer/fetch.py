"""Chooses the state a node adopts, and fetches it from several donors at once, by its digest, trusting none of them.

Descriptor, pages and chunks are each verified against the digest chain before they are used; a donor that sends other
bytes is dropped and named. While chunks are left, each request to a donor asks for the next run of them, at most half
of an even share of what is left, so that all finish at about the same time. When none is left, an idle donor is asked
for a chunk that another still owes; the first to send it wins. So one slow donor delays the end by one chunk at most.

What has been received survives this process (`PartFile`): the next call resumes there. It becomes a snapshot only when
all of it is there, has been read back from the disk, and is finite. That reading costs about a third of the time on a
fast link (512 MiB over loopback with TLS: 2.3 s to receive, 1.8 s to verify), and 2 % on 100 Mbit/s.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median_low

from manifests.serialisation import sha256_hex
from trainer.errors import PeerUnavailableError, RefusedError, RpcError, StateTransferError, TrainerUsageError
from trainer.network.discovery.announcement import Announcement
from trainer.network.rpc.messages import Peer, Reply
from trainer.network.rpc.scoped import CallEndpoint
from trainer.network.rpc.stream import Stream
from trainer.network.transfer.config import StateConfig
from trainer.network.transfer.descriptor import (
    DESCRIPTOR_NAME,
    DIGEST_BYTES,
    Descriptor,
    Expectation,
    all_finite,
    parse_descriptor,
)
from trainer.network.transfer.donor import (
    CHUNKS_METHOD,
    DESCRIPTOR_METHOD,
    PAGE_METHOD,
    ChunksRequest,
    DescriptorRequest,
    Empty,
    PageRequest,
)
from trainer.network.transfer.snapshot import PartFile, Snapshot, load_snapshot

logger = logging.getLogger(__name__)

_SMALL_REQUEST_TIMEOUT_S = 60.0
_MAX_CONCURRENT_REQUESTS = 3
_MAX_HOLDERS = 2  # Donors that may be asked for one chunk at a time: more would only compete.
_MAX_PAUSE_S = 30.0


def choose_state(own: tuple[int, str], announcements: Iterable[Announcement]) -> str | None:
    """Picks the state the most distinct nodes hold, this one included.

    Ties go to the higher outer step (the median of what its holders claim), then to the lower digest, so that nodes
    that see the same announcements choose the same. Each node has one vote: a single liar wins only against a state
    that nobody but this node holds.

    ``own`` is the outer step and digest of the state this node holds; an empty digest has no vote. Returns the digest
    to fetch; None: keep the own state, or nobody has any.
    """
    votes = {"": own}
    # Of a node that is listed twice the highest step and digest count, whatever the order.
    for step, digest, peer_id in sorted((it.outer_step, it.state_digest, it.peer_id) for it in announcements):
        votes[peer_id] = (step, digest)
    claimed_steps: dict[str, list[int]] = {}
    for step, digest in votes.values():
        if digest:
            claimed_steps.setdefault(digest, []).append(step)
    ranks = [(-len(steps), -median_low(steps), digest) for digest, steps in claimed_steps.items()]
    best = min(ranks)[2] if ranks else own[1]
    return None if best == own[1] else best


async def fetch_state(
    endpoint: CallEndpoint,
    donors: Sequence[Peer],
    digest: str,
    directory: str | os.PathLike[str],
    *,
    expectation: Expectation,
    timeout_s: float,
    config: StateConfig | None = None,
) -> Snapshot:
    """Fetches a state from nodes that claim to hold it, or loads it from ``directory`` if it is there.

    The expectation is checked before space is reserved. A partial fetch stays in ``directory`` for the next call.

    Raises StateTransferError where the donors do not send the whole state in time, it does not meet the expectation, or
    the disk is full or fails.
    """
    part = PartFile(Path(directory), digest)
    try:
        async with asyncio.timeout(timeout_s):
            if (Path(directory) / digest / DESCRIPTOR_NAME).is_file():
                snapshot = await asyncio.to_thread(load_snapshot, directory, digest)
                expectation.check(snapshot.descriptor)
                await asyncio.to_thread(_check_finite, snapshot, expectation)
                return snapshot
            part.open()
            with closing(part):
                await _fetch_parts(endpoint, donors, digest, part, expectation, config or StateConfig())
                return await asyncio.to_thread(finish_fetch, part, expectation)
    except TimeoutError:
        raise StateTransferError(
            f"the state {digest[:16]}… was not fetched from {len(donors)} donors within {timeout_s:g} s; "
            "what was received is kept, the next attempt resumes there"
        ) from None


async def fetch_descriptor(
    endpoint: CallEndpoint, donors: Sequence[Peer], digest: str, *, stall_timeout_s: float = 10.0
) -> Descriptor:
    """Returns the first valid descriptor that donors send; the StateTransferError says of each donor why it did not."""
    body, what = DescriptorRequest(digest=digest), f"the descriptor of the state {digest[:16]}…"
    data = await _first_valid(endpoint, donors, stall_timeout_s, DESCRIPTOR_METHOD, body, what, digest)
    return parse_descriptor(data, digest)


async def _fetch_parts(
    endpoint: CallEndpoint,
    donors: Sequence[Peer],
    digest: str,
    part: PartFile,
    expectation: Expectation,
    config: StateConfig,
) -> None:
    descriptor = part.saved_descriptor()
    if descriptor is None:
        descriptor = await fetch_descriptor(endpoint, donors, digest, stall_timeout_s=config.stall_timeout_s)
    expectation.check(descriptor)
    pages = []
    for number, page in enumerate(part.saved_pages(descriptor)):
        if page is None:
            body, what = PageRequest(digest=digest, page=number), f"page {number} of the state {digest[:16]}…"
            wanted = descriptor.pages[number], descriptor.page_chunks(number) * DIGEST_BYTES
            page = await _first_valid(endpoint, donors, config.stall_timeout_s, PAGE_METHOD, body, what, *wanted)
        pages.append(page)
    missing = await asyncio.to_thread(part.begin, descriptor, pages)
    if len(missing) < descriptor.num_chunks:
        logger.info("%d of %d chunks are here already", descriptor.num_chunks - len(missing), descriptor.num_chunks)
    named = [_Donor(name, peer) for name, peer in {_donor_name(peer): peer for peer in donors}.items()]
    pool = ChunkPool(missing, config.chunks_per_request)
    await _ChunkDownload(endpoint, named, digest, descriptor, part, pool, config).run()


async def _first_valid(
    endpoint: CallEndpoint,
    donors: Sequence[Peer],
    stall_timeout_s: float,
    method: str,
    body: DescriptorRequest | PageRequest,
    what: str,
    digest: str,
    size_bytes: int | None = None,
) -> bytes:
    """Sends a request to the donors, a few at a time, and returns the first payload of this digest and size."""
    problems: list[str] = []
    waiting = deque(donors)
    under_way: dict[asyncio.Task[Reply[Empty]], str] = {}
    try:
        while waiting or under_way:
            while waiting and len(under_way) < _MAX_CONCURRENT_REQUESTS:
                peer = waiting.popleft()
                call = endpoint.call(
                    peer, method, body, Empty, timeout_s=_SMALL_REQUEST_TIMEOUT_S, stall_timeout_s=stall_timeout_s
                )
                under_way[asyncio.create_task(call)] = _donor_name(peer)
            done, _ = await asyncio.wait(under_way, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                donor = under_way.pop(task)
                try:
                    payload = bytes(task.result().payload)
                except (RpcError, TrainerUsageError) as error:  # The latter: an address that cannot be dialled.
                    problems.append(f"{donor}: {error}")
                    continue
                if size_bytes in (None, len(payload)) and sha256_hex(payload) == digest:
                    return payload
                problems.append(f"{donor}: sent something else")
                logger.warning("%s sent something else than %s", donor, what)
    finally:
        for task in under_way:
            task.cancel()
        await asyncio.gather(*under_way, return_exceptions=True)
    raise StateTransferError(f"no donor sent {what}: {'; '.join(problems) or 'there are no donors'}")


def finish_fetch(part: PartFile, expectation: Expectation) -> Snapshot:
    """Reads everything back from the disk, refuses NaN and infinities, and makes it a snapshot."""
    snapshot = part.load()
    try:
        _check_finite(snapshot, expectation)
    except StateTransferError:
        part.discard()
        raise
    part.publish()
    return snapshot


def _check_finite(snapshot: Snapshot, expectation: Expectation) -> None:
    for name, tensor in snapshot.tensors.items() if expectation.finite else ():
        if not all_finite(tensor):
            raise StateTransferError(
                f"the state {snapshot.descriptor.digest[:16]}…: tensor {name!r} holds NaN or infinities; not adopted"
            )


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
        """Assigns the next chunks to a donor that can help now; ``num_workers`` requests to all may be under way."""
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
    num_failures: int = 0  # Consecutive, without a chunk between them.
    dropped: str = ""  # Why it was dropped; empty: it was not.


class _LyingDonorError(Exception):
    """A donor sent something else than the digest names."""


@dataclass(slots=True, eq=False)
class _ChunkDownload:
    """Downloads the missing chunks of a state into a part file; `run` it once."""

    endpoint: CallEndpoint
    donors: list[_Donor]
    digest: str
    descriptor: Descriptor
    part: PartFile
    pool: ChunkPool
    config: StateConfig
    changed: asyncio.Event = field(default_factory=asyncio.Event)  # Replaced each time it is set.

    async def run(self) -> None:
        """Returns when all chunks are there; raises StateTransferError if no donor is left or the disk fails."""
        workers = [
            asyncio.create_task(self._work(donor))
            for donor in self.donors
            for _ in range(self.config.parallel_per_donor)
        ]
        working = set(workers)
        try:
            while working and self.pool.num_missing:
                ended, working = await asyncio.wait(working, return_when=asyncio.FIRST_COMPLETED)
                for worker in ended:
                    worker.result()
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
        if self.pool.num_missing:
            reasons = "; ".join(f"{donor.name}: {donor.dropped}" for donor in self.donors)
            raise StateTransferError(
                f"{self.pool.num_missing} of {self.descriptor.num_chunks} chunks of the state {self.digest[:16]}… "
                f"could not be fetched: {reasons or 'there are no donors'}; what was received is kept"
            )

    async def _work(self, donor: _Donor) -> None:
        """Requests one run of chunks after another from one donor, until all are there or it is dropped."""
        while not donor.dropped and self.pool.num_missing:
            num_workers = self.config.parallel_per_donor * sum(not donor.dropped for donor in self.donors)
            taken = self.pool.take(donor.name, num_workers)
            if not taken:
                await self.changed.wait()
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
                self.pool.give_back(donor.name, taken)
                self.changed.set()  # Wakes workers that had nothing to do.
                self.changed = asyncio.Event()
            if pause_s and not donor.dropped:
                await asyncio.sleep(pause_s)

    async def _request(self, donor: _Donor, indices: list[int]) -> None:
        """Receives, verifies and writes one run of chunks."""
        body = ChunksRequest(digest=self.digest, indices=tuple(indices))
        timeout_s, stall_timeout_s = self.config.chunk_timeout_s * len(indices), self.config.stall_timeout_s
        async with self.endpoint.open_stream(
            donor.peer, CHUNKS_METHOD, body, timeout_s=timeout_s, stall_timeout_s=stall_timeout_s
        ) as stream:
            for index in indices:
                payload = await self._receive(donor, stream, index)
                if self.pool.is_missing(index):
                    if not await asyncio.to_thread(self.part.is_valid, index, payload):
                        raise _LyingDonorError(f"sent a chunk {index} that does not match its digest")
                    await asyncio.to_thread(self.part.write, index, payload)
                    self.pool.done(index)
                donor.num_failures = 0
                if not any(map(self.pool.is_missing, indices)):
                    return  # Other donors sent the rest.

    async def _receive(self, donor: _Donor, stream: Stream, index: int) -> memoryview:
        timeout_s = self.config.chunk_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                frame = await stream.receive()
        except TimeoutError:
            raise PeerUnavailableError(f"{donor.name} did not send a chunk within {timeout_s:g} s") from None
        if frame is None:
            raise PeerUnavailableError(f"{donor.name} ended before it sent all chunks")
        if frame.index != index:
            raise _LyingDonorError(f"sent chunk {frame.index} for chunk {index}")
        if len(frame.payload) != self.descriptor.chunk_bytes(index):
            raise _LyingDonorError(f"sent {len(frame.payload)} bytes as chunk {index}")
        return frame.payload

    def _note_failure(self, donor: _Donor, error: RpcError) -> float:
        """Counts a failure and drops the donor after too many; returns the pause before the next request."""
        is_busy = isinstance(error, RefusedError) and error.reason == "busy"
        donor.num_failures += 1
        if not is_busy and donor.num_failures >= self.config.max_failures:
            donor.dropped = str(error)
            logger.warning("%s is asked no more: %s", donor.name, error)
        else:
            logger.debug("%s failed (%d in a row): %s", donor.name, donor.num_failures, error)
        return min(self.config.retry_pause_s * 2.0 ** min(donor.num_failures - 1, 10), _MAX_PAUSE_S)


def _donor_name(peer: Peer) -> str:
    return f"donor {(peer.peer_id or 'unknown')[:16]}… at {peer.address}"

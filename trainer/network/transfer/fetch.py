"""Chooses the state a node adopts, and fetches it from several donors at once, by its digest, trusting none of them.

Descriptor, pages and chunks are each verified against the digest chain before they are used; a donor that sends other
bytes is dropped and named. The chunks of a donor that dies, stalls or is slow are requested from the others
(`ChunkPool`). What has been received survives this process (`PartFile`): the next call resumes there. It becomes a
snapshot only when all of it is there, has been read back from the disk, and is finite. That reading costs about a third
of the time on a fast link: 512 MiB over loopback with TLS took 2.3 s to receive and 1.8 s to verify (2 cores, shared
with the donors); on 100 Mbit/s it is 2 %.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import median_low

from manifests.serialisation import sha256_hex
from trainer.errors import RpcError, StateTransferError, TrainerUsageError
from trainer.network.discovery.announcement import Announcement
from trainer.network.rpc.endpoint import Endpoint
from trainer.network.rpc.messages import Peer, Reply
from trainer.network.transfer.config import StateConfig
from trainer.network.transfer.descriptor import (
    DESCRIPTOR_NAME,
    DIGEST_BYTES,
    Descriptor,
    Expectation,
    parse_descriptor,
)
from trainer.network.transfer.donor import DESCRIPTOR_METHOD, PAGE_METHOD, DescriptorRequest, Empty, PageRequest
from trainer.network.transfer.download import ChunkDownload, donor_name
from trainer.network.transfer.part_file import PartFile
from trainer.network.transfer.snapshot import Snapshot, load_snapshot
from trainer.network.transfer.tensor_bytes import all_finite

__all__ = ["choose_state", "fetch_descriptor", "fetch_state"]

logger = logging.getLogger(__name__)

_SMALL_REQUEST_TIMEOUT_S = 60.0
_MAX_CONCURRENT_REQUESTS = 3


def choose_state(own: tuple[int, str], announcements: Iterable[Announcement]) -> str | None:
    """Picks the state the most distinct nodes hold, this one included.

    Ties go to the higher outer step (the median of what its holders claim), then to the lower digest, so that nodes
    that see the same announcements choose the same. Each node has one vote: a single liar wins only against a state
    that nobody but this node holds.

    Args:
        own: outer step and digest of the state this node holds; an empty digest if it holds none worth keeping.
        announcements: verified ones of other nodes; those with an empty `state_digest` have no vote.

    Returns:
        The digest to fetch; None: keep the own state, or nobody has any.
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
    endpoint: Endpoint,
    donors: Sequence[Peer],
    digest: str,
    directory: str | os.PathLike[str],
    *,
    expectation: Expectation,
    timeout_s: float,
    config: StateConfig | None = None,
) -> Snapshot:
    """Fetches a state, or loads it from ``directory`` if it is there.

    Args:
        endpoint: this node's.
        donors: nodes that claim to hold it.
        digest: of the snapshot.
        directory: of the snapshots; a partial fetch stays there for the next call.
        expectation: the state to accept; checked before space is reserved.
        timeout_s: seconds for the whole fetch.
        config: how to spread the requests.

    Returns:
        The verified snapshot, which is then also in ``directory``.

    Raises:
        StateTransferError: the donors did not send the whole state in time; it does not meet the expectation; or the
            disk is full or fails.
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
            try:
                await _fetch_parts(endpoint, donors, digest, part, expectation, config or StateConfig())
                return await asyncio.to_thread(_finish, part, expectation)
            finally:
                part.close()
    except TimeoutError:
        raise StateTransferError(
            f"the state {digest[:16]}… was not fetched from {len(donors)} donors within {timeout_s:g} s; "
            "what was received is kept, the next attempt resumes there"
        ) from None


async def fetch_descriptor(
    endpoint: Endpoint, donors: Sequence[Peer], digest: str, *, stall_timeout_s: float = 10.0
) -> Descriptor:
    """Requests a descriptor from all donors and returns the first valid one.

    Raises:
        StateTransferError: none sent it; the message says of each donor why.
    """
    body = DescriptorRequest(digest=digest)
    what = f"the descriptor of the state {digest[:16]}…"
    data = await _first_valid(
        endpoint, donors, stall_timeout_s, DESCRIPTOR_METHOD, body, what, lambda payload: sha256_hex(payload) == digest
    )
    return parse_descriptor(data, digest)


async def _fetch_parts(
    endpoint: Endpoint,
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
    pages = [
        page if page is not None else await _fetch_page(endpoint, donors, descriptor, number, config.stall_timeout_s)
        for number, page in enumerate(part.saved_pages(descriptor))
    ]
    missing = await asyncio.to_thread(part.begin, descriptor, pages)
    if len(missing) < descriptor.num_chunks:
        logger.info("%d of %d chunks are here already", descriptor.num_chunks - len(missing), descriptor.num_chunks)
    await ChunkDownload(endpoint, donors, descriptor, part, missing, config).run()


async def _fetch_page(
    endpoint: Endpoint, donors: Sequence[Peer], descriptor: Descriptor, number: int, stall_timeout_s: float
) -> bytes:
    size_bytes, page_digest = descriptor.page_chunks(number) * DIGEST_BYTES, descriptor.pages[number]
    return await _first_valid(
        endpoint,
        donors,
        stall_timeout_s,
        PAGE_METHOD,
        PageRequest(digest=descriptor.digest, page=number),
        f"page {number} of the state {descriptor.digest[:16]}…",
        lambda payload: len(payload) == size_bytes and sha256_hex(payload) == page_digest,
    )


async def _first_valid(
    endpoint: Endpoint,
    donors: Sequence[Peer],
    stall_timeout_s: float,
    method: str,
    body: DescriptorRequest | PageRequest,
    what: str,
    is_valid: Callable[[bytes], bool],
) -> bytes:
    """Sends a request to the donors, a few at a time, and returns the first valid payload.

    Raises:
        StateTransferError: none sent it; the message says of each donor why.
    """
    problems: list[str] = []
    waiting = list(donors)
    under_way: dict[asyncio.Task[Reply[Empty]], Peer] = {}
    try:
        while waiting or under_way:
            while waiting and len(under_way) < _MAX_CONCURRENT_REQUESTS:
                peer = waiting.pop(0)
                call = endpoint.call(
                    peer, method, body, Empty, timeout_s=_SMALL_REQUEST_TIMEOUT_S, stall_timeout_s=stall_timeout_s
                )
                under_way[asyncio.create_task(call)] = peer
            done, _ = await asyncio.wait(under_way, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                peer = under_way.pop(task)
                try:
                    payload = bytes(task.result().payload)
                except (RpcError, TrainerUsageError) as error:  # The latter: an address that cannot be dialled.
                    problems.append(f"{donor_name(peer)}: {error}")
                    continue
                if is_valid(payload):
                    return payload
                problems.append(f"{donor_name(peer)}: sent something else")
                logger.warning("%s sent something else than %s", donor_name(peer), what)
    finally:
        for task in under_way:
            task.cancel()
        await asyncio.gather(*under_way, return_exceptions=True)
    raise StateTransferError(f"no donor sent {what}: {'; '.join(problems) or 'there are no donors'}")


def _finish(part: PartFile, expectation: Expectation) -> Snapshot:
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

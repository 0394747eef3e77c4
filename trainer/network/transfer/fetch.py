"""Fetches a state from several donors at once, by its digest, believing none of them.

Descriptor, pages and chunks are each verified against the digest chain before anything is done with them; a donor that
sends other bytes is dropped and named. A donor that dies, stalls or is slow loses its chunks to the others
(`ChunkPool`). What has come survives this process (`PartFile`): the next call goes on from there. Only when all is
there, has been read back from the disk whole, and is finite does it become a snapshot. That reading costs about a
third of the time on a fast link: 512 MiB over loopback with TLS took 2.3 s to come and 1.8 s to be taken (2 cores,
shared with the donors); on 100 Mbit/s it is 2 %.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from manifests.spelling import sha256_hex
from trainer.errors import RpcError, StateTransferError, TrainerUsageError
from trainer.network.rpc.endpoint import Endpoint
from trainer.network.rpc.messages import Peer
from trainer.network.transfer.config import StateConfig
from trainer.network.transfer.descriptor import DIGEST_BYTES, Descriptor, Expectation, parse_descriptor
from trainer.network.transfer.donor_messages import (
    DESCRIPTOR_METHOD,
    PAGE_METHOD,
    DescriptorRequest,
    Empty,
    PageRequest,
)
from trainer.network.transfer.download import ChunkDownload, donor_name
from trainer.network.transfer.layout import DESCRIPTOR_NAME
from trainer.network.transfer.part_file import PartFile
from trainer.network.transfer.snapshot import Snapshot, load_snapshot
from trainer.network.transfer.tensor_bytes import all_finite

__all__ = ["fetch_descriptor", "fetch_state"]

logger = logging.getLogger(__name__)

_SMALL_REQUEST_TIMEOUT_S = 60.0
_ASKED_AT_ONCE = 3


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
    """Fetches a state, or takes it from ``directory`` if it is there.

    Args:
        endpoint: this node's.
        donors: who says to hold it.
        digest: of the snapshot.
        directory: where snapshots lie; what was fetched in part waits there for the next call.
        expectation: what to take; checked before space is reserved.
        timeout_s: seconds for all of it.
        config: how to spread the asking.

    Returns:
        The verified snapshot, which then also lies in ``directory``.

    Raises:
        StateTransferError: no donor, or no set of donors, gave the whole state in time; it does not meet the
            expectation; or the disk does not take it.
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
            "what has come is kept, the next attempt goes on from there"
        ) from None


async def fetch_descriptor(
    endpoint: Endpoint, donors: Sequence[Peer], digest: str, *, stall_timeout_s: float = 10.0
) -> Descriptor:
    """Asks all donors for a descriptor and takes the first that is right.

    Raises:
        StateTransferError: none has it, or what they sent is not it; each is named with what it did.
    """
    body = DescriptorRequest(digest=digest)
    data = await _first_valid(
        endpoint,
        donors,
        DESCRIPTOR_METHOD,
        body,
        lambda payload: sha256_hex(payload) == digest,
        f"the descriptor of the state {digest[:16]}…",
        stall_timeout_s,
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
        page if page is not None else await _fetch_page(endpoint, donors, descriptor, number, config)
        for number, page in enumerate(part.saved_pages(descriptor))
    ]
    missing = await asyncio.to_thread(part.begin, descriptor, pages)
    if len(missing) < descriptor.num_chunks:
        logger.info("%d of %d chunks are here already", descriptor.num_chunks - len(missing), descriptor.num_chunks)
    await ChunkDownload(endpoint, donors, descriptor, part, missing, config).run()


async def _fetch_page(
    endpoint: Endpoint, donors: Sequence[Peer], descriptor: Descriptor, number: int, config: StateConfig
) -> bytes:
    size_bytes = descriptor.page_chunks(number) * DIGEST_BYTES
    return await _first_valid(
        endpoint,
        donors,
        PAGE_METHOD,
        PageRequest(digest=descriptor.digest, page=number),
        lambda payload: len(payload) == size_bytes and sha256_hex(payload) == descriptor.pages[number],
        f"page {number} of the state {descriptor.digest[:16]}…",
        config.stall_timeout_s,
    )


async def _first_valid(
    endpoint: Endpoint,
    donors: Sequence[Peer],
    method: str,
    body: DescriptorRequest | PageRequest,
    is_valid: Callable[[bytes], bool],
    what: str,
    stall_timeout_s: float,
) -> bytes:
    """Asks donors, a few at a time, and returns the first payload that is what was asked for.

    Raises:
        StateTransferError: none sent it; each is named with what it did.
    """
    problems: list[str] = []
    waiting = list(donors)
    under_way: dict[asyncio.Task[bytes], Peer] = {}
    try:
        while waiting or under_way:
            while waiting and len(under_way) < _ASKED_AT_ONCE:
                peer = waiting.pop(0)
                asking = _ask(endpoint, peer, method, body, stall_timeout_s)
                under_way[asyncio.create_task(asking)] = peer
            done, _ = await asyncio.wait(under_way, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                peer = under_way.pop(task)
                try:
                    payload = task.result()
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
    raise StateTransferError(f"nobody gave {what}: {'; '.join(problems) or 'there are no donors'}")


async def _ask(
    endpoint: Endpoint, peer: Peer, method: str, body: DescriptorRequest | PageRequest, stall_timeout_s: float
) -> bytes:
    reply = await endpoint.call(
        peer, method, body, Empty, timeout_s=_SMALL_REQUEST_TIMEOUT_S, stall_timeout_s=stall_timeout_s
    )
    return bytes(reply.payload)


def _finish(part: PartFile, expectation: Expectation) -> Snapshot:
    """Reads all back from the disk, looks for what no state may hold, and makes it a snapshot."""
    snapshot = part.load()
    try:
        _check_finite(snapshot, expectation)
    except StateTransferError:
        part.discard()
        raise
    part.publish()
    return snapshot


def _check_finite(snapshot: Snapshot, expectation: Expectation) -> None:
    if not expectation.finite:
        return
    for name, tensor in snapshot.tensors.items():
        if not all_finite(tensor):
            raise StateTransferError(
                f"the state {snapshot.descriptor.digest[:16]}…: tensor {name!r} holds NaN or infinities; not taken"
            )

"""The state after a round as objects, for newcomers: written by one member, vouched for by most, verified by chunks.

A snapshot is that of `trainer.network.transfer`, so one digest verifies every byte: descriptor → pages → chunks of
1 MiB, 64 of which make an object. Which digest is the run's, a majority of the round's members says, each in its signed
record; who wrote the objects matters to nobody. The descriptor is put last: a snapshot that has one is whole, unless
somebody put other bytes, and then no chunk of those is used.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Final

import torch

from genesis.populate.crashpoint import crash_point
from manifests.serialisation import sha256_hex
from trainer.bucket_rounds.place import Place, snapshot_prefix
from trainer.errors import StateTransferError
from trainer.network.transfer.descriptor import (
    CHUNK_BYTES,
    DIGEST_BYTES,
    MAX_DESCRIPTOR_BYTES,
    PAGE_CHUNKS,
    Descriptor,
    Expectation,
    chunks_of,
    parse_descriptor,
)
from trainer.network.transfer.fetch import finish_fetch
from trainer.network.transfer.snapshot import PartFile, Snapshot, load_snapshot, snapshots_in

logger = logging.getLogger(__name__)

PART_CHUNKS: Final = 64
"""Chunks of an object."""


def put_snapshot(
    place: Place, round_index: int, descriptor: Descriptor, pages: bytes, tensors: Mapping[str, torch.Tensor]
) -> None:
    """Stores a snapshot (`describe_chunks`) unless it is there; raises what the store does."""
    prefix = snapshot_prefix(round_index, descriptor.digest)
    place.put_once(f"{prefix}pages", pages)
    pending, number = bytearray(), 0
    for index, chunk in enumerate(chunks_of(tensors), 1):
        pending += chunk
        if index % PART_CHUNKS == 0 or index == descriptor.num_chunks:
            place.put_once(f"{prefix}data-{number:06d}", pending)
            crash_point("bucket-snapshot-part-put")
            pending, number = bytearray(), number + 1
    place.put_once(f"{prefix}descriptor", descriptor.to_bytes())
    crash_point("bucket-snapshot-put")


def fetch_snapshot(
    place: Place,
    round_index: int,
    digest: str,
    directory: Path,
    expectation: Callable[[Descriptor], Expectation],
    stop: Callable[[], bool] = lambda: False,
) -> Snapshot:
    """Fetches a snapshot into ``directory``, where an interrupted fetch goes on, or loads the one that is there.

    ``expectation`` says what it has to be, before space is reserved. Raises StateTransferError where the bucket does
    not hold what the digest names, or ``stop`` says True, and what the store does.
    """
    if digest in snapshots_in(directory):
        return load_snapshot(directory, digest)
    prefix = snapshot_prefix(round_index, digest)
    descriptor = parse_descriptor(_required(place, f"{prefix}descriptor", MAX_DESCRIPTOR_BYTES, digest), digest)
    expected = expectation(descriptor)
    expected.check(descriptor)
    part = PartFile(directory, digest)
    part.open()
    with closing(part):
        pages = _required(place, f"{prefix}pages", descriptor.num_chunks * DIGEST_BYTES, digest)
        step = PAGE_CHUNKS * DIGEST_BYTES
        cut = [pages[start : start + step] for start in range(0, len(pages), step)]
        _check_pages(descriptor, cut)
        missing = part.begin(descriptor, cut)
        for number in sorted({index // PART_CHUNKS for index in missing}):
            if stop():
                raise StateTransferError("fetching the state was interrupted; it goes on there next time")
            _fetch_part(place, prefix, number, descriptor, part)
        return finish_fetch(part, expected)


def _fetch_part(place: Place, prefix: str, number: int, descriptor: Descriptor, part: PartFile) -> None:
    first = number * PART_CHUNKS
    last = min(first + PART_CHUNKS, descriptor.num_chunks)
    key = f"{prefix}data-{number:06d}"
    body = memoryview(_required(place, key, PART_CHUNKS * CHUNK_BYTES, descriptor.digest))
    for index in range(first, last):
        start = (index - first) * CHUNK_BYTES
        chunk = body[start : start + descriptor.chunk_bytes(index)]
        if not part.is_valid(index, chunk):
            raise StateTransferError(f"{place.url}/{key}: chunk {index} is not the one of {descriptor.digest[:12]}")
        part.write(index, chunk)


def _required(place: Place, key: str, max_bytes: int, digest: str) -> bytes:
    body = place.get_bounded(key, max_bytes)
    if body is None:
        raise StateTransferError(f"the state {digest[:16]}…: expected {key} in {place.url}, found none of its size")
    return body


def _check_pages(descriptor: Descriptor, pages: list[bytes]) -> None:
    if tuple(map(sha256_hex, pages)) != descriptor.pages:
        raise StateTransferError(f"the state {descriptor.digest[:16]}…: its pages are not its own")

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
from typing import Final, TypeVar

import torch

from genesis.populate.crashpoint import crash_point
from manifests.serialisation import sha256_hex
from trainer.bucket_rounds.object_names import snapshot_prefix
from trainer.bucket_rounds.place import Place
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

T = TypeVar("T")

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
    descriptor = _required(
        place, f"{prefix}descriptor", MAX_DESCRIPTOR_BYTES, digest, lambda body: parse_descriptor(body, digest)
    )
    expected = expectation(descriptor)
    expected.check(descriptor)
    part = PartFile(directory, digest)
    part.open()
    with closing(part):
        cut = _required(
            place,
            f"{prefix}pages",
            descriptor.num_chunks * DIGEST_BYTES,
            digest,
            lambda body: _checked_pages(descriptor, body),
        )
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

    def written(body: bytes) -> int:
        chunks = memoryview(body)
        for index in range(first, last):
            start = (index - first) * CHUNK_BYTES
            chunk = chunks[start : start + descriptor.chunk_bytes(index)]
            if not part.is_valid(index, chunk):
                raise StateTransferError(f"{place.url}/{key}: chunk {index} is not the one of {descriptor.digest[:12]}")
            part.write(index, chunk)
        return last - first

    _required(place, key, PART_CHUNKS * CHUNK_BYTES, descriptor.digest, written)


def _required(place: Place, key: str, max_bytes: int, digest: str, read: Callable[[bytes], T]) -> T:
    """Returns what ``read`` makes of an object of a snapshot, from a CDN's copy or the bucket's."""
    info_bytes = place.size_bytes(key)
    found = None if info_bytes is None or info_bytes > max_bytes else place.get_verified(key, max_bytes, read)
    if found is None:
        raise StateTransferError(f"the state {digest[:16]}…: expected {key} in {place.url}, found none of its size")
    return found


def _checked_pages(descriptor: Descriptor, body: bytes) -> list[bytes]:
    step = PAGE_CHUNKS * DIGEST_BYTES
    pages = [body[start : start + step] for start in range(0, len(body), step)]
    if tuple(map(sha256_hex, pages)) != descriptor.pages:
        raise StateTransferError(f"the state {descriptor.digest[:16]}…: its pages are not its own")
    return pages

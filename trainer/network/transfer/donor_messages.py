"""What a fetcher asks of a donor."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from trainer.network.rpc.messages import Message
from trainer.network.transfer.descriptor import DigestField

__all__ = [
    "CHUNKS_METHOD",
    "DESCRIPTOR_METHOD",
    "MAX_CHUNKS_PER_REQUEST",
    "PAGE_METHOD",
    "ChunksRequest",
    "DescriptorRequest",
    "Empty",
    "PageRequest",
]

DESCRIPTOR_METHOD = "state/descriptor"
PAGE_METHOD = "state/page"
CHUNKS_METHOD = "state/chunks"
MAX_CHUNKS_PER_REQUEST = 256


class DescriptorRequest(Message):
    """The descriptor of a snapshot, as payload."""

    digest: DigestField


class PageRequest(Message):
    """One page of its chunk digests, as payload."""

    digest: DigestField
    page: Annotated[int, Field(ge=0, lt=2**32)]


class ChunksRequest(Message):
    """Some of its chunks, as frames of a stream, each numbered by its index, in this order."""

    digest: DigestField
    indices: Annotated[
        tuple[Annotated[int, Field(ge=0, lt=2**40)], ...], Field(min_length=1, max_length=MAX_CHUNKS_PER_REQUEST)
    ]


class Empty(Message):
    """A head with nothing in it."""

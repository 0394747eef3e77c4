"""The parts of a snapshot, in memory and on disk; one digest verifies every byte of it.

The tensors' bytes, in the order of their names, are one long string cut into chunks of 1 MiB. The SHA-256 digests of
the chunks, 32 bytes each, fill pages of 16,384 (16 GiB of data a page). The descriptor, canonical JSON, names the
tensors, the caller's `meta` and the SHA-256 of each page; its own SHA-256 is the snapshot's digest:

    digest → descriptor → page → chunk

A state of 90 GB (85,000 chunks) has six pages of half a MiB and a descriptor of 1 kB. Equal tensors and equal `meta`
give an equal digest on every machine, so members of a run compare digests to see whether they agree; `meta` must hold
nothing that differs between them (no times, no names).

    {directory}/{digest}/descriptor.json   the descriptor
    {directory}/{digest}/pages             SHA-256 of each chunk, 32 bytes each
    {directory}/{digest}/data              the tensors' bytes

This module imports no torch: donors and the reader of run files do not need it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final, Literal, Self, TypeAlias

from pydantic import Field, JsonValue, ValidationError, model_validator

from genesis.store.durable import sync_folder
from manifests.serialisation import canonical_json, sha256_hex
from trainer.errors import StateTransferError, TrainerUsageError
from trainer.network.rpc.messages import Message

__all__ = [
    "CHUNK_BYTES",
    "DATA_NAME",
    "DESCRIPTOR_NAME",
    "DIGEST_BYTES",
    "MAX_DESCRIPTOR_BYTES",
    "MAX_EXTENT",
    "PAGES_NAME",
    "PAGE_CHUNKS",
    "Descriptor",
    "Expectation",
    "Meta",
    "TensorSpec",
    "make_descriptor",
    "parse_descriptor",
    "publish",
    "snapshots_in",
]

CHUNK_BYTES: Final = 1 << 20
DIGEST_BYTES: Final = 32
PAGE_CHUNKS: Final = 16_384
MAX_DESCRIPTOR_BYTES: Final = 1 << 20
"""A descriptor travels in one message; 1 MiB holds some 10,000 tensors."""

DESCRIPTOR_NAME, PAGES_NAME, DATA_NAME = "descriptor.json", "pages", "data"

_ITEM_BYTES = {
    **dict.fromkeys(("bool", "uint8", "int8"), 1),
    **dict.fromkeys(("int16", "float16", "bfloat16"), 2),
    **dict.fromkeys(("int32", "float32"), 4),
    **dict.fromkeys(("int64", "float64"), 8),
}
_MAX_SIZE_BYTES = 1 << 50
MAX_EXTENT: Final = 1 << 48
"""Above the product of a tensor's dimensions, those of 0 left out: torch counts strides of empty tensors as well."""

Meta: TypeAlias = Mapping[str, JsonValue]
DigestField = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Dtype = Literal["bool", "uint8", "int8", "int16", "float16", "bfloat16", "int32", "float32", "int64", "float64"]


class TensorSpec(Message):
    """Name, dtype and shape of a tensor."""

    name: Annotated[str, Field(min_length=1, max_length=512)]
    dtype: Dtype
    shape: Annotated[tuple[Annotated[int, Field(ge=0, lt=MAX_EXTENT)], ...], Field(max_length=16)]

    @model_validator(mode="after")
    def _has_a_possible_shape(self) -> Self:
        if math.prod(filter(None, self.shape)) >= MAX_EXTENT:
            raise ValueError(f"expected dimensions whose product, those of 0 left out, is below {MAX_EXTENT}")
        return self

    @property
    def num_values(self) -> int:
        """Product of the shape."""
        return math.prod(self.shape)

    @property
    def size_bytes(self) -> int:
        """Bytes of its values."""
        return self.num_values * _ITEM_BYTES[self.dtype]


class Descriptor(Message):
    """The table of contents of a snapshot."""

    format: Literal["genesis state 1"] = "genesis state 1"
    meta: dict[str, JsonValue]
    tensors: tuple[TensorSpec, ...]
    """Sorted by name; their values follow each other in this order, little endian."""
    pages: tuple[DigestField, ...]
    """SHA-256 of each page of chunk digests."""

    def to_bytes(self) -> bytes:
        """Returns the canonical JSON, which the digest is taken of."""
        return canonical_json(self.model_dump(mode="json"))

    @property
    def digest(self) -> str:
        """SHA-256 of `to_bytes`."""
        return sha256_hex(self.to_bytes())

    @property
    def size_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.size_bytes for tensor in self.tensors)

    @property
    def num_chunks(self) -> int:
        """Number of chunks of `CHUNK_BYTES`; the last may be shorter."""
        return -(-self.size_bytes // CHUNK_BYTES)

    def chunk_bytes(self, index: int) -> int:
        """Returns the length of a chunk."""
        return min(CHUNK_BYTES, self.size_bytes - index * CHUNK_BYTES)

    def page_chunks(self, page: int) -> int:
        """Returns the number of chunks whose digests a page holds."""
        return min(PAGE_CHUNKS, self.num_chunks - page * PAGE_CHUNKS)


@dataclass(frozen=True, slots=True)
class Expectation:
    """The state a caller accepts; checked before anything of the claimed size is allocated.

    Args:
        max_bytes: most bytes of tensors.
        tensors: dtype and shape by name, exactly these; None accepts any.
        finite: refuse NaN and infinities in any tensor.
    """

    max_bytes: int
    tensors: Mapping[str, tuple[str, tuple[int, ...]]] | None = None
    finite: bool = True

    def check(self, descriptor: Descriptor) -> None:
        """Compares a descriptor with the expectation.

        Raises:
            StateTransferError: they differ; the message names the first difference.
        """
        if descriptor.size_bytes > self.max_bytes:
            raise StateTransferError(
                f"expected a state of at most {self.max_bytes} bytes, found one of {descriptor.size_bytes}"
            )
        if self.tensors is None:
            return
        found = {tensor.name: (tensor.dtype, tensor.shape) for tensor in descriptor.tensors}
        for name in sorted(self.tensors.keys() | found.keys()):
            if name not in found or name not in self.tensors:
                what = "is missing" if name not in found else "is not expected"
                raise StateTransferError(f"the state's tensor {name!r} {what}; is it of another architecture?")
            dtype, shape = self.tensors[name]
            if found[name] != (dtype, tuple(shape)):
                raise StateTransferError(
                    f"the state's tensor {name!r}: expected {dtype} {list(shape)}, found {found[name][0]} "
                    f"{list(found[name][1])}; is it of another architecture?"
                )


def make_descriptor(meta: Meta, tensors: tuple[TensorSpec, ...], pages: tuple[str, ...]) -> Descriptor:
    """Builds a descriptor.

    Raises:
        TrainerUsageError: a name or `meta` cannot be written as JSON, or the descriptor would be too long.
    """
    try:
        descriptor = Descriptor(meta=dict(meta), tensors=tensors, pages=pages)
        size_bytes = len(descriptor.to_bytes())
    except (ValidationError, ValueError) as error:
        raise TrainerUsageError(f"a snapshot's meta: expected JSON with finite numbers ({error})") from None
    if size_bytes > MAX_DESCRIPTOR_BYTES:
        raise TrainerUsageError(f"expected a descriptor of at most {MAX_DESCRIPTOR_BYTES} bytes, found {size_bytes}")
    return descriptor


def parse_descriptor(data: bytes, digest: str) -> Descriptor:
    """Parses a descriptor and verifies it against its digest.

    Raises:
        StateTransferError: the digest differs, or this release does not write such a descriptor.
    """
    if len(data) > MAX_DESCRIPTOR_BYTES or sha256_hex(data) != digest:
        raise StateTransferError(f"expected the descriptor of {digest[:16]}…, found other bytes ({len(data)})")
    try:
        descriptor = Descriptor.model_validate_json(data)
    except ValidationError as error:
        problem = error.errors(include_input=False, include_url=False)[0]["msg"]
        raise StateTransferError(f"the state {digest[:16]}… is none this release reads: {problem}") from None
    names = [tensor.name for tensor in descriptor.tensors]
    if descriptor.to_bytes() != data or names != sorted(set(names)):
        raise StateTransferError(f"the state {digest[:16]}… is not described in canonical form")
    if descriptor.size_bytes > _MAX_SIZE_BYTES or len(descriptor.pages) != -(-descriptor.num_chunks // PAGE_CHUNKS):
        raise StateTransferError(f"the state {digest[:16]}…: its pages do not fit its {descriptor.size_bytes} bytes")
    return descriptor


def snapshots_in(directory: str | os.PathLike[str]) -> list[str]:
    """Returns the digests of the complete snapshots in ``directory``, newest first."""
    folder = Path(directory)
    if not folder.is_dir():
        return []
    found = [path for path in folder.iterdir() if len(path.name) == 64 and (path / DESCRIPTOR_NAME).is_file()]
    return [path.name for path in sorted(found, key=lambda path: path.stat().st_mtime_ns, reverse=True)]


def publish(draft: Path, target: Path) -> None:
    """Renames a draft, whose files are synced, to its final name; a snapshot already there becomes the newest.

    Raises:
        OSError: it cannot be renamed.
    """
    os.utime(draft)
    try:
        draft.rename(target)
    except OSError:
        if not (target / DESCRIPTOR_NAME).is_file():
            raise
        os.utime(target)
    sync_folder(target.parent)

"""The parts of a snapshot, in memory; one digest verifies every byte of it. And tensors as bytes, without a copy.

The tensors' bytes, in the order of their names, are one long string cut into chunks of 1 MiB. The SHA-256 digests of
the chunks, 32 bytes each, fill pages of 16,384 (16 GiB of data a page). The descriptor, canonical JSON, names the
tensors, the caller's `meta` and the SHA-256 of each page; its own SHA-256 is the snapshot's digest:

    digest → descriptor → page → chunk

Equal tensors and equal `meta` give an equal digest on every machine, so members of a run compare digests to see whether
they agree; `meta` must hold nothing that differs between them (no times, no names).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Final, Literal, Self, TypeAlias, get_args

import numpy as np
import torch
from pydantic import Field, JsonValue, ValidationError, model_validator

from manifests.serialisation import canonical_json, sha256_hex
from trainer.errors import StateTransferError, TrainerUsageError
from trainer.network.rpc.messages import Message

CHUNK_BYTES: Final = 1 << 20
DIGEST_BYTES: Final = 32
PAGE_CHUNKS: Final = 16_384
MAX_DESCRIPTOR_BYTES: Final = 1 << 20  # A descriptor travels in one message; 1 MiB holds some 10,000 tensors.

DESCRIPTOR_NAME, PAGES_NAME, DATA_NAME = "descriptor.json", "pages", "data"

_MAX_SIZE_BYTES = 1 << 50
MAX_EXTENT: Final = 1 << 48
"""Above the product of a tensor's dimensions, those of 0 left out: torch counts strides of empty tensors as well."""

Meta: TypeAlias = Mapping[str, JsonValue]
DigestField = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Dtype = Literal["bool", "uint8", "int8", "int16", "float16", "bfloat16", "int32", "float32", "int64", "float64"]

_TORCH_DTYPES: dict[Dtype, torch.dtype] = {name: getattr(torch, name) for name in get_args(Dtype)}
_DTYPES = {dtype: name for name, dtype in _TORCH_DTYPES.items()}
_FINITE_BLOCK = 1 << 22


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
        return self.num_values * _TORCH_DTYPES[self.dtype].itemsize


class Descriptor(Message):
    """The table of contents of a snapshot."""

    format: Literal["genesis state 1"] = "genesis state 1"
    meta: dict[str, JsonValue]
    tensors: tuple[TensorSpec, ...]  # Sorted by name; their values follow each other in this order, little endian.
    pages: tuple[DigestField, ...]  # SHA-256 of each page of chunk digests.

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
    """The state a caller accepts; checked before anything of the claimed size is allocated."""

    max_bytes: int  # Of all tensors.
    tensors: Mapping[str, tuple[str, tuple[int, ...]]] | None = None
    """Dtype and shape by name, exactly these; None accepts any."""
    finite: bool = True  # Refuse NaN and infinities in any tensor.

    def check(self, descriptor: Descriptor) -> None:
        """Raises StateTransferError, naming the first difference, for a descriptor of another state."""
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
    """Builds a descriptor; raises TrainerUsageError for what JSON cannot hold, or a message not carry."""
    try:
        descriptor = Descriptor(meta=dict(meta), tensors=tensors, pages=pages)
        size_bytes = len(descriptor.to_bytes())
    except (ValidationError, ValueError) as error:
        raise TrainerUsageError(f"a snapshot's meta: expected JSON with finite numbers ({error})") from None
    if size_bytes > MAX_DESCRIPTOR_BYTES:
        raise TrainerUsageError(f"expected a descriptor of at most {MAX_DESCRIPTOR_BYTES} bytes, found {size_bytes}")
    return descriptor


def parse_descriptor(data: bytes, digest: str) -> Descriptor:
    """Parses a descriptor; raises StateTransferError if it is another's, or none that this release writes."""
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


def specs_of(tensors: Mapping[str, torch.Tensor]) -> tuple[TensorSpec, ...]:
    """Returns name, dtype and shape of each tensor, sorted by name; TrainerUsageError for a dtype not supported."""
    if sys.byteorder != "little":
        raise TrainerUsageError("expected a little-endian machine, found a big-endian one; state is exchanged as bytes")
    specs = []
    for name in sorted(tensors):
        dtype = _DTYPES.get(tensors[name].dtype)
        if dtype is None:
            raise TrainerUsageError(
                f"tensor {name!r}: expected one of {', '.join(_TORCH_DTYPES)}, found {tensors[name].dtype}"
            )
        specs.append(TensorSpec(name=name, dtype=dtype, shape=tuple(tensors[name].shape)))
    return tuple(specs)


def chunks_of(tensors: Mapping[str, torch.Tensor]) -> Iterator[memoryview]:
    """Yields the bytes of all tensors, sorted by name, in pieces of exactly `CHUNK_BYTES`; the last may be shorter.

    A piece is valid until the next is requested.
    """
    joint = bytearray()
    for name in sorted(tensors):
        data = _bytes_of(tensors[name])
        start = 0
        if joint:  # Chunks that span tensors are joined; all others are views.
            start = min(CHUNK_BYTES - len(joint), len(data))
            joint += data[:start]
            if len(joint) == CHUNK_BYTES:
                yield memoryview(joint)
                joint = bytearray()
        whole = start + (len(data) - start) // CHUNK_BYTES * CHUNK_BYTES
        for position in range(start, whole, CHUNK_BYTES):
            yield data[position : position + CHUNK_BYTES]
        joint += data[whole:]
    if joint:
        yield memoryview(joint)


def payload_of(tensors: Mapping[str, torch.Tensor]) -> bytes | memoryview:
    """Returns the bytes of all tensors, sorted by name; of a single tensor a view, valid until it is changed."""
    pieces = [_bytes_of(tensors[name]) for name in sorted(tensors)]
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    if flat.numel() == 0:
        return memoryview(b"")
    return flat.view(torch.uint8).numpy().data


def tensors_in(
    data: np.ndarray[tuple[int], np.dtype[np.uint8]], specs: Sequence[TensorSpec]
) -> dict[str, torch.Tensor]:
    """Returns the tensors whose bytes follow each other in ``data``: views where they are aligned, copies elsewhere."""
    tensors: dict[str, torch.Tensor] = {}
    start = 0
    for spec in specs:
        dtype = _TORCH_DTYPES[spec.dtype]
        piece = data[start : start + spec.size_bytes]
        start += spec.size_bytes
        if piece.ctypes.data % dtype.itemsize:
            piece = piece.copy()
        if spec.num_values == 0:
            tensors[spec.name] = torch.empty(spec.shape, dtype=dtype)
        else:
            tensors[spec.name] = torch.from_numpy(piece).view(dtype).reshape(spec.shape)
    return tensors


def all_finite(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor holds no NaN and no infinity.

    A finite sum has finite terms only, and takes a twentieth of the time of checking each; a block whose sum overflows
    is checked value by value (16 MiB of scratch).
    """
    if not tensor.dtype.is_floating_point:
        return True
    flat = tensor.reshape(-1)
    blocks = (flat[start : start + _FINITE_BLOCK] for start in range(0, flat.numel(), _FINITE_BLOCK))
    wide = torch.float64 if tensor.dtype == torch.float64 else torch.float32
    return all(bool(block.sum(dtype=wide).isfinite()) or bool(block.isfinite().all()) for block in blocks)

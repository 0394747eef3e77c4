"""What every codec is, and the checks they share.

A codec keeps no state: two calls with the same argument give the same bytes, whatever came between. Buffers are looked
at before anything is allocated for them, so that a stranger's message costs at most what the caller expected.
"""

from __future__ import annotations

import sys
from typing import Literal, Protocol

import torch
from torch import Tensor
from typing_extensions import Buffer

from trainer.errors import CodecError

__all__ = ["Codec", "CodecName", "byte_view", "check_vector", "expect_size", "output_vector"]

CodecName = Literal["fp32", "fp16", "int8"]

if sys.byteorder != "little":  # pragma: no cover - no machine with torch wheels is
    raise ImportError(
        "trainer.compression.vectors: expected a little-endian machine, found a big-endian one; use another machine"
    )


class Codec(Protocol):
    """Vectors to bytes and back."""

    @property
    def name(self) -> CodecName:
        """What configurations and messages call it."""
        ...

    def encode(self, vector: Tensor) -> memoryview:
        """The bytes of a vector.

        Args:
            vector: fp32[n], contiguous, on the CPU.

        Returns:
            Read-only bytes. They may share memory with ``vector``: send or copy them before it changes.

        Raises:
            CodecError: NaN or infinity in the vector, or it is no fp32 vector.
        """
        ...

    def decode(self, buffer: Buffer, num_values: int, out: Tensor | None = None) -> Tensor:
        """The vector of the bytes.

        Args:
            buffer: what ``encode`` gave, or what a stranger sent.
            num_values: how many values are expected.
            out: fp32[num_values], contiguous; written and returned instead of a new vector.

        Returns:
            fp32[num_values], sharing no memory with ``buffer``. fp32 and fp16 carry NaN and infinity as they came:
            see ``trainer.aggregation.finite_rows``.

        Raises:
            CodecError: the buffer has another size, or no honest encoder made it.
        """
        ...

    def encoded_bytes(self, num_values: int) -> int:
        """Size of an encoding, in bytes."""
        ...

    def values_per_part(self, part_bytes: int = 1 << 20) -> int:
        """How many values to send at once so that no part takes more than ``part_bytes``; at least one block."""
        ...


def check_vector(vector: Tensor) -> None:
    """Refuse what is not a contiguous fp32 vector in this machine's memory.

    Raises:
        CodecError: it is something else.
    """
    if vector.dim() != 1 or vector.dtype != torch.float32 or vector.device.type != "cpu" or not vector.is_contiguous():
        raise CodecError(
            f"expected a contiguous fp32 vector on the CPU, found {vector.dtype} of shape {tuple(vector.shape)} on "
            f"{vector.device}; flatten it first"
        )


def byte_view(buffer: Buffer) -> memoryview:
    """The bytes of any contiguous buffer, not copied.

    Raises:
        CodecError: the buffer is not contiguous.
    """
    view = memoryview(buffer)
    if not view.c_contiguous:
        raise CodecError("expected contiguous bytes, found a strided buffer; copy it first")
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")


def expect_size(codec: CodecName, view: memoryview, num_values: int, size_bytes: int) -> None:
    """Refuse a buffer that cannot hold exactly ``num_values`` values.

    Raises:
        CodecError: it is shorter or longer than ``size_bytes``.
    """
    if view.nbytes != size_bytes:
        raise CodecError(
            f"{codec}: expected {size_bytes} bytes for {num_values} values, found {view.nbytes}; drop the message"
        )


def output_vector(out: Tensor | None, num_values: int) -> Tensor:
    """Where to decode to: ``out`` if it fits, or new memory.

    Raises:
        CodecError: ``out`` is no contiguous fp32 vector of that length.
    """
    if num_values < 0:
        raise CodecError(f"expected 0 or more values, found {num_values}")
    if out is None:
        return torch.empty(num_values, dtype=torch.float32)
    check_vector(out)
    if out.numel() != num_values:
        raise CodecError(f"expected room for {num_values} values, found {out.numel()}")
    return out

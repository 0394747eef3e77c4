"""Tensors as one string of bytes, and back: no copy where the tensor lies in the right form already."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch

from trainer.errors import TrainerUsageError
from trainer.network.transfer.descriptor import CHUNK_BYTES, Dtype, TensorSpec

__all__ = ["all_finite", "chunks_of", "payload_of", "specs_of", "tensors_in"]

_DTYPES: dict[torch.dtype, Dtype] = {
    torch.bool: "bool",
    torch.uint8: "uint8",
    torch.int8: "int8",
    torch.int16: "int16",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.int32: "int32",
    torch.float32: "float32",
    torch.int64: "int64",
    torch.float64: "float64",
}
_TORCH_DTYPES = {name: dtype for dtype, name in _DTYPES.items()}
_FINITE_BLOCK = 1 << 22


def specs_of(tensors: Mapping[str, torch.Tensor]) -> tuple[TensorSpec, ...]:
    """Name, type and shape of each, by name.

    Raises:
        TrainerUsageError: one is of a type that is not stored.
    """
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
    """The bytes of all tensors, by name, in pieces of exactly `CHUNK_BYTES`, the last as long as the rest.

    A piece is valid until the next is asked for.
    """
    joint = bytearray()
    for name in sorted(tensors):
        data = _bytes_of(tensors[name])
        start = 0
        if joint:  # A chunk that spans tensors is put together; all others are views.
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
    """The bytes of all tensors, by name, in one piece; of a single one a view, valid as long as it is not changed."""
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
    """The tensors whose bytes lie one after another in ``data``: views of it where it is aligned, copies else."""
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
    """Whether it holds no NaN and no infinity.

    A finite sum has finite terms only, and a sum takes a twentieth of the time of looking at each; a block whose sum
    overflows is looked at value by value (16 MiB of scratch).
    """
    if not tensor.dtype.is_floating_point:
        return True
    flat = tensor.reshape(-1)
    blocks = (flat[start : start + _FINITE_BLOCK] for start in range(0, flat.numel(), _FINITE_BLOCK))
    wide = torch.float64 if tensor.dtype == torch.float64 else torch.float32
    return all(bool(block.sum(dtype=wide).isfinite()) or bool(block.isfinite().all()) for block in blocks)

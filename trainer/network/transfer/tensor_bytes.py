"""Converts tensors to one string of bytes and back, without a copy where the memory layout already fits."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import get_args

import numpy as np
import torch

from trainer.errors import TrainerUsageError
from trainer.network.transfer.descriptor import CHUNK_BYTES, Dtype, TensorSpec

_TORCH_DTYPES: dict[Dtype, torch.dtype] = {name: getattr(torch, name) for name in get_args(Dtype)}
_DTYPES = {dtype: name for name, dtype in _TORCH_DTYPES.items()}
_FINITE_BLOCK = 1 << 22


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

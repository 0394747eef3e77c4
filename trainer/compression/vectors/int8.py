"""Blockwise int8: 1,024 values share one scale, the largest magnitude of the block over 127.

Layout: the scales, fp32 little endian, one a block; then one signed byte a value, -127 to 127. The error of a value is
at most 0.50002 of its block's scale. A block in which no magnitude reaches ``SMALLEST_MAGNITUDE`` (1.5e-36) is sent as
zeros, because its scale would have lost digits of its own.

One outlier coarsens 1,023 neighbours and no others: that is why the blocks are small; why they are not smaller is the
scale's cost (0.4 % at 1,024).
"""

from __future__ import annotations

from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import Buffer

from trainer.compression.vectors.codec import CodecName, byte_view, check_vector, expect_size, output_vector
from trainer.errors import CodecError

__all__ = ["BLOCK_VALUES", "SMALLEST_MAGNITUDE", "Int8Codec"]

BLOCK_VALUES: Final = 1024
_LEVELS: Final = np.float32(127)
_BLOCK_BYTES: Final = BLOCK_VALUES + 4
# Blocks worked on at once, so that the fp32 scratch is 1 MiB however long the vector is.
_CHUNK_BLOCKS: Final = 256
SMALLEST_MAGNITUDE: Final = 2.0**-119
# The largest scale of which 127 times is still an fp32 number.
_MAX_SCALE: Final = np.nextafter(np.finfo(np.float32).max / _LEVELS, np.float32(0))


def _num_blocks(num_values: int) -> int:
    return -(-num_values // BLOCK_VALUES)


def _block_scales(blocks: Tensor) -> NDArray[np.float32]:
    """The scale of each block, 0 for one that is sent as zeros.

    Args:
        blocks: fp32[b, values of a block].

    Raises:
        CodecError: a block holds NaN or infinity.
    """
    # Reductions by torch (twice as fast), the few numbers that come of them by numpy (a fifth of the cost of a call).
    magnitudes: NDArray[np.float32] = np.maximum(blocks.amax(1).numpy(), -blocks.amin(1).numpy())
    if not np.isfinite(magnitudes).all():
        raise CodecError("int8: expected finite values, found NaN or infinity; drop the contribution")
    scales: NDArray[np.float32] = np.minimum(magnitudes / _LEVELS, _MAX_SCALE)
    scales[magnitudes < SMALLEST_MAGNITUDE] = 0
    return scales


def _encode_blocks(blocks: Tensor, scales: Tensor, levels: Tensor) -> None:
    """Write the scale of every block and the nearest level of every value.

    Args:
        blocks: fp32[b, values of a block].
        scales: fp32[b], written.
        levels: int8[b, values of a block], written.
    """
    scratch = torch.empty(min(_CHUNK_BLOCKS, len(blocks)), blocks.shape[1])
    for start in range(0, len(blocks), _CHUNK_BLOCKS):
        chunk = blocks[start : start + _CHUNK_BLOCKS]
        found = _block_scales(chunk)
        # A block that is sent as zeros is multiplied by 0.
        reciprocals = np.divide(np.float32(1), found, out=np.zeros_like(found), where=found > 0)
        scaled = torch.mul(chunk, torch.from_numpy(reciprocals)[:, None], out=scratch[: len(chunk)]).round_()
        if (found == _MAX_SCALE).any():  # cut: the largest magnitudes would come out as 128
            scaled.clamp_(-127, 127)
        scales[start : start + _CHUNK_BLOCKS] = torch.from_numpy(found)
        levels[start : start + _CHUNK_BLOCKS] = scaled


class Int8Codec:
    """Blocks of 1,024 values under one scale each."""

    name: Final[CodecName] = "int8"

    def encode(self, vector: Tensor) -> memoryview:
        """See ``Codec.encode``."""
        check_vector(vector)
        vector = vector.detach()
        num_values, num_whole = vector.numel(), vector.numel() // BLOCK_VALUES
        encoded = torch.empty(self.encoded_bytes(num_values), dtype=torch.int8)
        scales = encoded[: 4 * _num_blocks(num_values)].view(torch.float32)
        levels = encoded[4 * _num_blocks(num_values) :]
        split = num_whole * BLOCK_VALUES
        if num_whole:
            whole = vector[:split].view(-1, BLOCK_VALUES)
            _encode_blocks(whole, scales[:num_whole], levels[:split].view(-1, BLOCK_VALUES))
        if split < num_values:
            _encode_blocks(vector[None, split:], scales[num_whole:], levels[None, split:])
        return encoded.numpy().view(np.uint8).data.toreadonly()

    def decode(self, buffer: Buffer, num_values: int, out: Tensor | None = None) -> Tensor:
        """See ``Codec.decode``; what comes back is finite."""
        view = byte_view(buffer)
        expect_size(self.name, view, num_values, self.encoded_bytes(num_values))
        vector = output_vector(out, num_values)
        num_blocks, num_whole = _num_blocks(num_values), num_values // BLOCK_VALUES
        # Copied once: a quarter of the vector's bytes, and torch warns of memory it may not write.
        encoded = torch.empty(view.nbytes, dtype=torch.int8)
        np.copyto(encoded.numpy(), np.frombuffer(view, dtype=np.int8))
        scales = encoded[: 4 * num_blocks].view(torch.float32)
        levels = encoded[4 * num_blocks :]
        _check_scales(scales)
        if num_values and int(levels.amin()) < -_LEVELS:
            raise CodecError("int8: expected levels from -127 to 127, found -128; drop the message")
        split = num_whole * BLOCK_VALUES
        torch.mul(
            levels[:split].view(-1, BLOCK_VALUES),
            scales[:num_whole, None],
            out=vector[:split].view(-1, BLOCK_VALUES),
        )
        torch.mul(levels[split:], scales[num_whole:], out=vector[split:])
        return vector

    def encoded_bytes(self, num_values: int) -> int:
        """See ``Codec.encoded_bytes``."""
        return num_values + 4 * _num_blocks(num_values)

    def values_per_part(self, part_bytes: int = 1 << 20) -> int:
        """See ``Codec.values_per_part``; whole blocks."""
        return max(1, part_bytes // _BLOCK_BYTES) * BLOCK_VALUES


def _check_scales(scales: Tensor) -> None:
    if scales.numel() == 0:
        return
    smallest, largest = (float(extreme) for extreme in torch.aminmax(scales))
    if not (smallest >= 0.0 and largest <= _MAX_SCALE):
        raise CodecError(
            f"int8: expected scales from 0 to {_MAX_SCALE:.4g}, found {smallest:.4g} to {largest:.4g}; drop the message"
        )

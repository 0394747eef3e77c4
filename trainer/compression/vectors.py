"""Codecs of fp32 vectors: fp32 as it is, fp16, and int8, int4 and E3M0 with one scale a block.

    codec = codec_named("int8")
    payload = codec.encode(vector)                   # a read-only view of bytes, good for one message
    codec.decode(payload, vector.numel(), out=row)   # into memory the caller already has

Guarantees: decoding is a pure function of the bytes, the same bits on every machine; a buffer that no honest encoder
made is a ``CodecError``, never a crash, a silent wrong value or an allocation of the sender's choosing; each codec
states its error. The trade-off: int8 is a plain absmax grid, because one core encodes 6 GB/s of fp32 that way and
decodes 12; error feedback (`trainer.collective`) removes the bias that a finer grid would cost time to avoid. Four bits
halve the bytes of int8: `e3m0`, whose levels are powers of two as in Streaming DiLoCo (arXiv 2501.18512), keeps signs
and sizes of small values beside large ones; `int4`, whose levels are even, errs less where values of a block are alike.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from functools import cache
from types import MappingProxyType
from typing import ClassVar, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import Buffer

from trainer.compression import CodecName as CodecName
from trainer.errors import CodecError, TrainerUsageError

BLOCK_VALUES: Final = 1024  # Values of an int8 block.
FOUR_BIT_BLOCK_VALUES: Final = 256
"""Values of a block of four bits: shorter than int8's, since an outlier costs a coarse grid more; the scales take an
eighth of a bit a value."""
FP16_MAX: Final = 65504.0
SMALLEST_MAGNITUDE: Final = 2.0**-119
"""A block of int8 with no greater magnitude is sent as zeros: its scale would have lost digits of its own."""
_LEVELS: Final = np.float32(127)
# The largest scale of which 127 times is still an fp32 number.
_MAX_SCALE: Final = np.nextafter(np.finfo(np.float32).max / _LEVELS, np.float32(0))
# Blocks worked on at once, so that the fp32 scratch is 1 MiB however long the vector is.
_CHUNK_BLOCKS: Final = 256
_FOUR_BIT_CHUNK_VALUES: Final = 1 << 17
_HALF_OF_LEAST: Final = 0x3C000000  # The bits of 1/128, from which 1/64 is nearer than 0.
# Bytes of which a half is 8: the negative level without a positive one, or a negative zero.
_UNUSED: Final = np.array([byte & 15 == 8 or byte >> 4 == 8 for byte in range(256)])

if sys.byteorder != "little":  # pragma: no cover - no machine with torch wheels is
    raise ImportError(
        "trainer.compression.vectors: expected a little-endian machine, found a big-endian one; use another machine"
    )


class Codec(ABC):
    """Encodes vectors as bytes and decodes them; keeps no state."""

    name: ClassVar[CodecName]
    block_values: ClassVar[int] = 1  # Values that share a scale; parts of a vector are cut at blocks.
    _value_bytes: ClassVar[int]
    _scale_bytes: ClassVar[int] = 0  # Of each block.

    def encode(self, vector: Tensor) -> memoryview:
        """Encodes a vector, fp32[n], contiguous, on the CPU.

        The bytes are read-only and may share memory with ``vector``: send or copy them before it changes.

        Raises:
            CodecError: NaN or infinity in the vector, or it is not such a vector.
        """
        _check_vector(vector)
        return self._encode(vector.detach())

    def decode(self, buffer: Buffer, num_values: int, out: Tensor | None = None) -> Tensor:
        """Decodes what ``encode`` returned, or a stranger sent; its size is checked before anything is allocated.

        Returns ``out``, or a new fp32[num_values] that shares no memory with ``buffer``. fp32 and fp16 carry NaN and
        infinity as they came: see ``trainer.aggregation.finite_rows``.

        Raises:
            CodecError: the buffer has another size, or no honest encoder made it, or ``out`` does not fit.
        """
        view = memoryview(buffer)
        if not view.c_contiguous:
            raise CodecError("expected contiguous bytes, found a strided buffer; copy it first")
        if view.nbytes != self.encoded_bytes(num_values):
            raise CodecError(
                f"{self.name}: expected {self.encoded_bytes(num_values)} bytes for {num_values} values, found "
                f"{view.nbytes}; drop the message"
            )
        vector = torch.empty(num_values, dtype=torch.float32) if out is None else out
        _check_vector(vector)
        if vector.numel() != num_values:
            raise CodecError(f"expected room for {num_values} values, found {vector.numel()}")
        self._decode(np.frombuffer(view, dtype=np.uint8), vector)
        return vector

    def encoded_bytes(self, num_values: int) -> int:
        """Returns the size of an encoding."""
        return num_values * self._value_bytes + -(-num_values // self.block_values) * self._scale_bytes

    def values_per_part(self, part_bytes: int = 1 << 20) -> int:
        """Returns how many values fit ``part_bytes``, in whole blocks; at least one block."""
        return max(1, part_bytes // self.encoded_bytes(self.block_values)) * self.block_values

    @abstractmethod
    def _encode(self, vector: Tensor) -> memoryview: ...

    @abstractmethod
    def _decode(self, encoded: NDArray[np.uint8], out: Tensor) -> None: ...


class Fp32Codec(Codec):
    """Little-endian fp32: lossless, and encoding shares the vector's memory."""

    name: ClassVar[CodecName] = "fp32"
    _value_bytes: ClassVar[int] = 4

    def _encode(self, vector: Tensor) -> memoryview:
        # A finite sum proves finite terms, in a quarter of the time; a sum may also overflow.
        if not np.isfinite(float(vector.sum())):
            _finite_extremes(self.name, vector)
        return vector.numpy().view(np.uint8).data.toreadonly()

    def _decode(self, encoded: NDArray[np.uint8], out: Tensor) -> None:
        np.copyto(out.numpy(), encoded.view("<f4"))


class Fp16Codec(Codec):
    """Little-endian IEEE half precision, rounded to nearest even.

    The relative error is at most 2**-11 for magnitudes from 6.1e-5, the absolute error at most 2**-25 below that.
    Magnitudes above 65,504 are sent as 65,504, which no pseudo-gradient of a model that still learns comes near and
    which error feedback makes up for.
    """

    name: ClassVar[CodecName] = "fp16"
    _value_bytes: ClassVar[int] = 2

    def _encode(self, vector: Tensor) -> memoryview:
        smallest, largest = _finite_extremes(self.name, vector)
        if smallest < -FP16_MAX or largest > FP16_MAX:
            vector = vector.clamp(-FP16_MAX, FP16_MAX)
        return vector.to(torch.float16).numpy().view(np.uint8).data.toreadonly()

    def _decode(self, encoded: NDArray[np.uint8], out: Tensor) -> None:
        # torch converts 20 times as fast as numpy, but warns of memory it may not write: the bytes are copied first.
        halves = torch.empty(out.numel(), dtype=torch.float16)
        np.copyto(halves.numpy().view(np.uint8), encoded)
        out.copy_(halves)


class Int8Codec(Codec):
    """Blocks of 1,024 signed bytes under one scale each, the largest magnitude of the block over 127.

    Layout: the scales, fp32 little endian, one a block; then one byte a value, -127 to 127. The error of a value is at
    most 0.50002 of its block's scale. One outlier coarsens the 1,023 values beside it and no others, which is why
    blocks are small; the cost of the scales (0.4 %) is why they are not smaller. What is decoded is finite.
    """

    name: ClassVar[CodecName] = "int8"
    block_values: ClassVar[int] = BLOCK_VALUES
    _value_bytes: ClassVar[int] = 1
    _scale_bytes: ClassVar[int] = 4

    def _encode(self, vector: Tensor) -> memoryview:
        num_values, num_whole = vector.numel(), vector.numel() // BLOCK_VALUES
        encoded = torch.empty(self.encoded_bytes(num_values), dtype=torch.int8)
        scales, levels = encoded[: encoded.numel() - num_values].view(torch.float32), encoded[-num_values:]
        split = num_whole * BLOCK_VALUES
        if num_whole:
            whole = vector[:split].view(-1, BLOCK_VALUES)
            _encode_blocks(whole, scales[:num_whole], levels[:split].view(-1, BLOCK_VALUES))
        if split < num_values:
            _encode_blocks(vector[None, split:], scales[num_whole:], levels[None, split:])
        return encoded.numpy().view(np.uint8).data.toreadonly()

    def _decode(self, encoded: NDArray[np.uint8], out: Tensor) -> None:
        num_values, num_whole = out.numel(), out.numel() // BLOCK_VALUES
        if not num_values:
            return
        # Copied once: a quarter of the vector's bytes, and torch warns of memory it may not write.
        copied = torch.empty(encoded.size, dtype=torch.int8)
        np.copyto(copied.numpy(), encoded.view(np.int8))
        scales, levels = copied[:-num_values].view(torch.float32), copied[-num_values:]
        smallest, largest = (float(extreme) for extreme in torch.aminmax(scales))
        if not (smallest >= 0.0 and largest <= _MAX_SCALE):
            raise CodecError(
                f"int8: expected scales from 0 to {_MAX_SCALE:.4g}, found {smallest:.4g} to {largest:.4g}; drop the "
                "message"
            )
        if int(levels.amin()) < -_LEVELS:
            raise CodecError("int8: expected levels from -127 to 127, found -128; drop the message")
        split = num_whole * BLOCK_VALUES
        whole = levels[:split].view(-1, BLOCK_VALUES)
        torch.mul(whole, scales[:num_whole, None], out=out[:split].view(-1, BLOCK_VALUES))
        torch.mul(levels[split:], scales[num_whole:], out=out[split:])


class _FourBitCodec(Codec):
    """Blocks of 256 signed levels of four bits under one scale each, the largest magnitude of the block.

    Layout: the scales, fp32 little endian, one a block; then a byte for two values, the first in its lower half; the
    half of a byte that an odd number leaves over is 0. What is decoded is finite.
    """

    block_values: ClassVar[int] = FOUR_BIT_BLOCK_VALUES
    _scale_bytes: ClassVar[int] = 4
    _value_bytes: ClassVar[int] = 0
    _levels: ClassVar[NDArray[np.float32]]  # [16], what each four bits stand for, of a scale of 1.

    def encoded_bytes(self, num_values: int) -> int:
        """Returns the size of an encoding."""
        return -(-num_values // self.block_values) * self._scale_bytes + -(-num_values // 2)

    def _encode(self, vector: Tensor) -> memoryview:
        num_values = vector.numel()
        num_blocks = -(-num_values // self.block_values)
        encoded: NDArray[np.uint8] = np.empty(self.encoded_bytes(num_values), np.uint8)
        scales, packed = encoded[: 4 * num_blocks].view(np.float32), encoded[4 * num_blocks :]
        for start in range(0, num_values, _FOUR_BIT_CHUNK_VALUES):
            values = vector[start : start + _FOUR_BIT_CHUNK_VALUES]
            count = values.numel()
            if count % self.block_values:
                values = torch.nn.functional.pad(values, (0, -count % self.block_values))
            blocks = values.view(-1, self.block_values)
            found = torch.maximum(blocks.amax(1), -blocks.amin(1))
            if not bool(torch.isfinite(found).all()):
                raise CodecError(f"{self.name}: expected finite values, found NaN or infinity; drop the contribution")
            found[found < SMALLEST_MAGNITUDE] = 0
            first = start // self.block_values
            scales[first : first + len(blocks)] = found.numpy()
            reciprocals = torch.where(found > 0, 1 / found, found)
            halves = self._nearest(blocks * reciprocals[:, None]).view(-1, 2)
            bytes_of = halves[:, 0] | (halves[:, 1] << 4)
            packed[start // 2 : start // 2 + -(-count // 2)] = bytes_of[: -(-count // 2)].numpy()
        return encoded.data.toreadonly()

    def _decode(self, encoded: NDArray[np.uint8], out: Tensor) -> None:
        num_values = out.numel()
        if not num_values:
            return
        num_blocks = -(-num_values // self.block_values)
        scales: NDArray[np.float32] = encoded[: 4 * num_blocks].view("<f4").astype(np.float32)
        packed = encoded[4 * num_blocks :]
        if not (np.isfinite(scales).all() and (scales >= 0).all()):
            raise CodecError(f"{self.name}: expected finite scales of 0 or more, found others; drop the message")
        if (num_values % 2 and packed[-1] >> 4) or _UNUSED[packed].any():
            raise CodecError(f"{self.name}: expected levels that are used, found others; drop the message")
        pairs = _pairs_of(self.name)
        into: NDArray[np.float32] = out.numpy()
        for start in range(0, num_values, _FOUR_BIT_CHUNK_VALUES):
            piece = into[start : start + _FOUR_BIT_CHUNK_VALUES]
            first = start // self.block_values
            levels = pairs[packed[start // 2 : start // 2 + -(-len(piece) // 2)]].reshape(-1)[: len(piece)]
            whole = len(piece) // self.block_values
            split = whole * self.block_values
            np.multiply(
                levels[:split].reshape(whole, self.block_values),
                scales[first : first + whole, None],
                out=piece[:split].reshape(whole, self.block_values),
            )
            if split < len(piece):
                np.multiply(levels[split:], scales[first + whole], out=piece[split:])

    @abstractmethod
    def _nearest(self, ratios: Tensor) -> Tensor:
        """Returns the four bits, uint8, of the nearest level of each ratio, -1 to 1; 0 stands for 0."""


class Int4Codec(_FourBitCodec):
    """Levels of -7 to 7 sevenths in two's complement; the error is at most a fourteenth of the block's scale."""

    name: ClassVar[CodecName] = "int4"
    _levels: ClassVar[NDArray[np.float32]] = np.array([*range(8), 0, *range(-7, 0)], np.float32) / np.float32(7)

    def _nearest(self, ratios: Tensor) -> Tensor:
        return (ratios.mul_(7).round_().clamp_(-7, 7).to(torch.int8) & 15).view(torch.uint8)


class E3M0Codec(_FourBitCodec):
    """A sign and seven powers of two, 1 to 1/64 of the block's scale, or 0 (arXiv 2501.18512).

    The error is at most a third of a value, or a 128th of the scale where that is more.
    """

    name: ClassVar[CodecName] = "e3m0"
    _levels: ClassVar[NDArray[np.float32]] = np.array(
        [0.0, *(2.0**power for power in range(-6, 1)), 0.0, *(-(2.0**power) for power in range(-6, 1))], np.float32
    )

    def _nearest(self, ratios: Tensor) -> Tensor:
        # One half up in the mantissa (1.5 is the border of 1 and 2) and the exponent is that of the nearest power.
        bits = ratios.view(torch.int32)
        magnitudes = bits & 0x7FFFFFFF
        exponents = ((magnitudes + 0x400000) >> 23).sub_(120).clamp_(0, 7)
        exponents = torch.maximum(exponents, (magnitudes >= _HALF_OF_LEAST).to(torch.int32))
        return (exponents | ((bits < 0) & (exponents > 0)).to(torch.int32) << 3).to(torch.uint8)


_CODECS: Final = MappingProxyType[str, Codec](
    {codec.name: codec for codec in (Fp32Codec(), Fp16Codec(), Int8Codec(), Int4Codec(), E3M0Codec())}
)


@cache
def _pairs_of(name: str) -> NDArray[np.float32]:
    """What the two halves of each byte stand for, [256, 2]."""
    codec = _CODECS[name]
    if not isinstance(codec, _FourBitCodec):
        raise TrainerUsageError(f"expected a codec of four bits, found {name!r}")
    every_byte = np.arange(256)
    return np.stack([codec._levels[every_byte & 15], codec._levels[every_byte >> 4]], axis=1)


def codec_named(name: str) -> Codec:
    """Returns the codec of that name. Raises TrainerUsageError: there is none."""
    if name == "sparse":
        from trainer.compression.sparse import SPARSE  # It is made of what is here.

        return SPARSE
    if name not in _CODECS:
        raise TrainerUsageError(f"expected a codec of {', '.join(_CODECS)}, found {name!r}")
    return _CODECS[name]


def _check_vector(vector: Tensor) -> None:
    if vector.dim() != 1 or vector.dtype != torch.float32 or vector.device.type != "cpu" or not vector.is_contiguous():
        raise CodecError(
            f"expected a contiguous fp32 vector on the CPU, found {vector.dtype} of shape {tuple(vector.shape)} on "
            f"{vector.device}; flatten it first"
        )


def _finite_extremes(codec: CodecName, vector: Tensor) -> tuple[float, float]:
    """Smallest and largest value; CodecError if any value is not finite."""
    if vector.numel() == 0:
        return 0.0, 0.0
    smallest, largest = (float(extreme) for extreme in torch.aminmax(vector))
    if not (np.isfinite(smallest) and np.isfinite(largest)):
        raise CodecError(f"{codec}: expected finite values, found NaN or infinity; drop the contribution")
    return smallest, largest


def _encode_blocks(blocks: Tensor, scales: Tensor, levels: Tensor) -> None:
    """Writes the scale of every block, fp32[b], and the nearest level of every value, int8[b, values of a block]."""
    scratch = torch.empty(min(_CHUNK_BLOCKS, len(blocks)), blocks.shape[1])
    for start in range(0, len(blocks), _CHUNK_BLOCKS):
        chunk = blocks[start : start + _CHUNK_BLOCKS]
        # Reductions by torch (twice as fast), the few numbers that come of them by numpy (a fifth of a call's cost).
        magnitudes: NDArray[np.float32] = np.maximum(chunk.amax(1).numpy(), -chunk.amin(1).numpy())
        if not np.isfinite(magnitudes).all():
            raise CodecError("int8: expected finite values, found NaN or infinity; drop the contribution")
        found: NDArray[np.float32] = np.minimum(magnitudes / _LEVELS, _MAX_SCALE)
        found[magnitudes < SMALLEST_MAGNITUDE] = 0
        # A block that is sent as zeros is multiplied by 0.
        reciprocals = np.divide(np.float32(1), found, out=np.zeros_like(found), where=found > 0)
        scaled = torch.mul(chunk, torch.from_numpy(reciprocals)[:, None], out=scratch[: len(chunk)]).round_()
        if (found == _MAX_SCALE).any():  # A clipped scale: the largest magnitudes would come out as 128.
            scaled.clamp_(-127, 127)
        scales[start : start + _CHUNK_BLOCKS] = torch.from_numpy(found)
        levels[start : start + _CHUNK_BLOCKS] = scaled

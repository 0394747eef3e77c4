"""fp32 as it is, and fp16.

fp32 is lossless and copies nothing when encoding. fp16 rounds to nearest even: relative error at most 2**-11 for
magnitudes from 6.1e-5, absolute error at most 2**-25 below that; magnitudes above 65,504 are sent as 65,504, which no
pseudo-gradient of a model that still learns comes near and which error feedback makes up for.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import torch
from torch import Tensor
from typing_extensions import Buffer

from trainer.compression.vectors.codec import CodecName, byte_view, check_vector, expect_size, output_vector
from trainer.errors import CodecError

__all__ = ["FP16_MAX", "Fp16Codec", "Fp32Codec"]

FP16_MAX: Final = 65504.0


def _check_finite(codec: CodecName, smallest: float, largest: float) -> None:
    if not (np.isfinite(smallest) and np.isfinite(largest)):
        raise CodecError(f"{codec}: expected finite values, found NaN or infinity; drop the contribution")


def _extremes(vector: Tensor) -> tuple[float, float]:
    """Smallest and largest value; NaN if any value is."""
    if vector.numel() == 0:
        return 0.0, 0.0
    smallest, largest = torch.aminmax(vector.detach())
    return float(smallest), float(largest)


class Fp32Codec:
    """Little-endian fp32."""

    name: Final[CodecName] = "fp32"

    def encode(self, vector: Tensor) -> memoryview:
        """See ``Codec.encode``; shares the vector's memory."""
        check_vector(vector)
        _check_finite(self.name, *_extremes(vector))
        return vector.detach().numpy().view(np.uint8).data.toreadonly()

    def decode(self, buffer: Buffer, num_values: int, out: Tensor | None = None) -> Tensor:
        """See ``Codec.decode``."""
        view = byte_view(buffer)
        expect_size(self.name, view, num_values, self.encoded_bytes(num_values))
        vector = output_vector(out, num_values)
        np.copyto(vector.numpy(), np.frombuffer(view, dtype="<f4"))
        return vector

    def encoded_bytes(self, num_values: int) -> int:
        """See ``Codec.encoded_bytes``."""
        return 4 * num_values

    def values_per_part(self, part_bytes: int = 1 << 20) -> int:
        """See ``Codec.values_per_part``."""
        return max(1, part_bytes // 4)


class Fp16Codec:
    """Little-endian IEEE half precision."""

    name: Final[CodecName] = "fp16"

    def encode(self, vector: Tensor) -> memoryview:
        """See ``Codec.encode``."""
        check_vector(vector)
        smallest, largest = _extremes(vector)
        _check_finite(self.name, smallest, largest)
        if smallest < -FP16_MAX or largest > FP16_MAX:
            vector = vector.clamp(-FP16_MAX, FP16_MAX)
        halves = vector.detach().to(torch.float16).numpy()
        return halves.view(np.uint8).data.toreadonly()

    def decode(self, buffer: Buffer, num_values: int, out: Tensor | None = None) -> Tensor:
        """See ``Codec.decode``."""
        view = byte_view(buffer)
        expect_size(self.name, view, num_values, self.encoded_bytes(num_values))
        vector = output_vector(out, num_values)
        # torch converts 20 times as fast as numpy, but warns of memory it may not write: the bytes are copied first.
        halves = torch.empty(num_values, dtype=torch.float16)
        np.copyto(halves.numpy().view(np.uint8), np.frombuffer(view, dtype=np.uint8))
        return vector.copy_(halves)

    def encoded_bytes(self, num_values: int) -> int:
        """See ``Codec.encoded_bytes``."""
        return 2 * num_values

    def values_per_part(self, part_bytes: int = 1 << 20) -> int:
        """See ``Codec.values_per_part``."""
        return max(1, part_bytes // 2)

"""How vectors of fp32 values travel: as they are, in half the bytes, or in a quarter of them.

    codec = codec_named("int8")
    payload = codec.encode(vector)                   # a read-only view of bytes, good for one message
    codec.decode(payload, vector.numel(), out=row)   # into memory the caller already has

Guarantees: decoding is a pure function of the bytes, the same bits on every machine; a buffer that no honest encoder
made is a ``CodecError`` and never a crash, an allocation of the sender's choosing or a silent wrong value; the error of
each codec is bounded and stated beside it. What an encoding leaves out, the residual, is added to the next contribution
(`trainer.collective`). The trade-off: int8 is a plain absmax grid over blocks of 1,024 values (4 bytes of scale for
1,024 of values, 3.98 times fewer bytes than fp32) because one core encodes 6 GB/s of fp32 that way and decodes 12, and
error feedback takes away the bias that a finer grid would cost time to avoid.
"""

from __future__ import annotations

from trainer.compression.vectors.codec import Codec, CodecName
from trainer.compression.vectors.floats import Fp16Codec, Fp32Codec
from trainer.compression.vectors.int8 import BLOCK_VALUES, Int8Codec
from trainer.compression.vectors.names import codec_named

__all__ = [
    "BLOCK_VALUES",
    "Codec",
    "CodecName",
    "Fp16Codec",
    "Fp32Codec",
    "Int8Codec",
    "codec_named",
]

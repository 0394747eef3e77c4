"""Which codec a name stands for."""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

from trainer.compression.vectors.codec import Codec, CodecName
from trainer.compression.vectors.floats import Fp16Codec, Fp32Codec
from trainer.compression.vectors.int8 import Int8Codec
from trainer.errors import TrainerUsageError

__all__ = ["codec_named"]

_CODECS: Final = MappingProxyType[CodecName, Codec]({"fp32": Fp32Codec(), "fp16": Fp16Codec(), "int8": Int8Codec()})


def codec_named(name: str) -> Codec:
    """The codec of that name.

    Raises:
        TrainerUsageError: there is none.
    """
    for known, codec in _CODECS.items():
        if known == name:
            return codec
    raise TrainerUsageError(f"expected a codec of {', '.join(_CODECS)}, found {name!r}")

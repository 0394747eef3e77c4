"""The layout of Megatron's ``.idx``, which exports write and imports read; and which formats of ids can be read.

``.idx``: magic, version 1, code of the type of an id, number of sequences, number of documents + 1; then int32
lengths of the sequences in ids, int64 offsets of the sequences in bytes, and int64 document borders, as numbers of
sequences from 0 to all. All little-endian. The ids lie in ``.bin``, one sequence after the other, nothing between.
"""

from __future__ import annotations

import struct
from enum import StrEnum
from typing import Final

MEGATRON_MAGIC: Final = b"MMIDIDX\0\0"
MEGATRON_VERSION: Final = 1
MEGATRON_DTYPES: Final = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
"""Types of ids by their code; 6 and 7 are floats, which ids are not."""
MEGATRON_HEADER: Final = struct.Struct("<9sQBQQ")
"""Magic, version, code of the type, sequences, documents + 1."""

EXPORT_RECORD_NAME: Final = "genesis-export.json"
"""What an export was made of: `genesis.export.record`."""

DATATROVE_VOCABULARY: Final = "genesis/"
"""Before a vocabulary's digest, where datatrove's metadata name the tokenizer."""


class TokenFormat(StrEnum):
    """A form in which documents come as ids."""

    MEGATRON = "megatron"
    DATATROVE = "datatrove"

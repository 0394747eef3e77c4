"""What a user can choose about an export, and which type of number its ids get."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from genesis.errors import UsageError

NARROW_IDS = 2**16
"""Ids of a vocabulary that 2 bytes can tell apart."""

Ids = npt.NDArray[np.integer]
"""integer[N] in the little-endian type of the file, `id_dtype`."""

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._\-]{0,127}")
_RANGE = re.compile(r"([0-9]{0,15}):([0-9]{0,15})")
_COMPRESSION = re.compile(r"zstd(:([1-9]|1[0-9]|2[0-2]))?")
_MDS_LIMIT_BYTES = 2**32


class ExportFormat(StrEnum):
    """Whose form."""

    MEGATRON = "megatron"
    MDS = "mds"
    DATATROVE = "datatrove"
    NPY = "npy"


def id_dtype(target: ExportFormat, vocabulary_ids: int) -> np.dtype[np.integer]:
    """How an id is stored: uint16 for a vocabulary of at most 65,536 ids, else uint32; int32 for Megatron."""
    if vocabulary_ids <= NARROW_IDS:
        return np.dtype("<u2")
    return np.dtype("<i4") if target is ExportFormat.MEGATRON else np.dtype("<u4")


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportOptions:
    """One export."""

    target: ExportFormat
    source: str | None = None
    """Only the shards of this source; None for all sources, one after the other by name."""
    first_shard: int = 0
    end_shard: int | None = None
    """Only shards ``first_shard … end_shard − 1``; None for the store's end."""
    name: str = "tokens"
    """What the files are called, before their endings; MDS has names of its own."""
    seq_len: int | None = None
    """MDS: windows of so many ids instead of one sample a document."""
    size_limit_bytes: int = 1 << 26
    """MDS: size of a shard file; a document that is larger has a file of its own."""
    compression: str | None = None
    """MDS: ``zstd`` or ``zstd:LEVEL``."""
    hashes: tuple[str, ...] = ()
    """MDS: digests of each file that index.json is to have, names of hashlib."""
    threads: int = 2
    """Shards read at once."""

    def __post_init__(self) -> None:
        """Checks ranges, and that what is given belongs to the format."""
        if not _NAME.fullmatch(self.name):
            raise UsageError(f"--name: expected letters, digits, '.', '_' or '-', found {self.name!r}")
        if self.end_shard is not None and self.end_shard <= self.first_shard:
            raise UsageError(
                f"--shards: expected FIRST:END with FIRST < END, found {self.first_shard}:{self.end_shard}"
            )
        if not 1 <= self.threads <= 256:
            raise UsageError(f"--threads: expected 1 to 256, found {self.threads}")
        if self.target is not ExportFormat.MDS:
            self._check_no_mds_options()
            return
        if self.seq_len is not None and not 1 <= self.seq_len <= 2**27:
            raise UsageError(f"--seq-len: expected 1 to {2**27} ids, found {self.seq_len}")
        if not 1024 <= self.size_limit_bytes < _MDS_LIMIT_BYTES:
            raise UsageError(f"--size-limit: expected 1,024 to 2**32 - 1 bytes, found {self.size_limit_bytes}")
        if self.compression is not None and not _COMPRESSION.fullmatch(self.compression):
            raise UsageError(f"--compression: expected zstd or zstd:LEVEL, 1 to 22, found {self.compression!r}")
        if list(self.hashes) != sorted(set(self.hashes)) or not set(self.hashes) <= set(hash_names()):
            raise UsageError(
                f"--hash: expected different ones of {', '.join(hash_names())}, found {', '.join(self.hashes)}"
            )

    def _check_no_mds_options(self) -> None:
        given = {
            "--seq-len": self.seq_len is not None,
            "--compression": self.compression is not None,
            "--hash": bool(self.hashes),
        }
        for option, there in given.items():
            if there:
                raise UsageError(f"{option} goes with --to mds, found it with --to {self.target}")


def hash_names() -> list[str]:
    """The digests that both hashlib and mosaicml-streaming have."""
    return sorted(name for name in hashlib.algorithms_guaranteed if not name.startswith("shake_"))


def parse_shard_range(text: str) -> tuple[int, int | None]:
    """``10:20``, ``10:`` or ``:20``: the first shard and the one after the last.

    Raises:
        UsageError: it is no such range.
    """
    found = _RANGE.fullmatch(text.strip())
    if found is None or not (found[1] or found[2]):
        raise UsageError(f"--shards: expected a range such as 0:100, 100: or :100, found {text!r}")
    return int(found[1] or 0), int(found[2]) if found[2] else None

"""``packed/shard_{id}.zst``: the transfer form, a shard's ids narrowed to their vocabulary and compressed by zstd.

The file is one zstd frame (RFC 8878) around the ids as little-endian uint16 where the vocabulary has at most 65,536
ids, else uint32. It carries its content size and no checksum: the index entry's sha256 vouches for it, and the
shard's own sha256 for what it expands to. `zstd -d` reads it.

Writing is deterministic for one version of libzstd: the same ids and level give the same bytes on every machine.
Another version of libzstd may give other bytes, of another size, for the same ids; what they expand to never differs.
So a digest in an index is of the bytes that were written, and packing a shard again need not reproduce it.

Ids of 2 bytes are written with zstd's fastest strategy and matches from 4 bytes, two ids, where its presets begin at 5
or more: 1.20 to 1.25 bytes a token on 14 English shards, in the time in which level 3 gives 1.24 to 1.29. Level 9
gives 1.12 to 1.17 but takes five times as long; planes of low and high bytes are larger at every level. Ids of 4
bytes are written at level 3, which nothing that was tried improved on.

Reading is bounded before it begins: a frame that says it holds anything but the expected number of bytes, or asks for
a window larger than that, is refused from its header, so a hostile file costs no more memory than an honest one
(2 or 4 bytes an id beside the 8 of the result).
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt
import zstandard
from typing_extensions import Buffer

from manifests.errors import ShardFormatError

_MAGIC: Final = b"\x28\xb5\x2f\xfd"
_NARROW_IDS: Final = 2**16
_MIN_WINDOW_BYTES: Final = 2**10  # The smallest window that a frame header can spell.
_MAX_WINDOW_LOG: Final = 23  # 8 MB: what RFC 8878 asks every decoder to have.
_WIDE_LEVEL: Final = 3


def packed_dtype(next_merge_id: int) -> np.dtype[np.unsignedinteger]:
    """How an id is stored: little-endian uint16 for a vocabulary of at most 65,536 ids, else uint32."""
    return np.dtype("<u2") if next_merge_id <= _NARROW_IDS else np.dtype("<u4")


def max_packed_bytes(num_tokens: int, next_merge_id: int) -> int:
    """The largest packed file of so many ids: what zstd may make of ids that do not compress, 5,019,531 for 2,500,000.

    A reader refuses an index entry, or an answer, that says more, before it fetches it.
    """
    content = num_tokens * packed_dtype(next_merge_id).itemsize
    return content + (content >> 8) + (max(2**17 - content, 0) >> 11)


def pack_ids(ids: npt.NDArray[np.integer], next_merge_id: int, *, level: int | None = None) -> bytes:
    """The packed file of a shard's ids. Releases the interpreter lock.

    Args:
        ids: integer[N], N ≥ 1, each in 0 … ``next_merge_id`` − 1.
        next_merge_id: ids of the vocabulary the shard was written with.
        level: a preset of zstd, 1 to 22; None for the parameters measured to suit ids. A reader need not know it.

    Raises:
        ValueError: an id is outside the vocabulary, or there are none.
    """
    dtype = packed_dtype(next_merge_id)
    if ids.ndim != 1 or not len(ids):
        raise ValueError(f"expected one dimension of ids to pack, found the shape {ids.shape}")
    lowest, highest = int(ids.min()), int(ids.max())
    if lowest < 0 or highest >= next_merge_id:
        raise ValueError(f"expected ids of 0 to {next_merge_id - 1} to pack, found {lowest} to {highest}")
    narrow = np.ascontiguousarray(ids, dtype=dtype)
    return zstandard.ZstdCompressor(compression_params=_parameters(narrow.nbytes, dtype, level)).compress(narrow.data)


def unpack_ids(data: Buffer, out: npt.NDArray[np.int64], next_merge_id: int) -> None:
    """Expands a packed file into ``out``, which is left as it was unless everything is right.

    The file's sha256 should have been checked before; everything here holds for files that nothing vouches for too.

    Args:
        data: the whole file.
        out: int64[N], filled: `ShardImage.ids`, say. N is how many ids the file must hold.
        next_merge_id: ids of the vocabulary the shard was written with, by its index entry.

    Raises:
        ShardFormatError: the file is no single zstd frame of exactly N ids, is truncated, goes on behind the frame,
            asks for a window larger than its content, or holds an id of ``next_merge_id`` or above.
    """
    out[:] = narrow_ids(data, len(out), next_merge_id)


def narrow_ids(data: Buffer, num_tokens: int, next_merge_id: int) -> npt.NDArray[np.unsignedinteger]:
    """The ids of a packed file in the type they are stored in; `unpack_ids` without widening them.

    Args:
        data: the whole file.
        num_tokens: how many ids it must hold.
        next_merge_id: ids of the vocabulary the shard was written with, by its index entry.

    Returns:
        `packed_dtype`[``num_tokens``], read-only.

    Raises:
        ShardFormatError: see `unpack_ids`.
    """
    dtype = packed_dtype(next_merge_id)
    view = memoryview(data).cast("B")
    _check_frame(view, num_tokens * dtype.itemsize, max_packed_bytes(num_tokens, next_merge_id))
    try:
        content = zstandard.ZstdDecompressor().decompress(view, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise ShardFormatError(
            f"expected one zstd frame of {num_tokens} ids, found a damaged one ({error}); fetch it again"
        ) from None
    narrow = np.frombuffer(content, dtype=dtype)
    highest = int(narrow.max())
    if highest >= next_merge_id:
        position = int(narrow.argmax())
        raise ShardFormatError(f"expected packed ids below {next_merge_id}, found {highest} at position {position}")
    return narrow


def _parameters(
    content_bytes: int, dtype: np.dtype[np.unsignedinteger], level: int | None
) -> zstandard.ZstdCompressionParameters:
    if level is not None or dtype.itemsize > 2:
        return zstandard.ZstdCompressionParameters.from_level(
            _WIDE_LEVEL if level is None else level,
            source_size=content_bytes,
            write_content_size=True,
            write_checksum=False,
        )
    return zstandard.ZstdCompressionParameters(
        window_log=min(max((content_bytes - 1).bit_length(), 10), _MAX_WINDOW_LOG),
        hash_log=16,
        min_match=4,
        strategy=zstandard.STRATEGY_FAST,
        write_content_size=True,
        write_checksum=False,
    )


def _check_frame(view: memoryview, content_bytes: int, max_bytes: int) -> None:
    """Refuses, from the header alone, a frame that is not what an honest writer makes of so much content."""
    if not content_bytes:
        raise ShardFormatError("expected a packed shard of 1 id or more, asked for 0")
    if len(view) > max_bytes:
        raise ShardFormatError(
            f"expected a packed shard of at most {max_bytes} bytes for {content_bytes} bytes of ids, found {len(view)}"
        )
    magic = bytes(view[:4])
    if magic != _MAGIC:
        raise ShardFormatError(f"expected a zstd frame ({_MAGIC.hex()}…), found {magic.hex() or 'nothing'}")
    try:
        frame = zstandard.get_frame_parameters(view)
    except zstandard.ZstdError as error:
        raise ShardFormatError(f"expected a zstd frame, found a damaged header ({error}); fetch it again") from None
    if frame.content_size != content_bytes:
        found = "none" if frame.content_size == zstandard.CONTENTSIZE_UNKNOWN else f"{frame.content_size} bytes"
        raise ShardFormatError(f"expected a zstd frame with a content size of {content_bytes} bytes, found {found}")
    if frame.window_size > max(content_bytes, _MIN_WINDOW_BYTES):
        raise ShardFormatError(
            f"expected a zstd window of at most {content_bytes} bytes, the content's size, found {frame.window_size}"
        )
    if frame.dict_id:
        raise ShardFormatError(f"expected a zstd frame without a dictionary, found one that needs {frame.dict_id}")

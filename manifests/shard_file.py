"""``shard_{id}.pt``: token ids as the bytes that ``torch.save`` writes, made and read without torch.

A shard is a one-dimensional ``torch.int64`` tensor. ``torch.save`` stores it as an uncompressed zip of seven records;
everything but the ids, their CRC-32 and a fingerprint derived from it is fixed once the length is known. Writing
that layout here gives the same bytes whatever release of torch (or none) is installed: it spares every populating
process torch's import (2.2 s and 0.2 GB, measured), and lets ids be copied once, straight into the file's image.
A test holds the result equal to ``torch.save`` for every length.

Reading accepts exactly this form and nothing else; no pickle is ever executed.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
from isal import isal_zlib
from typing_extensions import Buffer

from manifests.errors import ShardFormatError

SHARD_DATA_OFFSET: Final = 704
"""Where the ids begin in every shard file, whatever its length."""

_MAX_TOKENS: Final = 2**28  # 2 GB
_IDS: Final = 4  # Which of the seven records holds the ids.
_ALIGNMENT: Final = 64
_FLAGS: Final = 0x0808  # sizes follow the data; names are UTF-8
_ARCHIVE: Final = "archive/"
_DATA: Final = "data/0"
_FINGERPRINT: Final = ".data/serialization_id"
# What torch's writer makes of the seven record names under libstdc++; the same for every one-tensor file.
_NAMES_HASH: Final = "15728199511854643026"
_MASK: Final = 2**64 - 1
_PICKLE_HEAD: Final = (
    b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\nq\x00((X\x07\x00\x00\x00storageq\x01ctorch\nLongStorage\nq\x02"
    b"X\x01\x00\x00\x000q\x03X\x03\x00\x00\x00cpuq\x04"
)


@dataclass(frozen=True, slots=True)
class _Record:
    """One zip record and where it stands."""

    name: bytes
    offset: int
    data_offset: int
    size: int

    @property
    def end(self) -> int:
        return self.data_offset + self.size + 16


@dataclass(frozen=True, slots=True)
class ShardImage:
    """A shard file being made in memory.

    Fill `ids`, then call `seal`; `buffer` is then the file. The image may be filled and sealed again.

    The memory begins at a page boundary, so that a store may hand it to the disk without copying it.

    Attributes:
        buffer: the whole file, ``shard_file_bytes(num_tokens)`` long.
        ids: int64[num_tokens], a view into ``buffer``.
    """

    buffer: memoryview
    ids: npt.NDArray[np.int64]

    @classmethod
    def empty(cls, num_tokens: int) -> ShardImage:
        """An image for ``num_tokens`` ids, all zero.

        Raises:
            ValueError: ``num_tokens`` is below 1 or above 2**28 − 1 (2 GB, the limit of this form).
        """
        buffer = memoryview(mmap.mmap(-1, shard_file_bytes(num_tokens), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
        buffer[:SHARD_DATA_OFFSET] = _head(num_tokens)
        ids = np.frombuffer(buffer, dtype="<i8", count=num_tokens, offset=SHARD_DATA_OFFSET)
        return cls(buffer=buffer, ids=ids)

    def seal(self) -> None:
        """Writes what depends on the ids: their CRC-32, torch's fingerprint, and the central directory."""
        end = SHARD_DATA_OFFSET + 8 * len(self.ids)
        self.buffer[end:] = _tail(len(self.ids), isal_zlib.crc32(self.buffer[SHARD_DATA_OFFSET:end]))


def encode_shard(ids: npt.NDArray[np.integer]) -> memoryview:
    """The ``.pt`` file of a tensor of ``ids``.

    Args:
        ids: integer[N], N ≥ 1.

    Returns:
        The bytes that ``torch.save(torch.from_numpy(ids.astype("int64")))`` writes.
    """
    image = ShardImage.empty(len(ids))
    image.ids[:] = ids
    image.seal()
    return image.buffer


def decode_shard(data: Buffer, *, expected_tokens: int | None = None) -> npt.NDArray[np.int64]:
    """The ids of a shard file, without a copy.

    Args:
        data: the whole file.
        expected_tokens: how many ids it must hold; by default whatever its size says.

    Returns:
        int64[N], a read-only view into ``data``.

    Raises:
        ShardFormatError: the file is not of this form, holds another number of ids, or its CRC-32 is wrong.
    """
    view = memoryview(data).cast("B")
    num_tokens = expected_tokens if expected_tokens is not None else _num_tokens(view)
    ids = view_shard(view, num_tokens)
    end = SHARD_DATA_OFFSET + 8 * num_tokens
    if isal_zlib.crc32(view[SHARD_DATA_OFFSET:end]) != _stored_crc(view, num_tokens):
        raise ShardFormatError("the ids do not match the CRC-32 stored with them: the file is damaged, fetch it again")
    ids.flags.writeable = False
    return ids


def view_shard(data: Buffer, num_tokens: int) -> npt.NDArray[np.int64]:
    """The ids of a shard file whose sha256 was checked before: a view, made without reading them.

    Size, header, and all that follows the ids are held to this form to the byte; only whether the ids match the
    CRC-32 stored with them is left out. That takes some 0.1 ms for a shard of 2,500,000 ids and touches its first and
    last page, where `decode_shard` reads all of it.

    Args:
        data: the whole file.
        num_tokens: how many ids it must hold.

    Returns:
        int64[num_tokens], read-only exactly if ``data`` is: over a private writable mapping it can be written to.

    Raises:
        ShardFormatError: the file is not of this form, or holds another number of ids.
    """
    view = memoryview(data).cast("B")
    if not 1 <= num_tokens < _MAX_TOKENS or len(view) != shard_file_bytes(num_tokens):
        expected = f"in {shard_file_bytes(num_tokens)} bytes, " if 1 <= num_tokens < _MAX_TOKENS else ""
        raise ShardFormatError(f"expected a shard of {num_tokens} ids {expected}found {len(view)} bytes")
    if view[:SHARD_DATA_OFFSET] != _head(num_tokens):
        raise ShardFormatError("expected the header of a one-dimensional int64 tensor, found another; nothing was read")
    if view[SHARD_DATA_OFFSET + 8 * num_tokens :] != _tail(num_tokens, _stored_crc(view, num_tokens)):
        raise ShardFormatError(
            "expected the directory of a one-dimensional int64 tensor behind its ids, found another: the file is "
            "damaged, fetch it again"
        )
    return np.frombuffer(view, dtype="<i8", count=num_tokens, offset=SHARD_DATA_OFFSET)


def shard_file_bytes(num_tokens: int) -> int:
    """Size of the file of ``num_tokens`` ids: 20,001,577 bytes for 2,500,000."""
    layout = _layout(num_tokens)
    return layout[-1].end + len(_directory(layout, [0] * len(layout)))


def _num_tokens(view: memoryview) -> int:
    """The length that the file's own pickle gives, read from where this form has it; 0 if it is not there."""
    start = _layout(1)[0].data_offset + len(_PICKLE_HEAD)
    opcode, rest = bytes(view[start : start + 1]), view[start + 1 : start + 5]
    widths = {b"K": "<B", b"M": "<H", b"J": "<i"}
    if opcode not in widths or len(rest) < 4:
        return 0
    (length,) = struct.unpack_from(widths[opcode], rest)
    return length if 1 <= length < _MAX_TOKENS else 0


def _contents(num_tokens: int) -> list[bytes]:
    """The records' contents, in torch's order; empty for the two that depend on the ids."""
    return [_pickle(num_tokens), b"1", b"64", b"little", b"", b"3\n", b""]


def _head(num_tokens: int) -> bytes:
    """Everything before the ids: four records and the header of theirs."""
    layout = _layout(num_tokens)
    before = zip(layout[:_IDS], _contents(num_tokens), strict=False)
    return b"".join(_record(record, content) for record, content in before) + _header(layout[_IDS])


def _tail(num_tokens: int, ids_crc: int) -> bytes:
    """Everything behind the ids, which follows from their number and their CRC-32."""
    layout, contents = _layout(num_tokens), _contents(num_tokens)
    crcs = [isal_zlib.crc32(content) for content in contents]
    crcs[_IDS] = ids_crc
    contents[-1] = _fingerprint(crcs[:-1])
    crcs[-1] = isal_zlib.crc32(contents[-1])
    after = zip(layout[_IDS + 1 :], contents[_IDS + 1 :], strict=True)
    behind = b"".join(_record(record, content) for record, content in after)
    return _descriptor(layout[_IDS], ids_crc) + behind + _directory(layout, crcs)


def _stored_crc(view: memoryview, num_tokens: int) -> int:
    """The CRC-32 that the file's own descriptor of the ids gives."""
    (crc,) = struct.unpack_from("<I", view, SHARD_DATA_OFFSET + 8 * num_tokens + 4)
    return int(crc)


def _layout(num_tokens: int) -> list[_Record]:
    if not 1 <= num_tokens < _MAX_TOKENS:
        raise ValueError(f"expected 1 to {_MAX_TOKENS - 1} ids in a shard, found {num_tokens}")
    names = ["data.pkl", ".format_version", ".storage_alignment", "byteorder", _DATA, "version", _FINGERPRINT]
    sizes = [len(content) for content in _contents(num_tokens)]
    sizes[_IDS], sizes[-1] = 8 * num_tokens, 40
    records: list[_Record] = []
    offset = 0
    for name, size in zip(names, sizes, strict=True):
        raw = (_ARCHIVE + name).encode()
        # Room for a 4-byte extra-field header, then up to the next multiple of 64.
        start = offset + 30 + len(raw) + 4
        record = _Record(raw, offset, -(-start // _ALIGNMENT) * _ALIGNMENT, size)
        records.append(record)
        offset = record.end
    return records


def _record(record: _Record, content: bytes) -> bytes:
    return _header(record) + content + _descriptor(record, isal_zlib.crc32(content))


def _header(record: _Record) -> bytes:
    padding = record.data_offset - record.offset - 30 - len(record.name)
    header = struct.pack("<4s5H3I2H", b"PK\3\4", 0, _FLAGS, 0, 0, 0, 0, 0, 0, len(record.name), padding)
    return header + record.name + b"FB" + struct.pack("<H", padding - 4) + b"Z" * (padding - 4)


def _descriptor(record: _Record, crc: int) -> bytes:
    return struct.pack("<4sIII", b"PK\7\10", crc, record.size, record.size)


def _directory(layout: list[_Record], crcs: list[int]) -> bytes:
    """Central directory, its zip64 end records, and the end record."""
    entries = b"".join(
        struct.pack(
            "<4s6H3I5H2I", b"PK\1\2", 0, 0, _FLAGS, 0, 0, 0, crc, record.size, record.size, len(record.name),
            0, 0, 0, 0, 0, record.offset,
        ) + record.name
        for record, crc in zip(layout, crcs, strict=True)
    )  # fmt: skip
    start, count = layout[-1].end, len(layout)
    zip64 = struct.pack("<4sQ2H2I4Q", b"PK\6\6", 44, 0x031E, 45, 0, 0, count, count, len(entries), start)
    locator = struct.pack("<4sIQI", b"PK\6\7", 0, start + len(entries), 1)
    end = struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, count, count, len(entries), start, 0)
    return entries + zip64 + locator + end


def _fingerprint(crcs: list[int]) -> bytes:
    """Torch's ``serialization_id``: a fixed hash of the names, and the CRCs folded as ``hash_combine`` does."""
    seed = 0
    for crc in crcs:
        seed ^= (crc + 0x9E3779B9 + (seed << 6) + (seed >> 2)) & _MASK
    return f"{_NAMES_HASH}{seed:020d}".encode()


def _pickle(num_tokens: int) -> bytes:
    """The pickle of a contiguous 1-D int64 tensor over storage ``0``, as torch's protocol-2 pickler spells it."""
    length = _pickled_int(num_tokens)
    tail = b"\x85q\x06K\x01\x85q\x07\x89ccollections\nOrderedDict\nq\x08)Rq\ttq\nRq\x0b."
    return _PICKLE_HEAD + length + b"tq\x05QK\x00" + length + tail


def _pickled_int(value: int) -> bytes:
    if value < 2**8:
        return struct.pack("<cB", b"K", value)
    if value < 2**16:
        return struct.pack("<cH", b"M", value)
    return struct.pack("<ci", b"J", value)

"""The shard form: byte for byte what ``torch.save`` writes, and nothing else is accepted."""

from __future__ import annotations

import io
import mmap
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from manifests import (
    SHARD_DATA_OFFSET,
    ShardFormatError,
    ShardImage,
    decode_shard,
    encode_shard,
    sha256_hex,
    shard_file_bytes,
    view_shard,
)

# These pin the format. A change means that every published shard has another digest: do not update them, find out why.
GOLDEN_FULL = "e8dc04d559f468f1c0c8a3e4e84c2577718ef5aada7968a7226cc16dbed01945"
GOLDEN_SMALL = "c9d5016c3d3dd5fc8eb98aba9f7512d0995e8018ec5fedd1a2972417fa55d7b7"

LENGTHS = st.integers(1, 300) | st.integers(1, 70_000) | st.sampled_from([255, 256, 65_535, 65_536])


def saved_by_torch(ids: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    torch.save(torch.from_numpy(ids.astype(np.int64)), buffer)
    return buffer.getvalue()


@pytest.mark.slow
@settings(deadline=None)
@given(length=LENGTHS, seed=st.integers(0, 2**32 - 1), bits=st.integers(1, 63))
def test_equal_to_torch_save(length, seed, bits):
    ids = np.random.default_rng(seed).integers(-(2**bits), 2**bits, size=length, dtype=np.int64)
    assert bytes(encode_shard(ids)) == saved_by_torch(ids)


@pytest.mark.slow
def test_equal_to_torch_save_for_every_small_length():
    for length in range(1, 700):
        ids = np.arange(length)
        assert bytes(encode_shard(ids)) == saved_by_torch(ids), length


@pytest.mark.slow
@settings(deadline=None)
@given(length=LENGTHS, seed=st.integers(0, 2**32 - 1))
def test_what_was_encoded_is_decoded(length, seed):
    ids = np.random.default_rng(seed).integers(0, 32_000, size=length)
    image = encode_shard(ids)
    assert len(image) == shard_file_bytes(length)
    for expected_tokens in (None, length):
        decoded = decode_shard(image, expected_tokens=expected_tokens)
        assert decoded.dtype == np.int64
        assert np.array_equal(decoded, ids)
        assert not decoded.flags.writeable


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32, np.int32, np.int64])
def test_any_integer_type_gives_the_same_file(dtype):
    ids = np.arange(1000)
    assert encode_shard(ids.astype(dtype)) == encode_shard(ids)


def test_torch_and_zip_read_it(tmp_path):
    ids = np.arange(5_000)
    (tmp_path / "shard_0.pt").write_bytes(encode_shard(ids))
    tensor = torch.load(tmp_path / "shard_0.pt", weights_only=True)
    assert tensor.dtype == torch.int64
    assert torch.equal(tensor, torch.from_numpy(ids))
    mapped = torch.load(tmp_path / "shard_0.pt", weights_only=True, mmap=True)
    assert torch.equal(mapped, tensor)
    with zipfile.ZipFile(io.BytesIO(encode_shard(np.arange(1000)))) as archive:
        assert archive.testzip() is None
        assert len(archive.namelist()) == 7


def test_an_image_may_be_filled_and_sealed_again():
    image = ShardImage.empty(500)
    for seed in range(3):
        image.ids[:] = np.random.default_rng(seed).integers(0, 32_000, 500)
        image.seal()
        assert bytes(image.buffer) == saved_by_torch(image.ids)


@settings(deadline=None)
@given(cut=st.integers(1, 3000), length=st.integers(1, 300))
def test_another_length_is_refused(cut, length):
    body = bytes(encode_shard(np.arange(length)))
    for damaged in (body[: max(len(body) - cut, 0)], body + b"\0" * cut):
        with pytest.raises(ShardFormatError):
            decode_shard(damaged)
    with pytest.raises(ShardFormatError):
        decode_shard(body, expected_tokens=length + cut)


@settings(deadline=None)
@given(length=LENGTHS, seed=st.integers(0, 2**32 - 1))
def test_a_view_shows_the_ids_where_they_are(length, seed):
    ids = np.random.default_rng(seed).integers(0, 32_000, size=length)
    body = bytearray(encode_shard(ids))
    view = view_shard(body, length)
    assert view.dtype == np.int64
    assert np.array_equal(view, ids)
    body[SHARD_DATA_OFFSET] ^= 1
    assert view[0] == ids[0] ^ 1


def test_a_view_may_be_written_to_exactly_if_its_buffer_may(tmp_path):
    path = tmp_path / "shard_0.pt"
    path.write_bytes(encode_shard(np.arange(5_000)))
    body = path.read_bytes()
    assert not view_shard(body, 5_000).flags.writeable
    assert not view_shard(memoryview(bytearray(body)).toreadonly(), 5_000).flags.writeable
    with path.open("rb") as file:
        private = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        shared = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    assert not view_shard(shared, 5_000).flags.writeable
    ids = view_shard(private, 5_000)
    ids[7] = 1
    assert (ids[7], decode_shard(path.read_bytes())[7]) == (1, 7)
    assert torch.from_numpy(ids)[7] == 1


def test_every_changed_byte_is_refused_but_by_a_view_those_of_ids_and_their_crc():
    sound, length = bytes(encode_shard(np.arange(20))), 20
    behind = SHARD_DATA_OFFSET + 8 * length
    for position in range(len(sound)):
        body = bytearray(sound)
        body[position] ^= 0x01
        for expected_tokens in (None, length):
            with pytest.raises(ShardFormatError):
                decode_shard(body, expected_tokens=expected_tokens)
        if SHARD_DATA_OFFSET <= position < behind:
            assert view_shard(body, length)[(position - SHARD_DATA_OFFSET) // 8] != (position - SHARD_DATA_OFFSET) // 8
        else:
            with pytest.raises(ShardFormatError):
                view_shard(body, length)


@pytest.mark.parametrize("length", [-1, 0, 19, 21, 2**28, 2**70])
def test_a_view_of_another_length_is_refused(length):
    """Also where the padding to 64 bytes makes the file the same size: its own pickle tells."""
    with pytest.raises(ShardFormatError):
        view_shard(encode_shard(np.arange(20)), length)


@settings(deadline=None)
@given(st.binary(max_size=4000), st.integers(1, 300))
def test_any_other_bytes_are_refused(data, length):
    with pytest.raises(ShardFormatError):
        decode_shard(data)
    with pytest.raises(ShardFormatError):
        view_shard(data, length)
    with pytest.raises(ShardFormatError):
        view_shard(data.ljust(shard_file_bytes(length), b"P")[: shard_file_bytes(length)], length)


class Bomb:
    """Touches a file where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.path,)


def test_other_things_that_torch_saves_are_refused_and_no_pickle_is_executed(tmp_path):
    ids = torch.arange(20)
    others = (ids.to(torch.int32), ids.reshape(4, 5), ids[::2], ids.to(torch.float64), {"ids": ids})
    for value in (*others, torch.nn.Parameter(torch.zeros(10)), Bomb(tmp_path / "executed")):
        buffer = io.BytesIO()
        torch.save(value, buffer)
        with pytest.raises(ShardFormatError):
            decode_shard(buffer.getvalue())
    assert not (tmp_path / "executed").exists()


def test_golden_digests_and_lengths_that_have_no_form():
    for length in (0, -1, 2**28):
        with pytest.raises(ValueError, match="ids in a shard"):
            ShardImage.empty(length)
    full = encode_shard(np.arange(2_500_000))
    assert len(full) == shard_file_bytes(2_500_000) == 20_001_577
    assert sha256_hex(full) == GOLDEN_FULL
    assert sha256_hex(encode_shard(np.array([10, 266, 31_999, 2]))) == GOLDEN_SMALL

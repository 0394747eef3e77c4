"""The sparse codec: what is kept, what it costs, and what no honest encoder made."""

from __future__ import annotations

import hashlib
import math
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.compression.sparse import (
    BLOCK_SIDE,
    CHUNK_BYTES,
    CHUNK_VALUES,
    TOP_K,
    ChunkOrder,
    SparseCodec,
    _selected,
    _selected_on_device,
)
from trainer.compression.vectors import codec_named
from trainer.errors import CodecError, TrainerUsageError

CODEC = SparseCodec()

dimensions = st.integers(0, 200)
shapes = st.lists(
    st.one_of(
        st.tuples(dimensions), st.tuples(dimensions, dimensions), st.tuples(st.integers(0, 70), st.just(3), st.just(5))
    ),
    max_size=5,
)


def gaussian(num_values: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_values, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("num_values", [0, 1, 63, 64, 4095, 4096, 4097, 3 * 4096, 40 * 4096 + 17])
def test_the_greatest_of_each_chunk_travel_and_nothing_else(num_values: int) -> None:
    vector = gaussian(num_values)
    payload = CODEC.encode(vector)
    assert len(payload) == CODEC.encoded_bytes(num_values) == math.ceil(num_values / CHUNK_VALUES) * CHUNK_BYTES
    sparse = CODEC.decode_sparse(payload, num_values)
    expected: list[int] = []
    for start in range(0, num_values, CHUNK_VALUES):
        chunk = vector[start : start + CHUNK_VALUES]
        expected += sorted((chunk.abs().topk(min(TOP_K, len(chunk))).indices + start).tolist())
    assert sparse.indices.tolist() == expected
    assert torch.equal(CODEC.decode(payload, num_values), sparse.dense())
    sent = vector.numpy()[sparse.indices]
    assert (np.sign(sparse.values) == np.sign(sent)).all()


def test_two_bits_lose_little_of_what_is_sent_and_less_than_bins_over_six_sigma() -> None:
    vector = gaussian(64 * CHUNK_VALUES)
    sparse = CODEC.decode_sparse(CODEC.encode(vector), vector.numel())
    sent = vector.numpy()[sparse.indices]
    lost = ((sent - sparse.values) ** 2).sum() / (sent**2).sum()
    rows = sent.reshape(-1, TOP_K)
    bins = np.clip(np.floor(rows / (3 * np.sqrt((rows**2).mean(1, keepdims=True)))), -2, 1)
    of_sigma = np.zeros_like(rows)
    for each in range(-2, 2):
        mask = bins == each
        of_sigma += mask * (rows * mask).sum(1, keepdims=True) / np.maximum(mask.sum(1, keepdims=True), 1)
    assert lost < 0.006 < ((rows - of_sigma) ** 2).sum() / (rows**2).sum()


def test_a_parameter_takes_less_than_a_fifth_of_a_bit() -> None:
    assert 8 * CODEC.encoded_bytes(1 << 27) / (1 << 27) == 0.171875


def test_what_waits_in_the_residual_is_sent_in_later_rounds() -> None:
    vector = gaussian(CHUNK_VALUES)
    residual, sent = torch.zeros_like(vector), torch.zeros_like(vector)
    for _ in range(200):
        carried = vector + residual
        sparse = CODEC.decode_sparse(CODEC.encode(carried), carried.numel())
        residual = carried.clone()
        sparse.subtract_from(residual)
        sent += sparse.dense()
    assert (sent / 200 - vector).norm() / vector.norm() < 0.25


def test_of_equal_magnitudes_the_first_are_taken() -> None:
    vector = torch.zeros(3 * CHUNK_VALUES)
    vector[CHUNK_VALUES : 2 * CHUNK_VALUES] = torch.tensor([1.0, -1.0]).repeat(CHUNK_VALUES // 2)
    vector[2 * CHUNK_VALUES + 100] = 5.0
    sparse = CODEC.decode_sparse(CODEC.encode(vector), vector.numel())
    places = sparse.indices.reshape(3, TOP_K) % CHUNK_VALUES
    assert places[0].tolist() == places[1].tolist() == list(range(TOP_K))
    assert places[2].tolist() == [*range(TOP_K - 1), 100]
    assert sparse.dense()[2 * CHUNK_VALUES + 100] == 5.0
    assert torch.equal(sparse.dense()[:CHUNK_VALUES], torch.zeros(CHUNK_VALUES))


@given(st.integers(0, 1 << 32), st.integers(0, 3))
@settings(max_examples=30, deadline=None)
def test_an_accelerator_selects_what_a_processor_does(seed: int, decimals: int) -> None:
    chunks = gaussian(2 * CHUNK_VALUES, seed).round(decimals=decimals).view(2, CHUNK_VALUES)
    for ours, theirs in zip(_selected(chunks.numpy()), _selected_on_device(chunks), strict=True):
        assert np.array_equal(ours, theirs)


def test_the_bytes_of_a_vector_stay_the_same() -> None:
    vector = torch.from_numpy(np.random.default_rng(17).standard_normal(3 * CHUNK_VALUES + 100, dtype=np.float32))
    digest = hashlib.sha256(CODEC.encode(vector)).hexdigest()
    assert digest == "f2dfee0b8349b01d74357bcb0e4a723ee059ce52df7b6e3bf7d756eb83c268fc"


@given(shapes)
@settings(deadline=None)
def test_chunk_order_is_reversible_and_keeps_blocks_together(tensor_shapes: list[tuple[int, ...]]) -> None:
    order = ChunkOrder.of(tensor_shapes)
    vector = torch.arange(order.num_values, dtype=torch.float32)
    ordered = order.chunked(vector)
    assert torch.equal(ordered.sort().values, vector)
    assert torch.equal(order.natural(ordered), vector)
    assert order.num_values == sum(math.prod(shape) for shape in tensor_shapes)
    start = chunk = 0
    for shape in tensor_shapes:
        matrix = vector[start : start + math.prod(shape)]
        start += math.prod(shape)
        if len(shape) < 2 or not matrix.numel():
            continue
        matrix = matrix.view(shape[0], -1)
        bands, across = matrix.shape[0] // BLOCK_SIDE, matrix.shape[1] // BLOCK_SIDE
        for band, column in product(range(bands), range(across)):
            rows = slice(band * BLOCK_SIDE, (band + 1) * BLOCK_SIDE)
            block = matrix[rows, column * BLOCK_SIDE : (column + 1) * BLOCK_SIDE]
            assert torch.equal(ordered[chunk : chunk + CHUNK_VALUES], block.reshape(-1))
            chunk += CHUNK_VALUES


def test_a_vector_of_another_length_has_no_chunk_order() -> None:
    with pytest.raises(TrainerUsageError, match="100"):
        ChunkOrder.of([(10, 10)]).chunked(torch.zeros(99))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("count", [1, 100])
def test_what_is_not_finite_is_not_encoded(value: float, count: int) -> None:
    vector = gaussian(2 * CHUNK_VALUES)
    vector[5000 : 5000 + count] = value
    with pytest.raises(CodecError, match="finite"):
        CODEC.encode(vector)


@pytest.mark.parametrize("scale", [1e-38, 1e38, 1e-45])
def test_the_smallest_and_greatest_magnitudes_stay_finite(scale: float) -> None:
    vector = (gaussian(CHUNK_VALUES).clamp(-3, 3) * scale).clamp(-3.4e38, 3.4e38)
    assert bool(torch.isfinite(CODEC.decode(CODEC.encode(vector), CHUNK_VALUES)).all())


@given(st.binary(min_size=CHUNK_BYTES, max_size=CHUNK_BYTES))
def test_any_bytes_are_a_sparse_vector_or_an_error(payload: bytes) -> None:
    try:
        sparse = CODEC.decode_sparse(payload, 1000)
    except CodecError:
        return
    assert len(sparse.indices) <= TOP_K
    assert (np.diff(sparse.indices) > 0).all()
    assert all(0 <= index < 1000 for index in sparse.indices)
    assert np.isfinite(sparse.values).all()


@given(st.integers(0, 2 * CHUNK_BYTES - 1), st.integers(0, 7))
def test_a_flipped_bit_gives_another_valid_vector_or_an_error(place: int, bit: int) -> None:
    payload = bytearray(CODEC.encode(gaussian(2 * CHUNK_VALUES)))
    payload[place] ^= 1 << bit
    try:
        sparse = CODEC.decode_sparse(payload, 2 * CHUNK_VALUES)
    except CodecError:
        return
    assert len(sparse.indices) == 2 * TOP_K
    assert (np.diff(sparse.indices) > 0).all()
    assert sparse.indices[TOP_K - 1] < CHUNK_VALUES <= sparse.indices[TOP_K]
    assert np.isfinite(sparse.values).all()


@pytest.mark.parametrize("size", [0, CHUNK_BYTES - 1, CHUNK_BYTES + 1])
def test_another_size_is_refused(size: int) -> None:
    with pytest.raises(CodecError, match="88"):
        CODEC.decode_sparse(bytes(size), CHUNK_VALUES)


def record(**fields: bytes) -> bytes:
    """One chunk's record with some fields replaced."""
    payload = bytearray(CODEC.encode(gaussian(CHUNK_VALUES)))
    places = {"table": slice(0, 8), "low": slice(8, 56), "high": slice(56, 72)}
    for name, value in fields.items():
        payload[places[name]] = value
    return bytes(payload)


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        (record(table=b"\x80\x7f" * 4), "finite means"),
        (record(table=b"\xc0\xff" * 4), "finite means"),
        (record(high=b"\xff" * 16), "indices"),
        (record(high=bytes(16)), "indices"),
        (record(high=bytes(8) + b"\xff" * 8), "64 indices"),
        (record(high=b"\xff" * 8 + bytes(8), low=bytes(48)), "rising"),
    ],
)
def test_what_no_encoder_made_is_refused(payload: bytes, message: str) -> None:
    with pytest.raises(CodecError, match=message):
        CODEC.decode_sparse(payload, CHUNK_VALUES)


def test_indices_of_one_chunk_cannot_lie_in_another() -> None:
    whole = bytearray(record() + record())
    whole[56:72], whole[CHUNK_BYTES + 56 : CHUNK_BYTES + 72] = b"\xff" * 16, bytes(16)
    with pytest.raises(CodecError, match="64 indices"):
        CODEC.decode_sparse(whole, 2 * CHUNK_VALUES)


def test_a_message_has_room_for_the_contributions_of_a_whole_round() -> None:
    values = CODEC.values_per_part(1 << 20)
    assert values % CHUNK_VALUES == 0
    assert 48 * CODEC.encoded_bytes(values) <= 1 << 20


def test_rounds_find_it_by_its_name() -> None:
    assert isinstance(codec_named("sparse"), SparseCodec)


@given(seed=st.integers(0, 1 << 16), num_kept=st.integers(0, 128), share_seen=st.floats(0.0, 1.0))
@settings(max_examples=60, deadline=None)
def test_what_is_zero_stays_zero_so_that_a_subspace_of_coordinates_is_kept(
    seed: int, num_kept: int, share_seen: float
) -> None:
    """An embedding of which few rows were seen has chunks of fewer than 64 values."""
    generator = torch.Generator().manual_seed(seed)
    table = torch.randn(256, 128, generator=generator)
    table[:, torch.randperm(128, generator=generator)[num_kept:]] = 0.0
    table[torch.rand(256, generator=generator) >= share_seen] = -0.0
    vector = table.flatten()
    decoded = CODEC.decode_sparse(CODEC.encode(vector), vector.numel())
    was = vector.numpy()[decoded.indices]
    assert not decoded.values[was == 0].any()
    assert (decoded.values * was >= 0).all()
    if share_seen > 0.5 and num_kept > 64:
        assert decoded.values.any()

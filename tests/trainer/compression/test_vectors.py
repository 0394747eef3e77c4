"""What every codec promises: its bound, its size, its refusals, whatever the vector; and the layout of int8."""

from __future__ import annotations

import itertools
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from trainer.compression.vectors import BLOCK_VALUES, FOUR_BIT_BLOCK_VALUES, SMALLEST_MAGNITUDE, Int8Codec, codec_named
from trainer.errors import CodecError, TrainerUsageError

NAMES = ("fp32", "fp16", "int8", "int4", "e3m0")
all_codecs = pytest.mark.parametrize("name", NAMES)
INT8 = Int8Codec()
LARGEST = float(np.finfo(np.float32).max)

finite = st.floats(width=32, allow_nan=False, allow_infinity=False)
lengths = st.one_of(st.integers(0, 40), st.integers(BLOCK_VALUES - 2, BLOCK_VALUES + 2), st.just(3 * BLOCK_VALUES + 7))
vectors = lengths.flatmap(lambda n: hnp.arrays(np.float32, n, elements=finite, fill=finite))


def int8_bound(vector: torch.Tensor) -> torch.Tensor:
    """Greatest error allowed of each value."""
    bounds = []
    for block in vector.double().split(BLOCK_VALUES) if len(vector) else ():
        largest = float(block.abs().max())
        # Half a level, and the rounding of the scale, of the quotient and of the product.
        bound = largest / 127 * 0.50002 + largest * 2.0**-23 if largest >= SMALLEST_MAGNITUDE else largest
        bounds.append(torch.full_like(block, bound))
    return torch.cat(bounds) if bounds else torch.zeros(0, dtype=torch.float64)


def fp16_bound(vector: torch.Tensor) -> torch.Tensor:
    magnitudes = vector.double().abs()
    rounding = torch.maximum(magnitudes * 2.0**-11, torch.tensor(2.0**-25, dtype=torch.float64))
    return torch.where(magnitudes > 65504, magnitudes - 65504 + 1e-9, rounding)


def four_bit_bound(vector: torch.Tensor, name: str) -> torch.Tensor:
    bounds = []
    for block in vector.double().split(FOUR_BIT_BLOCK_VALUES) if len(vector) else ():
        largest = float(block.abs().max())
        bound = torch.full_like(block, largest / 14) if name == "int4" else (block.abs() / 3).clamp_min(largest / 128)
        bounds.append(bound * 1.00001 if largest >= SMALLEST_MAGNITUDE else torch.full_like(block, largest))
    return torch.cat(bounds) if bounds else torch.zeros(0, dtype=torch.float64)


BOUNDS = {
    "fp32": lambda vector: torch.zeros(len(vector), dtype=torch.float64),
    "fp16": fp16_bound,
    "int8": int8_bound,
    "int4": partial(four_bit_bound, name="int4"),
    "e3m0": partial(four_bit_bound, name="e3m0"),
}


@all_codecs
@settings(max_examples=40, deadline=None)
@given(values=vectors)
@example(values=np.random.default_rng(1).standard_normal(600 * BLOCK_VALUES + 3, dtype=np.float32))  # Several chunks.
@example(values=np.float32([LARGEST, -LARGEST, LARGEST / 2, 0.0]))
@example(values=np.float32([1e-36, -1e-45, 5e-37, 0.0]))
def test_round_trip_is_within_the_bound(name, values):
    vector = torch.from_numpy(values.copy())
    codec = codec_named(name)
    encoded = bytes(codec.encode(vector))
    assert len(encoded) == codec.encoded_bytes(len(vector))
    decoded = codec.decode(encoded, len(vector))
    assert decoded.dtype == torch.float32
    assert torch.isfinite(decoded).all()
    assert ((decoded.double() - vector.double()).abs() <= BOUNDS[name](vector)).all()
    assert torch.equal(vector, torch.from_numpy(values)), "encoding changed its argument"
    again = codec.decode(codec.encode(decoded), len(vector))
    assert ((again.double() - decoded.double()).abs() <= decoded.double().abs() * 1e-6).all()


@all_codecs
@settings(max_examples=150, deadline=None)
@given(buffer=st.binary(max_size=200), num_values=st.integers(-3, 220))
def test_any_bytes_decode_or_are_refused(name, buffer, num_values):
    codec = codec_named(name)
    try:
        decoded = codec.decode(buffer, num_values)
    except CodecError:
        return
    assert len(buffer) == codec.encoded_bytes(num_values)
    assert decoded.shape == (num_values,)


@all_codecs
def test_only_contiguous_finite_fp32_vectors_are_encoded(name):
    for value, position in itertools.product((float("nan"), float("inf"), float("-inf")), (0, 1500, -1)):
        vector = torch.ones(2000)
        vector[position] = value
        with pytest.raises(CodecError, match="finite"):
            codec_named(name).encode(vector)
    matrix, strided = torch.ones(2, 2), torch.ones(8)[::2]
    for vector in (torch.ones(4, dtype=torch.float64), matrix, strided, torch.ones(4, dtype=torch.int32)):
        with pytest.raises(CodecError, match="contiguous fp32 vector"):
            codec_named(name).encode(vector)


@all_codecs
def test_decoding_goes_into_given_memory_and_shares_none_with_the_encoding(name):
    codec, rows = codec_named(name), torch.zeros(2, 1500)
    buffer = bytearray(codec.encode(torch.linspace(-1, 1, 1500, requires_grad=True)))
    decoded = codec.decode(buffer, 1500)
    assert codec.decode(buffer, 1500, rows[1]).data_ptr() == rows[1].data_ptr()
    assert not rows[0].any()
    with pytest.raises(CodecError, match="room for 1500 values, found 1499"):
        codec.decode(buffer, 1500, torch.zeros(1499))
    before = decoded.clone()
    buffer[:] = bytes(len(buffer))
    assert torch.equal(decoded, before) and torch.equal(rows[1], before)


@all_codecs
@pytest.mark.parametrize("part_bytes", [1, 1028, 5000, 1 << 20])
def test_parts_fill_their_size_and_keep_to_it(name, part_bytes):
    codec = codec_named(name)
    values = codec.values_per_part(part_bytes)
    step = codec.block_values
    assert values >= step
    assert values % step == 0
    assert values == step or codec.encoded_bytes(values) <= part_bytes
    assert codec.encoded_bytes(values + step) > part_bytes


def test_sizes_and_names():
    with pytest.raises(TrainerUsageError, match="fp32, fp16, int8, int4, e3m0, found 'int2'"):
        codec_named("int2")
    assert [codec_named(name).encoded_bytes(1025) for name in NAMES] == [4100, 2050, 1033, 533, 533]
    assert 4 * 262_144 / INT8.encoded_bytes(262_144) == pytest.approx(3.984, abs=1e-3)


def test_fp16_saturates_and_both_floats_carry_what_is_not_finite_for_the_reducer_to_find():
    fp32, fp16 = codec_named("fp32"), codec_named("fp16")
    assert fp16.decode(fp16.encode(torch.tensor([1e6, -1e30, 65504.0])), 3).tolist() == [65504.0, -65504.0, 65504.0]
    assert torch.isnan(fp32.decode(np.float32([np.nan]).tobytes(), 1)).all()
    assert torch.isinf(fp16.decode(np.float16([np.inf]).tobytes(), 1)).all()


def test_layout_is_scales_then_levels():
    vector = torch.zeros(BLOCK_VALUES + 2)
    vector[0], vector[1], vector[-1] = 254.0, -2.0, 12.7
    encoded = bytes(INT8.encode(vector))
    scales = np.frombuffer(encoded[:8], "<f4")
    assert scales.tolist() == pytest.approx([2.0, 0.1])
    levels = np.frombuffer(encoded[8:], np.int8)
    assert levels[[0, 1, 2, -2, -1]].tolist() == [127, -1, 0, 0, 127]


@pytest.mark.parametrize("scale", [float("nan"), float("inf"), -1.0, LARGEST / 100, 1.0])
def test_what_no_honest_encoder_made(scale):
    levels, message = ([1, -128], "-128") if scale == 1.0 else ([1, 2, 3], "scales from 0 to")
    encoded = np.array([scale], "<f4").tobytes() + np.array(levels, np.int8).tobytes()
    with pytest.raises(CodecError, match=message):
        INT8.decode(encoded, len(levels))


@pytest.mark.parametrize(
    ("name", "levels"),
    [
        ("int4", [level / 7 for level in range(-7, 8)]),
        ("e3m0", [0.0, *(sign * 2.0**power for power in range(-6, 1) for sign in (1, -1))]),
    ],
)
def test_four_bits_keep_their_levels(name, levels):
    vector = torch.tensor([1.0, *levels]) * 3
    assert torch.allclose(codec_named(name).decode(codec_named(name).encode(vector), len(vector)), vector, rtol=1e-6)


@pytest.mark.parametrize(
    ("value", "expected"), [(0.0077, 0.0), (0.0079, 1 / 64), (0.74, 0.5), (-0.76, -1.0), (0.3, 0.25)]
)
def test_e3m0_takes_the_nearest_power(value, expected):
    decoded = codec_named("e3m0").decode(codec_named("e3m0").encode(torch.tensor([1.0, value])), 2)
    assert decoded.tolist() == [1.0, expected]


@pytest.mark.parametrize("name", ["int4", "e3m0"])
@pytest.mark.parametrize(
    ("scale", "packed", "message"),
    [
        (float("nan"), [0, 0], "scales"),
        (float("inf"), [0, 0], "scales"),
        (-1.0, [0, 0], "scales"),
        (1.0, [0x08, 0], "levels"),
        (1.0, [0x80, 0], "levels"),
        (1.0, [0, 0x10], "levels"),
    ],
)
def test_four_bits_no_honest_encoder_made(name, scale, packed, message):
    encoded = np.array([scale], "<f4").tobytes() + bytes(packed)
    with pytest.raises(CodecError, match=message):
        codec_named(name).decode(encoded, 3)


@all_codecs
def test_what_is_zero_stays_zero_so_that_a_subspace_of_coordinates_is_kept(name: str) -> None:
    generator = torch.Generator().manual_seed(3)
    vector = torch.randn(10_000, generator=generator)
    vector[torch.rand(10_000, generator=generator) < 0.9] = 0.0
    codec = codec_named(name)
    assert not codec.decode(codec.encode(vector), vector.numel())[vector == 0].any()

"""Blocks of int8: layout, extremes, and what no honest encoder makes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from trainer.compression.vectors import BLOCK_VALUES, Int8Codec
from trainer.errors import CodecError

LARGEST = float(np.finfo(np.float32).max)


def encoded_by_hand(scales: list[float], levels: list[int]) -> bytes:
    return np.array(scales, "<f4").tobytes() + np.array(levels, np.int8).tobytes()


def test_layout_is_scales_then_levels():
    vector = torch.zeros(BLOCK_VALUES + 2)
    vector[0], vector[1], vector[-1] = 254.0, -2.0, 12.7
    encoded = bytes(Int8Codec().encode(vector))
    scales = np.frombuffer(encoded[:8], "<f4")
    assert scales.tolist() == pytest.approx([2.0, 0.1])
    levels = np.frombuffer(encoded[8:], np.int8)
    assert levels[[0, 1, 2, -2, -1]].tolist() == [127, -1, 0, 0, 127]


def test_an_outlier_coarsens_its_own_block_only():
    vector = torch.full((2 * BLOCK_VALUES,), 0.5)
    vector[3] = 1e6
    decoded = Int8Codec().decode(Int8Codec().encode(vector), vector.numel())
    assert decoded[4] == 0.0
    assert torch.equal(decoded[BLOCK_VALUES:], vector[BLOCK_VALUES:])


@pytest.mark.parametrize("magnitude", [LARGEST, np.nextafter(np.float32(LARGEST), np.float32(0)), 1e-30, 1e-36, 1e-45])
def test_extremes_stay_finite_and_close(magnitude):
    vector = torch.tensor([magnitude, -magnitude, magnitude / 2, 0.0])
    decoded = Int8Codec().decode(Int8Codec().encode(vector), 4)
    assert torch.isfinite(decoded).all()
    assert ((decoded.double() - vector.double()).abs() <= max(magnitude / 250, 1.6e-36)).all()


@pytest.mark.parametrize("scale", [float("nan"), float("inf"), -1.0, LARGEST / 100])
def test_scales_no_honest_encoder_made(scale):
    with pytest.raises(CodecError, match="expected scales from 0 to"):
        Int8Codec().decode(encoded_by_hand([scale], [1, 2, 3]), 3)


def test_a_level_no_honest_encoder_made():
    with pytest.raises(CodecError, match="-128"):
        Int8Codec().decode(encoded_by_hand([1.0], [1, -128]), 2)


def test_a_quarter_of_the_bytes():
    assert 4 * 262_144 / Int8Codec().encoded_bytes(262_144) == pytest.approx(3.984, abs=1e-3)

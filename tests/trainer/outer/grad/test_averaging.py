"""The mean is over all tokens exactly, whatever members expected to have when the round was agreed on."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainer.compression.vectors import BLOCK_VALUES, codec_named
from trainer.outer.diloco import FlatLayout
from trainer.outer.grad import GradientSum, Packing

LAYOUT = FlatLayout.from_shapes({"a": (3, 7), "b": (5,)})
MEMBERS = st.lists(st.tuples(st.integers(0, 10**6), st.integers(1, 10**6), st.integers(0, 99)), min_size=1, max_size=6)


@given(MEMBERS)
def test_a_weighed_mean_of_vectors_is_the_mean_over_tokens(members: list[tuple[int, int, int]]) -> None:
    packing = Packing.of(LAYOUT)
    sums, tokens, weighed, weights = torch.zeros(LAYOUT.num_values).double(), 0, 0.0, 0
    for num_tokens, expected, seed in members:
        gradient = torch.randn(LAYOUT.num_values, generator=torch.Generator().manual_seed(seed)) * num_tokens
        vector = torch.zeros(packing.num_values)
        packing.fill(vector, GradientSum(gradient, num_tokens, 1), expected)
        sums, tokens = sums + gradient.double(), tokens + num_tokens
        weighed, weights = weighed + expected * vector.double(), weights + expected
    result = (weighed / weights).float()
    share = packing.token_share(result)
    assert share * weights == pytest.approx(tokens, rel=1e-5)
    if tokens:
        mean = packing.gradient(result).double() / share
        torch.testing.assert_close(
            mean, sums / tokens, rtol=1e-4, atol=1e-5 * max(1.0, float(sums.abs().max()) / tokens)
        )


@pytest.mark.parametrize("codec", ["fp32", "fp16", "int8"])
def test_the_share_of_tokens_survives_every_codec_and_coarsens_no_gradient(codec: str) -> None:
    packing, name = Packing.of(LAYOUT), codec_named(codec)
    gradient = torch.linspace(-1e-3, 1e-3, LAYOUT.num_values) * 96
    vector = torch.zeros(packing.num_values)
    packing.fill(vector, GradientSum(gradient, 96, 3), 128)
    result = name.decode(name.encode(vector), packing.num_values)
    exactness = {"fp32": 1e-7, "fp16": 1e-3, "int8": 1e-6}[codec]
    assert packing.token_share(result) == pytest.approx(0.75, rel=exactness)
    torch.testing.assert_close(packing.gradient(result), gradient / 128, rtol=1e-3, atol=1e-3 / 128)


def test_who_brings_nothing_brings_zeros_and_the_layout_names_all_values() -> None:
    packing = Packing.of(LAYOUT)
    vector = torch.zeros(packing.num_values)
    packing.fill(vector, None, 64)
    packing.fill(vector, GradientSum(torch.ones(LAYOUT.num_values), 5, 1), 0)
    assert not vector.any() and packing.token_share(vector) == 0.0
    assert packing.num_values == 2 * BLOCK_VALUES
    assert packing.layout.names == ("a", "b", "padding", "token_share")
    whole = FlatLayout.from_shapes({"a": (BLOCK_VALUES,)})
    assert Packing.of(whole).layout.names == ("a", "token_share")

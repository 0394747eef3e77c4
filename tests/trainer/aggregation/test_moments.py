"""Moments: exact, summable over slices, bounded on the wire."""

from __future__ import annotations

import struct

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.aggregation import noise, whole_moments
from trainer.aggregation import MAX_MEMBERS, Moments, finite_rows, moments
from trainer.errors import CodecError, TrainerUsageError


def test_products_and_sums_are_those_of_the_vectors():
    x, reference = noise(3, 500), noise(1, 500, seed=1)[0]
    found = moments(x, reference)
    every = torch.cat([reference[None], x]).double().numpy()
    np.testing.assert_allclose(found.gram, every @ every.T, rtol=1e-12)
    np.testing.assert_allclose(found.sums, every.sum(1), rtol=1e-9)
    assert (found.num_values, found.num_members) == (500, 3)
    assert np.array_equal(found.gram, found.gram.T)


def test_vectors_that_agree_to_five_digits_still_have_a_distance():
    base = noise(1, 200_000)[0]
    near = base + 1e-5 * noise(1, 200_000, seed=2)[0]
    gram = moments(torch.stack([base, near]), torch.zeros(200_000)).gram
    squared = gram[1, 1] + gram[2, 2] - 2 * gram[1, 2]
    assert squared == pytest.approx(float((base.double() - near.double()).square().sum()), rel=1e-3)


@pytest.mark.parametrize("num_slices", [1, 2, 3, 7])
def test_slices_add_up(num_slices):
    x, reference = noise(4, 300_001), noise(1, 300_001, seed=1)[0]
    whole, added = moments(x, reference), whole_moments(x, reference, num_slices)
    np.testing.assert_allclose(added.gram, whole.gram, rtol=1e-10, atol=1e-8)
    assert added.num_values == whole.num_values


def test_a_row_that_is_not_finite_is_flagged_and_touches_no_other():
    x, reference = noise(4, 100), noise(1, 100, seed=1)[0]
    clean = moments(x, reference)
    x[1, 50], x[3, 0] = torch.nan, -torch.inf
    found = moments(x, reference)
    assert found.finite.tolist() == [True, False, True, False]
    assert whole_moments(x, reference).finite.tolist() == [True, False, True, False]
    kept = np.ix_([0, 1, 3], [0, 1, 3])
    np.testing.assert_allclose(found.gram[kept], clean.gram[kept], rtol=1e-12)
    assert not found.gram[[2, 4]].any()
    assert not found.gram[:, [2, 4]].any()


def test_extremes_have_moments():
    x = torch.full((2, 1000), torch.finfo(torch.float32).max)
    found = moments(x, torch.zeros(1000))
    assert found.finite.all()
    assert np.isfinite(found.gram).all()
    found = moments(torch.zeros(2, 0), torch.zeros(0))
    assert (found.num_values, found.finite.all()) == (0, True)


@settings(max_examples=60, deadline=None)
@given(num_members=st.integers(0, 9), num_values=st.integers(0, 50), seed=st.integers(0, 99), bad=st.booleans())
def test_bytes_and_back(num_members, num_values, seed, bad):
    x = noise(num_members, num_values, seed=seed)
    if bad and x.numel():
        x[-1, 0] = torch.nan
    found = moments(x, torch.ones(num_values))
    encoded = found.to_bytes()
    assert len(encoded) == 16 + num_members + 4 * (num_members + 1) * (num_members + 4)
    for again in (Moments.from_bytes(encoded), Moments.from_bytes(bytearray(encoded), num_members)):
        assert all(np.array_equal(getattr(again, it), getattr(found, it)) for it in ("gram", "sums", "finite"))
        assert again.num_values == num_values


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=150))
def test_any_bytes_are_moments_or_refused(buffer):
    try:
        found = Moments.from_bytes(buffer)
    except CodecError:
        return
    assert found.to_bytes() == buffer


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(position=st.integers(0, 455), value=st.integers(1, 255))
def test_a_changed_byte_gives_possible_moments_or_is_refused(position, value):
    encoded = bytearray(moments(noise(8, 40), torch.ones(40)).to_bytes())
    encoded[position] ^= value
    try:
        found = Moments.from_bytes(encoded, 8)
    except CodecError:
        return
    assert np.isfinite(found.gram).all()
    norms = np.sqrt(np.diagonal(found.gram))
    assert (np.abs(found.gram) <= np.outer(norms, norms) * (1 + 1e-5)).all()


def edited(offset: int, form: str, value: float) -> bytes:
    encoded = bytearray(moments(noise(1, 10), torch.ones(10)).to_bytes())
    struct.pack_into(form, encoded, offset, value)
    return bytes(encoded)


# Layout for one member: head 16, flag 1, then rr, rx, xx, then the two sums.
@pytest.mark.parametrize(
    ("buffer", "message"),
    [
        (b"", "at least 16 bytes"),
        (b"XXXX" + bytes(12), "found b'XXXX'"),
        (struct.pack("<4sIQ", b"GMO1", MAX_MEMBERS + 1, 0), "up to 256 members"),
        (struct.pack("<4sIQ", b"GMO1", 2**32 - 1, 0), "up to 256 members"),
        (edited(0, "4s", b"GMO1")[:-1], "expected 57 bytes"),
        (edited(16, "B", 2), "flags of 0 and 1"),
        (edited(17, "<d", float("nan")), "finite"),
        (edited(41, "<d", float("inf")), "finite"),
        (edited(17, "<d", -1.0), "squares of 0 or more"),
        (edited(25, "<d", 1e9), "Cauchy-Schwarz"),
        (edited(49, "<d", 1e9), "Cauchy-Schwarz"),
    ],
)
def test_what_no_vectors_have_is_refused(buffer, message):
    with pytest.raises(CodecError, match=message):
        Moments.from_bytes(buffer)


def test_usage():
    with pytest.raises(CodecError, match="of 3 members, found b'GMO1' of 2"):
        Moments.from_bytes(moments(noise(2, 5), torch.ones(5)).to_bytes(), 3)
    with pytest.raises(TrainerUsageError, match="moments of 2 members, found 3"):
        moments(noise(2, 5), torch.ones(5)) + moments(noise(3, 5), torch.ones(5))
    with pytest.raises(TrainerUsageError, match="vectors of 5 values"):
        moments(noise(2, 4), torch.ones(5))
    with pytest.raises(TrainerUsageError, match="finite reference"):
        moments(noise(2, 5), torch.full((5,), torch.nan))
    with pytest.raises(TrainerUsageError, match="up to 256"):
        moments(torch.zeros(257, 1), torch.zeros(1))


def test_finite_rows_tells_overflowing_sums_from_infinities():
    largest = torch.finfo(torch.float32).max
    x = torch.tensor([[1.0, 2.0], [largest, largest], [torch.inf, -torch.inf], [torch.nan, 0.0], [-torch.inf, 1.0]])
    assert finite_rows(x) == [True, True, False, False, False]
    assert finite_rows(list(x)) == finite_rows(x)
    assert finite_rows(torch.zeros(0, 5)) == []

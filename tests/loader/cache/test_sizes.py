"""Sizes as people write them."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loader.cache import cache_bytes, cache_dir, format_size, parse_size
from loader.errors import LoaderUsageError

FACTORS = {
    "": 1, "B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30,
    "TiB": 2**40,
}  # fmt: skip


@given(st.integers(1, 10**6), st.sampled_from(sorted(FACTORS)), st.sampled_from(["", " "]), st.booleans())
def test_a_number_and_a_unit(number, unit, space, lower):
    text = f"{number}{space}{unit}"
    assert parse_size(text.lower() if lower else text) == number * FACTORS[unit]


@pytest.mark.parametrize(("text", "size"), [("0.1GB", 10**8), ("1.5KiB", 1536), (" 20GB ", 20 * 10**9), ("7", 7)])
def test_fractions_are_exact(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text", ["", "GB", "20G", "20 gigs", "-1GB", "0", "0.0001kB", "1e9", "٢GB", "9" * 20 + "GB", "1,000", "0x10", "nan"]
)
def test_everything_else_is_refused_with_what_was_found(text):
    with pytest.raises(LoaderUsageError) as caught:
        parse_size(text)
    assert repr(text) in str(caught.value)


@given(st.text(max_size=30))
def test_any_text_gives_a_size_or_a_usage_error(text):
    with contextlib.suppress(LoaderUsageError):
        assert 1 <= parse_size(text) < 2**63


@given(st.integers(0, 10**18))
def test_what_is_shown_is_right_to_its_last_digit(size):
    shown = format_size(size)
    assert len(shown) <= 9
    if size:
        assert abs(parse_size(shown) - size) <= size * 0.051


def test_the_default_place_and_bound_and_what_overrides_them(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("GENESIS_CACHE_DIR", raising=False)
    monkeypatch.delenv("GENESIS_CACHE_BYTES", raising=False)
    assert cache_dir() == tmp_path / ".neuroshard/data_cache"
    assert cache_bytes() == 20 * 10**9
    monkeypatch.setenv("GENESIS_CACHE_DIR", "/from/environment")
    monkeypatch.setenv("GENESIS_CACHE_BYTES", "1MiB")
    assert (str(cache_dir()), cache_bytes()) == ("/from/environment", 2**20)
    assert (str(cache_dir("/given")), cache_bytes("2kB"), cache_bytes(5)) == ("/given", 2000, 5)
    with pytest.raises(LoaderUsageError):
        cache_bytes(0)

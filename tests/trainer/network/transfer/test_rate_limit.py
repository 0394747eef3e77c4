"""Bytes are spread over time; nobody is let through early."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.network.transfer.donor import RateLimiter


def test_no_limit_never_waits() -> None:
    limiter = RateLimiter(0)
    assert limiter.reserve(10**12) == 0
    assert limiter.reserve(10**12) == 0


@pytest.mark.slow
@given(st.lists(st.tuples(st.integers(1, 1000), st.floats(0, 5)), min_size=1, max_size=30))
def test_the_rate_is_kept_over_any_time(events: list[tuple[int, float]]) -> None:
    now = 0.0
    limiter = RateLimiter(100.0, clock=lambda: now)
    begun: list[tuple[float, int]] = []
    for size_bytes, pause_s in events:
        begun.append((now + limiter.reserve(size_bytes), size_bytes))
        now += pause_s
    for (start, size_bytes), (next_start, _) in pairwise(begun):
        assert next_start - start >= size_bytes / 100.0 - 1e-6


def test_who_comes_late_does_not_wait() -> None:
    now = 0.0
    limiter = RateLimiter(100.0, clock=lambda: now)
    assert limiter.reserve(100) == 0
    assert limiter.reserve(100) == pytest.approx(1.0)
    now = 10.0
    assert limiter.reserve(100) == 0

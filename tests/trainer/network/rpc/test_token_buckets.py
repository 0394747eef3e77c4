"""Token buckets: how often something may happen, whatever comes when."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from trainer.network.rpc.token_buckets import TokenBuckets


@given(
    st.floats(1.0, 50.0),
    st.floats(0.1, 100.0),
    st.lists(st.tuples(st.floats(0.0, 20.0), st.sampled_from("abc")), max_size=200),
)
def test_no_key_takes_more_than_its_bucket_and_the_time_give(
    capacity: float, per_s: float, steps: list[tuple[float, str]]
) -> None:
    now_s = 0.0
    buckets = TokenBuckets(capacity, per_s, lambda: now_s)
    taken = dict.fromkeys("abc", 0)
    for pause_s, key in steps:
        now_s += pause_s
        has, wait_s = buckets.left(key) >= 1.0, buckets.wait_s(key)
        assert has == (wait_s == 0.0) == buckets.take(key)
        taken[key] += has
    assert all(count <= capacity + per_s * now_s + 1e-6 for count in taken.values())


def test_a_token_given_back_can_be_taken_again_and_no_bucket_overflows() -> None:
    buckets = TokenBuckets(2.0, 0.5, lambda: 0.0)
    assert [buckets.take("a") for _ in range(3)] == [True, True, False]
    assert buckets.wait_s("a") == 2.0
    for _ in range(5):
        buckets.give_back("a")
        buckets.give_back("never taken from")
    assert [buckets.take("a") for _ in range(3)] == [True, True, False]


def test_full_buckets_are_not_remembered() -> None:
    now_s = 0.0
    buckets = TokenBuckets(8.0, 1.0, lambda: now_s)
    for number in range(50_000):
        now_s += 0.01
        buckets.take(str(number))
    assert len(buckets) <= 8192

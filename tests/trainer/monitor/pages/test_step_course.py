"""Steps that get coarser with age: no extreme of the loss is lost, whatever comes again, and the file has it all."""

from __future__ import annotations

import math
import sqlite3

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.monitor.pages.step_course import FACTOR, KEPT, StepCourse, bucket_of


def add(course: StepCourse, step: int, loss: float, seconds: float = 0.5) -> None:
    course.add(bucket_of(step, 1_000.0 + step, loss, 64 * (step + 1), 64, seconds))


def losses_told(course: StepCourse, limit: int = 10**6) -> tuple[float, float, int]:
    found = course.between(-math.inf, math.inf, limit)
    return min(it.low for it in found), max(it.high for it in found), sum(it.num_losses for it in found)


@given(st.lists(st.tuples(st.integers(0, 3), st.floats(0, 50, allow_nan=False)), min_size=1, max_size=400))
def test_each_step_counts_once_also_when_it_comes_again(moves):
    course, kept = StepCourse(), {}
    step = 0
    for back, loss in moves:
        step = max(0, step - 5 * back)
        kept = {at: value for at, value in kept.items() if at < step} | {step: loss}
        add(course, step, loss)
        step += 1
    for limit in (10**6, 40, 5, 1):
        found = course.between(-math.inf, math.inf, limit)
        assert sum(it.num_losses for it in found) == len(kept)
        assert (min(it.low for it in found), max(it.high for it in found)) == (min(kept.values()), max(kept.values()))
        edges = [edge for it in found for edge in (it.first_step, it.last_step)]
        assert edges == sorted(edges)
    assert course.last_step == step - 1


@pytest.fixture(scope="module")
def long_course() -> StepCourse:
    course = StepCourse()
    for step in range(200_000):
        add(course, step, 3.0 + (97.0 if step == 12_345 else 0.0))
    return course


def test_a_spike_of_one_step_is_seen_in_any_range_with_it(long_course):
    for limit in (100, 1_000, 10_000):
        assert losses_told(long_course, limit) == (3.0, 100.0, 200_000)
    near = long_course.between(12_000, 13_000, 600)
    assert max(it.high for it in near) == 100.0 and len(near) <= 600
    assert near[0].first_step <= 12_000 and near[-1].last_step >= 13_000


def test_what_is_kept_is_bounded(long_course):
    sizes = [len(kept) for kept in long_course._levels]
    assert max(sizes) == KEPT and sum(sizes) < 4 * KEPT
    newest = long_course.between(199_000, 200_000, 10**6)
    assert [it.first_step for it in newest] == list(range(199_000, 200_000))


def test_losses_that_are_not_finite_count_for_time_only():
    course = StepCourse()
    for step in range(FACTOR * 3):
        add(course, step, math.nan if step % 2 else math.inf)
    found = course.between(-math.inf, math.inf, 3)
    assert sum(it.num_losses for it in found) == 0
    assert sum(it.seconds for it in found) == FACTOR * 3 * 0.5


@given(st.integers(1, 700), st.integers(0, 700), st.integers(1, 50))
def test_the_file_has_what_memory_has(first, back, more):
    path, course = sqlite3.connect(":memory:"), StepCourse()
    course.load(path)
    for step in range(first):
        add(course, step, float(step % 13))
    with path:
        course.save(path)
    for step in range(max(0, first - back), max(0, first - back) + more):
        add(course, step, math.nan if step % 5 == 0 else 2.5)
    with path:
        course.save(path)
    again = StepCourse()
    again.load(path)
    for limit in (10**6, 30, 2):
        assert again.between(-math.inf, math.inf, limit) == course.between(-math.inf, math.inf, limit)
    add(again, 10_000, 1.0)
    add(course, 10_000, 1.0)
    assert again.between(-math.inf, math.inf, 30) == course.between(-math.inf, math.inf, 30)

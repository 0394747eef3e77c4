"""Curves of some hundred points: extremes stay, ranges are kept to, and what is no number is left out."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.shown_pages import fill
from trainer.monitor.history import History
from trainer.monitor.pages.course import CourseRange, CourseView, RoundMark, curve, evenly
from trainer.monitor.pages.seen_course import from_first, run_course

NUMBERS = st.floats(-1e6, 1e6, allow_nan=False)


@given(st.lists(st.tuples(NUMBERS, NUMBERS), min_size=1, max_size=300), st.integers(10, 60))
def test_extremes_and_weight_stay(pairs, points):
    x, y = (np.array(values) for values in zip(*pairs, strict=True))
    found = curve("it", "loss", "run", x, y, CourseRange(points=points))
    assert found is not None and len(found.x) <= points
    assert list(found.x) == sorted(found.x)
    low, high = found.low or found.y, found.high or found.y
    assert min(low) == pytest.approx(y.min(), rel=1e-5) and max(high) == pytest.approx(y.max(), rel=1e-5)


def test_only_the_range_is_shown_and_nothing_but_numbers():
    x = np.arange(100.0)
    y = np.where(x == 50, np.nan, np.where(x == 51, np.inf, x))
    found = curve("it", "loss", "run", x, y, CourseRange(begin=40, end=60, points=100))
    assert found is not None and found.x == (*range(40, 50), *range(52, 61))
    assert curve("it", "loss", "run", x, y, CourseRange(begin=200)) is None
    json.loads(CourseView(by="step", begin=math.nan, end=math.inf).model_dump_json(), parse_constant=pytest.fail)


def test_a_run_of_300_nodes_is_a_mean_and_a_band():
    with History(None, "run-1", clock=lambda: 1e9) as history:
        fill(history, num_nodes=300, num_looks=200, every_s=10.0, end_at=1e9)
        for by in ("step", "tokens", "time"):
            course = run_course(history.rows_of, CourseRange(by=by, points=100))
            assert [(it.what, it.who) for it in course.curves] == [
                *(("loss", "run"), ("speed", "run"), ("nodes", "run"), ("loss", "node"))
            ]
            assert all(len(it.x) <= 100 for it in course.curves)
            assert course.begin is not None and course.end is not None
            band = course.curves[3]
            assert "300" in band.name and band.low and band.high and min(band.low) < min(band.high)
            assert any(it.is_failed for it in course.rounds) and not all(it.is_failed for it in course.rounds)
        whole = run_course(history.rows_of, CourseRange(points=100))
        part = run_course(history.rows_of, CourseRange(points=100, begin=50, end=60))
        assert min(part.curves[0].x) >= 50 and max(part.curves[0].x) <= 60 and len(part.curves[0].x) == 11
        assert (part.begin, part.end) == (whole.begin, whole.end) == (0, 199)


def test_few_nodes_have_a_curve_each_by_name():
    with History(None, "run-1", clock=lambda: 1e9) as history:
        fill(history, num_nodes=3, num_looks=50, every_s=60.0, end_at=1e9)
        course = run_course(history.rows_of, CourseRange(by="time"))
        assert [it.name for it in course.curves if it.who == "node"] == ["node-0", "node-1", "node-2"]


def test_nothing_recorded_is_no_curve():
    with History(None, "run-1", clock=lambda: 1e9) as history:
        assert run_course(history.rows_of, CourseRange()) == CourseView(by="step", begin=None, end=None)


def test_a_speed_not_known_yet_is_no_stand_still():
    speeds = from_first(np.array([0.0, 0.0, 5.0, 0.0, 7.0]))
    assert np.isnan(speeds[:2]).all() and speeds[2:].tolist() == [5.0, 0.0, 7.0]
    assert np.isnan(from_first(np.zeros(3))).all()


def test_of_many_rounds_the_failed_ones_are_marked():
    marks = [RoundMark(x=index, round_index=index, stage="", is_failed=index == 77) for index in range(5_000)]
    found = evenly(marks, 50)
    assert len(found) == 50 and any(it.is_failed for it in found) and found[-1].x == 4_999

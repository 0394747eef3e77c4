"""What training waits for its batches."""

import itertools

import pytest

from trainer.monitor import MeteredIterator


def test_the_items_come_through_and_the_wait_is_taken_once(monkeypatch):
    ticks = itertools.count()
    monkeypatch.setattr("trainer.monitor.observer.time.perf_counter", lambda: next(ticks) * 0.5)
    batches = MeteredIterator([1, 2])
    assert list(itertools.islice(batches, 2)) == [1, 2]
    with pytest.raises(StopIteration):
        next(batches)
    assert batches.take_wait_s() == 1.5
    assert batches.take_wait_s() == 0.0

"""Batches in narrow types and back, and steps that are decided on the device: the same bits as on the host."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.model_configs import batches, small_model
from tests.support.rank_scenarios import Odd
from tests.trainer.inner.test_loop import CPU, FAST, _bits, _loop, _poisoned
from trainer.inner import InnerConfig, StepResult, loop, make_optimizer
from trainer.inner.queueing import BatchMover, StepClock, can_decide_on_device, narrowed, widened
from trainer.model.loss import filled_up

with_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")


@given(
    highest=st.sampled_from([1, 255, 65_534, 65_535, 65_536, 200_000]),
    shape=st.tuples(st.integers(1, 4), st.integers(1, 9)),
    seed=st.integers(0, 1000),
)
def test_ids_and_labels_come_back_from_as_few_bytes_as_they_need(highest, shape, seed):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, highest + 1, shape, generator=generator)
    ids[0, 0] = highest
    labels = ids.where(torch.rand(shape, generator=generator) < 0.7, -100)
    packed = narrowed(ids, labels)
    assert packed.dtype == (torch.uint16 if highest < 65_535 else torch.int32)
    found_ids, found_labels = widened(packed)
    assert found_ids.dtype == found_labels.dtype == torch.int64
    assert torch.equal(found_ids, ids) and torch.equal(found_labels, labels)


def test_a_short_batch_is_filled_up_with_rows_that_count_for_nothing():
    batch = next(batches(1, num_rows=3))
    ids, labels = filled_up(batch["input_ids"], batch["labels"], 5)
    assert ids.shape == labels.shape == (5, 8)
    assert (labels[3:] == -100).all() and torch.equal(labels[:3], batch["labels"])
    same, _ = filled_up(batch["input_ids"], batch["labels"], 3)
    assert same is batch["input_ids"]
    model = small_model()
    assert model(ids, labels).item() == pytest.approx(model(batch["input_ids"], batch["labels"]).item(), rel=1e-6)


def _with_decisions(monkeypatch: pytest.MonkeyPatch, on_device: bool) -> None:
    monkeypatch.setattr(loop, "can_decide_on_device", lambda *_: on_device)


@pytest.mark.parametrize("clip", [0.5, 100.0])
def test_steps_decided_on_the_device_are_those_of_the_host_bit_for_bit(monkeypatch, clip):
    config = InnerConfig(lr=1e-2, warmup_steps=2, decay_end_step=100, max_grad_norm=clip, accumulation_steps=2)

    def trained() -> tuple[bytes, list[StepResult]]:
        model = small_model()
        inner = _loop(model, batches(1), config)
        return _losses(inner.step, 8), _bits(inner, model)

    found = []
    for on_device in (False, True):
        _with_decisions(monkeypatch, on_device)
        found.append(trained())
    assert found[0] == found[1]


def _losses(step: Callable[[], StepResult], count: int) -> list[tuple[float, float]]:
    return [(result.loss, result.grad_norm) for result in (step() for _ in range(count))]


@pytest.mark.parametrize("kind", [-1, -2, -3])
def test_a_step_that_is_not_finite_touches_nothing_on_the_device_either(monkeypatch, kind):
    _with_decisions(monkeypatch, True)
    model = Odd()
    inner = _loop(model, _poisoned([0, 0, kind, 0]))
    inner.step(), inner.step()
    before = _bits(inner, model)
    assert inner.step().skipped
    assert _bits(inner, model) == before
    assert not inner.step().skipped
    assert _bits(inner, model) != before


def test_a_batch_without_a_label_that_counts_changes_nothing_on_the_device_either(monkeypatch):
    _with_decisions(monkeypatch, True)
    rows = next(batches(1))
    empty = {"input_ids": rows["input_ids"], "labels": torch.full_like(rows["labels"], -100)}
    beside = _loop(small_model(), [empty, rows], InnerConfig(accumulation_steps=2)).step()
    alone = _loop(small_model(), [rows]).step()
    assert (beside.loss, beside.grad_norm, beside.skipped) == (alone.loss, alone.grad_norm, False)
    assert _loop(small_model(), [empty]).step().skipped


def test_the_parts_of_a_step_are_within_it():
    inner = _loop(small_model(), islice(batches(1), 3), FAST)
    for _ in range(3):
        result = inner.step()
        assert min(result.data_s, result.compute_s, result.optimizer_s) > 0
        assert result.data_s + result.compute_s + result.optimizer_s <= result.seconds


@with_gpu
def test_batches_arrive_on_the_gpu_whole():
    device = torch.device("cuda", 0)
    mover = BatchMover(device)
    for batch in islice(batches(3), 20):
        ids, labels = mover.moved(batch)
        assert torch.equal(ids.cpu(), batch["input_ids"]) and torch.equal(labels.cpu(), batch["labels"])
    assert can_decide_on_device(make_optimizer(small_model().to(device), FAST), device)


def test_a_cpu_decides_at_once():
    assert not can_decide_on_device(make_optimizer(small_model(), FAST), CPU)


class Event:
    """One of a device that is late: times between such can be read only when it has come to them."""

    is_over = False

    def synchronize(self) -> None:
        self.is_over = True

    def elapsed_time(self, second: Event) -> float:
        assert second.is_over, "Both events must be completed"
        return 250.0


def test_the_time_between_two_points_is_read_when_the_device_has_come_to_the_second():
    clock = StepClock(CPU)
    assert clock.between(Event(), Event()) == 0.25  # type: ignore[arg-type]

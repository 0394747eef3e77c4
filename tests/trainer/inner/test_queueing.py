"""Batches in narrow types and back, and steps that are decided on the device: the same bits as on the host."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from itertools import islice

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tests.support.model_configs import batches, small_model
from tests.support.rank_scenarios import Odd
from tests.trainer.inner.test_loop import CPU, FAST, _bits, _loop, _poisoned
from trainer.inner import InnerConfig, InnerLoop, StepResult, loop, make_optimizer
from trainer.inner.parallel import RankExchange, rows_of
from trainer.inner.queueing import BatchMover, can_decide_on_device, filled_up, narrowed, widened
from trainer.inner.rank_place import RankPlace

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


class _OneOfTwo:
    """Stands for the other of two ranks: a step is this rank's alone, over its rows of a batch of both."""

    num_rows = staticmethod(RankExchange(nn.Identity(), "ddp", RankPlace(0, 2, 0, 2), 1, CPU).num_rows)

    def forward(self, *, is_last: bool):
        return nullcontext()

    def share(self, count: int) -> float:
        return 1.0

    def combine(self, losses, counts, gradients):
        return [float(loss) for loss in losses], list(counts), 1.0

    def scale(self, gradients, factor: float) -> None: ...


@pytest.mark.parametrize("batch_rows", [4, 5])
def test_a_rank_fills_up_its_rows_of_a_batch_and_not_the_batch_of_all_ranks(
    monkeypatch: pytest.MonkeyPatch, batch_rows: int
) -> None:
    seen: list[int] = []
    model = small_model()
    model.register_forward_pre_hook(lambda _, inputs: seen.append(len(inputs[0])))
    monkeypatch.setattr(loop, "compiled", lambda model, *_: model)  # What is compiled sees one shape of batch.
    config = InnerConfig(micro_batch_size=batch_rows, compile="on")
    whole = list(islice(batches(1, num_rows=batch_rows), 2))
    own = [rows_of(whole[0], RankPlace(rank, 2, rank, 2)) for rank in (0, 1)]
    inner = InnerLoop(model, make_optimizer(model, config), config, iter(own), CPU, exchange=_OneOfTwo())
    inner.step(), inner.step()
    assert seen == [-(-batch_rows // 2)] * 2


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

"""What is refused leaves weights, moments, accumulators and counters bit for bit as they were."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from tests.support.stage_replicas import CUT, bits_of, micro_batch, stage_replica
from trainer.errors import NonFiniteActivationError, PipelineError, TrainerUsageError
from trainer.pipeline.stage import StageReplica

Refused = Callable[[StageReplica], object]


class TooLateError(Exception):
    """The worker's clock says so."""


def _hidden(seed: int) -> torch.Tensor:
    return torch.randn(2, 8, CUT.dim, generator=torch.Generator().manual_seed(seed))


def _with(value: float, place: tuple[int, ...] = (1, 7, 31)) -> torch.Tensor:
    spoilt = _hidden(1)
    spoilt[place] = value
    return spoilt


def _too_late() -> None:
    raise TooLateError


def _in_the_middle(index: int) -> StageReplica:
    """A stage with a step behind it and a micro-batch counted."""
    stage = stage_replica(index, 3)
    for seed in range(3):
        _, ids, labels = micro_batch(seed)
        if index == 2:
            stage.tail("m", _hidden(seed), labels)
        else:
            stage.backward("m", ids if index == 0 else _hidden(seed), _hidden(seed), 16, 0)
        if seed == 0:
            stage.step(9)
    return stage


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e30, 1e15])
@pytest.mark.parametrize("place", [(0, 0, 0), (1, 7, 31)])
def test_a_gradient_that_is_not_finite_is_refused_by_head_and_body(value: float, place: tuple[int, ...]) -> None:
    for index, x in ((0, micro_batch(1)[1]), (1, _hidden(1))):
        stage = _in_the_middle(index)
        before = bits_of(stage)
        for cached in (True, False):
            if cached:
                stage.forward("bad", x)
            with pytest.raises(NonFiniteActivationError, match="bad"):
                stage.backward("bad", x, _with(value, place), 16, 1)
            assert bits_of(stage) == before


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_an_input_that_is_not_finite_is_refused_wherever_it_comes_in(value: float) -> None:
    body, tail, (_, _, labels) = _in_the_middle(1), _in_the_middle(2), micro_batch(1)
    before = bits_of(body), bits_of(tail)
    for call in (
        lambda: body.forward("bad", _with(value)),
        lambda: body.backward("bad", _with(value), _hidden(1), 16, 1),
        lambda: tail.tail("bad", _with(value), labels),
    ):
        with pytest.raises(NonFiniteActivationError, match="bad"):
            call()
    with pytest.raises(NonFiniteActivationError, match="held-out"):
        body.evaluate(_with(value))
    assert (bits_of(body), bits_of(tail)) == before
    assert body.cached_bytes == 0


def test_gradients_that_are_accepted_do_not_overflow_together() -> None:
    stage = stage_replica(1, 3)
    largest = _hidden(1)
    while True:
        try:
            stage.backward("huge", _hidden(0), largest, 16, 0)
        except NonFiniteActivationError:
            break
        largest = largest * 10
    for total in stage._accumulator.sums(stage._names()).values():
        total.mul_(1e6)  # As many of them as no step has.
    assert stage.step(9).applied


def test_a_refused_micro_batch_is_no_obstacle_to_the_next() -> None:
    stage, untroubled = stage_replica(1, 3), stage_replica(1, 3)
    with pytest.raises(NonFiniteActivationError):
        stage.backward("bad", _hidden(0), _with(math.nan), 16, 0)
    for each in (stage, untroubled):
        each.backward("good", _hidden(0), _hidden(1), 16, 0)
        assert each.step(9).applied
    assert bits_of(stage) == bits_of(untroubled)


def test_the_last_chance_to_stop_comes_behind_the_arithmetic_and_before_the_counting() -> None:
    for index, refused in (
        (0, lambda stage: stage.backward("m", micro_batch(1)[1], _hidden(1), 16, 1, before_apply=_too_late)),
        (1, lambda stage: stage.backward("m", _hidden(1), _hidden(1), 16, 1, before_apply=_too_late)),
        (1, lambda stage: stage.backward("m", _hidden(1), _hidden(1), 0, 1, before_apply=_too_late)),
        (2, lambda stage: stage.tail("m", _hidden(1), micro_batch(1)[2], before_apply=_too_late)),
        (2, lambda stage: stage.tail("m", _hidden(1), micro_batch(1, padded=8)[2], before_apply=_too_late)),
    ):
        stage = _in_the_middle(index)
        before = bits_of(stage)
        with pytest.raises(TooLateError):
            refused(stage)
        assert bits_of(stage) == before
    stage, seen = stage_replica(1, 3), []
    stage.backward("m", _hidden(1), _hidden(1), 16, 0, before_apply=lambda: seen.append(stage.accumulated))
    assert [each.num_tokens for each in seen] == [0]
    assert stage.accumulated.num_tokens == 16


@pytest.mark.parametrize("shape", [(2, 7, 32), (3, 8, 32), (2, 8, 31), (2, 8), (2, 8, 32, 1)])
def test_a_gradient_of_another_shape_is_refused(shape: tuple[int, ...]) -> None:
    stage = _in_the_middle(1)
    before = bits_of(stage)
    stage.forward("m", _hidden(1))
    with pytest.raises(PipelineError, match=r"expected a gradient of .* for m"):
        stage.backward("m", None, torch.zeros(shape), 16, 1)
    assert bits_of(stage) == before


def test_a_gradient_of_other_rows_does_not_cost_the_kept_graph() -> None:
    stage = stage_replica(1, 3)
    stage.forward("m", _hidden(1))
    with pytest.raises(PipelineError):
        stage.backward("m", None, torch.zeros(1, 8, 32), 16, 0)
    assert not stage.backward("m", None, _hidden(2), 16, 0).recomputed


def test_a_micro_batch_without_labels_counts_as_one_of_no_tokens() -> None:
    head, tail = _in_the_middle(0), _in_the_middle(2)
    _, ids, labels = micro_batch(1, padded=8)
    sums = {name: total.clone() for stage in (head, tail) for name, total in stage.state_dict()["sums"].items()}
    was = [(stage.accumulated.num_tokens, stage.accumulated.num_micro_batches) for stage in (head, tail)]
    hidden = head.forward("empty", ids)
    answer = tail.tail("empty", hidden, labels)
    assert (answer.loss_sum, answer.num_tokens) == (0.0, 0)
    assert torch.equal(answer.grad_hidden, torch.zeros_like(hidden))
    result = head.backward("empty", None, answer.grad_hidden, 0, head.version)
    assert result.grad_x is None
    assert head.cached_bytes == 0
    now = [(stage.accumulated.num_tokens, stage.accumulated.num_micro_batches) for stage in (head, tail)]
    assert now == [(tokens, micro_batches + 1) for tokens, micro_batches in was]
    for stage in (head, tail):
        assert all(torch.equal(total, sums[name]) for name, total in stage.state_dict()["sums"].items())


def test_a_body_hands_on_a_gradient_of_zero_for_it() -> None:
    result = stage_replica(1, 3).backward("empty", None, _hidden(1), 0, 0)
    assert torch.equal(result.grad_x, torch.zeros(2, 8, CUT.dim))


def test_only_a_tail_has_losses() -> None:
    body, (_, _, labels) = stage_replica(1, 3), micro_batch(1)
    for refused in (body.tail, body.evaluate_loss):
        arguments = ("m", _hidden(1), labels) if refused == body.tail else (_hidden(1), labels)
        with pytest.raises(TrainerUsageError, match="expected the tail, found a body"):
            refused(*arguments)

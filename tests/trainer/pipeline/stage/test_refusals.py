"""What is refused leaves weights, moments, accumulated gradients and counters bit for bit as they were."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.support.stage_replicas import CUT, backward, bits_of, count, hidden, micro_batch, stage_replica
from trainer.errors import NonFiniteActivationError, PipelineError, TrainerUsageError
from trainer.pipeline.stage import StageConfig, StageKind, StageReplica, StageShape

HIDDEN = torch.zeros(2, 8, CUT.dim)
IDS = torch.zeros(2, 8, dtype=torch.int64)
TOO_LONG = torch.zeros(1, 17, dtype=torch.int64)


class TooLateError(Exception):
    """The worker's clock says so."""


def _too_late() -> None:
    raise TooLateError


def _with(value: float, place: tuple[int, ...] = (1, 7, 31)) -> torch.Tensor:
    spoilt = hidden(1)
    spoilt[place] = value
    return spoilt


def _in_the_middle(index: int) -> StageReplica:
    """A stage with a step behind it and two micro-batches counted."""
    stage = stage_replica(index, 3)
    for seed in range(3):
        count(stage, seed)
        if seed == 0:
            stage.step(9)
    return stage


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e30, 1e15])
@pytest.mark.parametrize("place", [(0, 0, 0), (1, 7, 31)])
def test_a_gradient_that_is_not_finite_is_refused_by_head_and_body(value: float, place: tuple[int, ...]) -> None:
    for index, x in ((0, micro_batch(1)[1]), (1, hidden(1))):
        stage = _in_the_middle(index)
        before = bits_of(stage)
        for cached in (True, False):
            if cached:
                stage.forward("bad", x)
            with pytest.raises(NonFiniteActivationError, match="bad"):
                backward(stage, x, _with(value, place), "bad")
            assert bits_of(stage) == before


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_an_input_that_is_not_finite_is_refused_wherever_it_comes_in(value: float) -> None:
    body, tail, (_, _, labels) = _in_the_middle(1), _in_the_middle(2), micro_batch(1)
    before = bits_of(body), bits_of(tail)
    for call, named in (
        (lambda: body.forward("bad", _with(value)), "bad"),
        (lambda: backward(body, _with(value), hidden(1), "bad"), "bad"),
        (lambda: tail.tail("bad", _with(value), labels), "bad"),
        (lambda: body.evaluate(_with(value)), "held-out"),
    ):
        with pytest.raises(NonFiniteActivationError, match=named):
            call()
    assert (bits_of(body), bits_of(tail)) == before
    assert body.cached_bytes == 0


def test_gradients_that_are_accepted_do_not_overflow_together() -> None:
    stage, largest = stage_replica(1, 3), hidden(1)
    while True:
        try:
            backward(stage, hidden(0), largest, "huge")
        except NonFiniteActivationError:
            break
        largest = largest * 10
    for total in stage.state_dict()["sums"].values():
        total.mul_(1e6)  # As many of them as no step has.
    assert stage.step(9).applied


def test_a_refused_micro_batch_is_no_obstacle_to_the_next() -> None:
    stage, untroubled = stage_replica(1, 3), stage_replica(1, 3)
    with pytest.raises(NonFiniteActivationError):
        backward(stage, hidden(0), _with(math.nan), "bad")
    for each in (stage, untroubled):
        count(each)
        assert each.step(9).applied
    assert bits_of(stage) == bits_of(untroubled)


@pytest.mark.parametrize(
    ("index", "x", "num_tokens"), [(0, IDS, 16), (1, hidden(1), 16), (1, hidden(1), 0), (2, None, 16), (2, None, 0)]
)
def test_the_last_chance_to_stop_comes_after_the_arithmetic_and_before_the_counting(
    index: int, x: Any, num_tokens: int
) -> None:
    stage = _in_the_middle(index)
    before = bits_of(stage)
    with pytest.raises(TooLateError):
        if x is None:
            labels = micro_batch(1, padded=0 if num_tokens else 8)[2]
            stage.tail("m", hidden(1), labels, before_apply=_too_late)
        else:
            backward(stage, x, hidden(1), num_tokens=num_tokens, before_apply=_too_late)
    assert bits_of(stage) == before


def test_nothing_is_counted_before_the_last_chance_to_stop() -> None:
    stage, seen = stage_replica(1, 3), []
    backward(stage, hidden(1), hidden(1), before_apply=lambda: seen.append(stage.accumulated))
    assert [each.num_tokens for each in seen] == [0]
    assert stage.accumulated.num_tokens == 16


@pytest.mark.parametrize(
    ("shape", "keeps_graph"),
    [((2, 7, 32), True), ((3, 8, 32), True), ((2, 8, 31), False), ((2, 8), False), ((2, 8, 32, 1), False)],
)
def test_a_gradient_of_another_shape_is_refused_and_of_other_rows_does_not_cost_the_graph(
    shape: tuple[int, ...], keeps_graph: bool
) -> None:
    stage = _in_the_middle(1)
    before = bits_of(stage)
    stage.forward("m", hidden(1))
    with pytest.raises(PipelineError, match=r"expected a gradient of .* for m"):
        backward(stage, None, torch.zeros(shape))
    assert bits_of(stage) == before
    assert backward(stage, hidden(1), hidden(2)).recomputed != keeps_graph


def test_a_micro_batch_without_labels_counts_as_one_of_no_tokens() -> None:
    stages = head, tail = _in_the_middle(0), _in_the_middle(2)
    _, ids, labels = micro_batch(1, padded=8)
    sums = {name: total.clone() for stage in stages for name, total in stage.state_dict()["sums"].items()}
    was = [(stage.accumulated.num_tokens, stage.accumulated.num_micro_batches) for stage in stages]
    output = head.forward("empty", ids)
    answer = tail.tail("empty", output, labels)
    assert (answer.loss_sum, answer.num_tokens) == (0.0, 0)
    assert torch.equal(answer.grad_hidden, torch.zeros_like(output))
    assert backward(head, None, answer.grad_hidden, "empty", num_tokens=0).grad_x is None
    assert head.cached_bytes == 0
    now = [(stage.accumulated.num_tokens, stage.accumulated.num_micro_batches) for stage in stages]
    assert now == [(tokens, micro_batches + 1) for tokens, micro_batches in was]
    for stage in stages:
        assert all(torch.equal(total, sums[name]) for name, total in stage.state_dict()["sums"].items())
    result = backward(stage_replica(1, 3), None, hidden(1), "empty", num_tokens=0)
    assert torch.equal(result.grad_x, HIDDEN)


@pytest.mark.parametrize("ask", [lambda body, *given: body.tail("m", *given), StageReplica.evaluate_loss])
def test_only_a_tail_has_losses(ask: Callable[..., object]) -> None:
    with pytest.raises(TrainerUsageError, match="expected the tail, found a body"):
        ask(stage_replica(1, 3), hidden(1), micro_batch(1)[2])


@pytest.mark.parametrize(
    ("kind", "good", "bad"),
    [
        (
            "head",
            [IDS, IDS.int(), IDS + 63, TOO_LONG[:, 1:]],
            [IDS.float(), IDS.short(), IDS.bool(), IDS + 64, IDS - 1, IDS[0], IDS[:0], IDS[:, :0], HIDDEN, TOO_LONG],
        ),
        *(
            (
                kind,
                [HIDDEN, HIDDEN.bfloat16()],
                [HIDDEN[0], HIDDEN[:0], HIDDEN[..., :-1], HIDDEN.long(), torch.zeros(1, 17, CUT.dim), IDS],
            )
            for kind in ("body", "tail")
        ),
    ],
)
def test_an_input_is_taken_if_type_shape_and_ids_fit(
    kind: StageKind, good: list[torch.Tensor], bad: list[torch.Tensor]
) -> None:
    shape = StageShape.of(CUT, kind)
    for x in good:
        shape.check_input(x)
    for x in bad:
        with pytest.raises(PipelineError, match="expected ids" if kind == "head" else "expected hidden states"):
            shape.check_input(x)


def test_labels_are_ids_or_ignored_and_as_many_as_there_are_positions() -> None:
    tail = StageShape.of(CUT, "tail")
    for good in (IDS, IDS.int(), IDS - 100, IDS + 63):
        tail.check_labels(good, HIDDEN)
    for bad in (IDS + 64, IDS - 1, IDS - 99, IDS - 101, IDS.float(), IDS[:1], IDS[:, :7], HIDDEN.long()):
        with pytest.raises(PipelineError, match="expected labels"):
            tail.check_labels(bad, HIDDEN)


def test_the_default_options_hold_together_and_clipping_can_be_off() -> None:
    assert StageConfig().backward == "cached"
    assert StageConfig(clip_factor=math.inf, tail_clip_factor=math.inf).clip_factor == math.inf


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("target_tokens", -1),
        ("clip_factor", 0.0),
        ("clip_factor", math.nan),
        ("tail_clip_factor", -1.0),
        ("outlier_factor", 0.5),
        ("outlier_factor", math.nan),
        ("backward", "both"),
        ("max_cached_bytes", -1),
        ("max_staleness", -1),
    ],
)
def test_an_option_out_of_range_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(TrainerUsageError, match=rf"^{field}: expected .*, found "):
        StageConfig(**{field: value})

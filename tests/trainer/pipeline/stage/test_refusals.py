"""What is refused leaves everything bit for bit as it was; a state resumes to the bit, or changes nothing."""

from __future__ import annotations

import io
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.stage_replicas import CUT, backward, bits_of, count, hidden, micro_batch, stage_replica, sums_of
from trainer.errors import CheckpointMismatchError, NonFiniteActivationError, PipelineError
from trainer.pipeline.stage import StageReplica, StageShape

HIDDEN = torch.zeros(2, 8, CUT.dim)
IDS = torch.zeros(2, 8, dtype=torch.int64)
TOO_LONG = torch.zeros(1, 17, dtype=torch.int64)


def _too_late() -> None:
    raise TimeoutError


def _with(value: float) -> torch.Tensor:
    spoilt = hidden(1)
    spoilt[1, 7, 31] = value
    return spoilt


def _in_the_middle(index: int) -> StageReplica:
    stage = stage_replica(index, 3)
    for seed in range(3):
        count(stage, seed)
        if seed == 0:
            stage.step(9)
    return stage


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e30, 1e15])
def test_a_gradient_that_is_not_finite_is_refused_by_head_and_body(value: float) -> None:
    for index, x in ((0, micro_batch(1)[1]), (1, hidden(1))):
        stage = _in_the_middle(index)
        before = bits_of(stage)
        for cached in (True, False):
            if cached:
                stage.forward("bad", x)
            with pytest.raises(NonFiniteActivationError, match="bad"):
                backward(stage, x, _with(value), "bad")
            assert bits_of(stage) == before


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_an_input_that_is_not_finite_is_refused_wherever_it_comes_in(value: float) -> None:
    body, tail, labels, spoilt = _in_the_middle(1), _in_the_middle(2), micro_batch(1)[2], _with(value)
    before = bits_of(body), bits_of(tail)
    for call, named in (
        (lambda: body.forward("bad", spoilt), "bad"),
        (lambda: backward(body, spoilt, hidden(1), "bad"), "bad"),
        (lambda: tail.tail("bad", spoilt, labels), "bad"),
        (lambda: tail.evaluate_loss(spoilt, labels, with_gradient=True), "comparison"),
        (lambda: body.evaluate(hidden(1), spoilt), "comparison"),
        (lambda: body.evaluate(spoilt), "held-out"),
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


@pytest.mark.parametrize(
    ("index", "x", "num_tokens"), [(0, IDS, 16), (1, hidden(1), 16), (1, hidden(1), 0), (2, None, 16), (2, None, 0)]
)
def test_the_last_chance_to_stop_comes_after_the_arithmetic_and_before_the_counting(index, x, num_tokens):
    stage = _in_the_middle(index)
    before = bits_of(stage)
    with pytest.raises(TimeoutError):
        if x is None:
            labels = micro_batch(1, padded=0 if num_tokens else 8)[2]
            stage.tail("m", hidden(1), labels, before_apply=_too_late)
        else:
            backward(stage, x, hidden(1), num_tokens=num_tokens, before_apply=_too_late)
    assert bits_of(stage) == before


@pytest.mark.parametrize(
    ("shape", "keeps_graph"),
    [((2, 7, 32), True), ((3, 8, 32), True), ((2, 8, 31), False), ((2, 8), False)],
)
def test_a_gradient_of_another_shape_is_refused_and_of_other_rows_does_not_cost_the_graph(shape, keeps_graph):
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
    sums, was = sums_of(stages), [stage.accumulated for stage in stages]
    output = head.forward("empty", ids)
    answer = tail.tail("empty", output, labels)
    assert (answer.loss_sum, answer.num_tokens) == (0.0, 0)
    assert torch.equal(answer.grad_hidden, torch.zeros_like(output))
    assert backward(head, None, answer.grad_hidden, "empty", num_tokens=0).grad_x is None
    assert head.cached_bytes == 0
    counted = [replace(each, num_micro_batches=each.num_micro_batches + 1) for each in was]
    assert [stage.accumulated for stage in stages] == counted
    assert all(torch.equal(total, sums[name]) for name, total in sums_of(stages).items())
    result = backward(stage_replica(1, 3), None, hidden(1), "empty", num_tokens=0)
    assert torch.equal(result.grad_x, HIDDEN)


def test_an_input_is_taken_if_type_shape_and_ids_fit() -> None:
    good = [IDS, IDS.int(), IDS + 63, TOO_LONG[:, 1:]]
    bad = [IDS.float(), IDS.short(), IDS.bool(), IDS + 64, IDS - 1, IDS[0], IDS[:0], IDS[:, :0], HIDDEN, TOO_LONG]
    too_long = torch.zeros(1, 17, CUT.dim)
    bad_hidden = [HIDDEN[0], HIDDEN[:0], HIDDEN[..., :-1], HIDDEN.long(), too_long, IDS]
    hidden_states = [HIDDEN, HIDDEN.bfloat16()], bad_hidden, "expected hidden states"
    for kind, taken, refused, message in (
        ("head", good, bad, "expected ids"),
        ("body", *hidden_states),
        ("tail", *hidden_states),
    ):
        shape = StageShape.of(CUT, kind)
        for x in taken:
            shape.check_input(x)
        for x in refused:
            with pytest.raises(PipelineError, match=message):
                shape.check_input(x)


def test_labels_are_ids_or_ignored_and_as_many_as_there_are_positions() -> None:
    tail = StageShape.of(CUT, "tail")
    for good in (IDS, IDS.int(), IDS - 100, IDS + 63):
        tail.check_labels(good, HIDDEN)
    for bad in (IDS + 64, IDS - 1, IDS - 99, IDS - 101, IDS.float(), IDS[:1], IDS[:, :7], HIDDEN.long()):
        with pytest.raises(PipelineError, match="expected labels"):
            tail.check_labels(bad, HIDDEN)


_ACTIONS = st.lists(st.sampled_from(["count", "count", "empty", "step", "forward", "drop"]), max_size=8)


def _act(stage: StageReplica, action: str, number: int) -> None:
    values = hidden(number, positions=4)
    _, ids, labels = micro_batch(number, positions=4, padded=4 if action == "empty" else number % 3)
    x = ids if stage.kind == "head" else values
    if action == "step":
        stage.step(number)
    elif action == "drop":
        stage.drop()
    elif stage.kind == "tail":
        stage.tail("m", values, labels)
    elif action == "forward":
        stage.forward(f"m{number}", x)
    else:
        backward(stage, x, values, num_tokens=0 if action == "empty" else 8)


def _through_a_file(state: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, weights_only=True)
    return loaded


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(index=st.integers(0, 2), before=_ACTIONS, behind=_ACTIONS, other=_ACTIONS)
def test_it_resumes_to_the_bit_from_anywhere(index, before, behind, other):
    first, second = stage_replica(index, 3), stage_replica(index, 3, seed=1)
    for number, action in enumerate(before):
        _act(first, action, number)
    for number, action in enumerate(other):
        _act(second, action, 50 + number)
    second.load_state_dict(_through_a_file(first.state_dict()))
    assert bits_of(second) == bits_of(first)
    assert second.accumulated == first.accumulated
    for number, action in enumerate(behind, start=100):
        _act(first, action, number)
        _act(second, action, number)
    assert bits_of(second) == bits_of(first)


def test_loading_drops_forward_passes_shares_nothing_and_leaves_options_as_configured() -> None:
    first, second = stage_replica(1, 3, seed=1), stage_replica(1, 3)
    _act(first, "count", 1)
    first.step(50)
    _act(first, "count", 1)
    first.optimizer.param_groups[0]["weight_decay"] = 0.7
    _act(second, "forward", 1)
    assert second.cached_bytes > 0
    second.load_state_dict(first.state_dict())
    assert second.cached_bytes == 0
    assert second.optimizer.param_groups[0]["weight_decay"] == 0.1
    before = bits_of(first)
    _act(second, "count", 2)
    assert bits_of(first) == before


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("version", 2, "version 1, found 2"),
        ("module", {}, "expected the weight layers"),
        ("sums", {"layers.0.x": torch.zeros(1)}, "none called layers.0.x"),
        ("sums", {"layers.2.attention_norm.weight": torch.zeros(1)}, r"shape \(32,\), found \(1,\)"),
        ("sums", {"layers.2.attention_norm.weight": "x"}, r"shape \(32,\), found None"),
        ("num_tokens", -1, "num_tokens"),
        ("num_micro_batches", 1.5, "num_micro_batches"),
        ("stage_version", True, "stage_version"),
        ("skipped_steps", "x", "skipped_steps"),
        ("loss_sum", float("nan"), "loss_sum: .* finite"),
        ("norms", [[float("inf"), 16]], "norms"),
        ("norms", [[-1.0, 16]], "norms"),
        ("norms", [[1.0, 0]], "norms"),
        ("norms", 7, "the state of a stage"),
        ("optimizer", {"param_groups": []}, "the state of a stage|parameters by group"),
        *((name, None, "expected") for name in sorted(stage_replica(1, 3).state_dict().keys() - {"norms"})),
    ],
)
def test_a_state_that_is_none_of_this_stage_changes_nothing(name: str, value: object, message: str) -> None:
    stage = stage_replica(1, 3)
    _act(stage, "count", 1)
    before = bits_of(stage)
    with pytest.raises(CheckpointMismatchError, match=message):
        stage.load_state_dict({**stage_replica(1, 3, seed=1).state_dict(), name: value})
    without = {key: each for key, each in stage.state_dict().items() if key != name}
    if name != "norms":
        with pytest.raises(CheckpointMismatchError, match="expected"):
            stage.load_state_dict(without)
    assert bits_of(stage) == before


@pytest.mark.parametrize(("index", "other", "num_stages"), [(1, 0, 3), (1, 2, 4)])
def test_the_state_of_another_stage_is_refused(index: int, other: int, num_stages: int) -> None:
    with pytest.raises(CheckpointMismatchError, match="expected"):
        stage_replica(index, num_stages).load_state_dict(stage_replica(other, num_stages).state_dict())

"""Error feedback: nothing is lost over the rounds, and a failed round leaves nothing behind."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.compression.vectors import ErrorFeedback, codec_named
from trainer.errors import CheckpointMismatchError, CodecError, TrainerUsageError

NUM_VALUES = 1500


def gradients(count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(NUM_VALUES, generator=generator) for _ in range(count)]


def through_int8(vector: torch.Tensor) -> torch.Tensor:
    codec = codec_named("int8")
    return codec.decode(codec.encode(vector), vector.numel())


@settings(max_examples=25, deadline=None)
@given(fates=st.lists(st.sampled_from(["commit", "rollback"]), min_size=1, max_size=20))
def test_what_arrived_is_what_was_meant_but_for_one_residual(fates):
    feedback = ErrorFeedback(NUM_VALUES)
    meant, arrived = torch.zeros(NUM_VALUES, dtype=torch.float64), torch.zeros(NUM_VALUES, dtype=torch.float64)
    for gradient, fate in zip(gradients(len(fates)), fates, strict=True):
        compensated = feedback.compensate(gradient)
        decoded = through_int8(compensated)
        if fate == "rollback":
            feedback.rollback()
            continue
        feedback.commit(compensated, decoded)
        meant += gradient
        arrived += decoded
    assert (meant - arrived - feedback.residual).abs().max() < 1e-5
    assert feedback.residual.abs().max() < 0.05


def test_without_it_a_small_constant_never_arrives():
    """A value below half a level is sent as 0 each time; with feedback its sum arrives."""
    gradient = torch.zeros(NUM_VALUES)
    gradient[0], gradient[1] = 127.0, 0.3
    feedback = ErrorFeedback(NUM_VALUES)
    arrived = torch.zeros(NUM_VALUES)
    for _ in range(20):
        compensated = feedback.compensate(gradient)
        decoded = through_int8(compensated)
        feedback.commit(compensated, decoded)
        arrived += decoded
    assert through_int8(gradient)[1] == 0.0
    assert arrived[1] == pytest.approx(20 * 0.3, abs=0.51)


def test_rollback_restores_bit_for_bit():
    first, second = gradients(2)
    feedback = ErrorFeedback(NUM_VALUES)
    feedback.commit(feedback.compensate(first), through_int8(first))
    before = feedback.residual.clone()
    feedback.compensate(second)
    feedback.rollback()
    feedback.rollback()
    assert torch.equal(feedback.residual, before)


def test_parts_that_did_not_arrive_are_said_again():
    (gradient,) = gradients(1)
    feedback = ErrorFeedback(NUM_VALUES)
    compensated = feedback.compensate(gradient)
    decoded = compensated.clone()
    decoded[1000:] = 0.0
    feedback.commit(compensated, decoded)
    again = feedback.compensate(torch.zeros(NUM_VALUES))
    assert torch.equal(again[1000:], gradient[1000:])
    assert not again[:1000].any()


def test_compensating_in_place():
    (gradient,) = gradients(1)
    feedback = ErrorFeedback(NUM_VALUES)
    feedback.commit(feedback.compensate(gradient), torch.zeros(NUM_VALUES))
    into = gradient.clone()
    assert feedback.compensate(into, out=into) is into
    assert torch.equal(into, 2 * gradient)


def test_order_of_calls_is_kept():
    (gradient,) = gradients(1)
    feedback = ErrorFeedback(NUM_VALUES)
    with pytest.raises(TrainerUsageError, match="found no open round"):
        feedback.commit(gradient, gradient)
    feedback.compensate(gradient)
    with pytest.raises(TrainerUsageError, match=r"expected commit\(\) or rollback\(\)"):
        feedback.compensate(gradient)


def test_a_commit_that_cannot_be_leaves_the_round_open_and_the_residual_alone():
    (gradient,) = gradients(1)
    feedback = ErrorFeedback(NUM_VALUES)
    compensated = feedback.compensate(gradient)
    with pytest.raises(CodecError, match="finite residual"):
        feedback.commit(compensated, torch.full((NUM_VALUES,), torch.inf))
    with pytest.raises(CodecError, match="expected 1500 values, found 3"):
        feedback.commit(compensated, torch.zeros(3))
    assert not feedback.residual.any()
    feedback.rollback()
    assert torch.equal(feedback.compensate(gradient), gradient)


def test_saved_and_restored():
    first, second = gradients(2)
    feedback = ErrorFeedback(NUM_VALUES)
    feedback.commit(feedback.compensate(first), through_int8(first))
    state = feedback.state_dict()
    restored = ErrorFeedback(NUM_VALUES)
    restored.compensate(second)
    restored.load_state_dict(state)
    assert torch.equal(restored.compensate(second), feedback.compensate(second))
    feedback.commit(second, torch.zeros(NUM_VALUES))
    assert not torch.equal(state["residual"], feedback.residual), "the saved state followed the living one"


@pytest.mark.parametrize(
    "state",
    [{}, {"version": 2, "residual": torch.zeros(NUM_VALUES)}, {"version": 1, "residual": torch.zeros(3)}],
    ids=["empty", "version", "length"],
)
def test_a_state_of_something_else_is_refused(state):
    with pytest.raises(CheckpointMismatchError, match="error feedback"):
        ErrorFeedback(NUM_VALUES).load_state_dict(state)

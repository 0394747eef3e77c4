"""A state resumes to the bit, wherever between two steps it was taken; one that does not fit changes nothing."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.stage_replicas import backward, bits_of, hidden, micro_batch, stage_replica
from trainer.errors import CheckpointMismatchError
from trainer.pipeline.stage import StageReplica

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
def test_it_resumes_to_the_bit_from_anywhere(
    index: int, before: list[str], behind: list[str], other: list[str]
) -> None:
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


def test_two_replicas_of_one_state_do_not_share_their_sums() -> None:
    first, second = stage_replica(1, 3), stage_replica(1, 3)
    _act(first, "count", 1)
    second.load_state_dict(first.state_dict())
    before = bits_of(first)
    _act(second, "count", 2)
    assert bits_of(first) == before


def test_loading_drops_forward_passes_calls_the_hook_and_leaves_options_as_configured() -> None:
    seen: list[bytes] = []
    first, second = stage_replica(1, 3, seed=1), stage_replica(1, 3, after_update=lambda module: seen.append(b""))
    _act(first, "count", 1)
    first.step(50)
    first.optimizer.param_groups[0]["weight_decay"] = 0.7
    _act(second, "forward", 1)
    assert second.cached_bytes > 0
    second.load_state_dict(first.state_dict())
    assert second.cached_bytes == 0
    assert len(seen) == 1
    assert second.optimizer.param_groups[0]["weight_decay"] == 0.1


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("version", 2, "version 1, found 2"),
        ("module", {}, "expected the weight layers"),
        ("module", None, "the state of a stage"),
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
        ("norms", [[1.0]], "the state of a stage"),
        ("norms", 7, "the state of a stage"),
        ("optimizer", {"param_groups": []}, "the state of a stage|parameters by group"),
    ],
)
def test_a_state_that_is_none_of_this_stage_changes_nothing(name: str, value: object, message: str) -> None:
    stage = stage_replica(1, 3)
    _act(stage, "count", 1)
    before = bits_of(stage)
    with pytest.raises(CheckpointMismatchError, match=message):
        stage.load_state_dict({**stage_replica(1, 3, seed=1).state_dict(), name: value})
    assert bits_of(stage) == before


@pytest.mark.parametrize("missing", sorted(stage_replica(1, 3).state_dict().keys() - {"norms"}))
def test_a_state_without_one_of_its_parts_is_refused(missing: str) -> None:
    state = stage_replica(1, 3).state_dict()
    del state[missing]
    with pytest.raises(CheckpointMismatchError, match="expected"):
        stage_replica(1, 3).load_state_dict(state)


def test_a_state_from_before_norms_were_kept_is_taken_up() -> None:
    first, second = stage_replica(1, 3), stage_replica(1, 3, seed=1)
    _act(first, "count", 1)
    state = first.state_dict()
    del state["norms"]
    second.load_state_dict(state)
    assert bits_of(second) == bits_of(first)
    assert second.state_dict()["norms"] == []


@pytest.mark.parametrize(("index", "other", "num_stages"), [(1, 0, 3), (1, 2, 4)])
def test_the_state_of_another_stage_is_refused(index: int, other: int, num_stages: int) -> None:
    with pytest.raises(CheckpointMismatchError, match="expected"):
        stage_replica(index, num_stages).load_state_dict(stage_replica(other, num_stages).state_dict())

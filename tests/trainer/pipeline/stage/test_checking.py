"""Tensors from strangers: what a stage takes, told before it is computed with."""

from __future__ import annotations

import pytest
import torch

from tests.support.stage_replicas import CUT
from trainer.errors import PipelineError
from trainer.pipeline.stage import StageKind, StageShape

HIDDEN = torch.zeros(2, 8, CUT.dim)
IDS = torch.zeros(2, 8, dtype=torch.int64)


def _shape(kind: StageKind) -> StageShape:
    return StageShape.of(CUT, kind)


@pytest.mark.parametrize("ids", [IDS, IDS.int(), IDS + 63, torch.zeros(1, 16, dtype=torch.int64)])
def test_ids_in_the_vocabulary_are_taken(ids: torch.Tensor) -> None:
    _shape("head").check_input(ids)


@pytest.mark.parametrize(
    "ids",
    [
        IDS.float(),
        IDS.to(torch.int16),
        IDS.bool(),
        IDS + 64,
        IDS - 1,
        IDS[0],
        IDS[:0],
        IDS[:, :0],
        HIDDEN,
        torch.zeros(1, 17, dtype=torch.int64),
    ],
    ids=lambda ids: f"{ids.dtype}{list(ids.shape)}",
)
def test_other_ids_are_refused(ids: torch.Tensor) -> None:
    with pytest.raises(PipelineError, match="expected ids"):
        _shape("head").check_input(ids)


@pytest.mark.parametrize("kind", ["body", "tail"])
def test_hidden_states_are_taken_by_what_they_are(kind: StageKind) -> None:
    _shape(kind).check_input(HIDDEN)
    _shape(kind).check_input(HIDDEN.bfloat16())
    for bad in (HIDDEN[0], HIDDEN[:0], HIDDEN[..., :-1], HIDDEN.long(), torch.zeros(1, 17, CUT.dim), IDS):
        with pytest.raises(PipelineError, match="expected hidden states"):
            _shape(kind).check_input(bad)


def test_labels_are_ids_or_ignored_and_as_many_as_there_are_positions() -> None:
    tail = _shape("tail")
    for good in (IDS, IDS.int(), IDS - 100, IDS + 63):
        tail.check_labels(good, HIDDEN)
    for bad in (IDS + 64, IDS - 1, IDS - 99, IDS - 101, IDS.float(), IDS[:1], IDS[:, :7], HIDDEN.long()):
        with pytest.raises(PipelineError, match="expected labels"):
            tail.check_labels(bad, HIDDEN)

"""What a slice becomes of an average."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainer.errors import RoundFailedError
from trainer.outer.engine.collective import RoundReport, RoundResult
from trainer.outer.sparta.averaging import merged

VALUES = st.floats(-1e6, 1e6, width=32)
ROWS = st.lists(st.tuples(VALUES, VALUES, VALUES), min_size=1, max_size=20)


def result(average: torch.Tensor, *, completeness: float = 1.0, residual: torch.Tensor | None = None) -> RoundResult:
    report = RoundReport(round_index=0, members=("a",), completeness=completeness)
    return RoundResult(vector=average, report=report, residual=residual)


def columns(rows: list[tuple[float, float, float]]) -> tuple[torch.Tensor, ...]:
    return tuple(torch.tensor(column) for column in zip(*rows, strict=True))


@pytest.mark.slow
@given(ROWS)
def test_the_average_with_ones_own_progress_since(rows) -> None:
    now, contributed, average = columns(rows)
    expected = (average.double() + now.double() - contributed.double()).float()
    new = merged(now, contributed, result(average))
    assert torch.allclose(new, expected, rtol=1e-5, atol=0.5)


@pytest.mark.slow
@given(ROWS)
def test_who_has_not_moved_takes_the_average_bit_for_bit(rows) -> None:
    contributed, average, _ = columns(rows)
    assert torch.equal(merged(contributed, contributed, result(average)), average)


@pytest.mark.slow
@given(ROWS)
def test_who_was_at_the_average_keeps_every_bit(rows) -> None:
    now, contributed, _ = columns(rows)
    assert torch.equal(merged(now, contributed, result(contributed.clone())), now)


def test_a_part_nobody_brought_is_left_alone() -> None:
    """The collective answers zeros for it, which is right for differences, and would wipe out parameters."""
    now, contributed = torch.tensor([1.5, 2.5, 3.5]), torch.tensor([1.0, 2.0, 3.0])
    average = torch.tensor([2.0, 0.0, 0.0])
    assert merged(now, contributed, result(average, completeness=0.4)).tolist() == [2.5, 2.5, 3.5]
    assert merged(now, contributed, result(average)).tolist() == [2.5, 0.5, 0.5], "all brought it: the mean is 0"


def test_the_remainder_of_a_lossy_encoding_stays_at_home() -> None:
    """Then the mean over the replicas is what it was, whatever was rounded on the way."""
    held = [torch.tensor([1.3, -2.7]), torch.tensor([3.4, -0.2])]
    said = [vector.round() for vector in held]
    average = (said[0] + said[1]) / 2
    new = [
        merged(vector, vector, result(average, residual=vector - rounded))
        for vector, rounded in zip(held, said, strict=True)
    ]
    assert torch.allclose(new[0] + new[1], held[0] + held[1])
    alone = merged(held[0], held[0], result(held[0].round(), residual=held[0] - held[0].round()))
    assert torch.equal(alone, held[0])


@pytest.mark.parametrize(
    "average",
    [torch.tensor([1.0]), torch.tensor([1.0, torch.nan]), torch.tensor([-torch.inf, 0.0]), torch.tensor([3e38, 0.0])],
    ids=["short", "nan", "inf", "overflow"],
)
def test_a_result_that_cannot_be_applied(average: torch.Tensor) -> None:
    with pytest.raises(RoundFailedError):
        merged(torch.tensor([3e38, 0.0]), torch.tensor([0.0, 0.0]), result(average))

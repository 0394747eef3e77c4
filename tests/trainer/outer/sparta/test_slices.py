"""Which values a round averages, and what they become."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tests.support.replica_group import Replica, Scripted
from trainer.outer.diloco import FlatLayout
from trainer.outer.engine.collective import RoundReport, RoundResult
from trainer.outer.sparta import SpartaConfig
from trainer.outer.sparta.slices import merged, schedule_digest, slice_of

SHAPES = st.lists(st.lists(st.integers(0, 7), max_size=3).map(tuple), min_size=1, max_size=6)


@st.composite
def layouts(draw: st.DrawFn) -> tuple[FlatLayout, dict[str, int]]:
    """Any tensors, some of the matrices with an axis that is kept whole."""
    shapes = {f"t{index}": shape for index, shape in enumerate(draw(SHAPES))}
    matrices = [name for name, shape in shapes.items() if len(shape) == 2]
    kept = {name: draw(st.integers(0, 1)) for name in matrices if draw(st.booleans())}
    return FlatLayout.from_shapes(shapes), kept


def touched(layout: FlatLayout, values) -> dict[str, torch.Tensor]:
    """1 at the slice's values, 0 elsewhere."""
    tensors = {name: torch.zeros(shape) for name, shape, _ in layout.slices()}
    values.scatter(torch.ones(values.num_values), tensors)
    return tensors


@pytest.mark.slow
@given(layouts(), st.integers(1, 30), st.integers(0, 10**9))
def test_a_cycle_of_rounds_touches_each_value_exactly_once(laid, num_slices: int, first: int) -> None:
    layout, kept = laid
    counts = {name: torch.zeros(shape) for name, shape, _ in layout.slices()}
    for round_index in range(first, first + num_slices):
        values = slice_of(round_index, layout, num_slices, kept)
        for name, tensor in touched(layout, values).items():
            counts[name] += tensor
    assert all(bool((count == 1).all()) for count in counts.values())


@given(SHAPES, st.integers(1, 30))
def test_slices_differ_by_one_value_at_most(shapes: list[tuple[int, ...]], num_slices: int) -> None:
    layout = FlatLayout.from_shapes({f"t{index}": shape for index, shape in enumerate(shapes)})
    sizes = [slice_of(it, layout, num_slices).num_values for it in range(num_slices)]
    assert sum(sizes) == layout.num_values and max(sizes) - min(sizes) <= 1


@pytest.mark.slow
@given(layouts(), st.integers(1, 12), st.integers(0, 40), st.integers(0, 2**31))
def test_what_is_gathered_goes_back_where_it_was(laid, num_slices: int, round_index: int, seed: int) -> None:
    layout, kept = laid
    torch.manual_seed(seed)
    tensors = {name: torch.randn(shape) for name, shape, _ in layout.slices()}
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    rng_state = torch.get_rng_state()
    values = slice_of(round_index, layout, num_slices, kept_axes=kept)
    values.scatter(values.gather(tensors) + 1, tensors)
    assert torch.equal(torch.get_rng_state(), rng_state), "no random numbers are drawn"
    mask = touched(layout, values)
    assert all(torch.equal(tensors[name], before[name] + mask[name]) for name in tensors)
    for name, axis in kept.items():  # Averaged whole.
        sums = mask[name].sum(axis)
        assert bool(((sums == 0) | (sums == mask[name].shape[axis])).all())


@pytest.mark.parametrize("every_steps", [1, 2, 3, 5, 20])
@pytest.mark.parametrize("background", [True, False])
def test_twenty_rounds_of_a_replica_touch_each_parameter_once(every_steps: int, background: bool) -> None:
    collective = Scripted(lambda contribution: contribution.vector + 1)
    averaged: list[nn.Module] = []
    config = SpartaConfig(every_steps=every_steps, background=background)
    replica = Replica(config, collective, after_average=averaged.append)
    before = replica.vector()
    while len(replica.results) < 20:
        replica.turn()
        replica.drain()
    assert torch.allclose(replica.vector(), before + 1, atol=1e-6)
    assert Counter(result.fragment for result in replica.results) == Counter(range(20))
    assert replica.trainer.outer_step == 1 and len(collective.contributions) == len(averaged) == 20


def test_the_digest_tells_schedules_apart() -> None:
    layout, other = FlatLayout.from_shapes({"a": (5, 4)}), FlatLayout.from_shapes({"a": (4, 5)})
    schedules = [(layout, 4), (layout, 5), (layout, 4, {"a": 0}), (other, 4)]
    assert len({schedule_digest(*schedule) for schedule in schedules}) == 4
    assert schedule_digest(layout, 4) == "eea9d0e4d36861cc7f0bb70feec28434ff19f0a5bf7844e96fe08fb17e7342d1", (
        "stands in checkpoints and on the wire"
    )


VALUES = st.floats(-1e6, 1e6, width=32)
ROWS = st.lists(st.tuples(VALUES, VALUES, VALUES), min_size=1, max_size=20)


def result(average: torch.Tensor, *, completeness: float = 1.0, residual: torch.Tensor | None = None) -> RoundResult:
    report = RoundReport(round_index=0, members=("a",), completeness=completeness)
    return RoundResult(vector=average, report=report, residual=residual)


@pytest.mark.slow
@given(ROWS)
def test_the_average_with_ones_own_progress_since(rows) -> None:
    now, contributed, average = (torch.tensor(column) for column in zip(*rows, strict=True))
    expected = (average.double() + now.double() - contributed.double()).float()
    assert torch.allclose(merged(now, contributed, result(average)), expected, rtol=1e-5, atol=0.5)
    assert torch.equal(merged(contributed, contributed, result(average)), average), "has not moved: bit for bit"
    assert torch.equal(merged(now, contributed, result(contributed.clone())), now), "was at the average: every bit"


def test_a_part_nobody_brought_is_left_alone() -> None:
    """The collective answers zeros for it, which is right for differences, and would wipe out parameters."""
    now, contributed = torch.tensor([1.5, 2.5, 3.5]), torch.tensor([1.0, 2.0, 3.0])
    average = torch.tensor([2.0, 0.0, 0.0])
    assert merged(now, contributed, result(average, completeness=0.4)).tolist() == [2.5, 2.5, 3.5]
    assert merged(now, contributed, result(average)).tolist() == [2.5, 0.5, 0.5], "all brought it: the mean is 0"


def test_the_remainder_of_a_lossy_encoding_stays_at_home() -> None:
    """Then the mean over the replicas is what it was, whatever was rounded on the way."""
    held = [torch.tensor([1.3, -2.7]), torch.tensor([3.4, -0.2])]
    sent = [vector.round() for vector in held]
    average = (sent[0] + sent[1]) / 2
    new = [
        merged(vector, vector, result(average, residual=vector - rounded))
        for vector, rounded in zip(held, sent, strict=True)
    ]
    assert torch.allclose(new[0] + new[1], held[0] + held[1])
    alone = merged(held[0], held[0], result(held[0].round(), residual=held[0] - held[0].round()))
    assert torch.equal(alone, held[0])

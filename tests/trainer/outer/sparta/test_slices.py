"""Which values a round averages."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.sparta_replicas import Replica, Scripted
from trainer.errors import TrainerUsageError
from trainer.outer.diloco import FlatLayout
from trainer.outer.sparta import SpartaConfig, schedule_digest, slice_index, slice_of
from trainer.outer.sparta.slices import check_kept_axes

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
@given(layouts(), st.integers(1, 30), st.integers(0, 10**9), st.integers(0, 10**6))
def test_a_cycle_of_rounds_touches_each_value_exactly_once(laid, num_slices: int, first: int, salt: int) -> None:
    layout, kept = laid
    counts = {name: torch.zeros(shape) for name, shape, _ in layout.slices()}
    for round_index in range(first, first + num_slices):
        values = slice_of(round_index, layout, num_slices, salt, kept)
        for name, tensor in touched(layout, values).items():
            counts[name] += tensor
    assert all(bool((count == 1).all()) for count in counts.values())


@given(SHAPES, st.integers(1, 30))
def test_slices_differ_by_one_value_at_most(shapes: list[tuple[int, ...]], num_slices: int) -> None:
    layout = FlatLayout.from_shapes({f"t{index}": shape for index, shape in enumerate(shapes)})
    sizes = [slice_of(it, layout, num_slices).num_values for it in range(num_slices)]
    assert sum(sizes) == layout.num_values and max(sizes) - min(sizes) <= 1


@pytest.mark.slow
@given(layouts(), st.integers(1, 9), st.integers(0, 40), st.integers(0, 2**31))
def test_what_is_gathered_goes_back_where_it_was(laid, num_slices: int, round_index: int, seed: int) -> None:
    layout, kept = laid
    torch.manual_seed(seed)
    tensors = {name: torch.randn(shape) for name, shape, _ in layout.slices()}
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    values = slice_of(round_index, layout, num_slices, kept_axes=kept)
    values.scatter(values.gather(tensors) + 1, tensors)
    mask = touched(layout, values)
    assert all(torch.equal(tensors[name], before[name] + mask[name]) for name in tensors)


@pytest.mark.slow
@given(layouts(), st.integers(1, 12), st.integers(0, 40))
def test_a_kept_axis_is_averaged_whole(laid, num_slices: int, round_index: int) -> None:
    layout, kept = laid
    mask = touched(layout, slice_of(round_index, layout, num_slices, kept_axes=kept))
    for name, axis in kept.items():
        sums = mask[name].sum(axis)
        assert bool(((sums == 0) | (sums == mask[name].shape[axis])).all())


@pytest.mark.parametrize("every_steps", [1, 2, 3, 5, 20])
@pytest.mark.parametrize("background", [True, False])
def test_twenty_rounds_of_a_replica_touch_each_parameter_once(every_steps: int, background: bool) -> None:
    """Whatever ``every_steps``: node0 rounded ``epoch / every`` to even numbers, and never averaged half of them."""
    collective = Scripted(lambda contribution: contribution.vector + 1)
    replica = Replica(SpartaConfig(every_steps=every_steps, background=background), collective)
    before = replica.vector()
    while len(replica.results) < 20:
        replica.turn()
        replica.drain()
    assert torch.allclose(replica.vector(), before + 1, atol=1e-6)
    assert Counter(result.fragment for result in replica.results) == Counter(range(20))
    assert replica.trainer.outer_step == 1 and len(collective.contributions) == 20


def test_no_random_numbers_are_drawn() -> None:
    torch.manual_seed(7)
    before = torch.get_rng_state()
    layout = FlatLayout.from_shapes({"a": (5, 4)})
    assert slice_of(3, layout, 4, 2) == slice_of(3, layout, 4, 2)
    assert torch.equal(torch.get_rng_state(), before)


@given(st.integers(0, 10**9), st.integers(1, 100), st.integers(0, 10**9))
def test_the_salt_moves_the_order_round(round_index: int, num_slices: int, salt: int) -> None:
    assert slice_index(round_index, num_slices, salt) == slice_index(round_index + salt, num_slices)


def test_the_digest_tells_schedules_apart() -> None:
    layout, other = FlatLayout.from_shapes({"a": (5, 4)}), FlatLayout.from_shapes({"a": (4, 5)})
    digests = {
        schedule_digest(layout, 4),
        schedule_digest(layout, 5),
        schedule_digest(layout, 4, 1),
        schedule_digest(layout, 4, 0, {"a": 0}),
        schedule_digest(other, 4),
    }
    assert len(digests) == 5 and schedule_digest(layout, 4, 4) == schedule_digest(layout, 4)


@pytest.mark.parametrize("kept", [{"b": 0}, {"a": 2}, {"a": -1}, {"v": 0}])
def test_axes_that_are_not_there_are_refused(kept: dict[str, int]) -> None:
    with pytest.raises(TrainerUsageError, match="kept axis"):
        check_kept_axes(FlatLayout.from_shapes({"a": (5, 4), "v": (3,)}), kept)

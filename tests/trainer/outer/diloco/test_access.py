"""Snapshots and merges: the same values from a processor's memory and through a device's pieces, with any threads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.support.replica_group import drift, parameter_bits
from trainer.errors import TrainerUsageError
from trainer.outer.diloco import DiLoCoConfig, DiLoCoTrainer, FlatLayout
from trainer.outer.diloco.access import DeviceParameters, ModelParameters, ParameterAccess, access_to, merge_into
from trainer.outer.diloco.rounds import arithmetic_threads
from trainer.outer.engine import device_copy
from trainer.outer.engine.collective import LocalCollective

SIZES = [(3, 7), (1,), (40,), (), (5, 5)]
CPU = torch.device("cpu")
WAYS: dict[str, Callable[[dict[str, Tensor]], ParameterAccess]] = {
    "processor": ModelParameters,
    "device": lambda tensors: DeviceParameters(tensors, CPU),
}


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that tensors are smaller than a piece, as large, and larger."""
    monkeypatch.setattr(device_copy, "_PIECE_VALUES", 5)


def named(seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {f"{index}": torch.randn(size, generator=generator).to(dtype) for index, size in enumerate(SIZES)}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_way_reads_and_sets_what_the_layout_does(way: str, dtype: torch.dtype) -> None:
    tensors = named(dtype=dtype)
    layout, access = FlatLayout.of(tensors), WAYS[way](tensors)
    vector = layout.gather(tensors)
    assert torch.equal(access.gather(layout), vector)
    snapshot = access.snapshot(layout)
    for tensor in tensors.values():
        tensor.add_(1.0)
    anchor = torch.arange(layout.num_values, dtype=torch.float32)
    assert torch.equal(snapshot.subtracted_from(anchor), anchor - vector), "the values as they were"
    other = named(1, dtype)
    access.scatter(layout, layout.gather(other))
    assert all(torch.equal(tensors[name], other[name]) for name in tensors)
    access.prepare_merge(layout, vector)(0.0)
    assert torch.equal(layout.gather(tensors), vector)
    access.prepare_merge(layout, anchor)(0.25)
    merged = (vector * 0.25 + anchor).to(dtype).float()
    assert torch.equal(layout.gather(tensors), merged)
    with pytest.raises(TrainerUsageError, match="expected a vector"):
        access.scatter(layout, vector[1:])
    assert torch.equal(layout.gather(tensors), merged)


def test_a_snapshot_does_not_change_what_the_one_before_led_to() -> None:
    tensors = named()
    layout, access = FlatLayout.of(tensors), ModelParameters(tensors)
    anchor = torch.zeros(layout.num_values)
    first = access.snapshot(layout).subtracted_from(anchor)
    kept = first.clone()
    tensors["0"].zero_()
    access.snapshot(layout).subtracted_from(anchor)
    assert torch.equal(first, kept)


def test_a_model_on_the_processor_is_read_in_one_copy() -> None:
    assert isinstance(access_to(named()), ModelParameters)


@given(keep=st.floats(0.0, 1.0, exclude_max=True), seed=st.integers(0, 1000))
def test_a_merge_is_the_same_wherever_values_lie(keep: float, seed: int) -> None:
    """Fused multiply-add in the middle of a vector and none at its end would round another way."""
    generator = torch.Generator().manual_seed(seed)
    target, values = torch.randn(1003, generator=generator), torch.randn(1003, generator=generator)
    whole, pieces = target.clone(), target.clone()
    merge_into(whole, values, keep)
    for start in range(0, 1003, 17):
        merge_into(pieces[start : start + 17], values[start : start + 17], keep)
    assert torch.equal(whole, pieces)
    exact = torch.from_numpy(target.numpy() * torch.tensor(keep).numpy()) + values if keep else values
    assert torch.equal(whole, exact)


class Wide(nn.Module):
    """More values than one thread takes by itself, and an odd number of them."""

    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.randn(200_003, generator=torch.Generator().manual_seed(1)))


@pytest.mark.parametrize("overlap_steps", [0, 1])
def test_rounds_end_with_the_same_bits_at_any_number_of_threads(overlap_steps: int) -> None:
    config = DiLoCoConfig(inner_steps=3, overlap_steps=overlap_steps, merge_alpha=0.3)

    def trained(own_threads: int, lent_threads: int) -> tuple[bytes, str]:
        with arithmetic_threads(own_threads):
            model = Wide()
            trainer = DiLoCoTrainer(model, config, LocalCollective(), num_threads=lent_threads)
            for step in range(9):
                drift(model, 0.1 * (step + 1))
                trainer.after_inner_step()
            trainer.drain()
            assert torch.get_num_threads() == own_threads, "given back"
            return parameter_bits(model), trainer.state_digest()

    assert trained(1, 0) == trained(1, 3) == trained(2, 0) == trained(4, 2)


def test_a_round_that_training_waits_for_has_the_threads_that_were_lent() -> None:
    seen: list[int] = []

    class Counting(LocalCollective):
        def reduce(self, contribution):
            seen.append(torch.get_num_threads())
            return super().reduce(contribution)

    for overlap_steps in (0, 1):
        config = replace(DiLoCoConfig(inner_steps=2), overlap_steps=overlap_steps)
        with arithmetic_threads(1):
            trainer = DiLoCoTrainer(Wide(), config, Counting(), num_threads=3)
            trainer.after_inner_step(), trainer.after_inner_step()
            trainer.drain()
    assert seen == [3, 1], "beside training on a CPU a round has no more than before"

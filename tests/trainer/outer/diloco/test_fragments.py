from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from trainer.errors import TrainerUsageError
from trainer.outer.diloco import DiLoCoConfig, FragmentPlan, synchronised_parameters


def named(num_layers: int, vocab_rows: int = 8) -> dict[str, torch.Tensor]:
    tensors = {"embedding.weight": torch.zeros(vocab_rows, 2)}
    for layer in range(num_layers):
        tensors[f"layers.{layer}.attention.0.weight"] = torch.zeros(2, 2)
        tensors[f"layers.{layer}.feed_forward.1.weight"] = torch.zeros(3, 2)
    return tensors | {"readout.norm.weight": torch.zeros(2), "readout.output.weight": torch.zeros(vocab_rows, 2)}


@given(st.integers(1, 30), st.integers(1, 32))
def test_every_tensor_is_in_one_fragment_and_layers_stay_whole(num_layers: int, num_fragments: int) -> None:
    tensors = named(num_layers)
    if num_fragments > num_layers + 2:
        with pytest.raises(TrainerUsageError, match=f"expected at most {num_layers + 2}"):
            FragmentPlan.of(tensors, num_fragments)
        return
    plan = FragmentPlan.of(tensors, num_fragments)
    assert sorted(name for layout in plan.layouts for name in layout.names) == sorted(tensors)
    homes = {name: index for index, layout in enumerate(plan.layouts) for name in layout.names}
    for layer in range(num_layers):
        assert homes[f"layers.{layer}.attention.0.weight"] == homes[f"layers.{layer}.feed_forward.1.weight"]
        assert homes[f"layers.{layer}.attention.0.weight"] == layer % num_fragments
    assert homes["readout.norm.weight"] == homes["readout.output.weight"]
    assert num_fragments == 1 or homes["embedding.weight"] != homes["readout.output.weight"]


def test_embedding_and_output_go_where_there_is_least() -> None:
    homes = [layout.names for layout in FragmentPlan.of(named(6), 4).layouts]
    assert "embedding.weight" in homes[3] and "readout.output.weight" in homes[2]


def test_one_fragment_keeps_the_models_order() -> None:
    tensors = named(3)
    assert FragmentPlan.of(tensors, 1).layouts[0].names == tuple(tensors)


@given(st.integers(1, 12), st.integers(1, 4))
def test_a_larger_vocabulary_moves_nothing(num_layers: int, num_fragments: int) -> None:
    if num_fragments > num_layers + 2:
        return
    before = FragmentPlan.of(named(num_layers), num_fragments)
    after = FragmentPlan.of(named(num_layers, vocab_rows=4096), num_fragments)
    assert [layout.names for layout in before.layouts] == [layout.names for layout in after.layouts]


def test_sequential_modules_are_cut_by_their_numbers() -> None:
    model = nn.Sequential(nn.Linear(1, 2), nn.Tanh(), nn.Linear(2, 1))
    plan = FragmentPlan.of(synchronised_parameters(model), 2)
    assert [layout.names for layout in plan.layouts] == [("0.weight", "0.bias"), ("2.weight", "2.bias")]
    assert [place.stop - place.start for place in plan.slices()] == [4, 3] and plan.whole().num_values == 7


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
def test_frozen_parameters_stay_out_and_compiled_names_are_plain() -> None:
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    model[0].weight.requires_grad_(False)
    assert list(synchronised_parameters(model)) == ["0.bias", "1.weight", "1.bias"]
    assert list(synchronised_parameters(torch.compile(model))) == ["0.bias", "1.weight", "1.bias"]


@given(st.integers(1, 600), st.integers(1, 40))
def test_turns_come_round_every_inner_steps(inner_steps: int, num_fragments: int) -> None:
    if num_fragments > inner_steps:
        return
    config = DiLoCoConfig(inner_steps=inner_steps, num_fragments=num_fragments)
    intervals = [config.steps_before(fragment) for fragment in range(num_fragments)]
    assert sum(intervals) == inner_steps and max(intervals) - min(intervals) <= 1


@pytest.mark.parametrize(
    "options",
    [
        {"inner_steps": 0},
        {"outer_lr": 0.0},
        {"outer_lr": float("nan")},
        {"outer_momentum": 1.0},
        {"outer_momentum": float("nan")},
        {"num_fragments": 0},
        {"inner_steps": 3, "num_fragments": 4},
        {"inner_steps": 10, "num_fragments": 2, "overlap_steps": 5},
        {"overlap_steps": -1},
        {"merge_alpha": 1.0},
        {"round_timeout_s": 0.0},
    ],
)
def test_senseless_options_are_refused_by_name(options: dict[str, float]) -> None:
    with pytest.raises(TrainerUsageError, match=f"diloco.{list(options)[-1]}: expected .* found"):
        DiLoCoConfig(**options)

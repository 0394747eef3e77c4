from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from trainer.errors import IncompatiblePeerError, TrainerUsageError
from trainer.outer.diloco import FlatLayout, FragmentPlan, synchronised_parameters

SHAPES = st.lists(st.lists(st.integers(0, 4), max_size=3).map(tuple), min_size=1, max_size=6)


@pytest.mark.slow
@given(SHAPES, st.integers(0, 2**31))
def test_tensors_come_back_bit_for_bit(shapes: list[tuple[int, ...]], seed: int) -> None:
    torch.manual_seed(seed)
    tensors = {f"t{index}": torch.randn(shape) for index, shape in enumerate(shapes)}
    layout = FlatLayout.of(tensors)
    vector = layout.gather(tensors)
    back = {name: torch.full_like(tensor, torch.nan) for name, tensor in tensors.items()}
    layout.scatter(vector, back)
    assert vector.shape == (layout.num_values,)
    for name, tensor in tensors.items():
        assert back[name].numpy().tobytes() == tensor.numpy().tobytes()


def test_values_lie_in_the_order_of_the_names_also_of_transposed_and_narrow_tensors() -> None:
    tensors = {"a": torch.tensor(5.0), "b": torch.tensor([[1.0, 2.0], [3.0, 4.0]])}
    assert FlatLayout.of({"b": tensors["b"], "a": tensors["a"]}).gather(tensors).tolist() == [1, 2, 3, 4, 5]
    tensors = {"t": torch.arange(6.0).view(2, 3).t(), "h": torch.tensor([1.5, -2.0], dtype=torch.bfloat16)}
    layout = FlatLayout.of(tensors)
    vector = layout.gather(tensors)
    assert vector.tolist() == [0, 3, 1, 4, 2, 5, 1.5, -2.0]
    layout.scatter(vector + 1, tensors)
    assert tensors["t"].tolist() == [[1, 4], [2, 5], [3, 6]] and tensors["h"].tolist() == [2.5, -1.0]


def test_nothing_is_written_when_one_tensor_does_not_fit() -> None:
    layout = FlatLayout.of({"a": torch.ones(2), "b": torch.ones(3)})
    tensors = {"a": torch.ones(2), "b": torch.ones(4)}
    with pytest.raises(TrainerUsageError, match=r"expected 'b' of shape \[3\], found \[4\]"):
        layout.scatter(torch.zeros(5), tensors)
    assert tensors["a"].tolist() == [1, 1]
    with pytest.raises(TrainerUsageError, match="none of that name"):
        layout.gather({"a": torch.ones(2)})
    with pytest.raises(TrainerUsageError, match=r"expected a vector of \[5\]"):
        layout.scatter(torch.zeros(3), {"a": torch.ones(2), "b": torch.ones(3)})


def test_digest_tells_names_shapes_and_order_apart() -> None:
    a, b = torch.ones(2, 3), torch.ones(6)
    layouts = [{"a": a, "b": b}, {"b": b, "a": a}, {"a": b, "b": b}, {"a": a, "c": b}]
    assert len({FlatLayout.of(tensors).digest() for tensors in layouts}) == len(layouts)
    with pytest.raises(IncompatiblePeerError, match="expected the layout"):
        FlatLayout.of({"a": a}).require_same(FlatLayout.of({"a": b}).digest(), "a peer")


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
    grown = FragmentPlan.of(named(num_layers, vocab_rows=4096), num_fragments)
    assert [layout.names for layout in grown.layouts] == [layout.names for layout in plan.layouts]


def test_embedding_and_output_go_where_there_is_least_and_one_fragment_keeps_the_order() -> None:
    homes = [layout.names for layout in FragmentPlan.of(named(6), 4).layouts]
    assert "embedding.weight" in homes[3] and "readout.output.weight" in homes[2]
    assert FragmentPlan.of(named(3), 1).layouts[0].names == tuple(named(3))


def test_sequential_modules_are_cut_by_their_numbers() -> None:
    model = nn.Sequential(nn.Linear(1, 2), nn.Tanh(), nn.Linear(2, 1))
    plan = FragmentPlan.of(synchronised_parameters(model), 2)
    assert [layout.names for layout in plan.layouts] == [("0.weight", "0.bias"), ("2.weight", "2.bias")]
    assert [place.stop - place.start for place in plan.slices()] == [4, 3] and plan.whole().num_values == 7
    # What checkpoints and peers compare: a layer's tensors lie together also where the model has others between them.
    around = dict.fromkeys(("0.embedding", "0.layers.0.weight", "0.norm"), torch.ones(1))
    assert FragmentPlan.of(around, 1).layouts[0].names == ("0.embedding", "0.norm", "0.layers.0.weight")

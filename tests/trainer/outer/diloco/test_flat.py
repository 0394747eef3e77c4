from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from trainer.errors import IncompatiblePeerError, TrainerUsageError
from trainer.outer.diloco import FlatLayout

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


def test_values_lie_in_the_order_of_the_names() -> None:
    layout = FlatLayout.of([("b", torch.tensor([[1.0, 2.0], [3.0, 4.0]])), ("a", torch.tensor(5.0))])
    tensors = {"a": torch.tensor(5.0), "b": torch.tensor([[1.0, 2.0], [3.0, 4.0]])}
    assert layout.gather(tensors).tolist() == [1, 2, 3, 4, 5]
    assert layout.select(["a"]).gather({"a": torch.tensor(5.0)}).tolist() == [5]


def test_transposed_and_narrow_parameters() -> None:
    tensors = {"t": torch.arange(6.0).view(2, 3).t(), "h": torch.tensor([1.5, -2.0], dtype=torch.bfloat16)}
    layout = FlatLayout.of(tensors)
    vector = layout.gather(tensors)
    assert vector.tolist() == [0, 3, 1, 4, 2, 5, 1.5, -2.0]
    layout.scatter(vector + 1, tensors)
    assert tensors["t"].tolist() == [[1, 4], [2, 5], [3, 6]] and tensors["h"].tolist() == [2.5, -1.0]


def test_scatter_into_parameters_that_need_gradients() -> None:
    model = nn.Linear(2, 1)
    layout = FlatLayout.of(model.named_parameters())
    layout.scatter(torch.tensor([1.0, 2.0, 3.0]), dict(model.named_parameters()))
    assert model.weight.tolist() == [[1, 2]] and model.weight.requires_grad and model.weight.is_leaf


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
    assert FlatLayout.of({"a": a, "b": b}).digest() == FlatLayout.of(iter([("a", a), ("b", b)])).digest()
    with pytest.raises(IncompatiblePeerError, match="expected the layout"):
        FlatLayout.of({"a": a}).require_same(FlatLayout.of({"a": b}).digest(), "a peer")


@pytest.mark.parametrize(
    "tensors", [[], [("a", torch.ones(1)), ("a", torch.ones(1))], [("ids", torch.ones(1, dtype=torch.int64))]]
)
def test_what_cannot_be_laid_out(tensors: list[tuple[str, torch.Tensor]]) -> None:
    with pytest.raises(TrainerUsageError):
        FlatLayout.of(tensors)
